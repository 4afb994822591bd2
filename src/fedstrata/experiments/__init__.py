"""The functions that users call: run, compare, sweep and search, and the references for comparisons."""
