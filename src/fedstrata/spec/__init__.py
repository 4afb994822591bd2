"""The settings of a spec: experiments, callbacks and tracking, and the generated reference of the settings."""
