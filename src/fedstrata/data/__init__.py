"""Data sets, and how they are divided among clients."""

from fedstrata.data.dataset import Dataset, from_arrays
from fedstrata.data.holding import Classes, Domains, Group, Groups
from fedstrata.data.partition import PARTITIONS, UNUSED, Assignment, Partition
from fedstrata.data.picture import draw_partition, label_table, render_table
from fedstrata.data.schemes import IID, Dirichlet, Given, PowerLaw, Shards
from fedstrata.data.sources import Data, available, folders

__all__ = [
    "IID",
    "PARTITIONS",
    "UNUSED",
    "Assignment",
    "Classes",
    "Data",
    "Dataset",
    "Dirichlet",
    "Domains",
    "Given",
    "Group",
    "Groups",
    "Partition",
    "PowerLaw",
    "Shards",
    "available",
    "draw_partition",
    "folders",
    "from_arrays",
    "label_table",
    "render_table",
]
