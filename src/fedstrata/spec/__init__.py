"""The specification (spec) of an experiment, its callbacks and trackers, and the reference of all settings."""
