"""
One file from scratch
=====================

Stratify in one file of PyTorch, without the library: data, clients, the schedule, both modes, and FedAvg beside it. Read it
from top to bottom.

.. literalinclude:: ../../examples/stratify_from_scratch.py
   :language: python

What it prints:
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path.cwd().resolve().parent / "stratify_from_scratch.py"), run_name="__main__")

# %%
# *single* and *batch* are the two modes. *hops* is how often the model travelled from one client to another. The last line is
# the library on the same data: :doc:`/concepts/stratify`.
