"""Methods of ``fedstrata.papers.other_readings``, under the path by which ``rebafl_tables.py`` names them."""

from fedstrata.papers.other_readings import LostFedDyn, LostSCAFFOLD

__all__ = ["LostFedDyn", "LostSCAFFOLD"]
