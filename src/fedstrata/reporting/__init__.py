"""Tables, pictures and HTML pages about runs, and the progress that a terminal shows during a run.

In this package, a label is the name of a method or variant in a report. Runs that differ only by their seeds have the
same label.
"""
