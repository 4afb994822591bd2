"""Audits that measure how much clients' messages reveal of their data, by attacks and by controls.

The controls are easier targets, which show how strong the attacks are.
"""
