"""Federated methods. Most methods are recipes, which are combinations of samplers, an objective and an aggregator."""
