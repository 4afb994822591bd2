"""Define the base class, the registry and the result class of partition schemes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from fedstrata.base.arrays import Ints
from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng
from fedstrata.data.dataset import Dataset

UNUSED = -1
"""The owner of a sample without a client, in arrays of owners."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """The indices of each client's samples, in one array for all N clients (compressed sparse rows).

    Client k has the samples ``indices[offsets[k]:offsets[k + 1]]``.

    Args:
        indices: The indices of the samples in the training set, grouped by client, int64.
        offsets: The positions in ``indices`` at which the clients' samples start, followed by the length of
            ``indices``; shape (N + 1,), int64.
        codes: The index of each client in the data set's ``client_names``, shape (N,); None if the data set does not
            define the clients.

    >>> two = Assignment.from_owners(np.array([1, 0, UNUSED, 1]), clients=2)
    >>> len(two), two[1].tolist(), two.sizes.tolist()
    (2, [0, 3], [1, 2])
    """

    indices: Ints
    offsets: Ints
    codes: Ints | None = None

    @classmethod
    def from_owners(cls, owner: Ints, clients: int) -> Assignment:
        """Build an assignment from the owner of every sample.

        Args:
            owner: The client of each training sample, shape (samples,), or ``UNUSED`` if no client has the sample.
            clients: The number of clients N.
        """
        order = np.argsort(owner, kind="stable").astype(np.int64)
        sizes = np.bincount(owner[owner >= 0], minlength=clients)
        return cls(order[len(owner) - int(sizes.sum()) :], np.concatenate(([0], np.cumsum(sizes))))

    @classmethod
    def from_lists(cls, lists: Sequence[Ints]) -> Assignment:
        """Build an assignment from one array of sample indices per client."""
        sizes = [len(part) for part in lists]
        indices = np.concatenate([np.asarray(part, dtype=np.int64) for part in lists])
        return cls(indices, np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Ints:
        if not 0 <= client < len(self.offsets) - 1:
            raise IndexError(f"client {client} does not exist. Use 0…{len(self) - 1}.")
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> Ints:
        """The number of samples of each client, shape (N,)."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> Ints:
        """The client of each entry of ``indices``."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.sizes)

    def names(self, dataset: Dataset) -> list[str]:
        """Return the name of each client.

        If the data set does not define the clients, the names are the clients' ids, 0 … N − 1, as strings.

        Args:
            dataset: The data set that was divided.
        """
        if self.codes is None:
            return [str(client) for client in range(len(self))]
        return [dataset.client_names[code] for code in self.codes.tolist()]

    def counts(self, labels: Ints, classes: int) -> Ints:
        """Count the samples of each class at each client.

        Args:
            labels: The label of every training sample, shape (samples,).
            classes: The number of classes C.

        Returns:
            The counts, shape (N, C), int64.
        """
        cells = self.owners * classes + labels[self.indices]
        return np.bincount(cells, minlength=len(self) * classes).reshape(len(self), classes).astype(np.int64)


Clients = Annotated[PositiveInt, Field(le=10_000_000)]
"""A number of clients, limited so that arrays with one entry per client fit into memory."""


class Partition(Setting):
    """The division of the training set among the clients.

    To write your own scheme, define a subclass that implements ``assign``. The method ``split`` checks the result of
    ``assign``.

    Args:
        clients: Number of clients.
        min_size: Minimum number of samples per client.
    """

    clients: Clients = 100
    min_size: NonNegativeInt = 1

    by_label: ClassVar[bool] = False
    """Whether the division depends on the labels of the samples."""

    @property
    def covers(self) -> bool:
        """Whether every sample must belong to a client."""
        return True

    @abstractmethod
    def assign(self, labels: Ints, domains: Ints | None, rng: np.random.Generator) -> Ints | Sequence[Ints]:
        """Divide the training samples among the clients. The result depends only on the arguments and settings.

        Args:
            labels: The label of every training sample, shape (samples,).
            domains: The domain of every training sample, shape (samples,); None if the data set has no domains.
            rng: The only source of randomness.

        Returns:
            The owner of every sample, shape (samples,), or a list with the sample indices of each client.
        """

    def split(self, dataset: Dataset, seed: int) -> Assignment:
        """Divide the training samples with ``assign``, and check that no sample is lost or given to two clients.

        Args:
            dataset: The data set with the training samples to divide.
            seed: The experiment's seed.

        Raises:
            SpecError: The data set is too small, or a client would get fewer than ``min_size`` samples.
        """
        samples, needed = dataset.train_size, self.clients * self.min_size
        if needed > samples:
            most = f"Use at most {samples // self.min_size} with min_size = {self.min_size}."
            problem = f"{dataset.name} has only {samples} training samples. {most}"
            raise SpecError("partition.clients", problem, self.clients)
        domains = None if dataset.domain_train is None else dataset.domain_train.cpu().numpy()
        labels = dataset.require_strata("partition.name", self.name) if self.by_label else dataset.strata_or_one[0]
        result = self.assign(labels, domains, rng(seed, "partition"))
        assignment = self._checked(result, samples)
        smallest = int(np.argmin(assignment.sizes))
        if assignment.sizes[smallest] < self.min_size:
            problem = (
                f"client {smallest} gets {assignment.sizes[smallest]} samples. Reduce min_size, or use fewer clients."
            )
            raise SpecError("partition.min_size", problem, self.min_size)
        return assignment

    def _checked(self, result: Ints | Sequence[Ints], samples: int) -> Assignment:
        """Convert the result of ``assign``. Raise ``SpecError`` if samples are lost, repeated or unknown."""

        def wrong(problem: str) -> SpecError:
            return SpecError("partition.name", f"{type(self).__name__} {problem}")

        if isinstance(result, np.ndarray) and result.ndim == 1 and result.dtype.kind in "iu":
            if len(result) != samples:
                raise wrong(f"returned {len(result)} owners for {samples} samples. Return one owner per sample.")
            if samples and not (result.min() >= UNUSED and result.max() < self.clients):
                raise wrong(f"returned owners {result.min()}…{result.max()}. Return only owners 0…{self.clients - 1}.")
            assignment = Assignment.from_owners(result, self.clients)
        else:
            assignment = Assignment.from_lists(list(result))
            if len(assignment) != self.clients:
                raise wrong(f"returned {len(assignment)} lists for {self.clients} clients. Return one list per client.")
        indices = assignment.indices
        if len(indices) and not (indices.min() >= 0 and indices.max() < samples):
            raise wrong(f"returned indices {indices.min()}…{indices.max()}. Return only indices 0…{samples - 1}.")
        held = np.bincount(indices, minlength=samples)
        if held.max(initial=0) > 1:
            raise wrong(f"gives sample {int(held.argmax())} to {held.max()} clients. Give each sample to one client.")
        if self.covers and held.min(initial=1) == 0:
            raise wrong(f"leaves out {int((held == 0).sum())} of {samples} samples. Give every sample to a client.")
        return assignment


_SCHEMES, _HOLDING = "fedstrata.data.partitions.schemes", "fedstrata.data.partitions.label_skew"

PARTITIONS = Registry(
    "partition",
    Partition,  # type: ignore[type-abstract]
    {
        "iid": f"{_SCHEMES}:IID",
        "dirichlet": f"{_SCHEMES}:Dirichlet",
        "classes": f"{_HOLDING}:Classes",
        "shards": f"{_SCHEMES}:Shards",
        "groups": f"{_HOLDING}:Groups",
        "domain": f"{_HOLDING}:Domains",
        "power-law": f"{_SCHEMES}:PowerLaw",
        "given": f"{_SCHEMES}:Given",
        "natural": "fedstrata.data.partitions.natural:Natural",
        "single-client": "fedstrata.data.partitions.natural:SingleClient",
    },
)
"""The possible values of ``partition.name``."""

AnyPartition = Annotated[Partition, FromRegistry(PARTITIONS, default="dirichlet")]
