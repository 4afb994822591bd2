"""The handlers: functions with which clients answer requests."""
