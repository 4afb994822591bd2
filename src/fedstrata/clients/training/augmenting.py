"""Augment the batches on which clients train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fedstrata.base.rng import rng
from fedstrata.clients.client import Client, ClientContext
from fedstrata.federation.messages import ClientId
from fedstrata.objectives.base import Batch


@torch.no_grad()
def augmented(
    context: ClientContext, x: Any, *, client: ClientId, round: int, step: int, seed: int | None = None
) -> Any:
    """Return the augmented inputs of a client's batch, or the unchanged inputs if ``data.augment`` is not set.

    The augmentation depends only on the inputs, the seed, the client, the round and the step.

    Args:
        context: The context of the client.
        x: The inputs of the batch, which the function may change in place.
        client: The client.
        round: The round, counted from 1.
        step: The client's step in this round, counted from 0.
        seed: The seed of the random numbers. Default: the spec's seed.
    """
    augment = context.config.augment
    if augment is None:
        return x
    seed = context.config.seed if seed is None else seed
    number = int(rng(seed, f"augment/{step}", round, client).integers(2**63))
    return augment(x, torch.Generator().manual_seed(number))


def augmented_batches(client: Client, batches: Iterator[Batch], round: int) -> Iterator[Batch]:
    """Yield the augmented batches of a client's steps, with new random numbers in each step.

    With ``training.accumulate``, all mini-batches of a step are augmented together, so the result does not depend on
    the number of mini-batches.

    Args:
        client: The client.
        batches: The samples of each step of the round.
        round: The round, counted from 1.
    """
    for step, batch in enumerate(batches):
        x = augmented(client.context, batch.x, client=client.number, round=round, step=step, seed=client.seed)
        yield replace(batch, x=x)
