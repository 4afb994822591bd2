"""Audits, which measure by attacks how much clients' messages reveal of the clients' data.

For comparison, they also try to recover the data without the messages, such as by guessing at random.
"""
