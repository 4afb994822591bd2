"""Federated methods. Most methods are recipes: combinations of samplers, an objective and an aggregator."""
