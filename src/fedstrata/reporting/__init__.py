"""Tables, pictures and HTML pages about runs, and the progress that a terminal shows during a run.

A report compares methods, or variants of a method. Each has a *label*, its name in the report. Runs that differ only by
their seeds have the same label. The docstrings of this package say *method* for methods and variants.
"""
