"""Partition schemes from the literature.

All schemes except ``Given`` assign each training sample to exactly one client.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import DataError, SpecError
from fedstrata.data.partitions.assign import cut_by_dirichlet, deal_by_mix, log_dirichlet, taken_from_largest, top_up
from fedstrata.data.partitions.base import Assignment, Partition
from fedstrata.data.sources import read_arrays
from fedstrata.data.subsets import largest_remainder

Generator = np.random.Generator
MOST_SHARDS = 10_000_000
"""The maximum number of shards if clients may have no samples (``min_size = 0``), to limit memory use."""

Alpha = Annotated[float, Field(ge=1e-9, le=1e9)]


class IID(Partition):
    """Each client gets the same number (±1) of random samples (McMahan et al. 2017)."""

    def assign(self, labels: Ints, domains: Ints | None, rng: Generator) -> Ints:
        """Divide the samples among the clients; see ``Partition.assign``."""
        owner = np.empty(len(labels), dtype=np.int64)
        owner[rng.permutation(len(labels))] = np.arange(len(labels)) % self.clients
        return owner


class Dirichlet(Partition):
    """Label skew by Dirichlet draws: with a smaller α, a client has fewer classes.

    Args:
        alpha: Concentration α of the Dirichlet distribution. With 1e6, the partition is nearly IID.
        balance: Which distributions are drawn. ``class``: each class's distribution over the clients; client sizes
            differ. ``client``: each client's distribution over the classes; client sizes are equal (±1).
        prior: Parameters of the Dirichlet distribution if ``balance = "client"``. ``shares``: α times the class's
            fraction of all samples (Hsu et al. 2019). ``flat``: α for every class, as in the code of FedSTaS.
    """

    by_label = True

    alpha: Alpha = 0.5
    balance: Literal["class", "client"] = "class"
    prior: Literal["shares", "flat"] = "shares"

    @model_validator(mode="after")
    def _prior_of_mixes(self) -> Dirichlet:
        if self.prior != "shares" and self.balance != "client":
            problem = "has no effect with balance = 'class'. Remove the key, or set balance = 'client'."
            raise SpecError("prior", problem, self.prior)
        return self

    def assign(self, labels: Ints, domains: Ints | None, rng: Generator) -> Ints:
        """Divide the samples among the clients; see ``Partition.assign``."""
        _, codes, amounts = np.unique(labels, return_inverse=True, return_counts=True)
        if self.balance == "class":
            owner = cut_by_dirichlet(codes, self.clients, self.alpha, rng)
            return top_up(owner, self.clients, self.min_size, rng)
        shares = amounts / len(labels) if self.prior == "shares" else np.ones(len(amounts))
        prior = np.broadcast_to(self.alpha * shares, (self.clients, len(amounts)))
        sizes = np.full(self.clients, len(labels) // self.clients)
        sizes[rng.permutation(self.clients)[: len(labels) % self.clients]] += 1
        return deal_by_mix(codes, sizes, log_dirichlet(prior, rng), rng)


class Shards(Partition):
    """Samples are sorted by label and cut into equal shards. Each client gets the same number of shards.

    McMahan et al. 2017 (section 3) call this division "pathological non-IID". A shard at the border between two classes
    has samples of both classes. A client may therefore have a few samples of an additional class. The clients' numbers
    of samples differ by at most ``per_client``.

    Args:
        per_client: Number of shards per client.
    """

    by_label = True

    per_client: PositiveInt = 2

    def assign(self, labels: Ints, domains: Ints | None, rng: Generator) -> Ints:
        """Divide the samples among the clients; see ``Partition.assign``."""
        shards = self.clients * self.per_client
        most = len(labels) if self.min_size else max(len(labels), MOST_SHARDS)
        if shards > most:
            problem = f"gives {shards} shards, but there are {len(labels)} samples. Use at most {most // self.clients}."
            raise SpecError("partition.per_client", problem, self.per_client)
        shuffled = rng.permutation(len(labels))
        ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
        holder = rng.permutation(shards) // self.per_client
        owner = np.empty(len(labels), dtype=np.int64)
        owner[ordered] = holder[np.arange(len(labels)) * shards // len(labels)]
        return owner


class PowerLaw(Partition):
    """Quantity skew: the number of samples of client k = 1, 2, … is proportional to k^(−exponent).

    Classes are not skewed, because each client's samples are drawn at random. Numbers of samples are rounded with the
    largest-remainder method. Clients with fewer than ``min_size`` samples get samples from the largest clients. FedProx
    (Li et al. 2020, section 5) also uses a power law, but does not state its parameters.

    Args:
        exponent: Exponent of the power law. With 0, all clients have equally many samples.
    """

    exponent: Annotated[NonNegativeFloat, Field(le=100)] = 1.0

    def assign(self, labels: Ints, domains: Ints | None, rng: Generator) -> Ints:
        """Divide the samples among the clients; see ``Partition.assign``."""
        sizes = largest_remainder(np.arange(1, self.clients + 1) ** -self.exponent, len(labels))
        missing = np.maximum(self.min_size - sizes, 0)
        sizes = sizes + missing - taken_from_largest(sizes, int(missing.sum()))
        owner = np.empty(len(labels), dtype=np.int64)
        owner[rng.permutation(len(labels))] = np.repeat(np.arange(self.clients), sizes)
        return owner


class Given(Partition):
    """The samples of each client are listed in the spec or in a file.

    The lists need not contain all samples. The lists are the same for all seeds.

    Args:
        indices: One list per client, with the indices of the client's samples in the training set.
        file: A ``.npz`` file that replaces ``indices``. The path is relative to the spec or the working directory. The
            file's array ``indices`` contains the samples client by client. Its array ``offsets`` contains each client's
            first position in ``indices``, followed by the length of ``indices``.
    """

    indices: Annotated[tuple[tuple[int, ...], ...], Field(min_length=1)] = ()
    file: str | None = None

    @field_validator("indices", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(part.tolist() if hasattr(part, "tolist") else part for part in value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _count(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        if (file := table.get("file")) is not None:
            if "indices" in table:
                raise SpecError("file", "has no effect together with 'indices'. Remove one of the two keys.", str(file))
            # The spec keeps the indices and not the name of the file, so that equal partitions have equal specs.
            table = {**table, "indices": _indices_in(file), "file": None}
        elif "indices" not in table:
            raise SpecError("indices", "is required, but not set. Set either 'indices' or 'file'.")
        if isinstance(table.get("indices"), np.ndarray):
            table = {**table, "indices": table["indices"].tolist()}
        if "clients" not in table and isinstance(table.get("indices"), (list, tuple)):
            return {**table, "clients": max(len(table["indices"]), 1)}
        return table  # the validation of the fields reports other errors

    @model_validator(mode="after")
    def _agree(self) -> Given:
        if len(self.indices) != self.clients:
            problem = (
                f"there are indices for {len(self.indices)} clients. Remove the key, or set it to {len(self.indices)}."
            )
            raise SpecError("clients", problem, self.clients)
        return self

    @property
    def covers(self) -> bool:
        """Whether every sample must belong to a client: False, because the lists may leave out samples."""
        return False

    def assign(self, labels: Ints, domains: Ints | None, rng: Generator) -> list[Ints]:
        """Divide the samples among the clients; see ``Partition.assign``."""
        return [np.array(part, dtype=np.int64) for part in self.indices]

    def packed(self) -> bytes:
        """Return the indices as the bytes of a ``.npz`` file, for the setting ``file``."""
        lists = Assignment.from_lists([np.array(part, dtype=np.int64) for part in self.indices])
        content = io.BytesIO()
        np.savez(content, indices=lists.indices, offsets=lists.offsets)
        return content.getvalue()


def _indices_in(file: object) -> list[list[int]]:
    """Read the indices of each client's samples from a file; see ``Given``."""
    if not isinstance(file, (str, Path)):
        raise SpecError("file", "is not the path of a .npz file. Give a path that ends in .npz.", file)
    try:
        arrays = read_arrays(Path(file), ("indices", "offsets"))
    except DataError as error:
        raise SpecError("file", str(error), str(file)) from None
    indices, offsets = arrays["indices"], arrays["offsets"]
    flat = all(array.ndim == 1 and array.dtype.kind in "iu" for array in arrays.values()) and len(offsets) > 1
    ends = offsets.astype(np.int64) if flat else offsets
    if not (flat and ends[0] == 0 and ends[-1] == len(indices) and (np.diff(ends) >= 0).all()):
        problem = (
            "must contain two arrays of integers, 'indices' and 'offsets'. The offsets must ascend from 0 to the "
            f"number of indices, {indices.size}."
        )
        raise SpecError("file", problem, str(file))
    return [part.tolist() for part in np.split(indices, ends[1:-1])]
