"""
Stratify from scratch in one file
=================================

This file implements two modes of Stratify in PyTorch, without fedstrata. For comparison, the file also implements
FedAvg.

.. literalinclude:: ../../examples/stratify_from_scratch.py
   :language: python

The script prints:
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path.cwd().resolve().parent / "stratify_from_scratch.py"), run_name="__main__")

# %%
# The columns *single* and *batch* give the accuracies of the two modes. The column *hops* counts how often one client
# passed the model to another client. The last line is the result of fedstrata on the same data.
# :doc:`/concepts/stratify` explains the method.
