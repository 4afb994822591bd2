"""Measure with attacks how much the messages of a run reveal about the clients' data.

For comparison, audits also run attacks without the messages, such as random guesses.
"""
