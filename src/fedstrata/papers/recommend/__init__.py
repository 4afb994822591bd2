"""Advise which methods to compare, from measured properties of a spec and from results of the board."""
