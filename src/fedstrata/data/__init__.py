"""Data sets and where they come from."""

from fedstrata.data.dataset import Dataset, from_arrays
from fedstrata.data.sources import Data, available, folders

__all__ = ["Data", "Dataset", "available", "folders", "from_arrays"]
