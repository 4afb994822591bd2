"""Run the experiments of four papers, compare the results with the published numbers, and judge the papers' claims.

Each table of a paper is a TOML file. A cell is the run of one row (a method), column (a setting) and seed of a table.
"""
