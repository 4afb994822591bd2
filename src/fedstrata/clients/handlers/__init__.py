"""The handlers: the functions with which clients answer each class of requests."""
