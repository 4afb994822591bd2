"""Evaluate models: metrics, samples that are held out of training, and results of each client."""
