"""Methods for ``rebafl_tables.py``, by the path that it names; they are in ``fedstrata.papers.other_readings``."""

from fedstrata.papers.other_readings import LostFedDyn, LostSCAFFOLD

__all__ = ["LostFedDyn", "LostSCAFFOLD"]
