"""Recommend which methods to compare, based on measured properties of a spec and on results of the board."""
