"""Run experiments (``run``, ``compare``, ``sweep``, ``search``), and compute references for comparisons."""
