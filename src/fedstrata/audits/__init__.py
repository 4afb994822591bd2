"""Audits, which use attacks to measure how much clients' messages reveal about the clients' data.

For comparison, audits also try to recover the data without the messages, for example by random guesses.
"""
