"""
Stratify from scratch in one file
=================================

This file implements two modes of Stratify in PyTorch, without fedstrata. For comparison, it also implements FedAvg.

.. literalinclude:: ../../examples/stratify_from_scratch.py
   :language: python

The script prints:
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path.cwd().resolve().parent / "stratify_from_scratch.py"), run_name="__main__")

# %%
# The columns *single* and *batch* give the accuracy of the two modes. *hops* is the number of times that the model was
# passed from one client to another. The last line is the result of fedstrata on the same data.
# :doc:`/concepts/stratify` explains the method.
