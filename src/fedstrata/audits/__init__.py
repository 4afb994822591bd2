"""Audits, which measure by attacks how much clients' messages reveal of the clients' data.

For comparison, audits also try to recover the data without the messages, for example by random guesses.
"""
