"""Divide a data set among clients."""

from fedstrata.data.partitions.base import PARTITIONS, UNUSED, Assignment, Partition
from fedstrata.data.partitions.label_skew import Classes, ClassGroup, Domains, Groups
from fedstrata.data.partitions.natural import Natural, SingleClient
from fedstrata.data.partitions.picture import draw_partition, render_table
from fedstrata.data.partitions.schemes import IID, Dirichlet, Given, PowerLaw, Shards

__all__ = [
    "IID",
    "PARTITIONS",
    "UNUSED",
    "Assignment",
    "ClassGroup",
    "Classes",
    "Dirichlet",
    "Domains",
    "Given",
    "Groups",
    "Natural",
    "Partition",
    "PowerLaw",
    "Shards",
    "SingleClient",
    "draw_partition",
    "render_table",
]
