"""Repeat the experiments of four papers, compare the results with the published numbers, and judge the papers' claims.

A TOML file describes each table of a paper. The rows of a table are methods, and the columns are settings. A cell is
one training run, for one row, one column and one seed. The package ``board`` ranks all methods under one protocol.
"""
