"""The settings of a spec: experiments, callbacks and tracking, and the reference that is generated from the settings."""
