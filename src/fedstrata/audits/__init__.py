"""Run attacks that measure how much the messages of a run reveal about the clients' data.

For comparison, audits also run attacks that do not use the messages, such as random guesses.
"""
