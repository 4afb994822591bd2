"""Functions that run experiments (``run``, ``compare``, ``sweep``, ``search``), and references for comparisons."""
