"""Divide a data set among clients."""
