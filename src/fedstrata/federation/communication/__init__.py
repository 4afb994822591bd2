"""Compression of the models that clients receive, and of the updates that they send."""
