"""Simulate attacks: some clients train on false labels, or send false updates.

The server simulates attacks on updates: it changes the attackers' replies before the method gets them. An attack can
use the honest updates of the round, because the strongest attackers are assumed to know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.errors import SpecError
from fedstrata.base.rng import rng
from fedstrata.federation.messages import ClientId, FitReply, Request, TrainingRequest, Weights
from fedstrata.federation.vectors import changes, split

DEFAULT_SHARE = 0.2


class Attack(Setting):
    """Base class of attacks. An ``Attack`` determines which clients attack.

    Args:
        share: Fraction of clients that attack. The choice of attackers depends on the seed, not on the round.
            Default: 0.2.
        clients: Ids of the attackers. Set either ``clients`` or ``share``.
    """

    alters_replies: ClassVar[bool] = True
    """Whether the attackers send false updates. If so, the method must be a ``Recipe``."""

    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    clients: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Attack:
        if self.share is not None and self.clients is not None:
            raise SpecError(
                "share", "cannot be set together with 'clients'. Remove one of the two settings.", self.share
            )
        return self

    def attackers(self, clients: int, seed: int) -> tuple[ClientId, ...]:
        """Return the clients that attack, in ascending order.

        Args:
            clients: Number of clients, N.
            seed: The experiment's seed.

        Raises:
            SpecError: A client in ``clients`` does not exist, or ``share`` is so small that no client attacks.

        >>> SignFlip(share=0.3).attackers(10, seed=0), SignFlip(clients=[7, 2]).attackers(10, seed=0)
        ((1, 5, 9), (2, 7))
        """
        if self.clients is not None:
            if (largest := max(self.clients)) >= clients:
                raise SpecError(
                    "attack.clients",
                    f"is not the id of a client. Use ids from 0 to {clients - 1}.",
                    largest,
                )
            return tuple(sorted(set(self.clients)))
        share = self.share or DEFAULT_SHARE
        if not (number := round(share * clients)):
            problem = f"is rounded to 0 of {clients} clients. Use a larger share, or set attack.clients."
            raise SpecError("attack.share", problem, share)
        drawn = rng(seed, "attackers").choice(clients, size=number, replace=False)
        return tuple(sorted(drawn.tolist()))

    def false_labels(self, labels: Tensor, classes: int) -> Tensor:
        """Return the labels on which an attacker trains. Default: the true labels.

        Args:
            labels: The labels of the attacker's samples, int64, shape (n,).
            classes: The number of classes C.
        """
        return labels

    def false_update(self, update: Tensor, honest: Tensor, generator: np.random.Generator) -> Tensor:
        """Return the update that an attacker sends. Default: the attacker's true update.

        Args:
            update: The update that the attacker computed, shape (d,).
            honest: The updates of the h honest clients that replied, shape (h, d).
            generator: The random generator for this client and round.
        """
        return update

    def altered(
        self,
        round: int,
        seed: int,
        attackers: frozenset[ClientId],
        requests: Mapping[ClientId, Request],
        replies: Mapping[ClientId, Any],
    ) -> dict[ClientId, FitReply]:
        """Return the attackers' replies with false updates. Replies that the attack does not change are left out.

        Args:
            round: The round, counted from 1.
            seed: The experiment's seed.
            attackers: The clients that attack.
            requests: The request to each client.
            replies: The reply of each client.
        """
        sent: dict[ClientId, Weights] = {}
        for client, reply in replies.items():
            request = requests[client]
            if isinstance(reply, FitReply) and isinstance(request, TrainingRequest):
                sent[client] = request.weights
        false = [client for client in sent if client in attackers]
        if not self.alters_replies or not false:
            return {}

        def updates(clients: list[ClientId]) -> Tensor:
            pairs = [(sent[client].params, replies[client].weights.params) for client in clients]
            return torch.stack([changes(before, after) for before, after in pairs])

        own = updates(false)
        honest = updates(others) if (others := [client for client in sent if client not in attackers]) else own[:0]
        result: dict[ClientId, FitReply] = {}
        for client, update in zip(false, own, strict=True):
            moved = self.false_update(update, honest, rng(seed, "attack", round, client))
            before, weights = sent[client].params, replies[client].weights
            params = {name: before[name] + change for name, change in split(moved, before).items()}
            result[client] = replace(replies[client], weights=Weights(params, weights.buffers))
        return result


class LabelFlip(Attack):
    """Attackers train on false labels: with C classes, label c becomes C − 1 − c."""

    alters_replies = False

    def false_labels(self, labels: Tensor, classes: int) -> Tensor:
        """Return C − 1 − c for each label c.

        >>> LabelFlip().false_labels(torch.tensor([0, 1, 9]), 10).tolist()
        [9, 8, 0]
        """
        return classes - 1 - labels


class SignFlip(Attack):
    """Attackers send their update with the opposite sign.

    Args:
        scale: Factor by which attackers multiply their sign-flipped update.
    """

    scale: PositiveFloat = 1.0

    def false_update(self, update: Tensor, honest: Tensor, generator: np.random.Generator) -> Tensor:
        """Return the update, multiplied by −``scale``."""
        return -self.scale * update


class Gaussian(Attack):
    """Attackers send normally distributed random numbers instead of an update.

    Args:
        deviation: Standard deviation of the attackers' random numbers.
    """

    deviation: PositiveFloat = 1.0

    def false_update(self, update: Tensor, honest: Tensor, generator: np.random.Generator) -> Tensor:
        """Return independent normal random numbers, which differ between clients and rounds."""
        drawn = torch.from_numpy(generator.standard_normal(len(update)))
        return (self.deviation * drawn).to(update.dtype)


class LittleIsEnough(Attack):
    """Attackers send updates that differ little from honest updates (ALIE, Baruch et al. 2019).

    In each coordinate, an attacker sends the mean of the round's honest updates plus z standard deviations of these
    updates.

    Args:
        deviations: Number z of standard deviations that attackers add to the mean honest update, in each coordinate.
    """

    deviations: PositiveFloat = 1.5

    def false_update(self, update: Tensor, honest: Tensor, generator: np.random.Generator) -> Tensor:
        """Return the honest updates' mean plus z standard deviations; without honest updates, return ``update``."""
        if len(honest) < 2:
            return honest[0] if len(honest) else update
        return honest.mean(dim=0) + self.deviations * honest.std(dim=0)


class InnerProduct(Attack):
    """Attackers send the mean honest update with the opposite sign (inner-product manipulation, Xie et al. 2019).

    Args:
        scale: Factor ε: attackers send −ε times the mean honest update.
    """

    scale: PositiveFloat = 2.0

    def false_update(self, update: Tensor, honest: Tensor, generator: np.random.Generator) -> Tensor:
        """Return −ε times the mean of the honest updates; without honest updates, −ε times ``update``."""
        return -self.scale * (honest.mean(dim=0) if len(honest) else update)


ATTACKS: Registry[Attack] = Registry(
    "attack",
    Attack,
    {
        "label-flip": "fedstrata.federation.attacks:LabelFlip",
        "sign-flip": "fedstrata.federation.attacks:SignFlip",
        "gaussian": "fedstrata.federation.attacks:Gaussian",
        "alie": "fedstrata.federation.attacks:LittleIsEnough",
        "ipm": "fedstrata.federation.attacks:InnerProduct",
    },
)

AnyAttack = Annotated[Attack, FromRegistry(ATTACKS)]
