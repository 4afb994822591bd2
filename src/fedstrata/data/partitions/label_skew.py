"""Partition schemes that fix the number of classes or domains of each client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from fedstrata.base.arrays import Ints
from fedstrata.base.config import Setting
from fedstrata.base.errors import SpecError
from fedstrata.data.partitions.assign import cut_by_dirichlet, deal_to_holders, hold_classes, top_up
from fedstrata.data.partitions.base import Clients, Partition
from fedstrata.data.partitions.schemes import Alpha, Generator


class Classes(Partition):
    """Label skew with k classes per client (#C = k). Each class is divided equally among its clients.

    Stratify (section V) and many other papers use this division. The classes of a client are random. Each class is
    assigned to the same number of clients (±1), and to at least one.

    Args:
        per_client: Number of classes per client.
        size: Number of samples per client, divided equally (±1) among the client's classes. Default: all samples are
            used.
    """

    by_label = True

    per_client: PositiveInt = 2
    size: PositiveInt | None = None

    @property
    def covers(self) -> bool:
        """Whether every sample must belong to a client: True if ``size`` is not set."""
        return self.size is None

    def assign(self, labels: Ints, domains: Ints | None, rng: Generator) -> Ints:
        """Divide the samples among the clients; see ``Partition.assign``."""
        each = np.full(self.clients, self.per_client)
        return _held(self, "per_client", labels, each, self.size, rng)


class ClassGroup(Setting):
    """A group of clients with the same number of classes.

    Args:
        clients: Number of clients in the group.
        classes: Number of classes of each client in the group.
    """

    clients: PositiveInt
    classes: PositiveInt


class Groups(Partition):
    """Label skew: groups of clients have different numbers of classes.

    Clients are numbered group after group. All classes have the same number of clients (±1). Each class is divided
    equally among its clients. The default is the clustered setting of ReBaFL (section 5.3): 20 clients in five groups
    with 2, 2, 3, 3 and 5 classes per client.

    Args:
        groups: List of groups. Each group has a number of ``clients``, and a number of ``classes`` per client.
        size: Number of samples per client, divided equally (±1) among the client's classes. Default: all samples are
            used.
    """

    by_label = True

    clients: Clients = 20
    groups: Annotated[tuple[ClassGroup, ...], Field(min_length=1)] = tuple(
        ClassGroup(clients=4, classes=classes) for classes in (2, 2, 3, 3, 5)
    )
    size: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _count(cls, table: Any) -> Any:
        if isinstance(table, Mapping) and "clients" not in table and isinstance(table.get("groups"), (list, tuple)):
            amounts = [
                group.get("clients") if isinstance(group, Mapping) else group.clients
                for group in table["groups"]
                if isinstance(group, (Mapping, ClassGroup))
            ]
            if amounts and all(isinstance(amount, int) and amount > 0 for amount in amounts):
                return {**table, "clients": sum(amounts)}
        return table  # the validation of the fields reports other errors

    @model_validator(mode="after")
    def _agree(self) -> Groups:
        total = sum(group.clients for group in self.groups)
        if total != self.clients:
            raise SpecError(
                "clients",
                f"the groups have {total} clients in total. Remove the key, or set it to {total}.",
                self.clients,
            )
        return self

    @property
    def covers(self) -> bool:
        """Whether every sample must belong to a client: True if ``size`` is not set."""
        return self.size is None

    def assign(self, labels: Ints, domains: Ints | None, rng: Generator) -> Ints:
        """Divide the samples among the clients; see ``Partition.assign``."""
        each = np.repeat([g.classes for g in self.groups], [g.clients for g in self.groups])
        return _held(self, "groups", labels, each, self.size, rng)


class Domains(Partition):
    """Feature skew with d domains per client (#D = d). Each domain is divided equally among its clients.

    Stratify (section V) uses this division.

    Args:
        per_client: Number of domains per client. Default: 1.
        alpha: Concentration α of Dirichlet draws that divide each domain's samples among the clients. Set either
            ``alpha`` or ``per_client``.
    """

    per_client: PositiveInt | None = None
    alpha: Alpha | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Domains:
        if self.per_client is not None and self.alpha is not None:
            raise SpecError("alpha", "has no effect together with per_client. Set only one of the two.", self.alpha)
        return self

    def assign(self, labels: Ints, domains: Ints | None, rng: Generator) -> Ints:
        """Divide the samples among the clients; see ``Partition.assign``."""
        if domains is None:
            problem = (
                "requires domains. Use a data set with domains, such as digits3, or give domain_train with your arrays."
            )
            raise SpecError("partition.name", problem, self.name)
        if self.alpha is None:
            each = np.full(self.clients, self.per_client or 1)
            return _held(self, "per_client", domains, each, None, rng, kind="domain")
        codes = np.unique(domains, return_inverse=True)[1]
        owner = cut_by_dirichlet(codes, self.clients, self.alpha, rng)
        return top_up(owner, self.clients, self.min_size, rng)


def _held(
    partition: Partition, key: str, labels: Ints, each: Ints, size: int | None, rng: Generator, kind: str = "class"
) -> Ints:
    """Assign the samples so that each client has a given number of classes (or domains).

    Args:
        partition: The partition.
        key: The setting with the number of classes, for error messages.
        labels: The class (or domain) of every sample, shape (samples,).
        each: The number of classes of each client, shape (N,).
        size: The number of samples of each client; None to use all samples.
        rng: The random generator.
        kind: ``"class"`` or ``"domain"``, for error messages.

    Returns:
        The owner of every sample, shape (samples,).

    Raises:
        SpecError: The data have too few classes, or too few samples of a class.
    """
    values, codes, amounts = np.unique(labels, return_inverse=True, return_counts=True)
    most, holdings = int(each.max()), int(each.sum())
    if most > len(values):
        raise SpecError(
            f"partition.{key}",
            f"the data have only {len(values)} different {kind} labels. Use at most {len(values)}.",
            most,
        )
    if holdings < len(values):
        problem = (
            f"all clients together would have only {holdings} of the data's {len(values)} {kind} labels. "
            "Use more clients, or more labels per client."
        )
        raise SpecError(f"partition.{key}", problem, most)
    owner, held = hold_classes(each, len(values), rng)
    quota = None
    if size is None:
        wanted = np.bincount(held) * min(partition.min_size, 1)
        problem = "clients need at least one each. Use fewer clients, or min_size = 0."
        size_key, value = "clients", partition.clients
    else:
        if size < most:
            raise SpecError(
                "partition.size",
                f"a client with {most} {kind} labels needs at least one sample of each label. Use at least {most}.",
                size,
            )
        rank = np.arange(holdings) - (np.cumsum(each) - each)[owner]
        quota = size // each[owner] + (rank < size % each[owner])
        wanted = np.bincount(held, weights=quota).astype(np.int64)
        problem, size_key, value = "are needed. Use a smaller size.", "size", size
    short = np.flatnonzero(wanted > amounts)
    if len(short):
        first = short[0]
        counts = f"{kind} {values[first]} has {amounts[first]} samples, but {wanted[first]}"
        raise SpecError(f"partition.{size_key}", f"{counts} {problem}", value)
    return deal_to_holders(codes, owner, held, rng, quota)
