"""Handlers, which are the functions with which clients answer requests."""
