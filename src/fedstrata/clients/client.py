"""A client: its data, its state, and the answers it gives."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_not
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.errors import WithheldError
from fedstrata.base.records import Tree
from fedstrata.base.rng import rng
from fedstrata.clients.context import ClientContext
from fedstrata.federation.messages import ClientId
from fedstrata.models.batchnorm import ReduceGroup
from fedstrata.models.model import Model

T = TypeVar("T")


class Client:
    """One client while it answers one request; made when asked, gone afterwards.

    Args:
        number: Its number.
        context: What it shares with the others of this process.
        state: What it kept from earlier requests. Handlers replace entries and never change a value in place, so that
            an answer that does not count leaves no trace.
        group: Those that answer the same request at the same time, for ``all_reduce_sum``; None for none.
        model: A model of its own when it runs beside others.
    """

    def __init__(
        self,
        number: ClientId,
        context: ClientContext,
        state: Mapping[str, Tree] | None = None,
        group: ReduceGroup | None = None,
        model: Model | None = None,
    ) -> None:
        self.number, self.context, self.group = number, context, group
        self._before: Mapping[str, Tree] = state or {}
        self.state: dict[str, Tree] = dict(self._before)
        self.model = model or context.config.model
        begin, end = context.assignment.offsets[number : number + 2]
        self.indices: NDArray[np.int64] = context.assignment.indices[begin:end]
        self.behind = 0
        """Samples behind the answer, as its handler said; for the ledgers of the client's site."""

    def release(self, samples: int) -> None:
        """Let an answer go out that so many samples are behind; every handler calls it before it looks at them.

        Raises:
            WithheldError: There are fewer than ``privacy.min_samples``. The message does not say how many. With a
                minimum of 1, an answer without samples may go out too.
        """
        if samples < (least := self.context.privacy.min_samples) and least > 1:
            problem = f"fewer than privacy.min_samples = {least} samples are behind it"
            raise WithheldError(f"the answer stays here: {problem}")
        self.behind = samples

    def release_trained(self, samples: int) -> None:
        """Let an update go out: behind it are those samples alone that its steps see.

        Args:
            samples: Those that there are to train on.
        """
        training = self.context.config.training
        seen = samples if training.local_steps is None else training.local_steps * training.batch_size
        self.release(min(samples, seen))

    def __len__(self) -> int:
        return len(self.indices)

    def changed(self) -> bool:
        """Whether an entry of the state was replaced, added or removed."""
        state, before = self.state, self._before
        return state.keys() != before.keys() or any(map(is_not, state.values(), map(before.get, state)))

    @property
    def labels(self) -> NDArray[np.int64]:
        """Its labels, shape (n_k,)."""
        found: NDArray[np.int64] = self.context.data.y_train.numpy()[self.indices]
        return found

    def samples(self, chosen: NDArray[np.int64] | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Inputs and labels of some of its samples, by their place among its own."""
        where = torch.from_numpy(self.indices[chosen])
        return self.context.data.inputs(where), self.context.data.y_train[where]

    def rng(self, purpose: str, round: int) -> np.random.Generator:
        """A fresh generator of its own."""
        return rng(self.context.config.seed, purpose, round, self.number)
