"""The specification (spec) of an experiment, with callbacks and trackers, and the reference of all settings."""
