"""Compression of models and updates: codecs, error feedback, and deliveries of the changes that a client missed."""
