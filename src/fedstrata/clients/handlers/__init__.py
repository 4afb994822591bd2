"""The handlers: how clients answer each kind of request."""
