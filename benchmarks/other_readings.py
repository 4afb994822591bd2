"""Methods for ``rebafl_tables.py``, by the path that its results were made with: ``fedstrata.papers.other_readings``."""

from fedstrata.papers.other_readings import LostFedDyn, LostSCAFFOLD

__all__ = ["LostFedDyn", "LostSCAFFOLD"]
