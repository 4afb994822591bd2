"""The handlers: the functions with which clients answer requests."""
