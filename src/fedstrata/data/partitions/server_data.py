"""Select the training samples that do not belong to any client. The server may use only these samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedstrata.base.arrays import Ints
from fedstrata.base.inputs import Inputs
from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import Assignment


@dataclass(frozen=True, eq=False)
class ServerData:
    """The training samples that a partition does not assign to a client.

    Args:
        data: The data set.
        assignment: The samples of each client.
    """

    data: Dataset
    assignment: Assignment

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None, because server data are not sent to other processes."""
        return type(None), ()

    def indices(self) -> Ints:
        """Return the samples' indices in the training set, ascending.

        If the data set itself defines the clients, the result is empty, because samples outside the assignment belong
        to other clients.
        """
        if self.assignment.codes is not None:
            return np.empty(0, dtype=np.int64)
        return np.setdiff1d(np.arange(self.data.train_size), self.assignment.indices)

    def counts(self) -> Ints:
        """Count the left-out training samples of each class, shape (C,)."""
        return np.bincount(self.data.y_train.numpy()[self.indices()], minlength=self.data.outputs)

    def balanced(self, per_class: int, generator: np.random.Generator) -> tuple[Inputs, Tensor]:
        """Draw ``per_class`` random samples of every class, and return their inputs and labels.

        Raises:
            ValueError: A class has fewer samples than ``per_class``.
        """
        indices = self.indices()
        labels = self.data.y_train.numpy()[indices]
        chosen = np.concatenate(
            [generator.choice(indices[labels == c], size=per_class, replace=False) for c in range(self.data.outputs)]
        )
        return self.data.inputs(chosen), self.data.targets(chosen)
