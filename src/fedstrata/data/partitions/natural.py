"""Divide samples according to the client ids in the data, or give samples to a single client as a baseline."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng
from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import UNUSED, AnyPartition, Assignment, Clients, Partition


class Natural(Partition):
    """One client, such as a hospital or device, for each client id in the data.

    For arrays and ``.npz`` files, the ids are in ``client_train``; for hub data sets, in the column ``data.client``;
    for tables, in the column ``data.schema.client``. Clients are numbered in the order of their ids.

    Args:
        clients: Number of clients to draw at random from the data. Default: all clients.
        min_size: Minimum number of samples per client. Clients with fewer samples are left out, with a warning.
    """

    clients: Clients | None = None  # type: ignore[assignment]  # the base class does not allow None

    def assign(self, labels: Ints, domains: Ints | None, rng: np.random.Generator) -> Ints:
        """Raise ``SpecError``, because this scheme overrides ``split`` instead of ``assign``."""
        raise SpecError(
            "partition.name",
            "requires client ids, which cannot be derived from labels. Use another partition.",
            self.name,
        )

    def split(self, dataset: Dataset, seed: int) -> Assignment:
        """Divide the training samples among the clients; see ``Partition.split``.

        Raises:
            SpecError: The data have no client ids, or too few clients have at least ``min_size`` samples.
        """
        if dataset.client_train is None:
            problem = (
                f"{dataset.name} does not identify the client of each sample. Give client_train (arrays), data.client "
                "(a column of a Hugging Face data set) or data.schema.client (a column of a table)."
            )
            raise SpecError("partition.name", problem, self.name)
        codes = dataset.client_train.cpu().numpy()
        sizes = np.bincount(codes, minlength=len(dataset.client_names))
        every, kept = np.flatnonzero(sizes), np.flatnonzero(sizes >= max(self.min_size, 1))
        if len(kept) < (self.clients or 1):
            key, value = ("clients", self.clients) if self.clients else ("min_size", self.min_size)
            problem = f"only {len(kept)} of {len(every)} clients have at least {max(self.min_size, 1)} training samples"
            problem += f", and the largest client has {int(sizes.max(initial=0))}. Use a smaller value."
            raise SpecError(f"partition.{key}", problem, value)
        if small := len(every) - len(kept):
            samples = int(sizes.sum() - sizes[kept].sum())
            problem = f"{small} of {len(every)} clients have fewer than partition.min_size = {self.min_size} samples"
            warnings.warn(f"{problem}. The run leaves out these clients and their {samples} samples", stacklevel=2)
        if self.clients is not None:
            kept = np.sort(rng(seed, "partition").choice(kept, size=self.clients, replace=False))
        number = np.full(len(sizes), UNUSED, dtype=np.int64)
        number[kept] = np.arange(len(kept))
        return replace(Assignment.from_owners(number[codes], len(kept)), codes=kept.astype(np.int64))


class SingleClient(Partition):
    """A single client trains on the samples of one or all clients, as a baseline for federated training.

    For centralised training, the single client gets the samples of all clients of another partition (``of``). For local
    training, the single client gets the samples of one of these clients.

    Args:
        clients: Number of clients: always 1.
        of: Partition from which the single client gets its samples.
        only: Id (from 0) of the client whose samples are used. Default: the samples of all clients.
    """

    clients: Literal[1] = 1
    of: AnyPartition
    only: NonNegativeInt | None = None

    def assign(self, labels: Ints, domains: Ints | None, rng: np.random.Generator) -> Ints:
        """Raise ``SpecError``, because this scheme overrides ``split`` instead of ``assign``."""
        problem = "divides whole data sets, and cannot divide a list of labels. Use another partition."
        raise SpecError("partition.name", problem, self.name)

    def split(self, dataset: Dataset, seed: int) -> Assignment:
        """Divide the training samples among the clients; see ``Partition.split``.

        Raises:
            SpecError: ``only`` is not the id of a client, or the partition set in ``of`` cannot divide the data.
        """
        try:
            whole = self.of.split(dataset, seed)
        except SpecError as error:
            key = f"partition.of.{error.key.removeprefix('partition.')}"
            raise SpecError(key, error.problem, error.value) from None
        if self.only is None:
            return Assignment.from_lists([np.sort(whole.indices)])
        if self.only >= len(whole):
            raise SpecError(
                "partition.only",
                f"the partition in partition.of does not contain this client. Use a number from 0 to {len(whole) - 1}.",
                self.only,
            )
        alone = Assignment.from_lists([whole[self.only]])
        return alone if whole.codes is None else replace(alone, codes=whole.codes[[self.only]])
