"""Samplers: choose the clients that take part in a round, and how many of their samples they use."""
