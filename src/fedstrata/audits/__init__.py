"""Audit runs: use attacks to measure how much clients' messages reveal about the clients' data.

For comparison, audits also attack without the messages, for example by random guesses.
"""
