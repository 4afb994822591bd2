"""Prepare, execute, store and resume one run, and use its final model for inference."""
