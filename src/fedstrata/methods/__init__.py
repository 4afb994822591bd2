"""The federated methods, one file each. Most are recipes: combinations of samplers, an objective and an aggregator."""
