"""The methods of ``fedstrata.papers.other_readings``, under the path that ``rebafl_tables.py`` uses."""

from fedstrata.papers.other_readings import LostFedDyn, LostSCAFFOLD

__all__ = ["LostFedDyn", "LostSCAFFOLD"]
