"""Partitions: schemes that divide the training samples of a data set among clients."""
