"""The experiments of four papers: they are run, compared with the published figures, and the papers' claims judged.

Each table of a paper is a TOML file. A cell is the run of one row (a method), column (a setting) and seed of a table.
"""
