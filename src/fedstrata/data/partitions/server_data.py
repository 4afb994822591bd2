"""Training samples that no client holds: the only ones that a server may ever look at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import Assignment


@dataclass(frozen=True, eq=False)
class ServerData:
    """What a partition leaves out of a data set.

    Args:
        data: The data set.
        assignment: Which of its training samples are the clients'.
    """

    data: Dataset
    assignment: Assignment

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """It arrives nowhere: what travels with a job to other processes is None."""
        return type(None), ()

    def indices(self) -> NDArray[np.int64]:
        """Numbers of the samples, ascending; none where clients are natural ones, for then others' are left over."""
        if self.assignment.codes is not None:
            return np.empty(0, dtype=np.int64)
        left = np.ones(self.data.train_size, dtype=bool)
        left[self.assignment.indices] = False
        return np.flatnonzero(left)

    def counts(self) -> NDArray[np.int64]:
        """Samples of each class, (C,)."""
        return np.bincount(self.data.y_train.numpy()[self.indices()], minlength=self.data.classes)

    def balanced(self, per_class: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and labels of ``per_class`` random samples of every class.

        Raises:
            ValueError: There are fewer of some class.
        """
        indices = self.indices()
        labels = self.data.y_train.numpy()[indices]
        chosen = np.concatenate(
            [generator.choice(indices[labels == c], size=per_class, replace=False) for c in range(self.data.classes)]
        )
        return self.data.inputs(chosen), self.data.labels(chosen)
