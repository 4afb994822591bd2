"""Write tables, pictures and HTML pages about runs, and show the progress of a run in a terminal.

A report compares methods, or variants of a method. Each method or variant has a *label*, its name in the report. Runs
that differ only in their seeds share a label. The docstrings of this package use the word *method* for methods and
variants.
"""
