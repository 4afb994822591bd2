"""Federated methods, one file each. Most methods are recipes: combinations of samplers, an objective and an aggregator."""
