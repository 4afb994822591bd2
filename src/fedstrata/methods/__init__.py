"""Federated methods. Most are recipes: combinations of samplers, an objective and an aggregator."""
