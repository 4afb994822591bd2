"""
Stratify from scratch in one file
=================================

This file implements Stratify in PyTorch, without fedstrata. It contains the data, the clients, the schedule and two
modes of Stratify. For comparison, it also implements FedAvg. Read the file from top to bottom.

.. literalinclude:: ../../examples/stratify_from_scratch.py
   :language: python

The script prints:
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path.cwd().resolve().parent / "stratify_from_scratch.py"), run_name="__main__")

# %%
# *single* and *batch* are the two modes. *hops* is the number of times that the model was passed from one client to
# another. The last line is the result of fedstrata on the same data. :doc:`/concepts/stratify` explains the method.
