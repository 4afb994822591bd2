"""The functions that users call to run experiments (run, compare, sweep, search), and references for comparisons."""
