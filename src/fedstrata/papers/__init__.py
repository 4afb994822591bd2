"""Run the experiments of four papers, compare the results with the published numbers, and judge the papers' claims.

Each table of a paper is a TOML file. The rows of a table are methods, and its columns are settings. A cell is the run
of one row and column with one seed. The package ``board`` ranks all methods under one protocol.
"""
