"""Rank all methods under a fixed, versioned protocol of partitions and availability models, with equal tuning budgets.

The file ``absent-v1.toml`` contains the protocol. A column of the board combines a partition and an availability model.
An entry is a method, or a composition of parts of several methods. A cell is one run: one entry in one column, with
one seed.
"""
