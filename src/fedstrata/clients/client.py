"""A client: its data, its state, and what its handlers need."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_not

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


class Client:
    """One client; it exists only while it answers one request.

    Args:
        number: The client's number.
        context: What all clients of this process share.
        state: What the client kept from earlier requests. Handlers replace entries and never change a value in place,
            so that a refused answer changes nothing.
        group: The clients that answer at the same time, for ``all_reduce_sum``; None if the client runs alone.
        model: The client's own copy of the model, if it runs in a group. Default: the model of the context.
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
        """Number of samples that contribute to the answer, as the handler said; for the audit log of the site."""

    def release(self, samples: int) -> None:
        """Check that enough samples contribute to an answer; every handler calls this before it reads the samples.

        With ``privacy.min_samples`` = 1, an answer without samples is allowed too.

        Raises:
            WithheldError: There are fewer samples than ``privacy.min_samples``. The message does not say how many.
        """
        if samples < (least := self.context.privacy.min_samples) and least > 1:
            problem = f"fewer than privacy.min_samples = {least} samples are behind it"
            raise WithheldError(f"the answer stays here: {problem}")
        self.behind = samples

    def release_trained(self, samples: int) -> None:
        """Check that enough samples contribute to an update: only those that the training steps see count.

        Args:
            samples: Number of samples to train on.
        """
        training = self.context.config.training
        seen = samples if training.local_steps is None else training.local_steps * training.batch_size
        self.release(min(samples, seen))

    def __len__(self) -> int:
        return len(self.indices)

    def changed(self) -> bool:
        """Return True if an entry of the state was replaced, added or removed."""
        state, before = self.state, self._before
        return state.keys() != before.keys() or any(map(is_not, state.values(), map(before.get, state)))

    @property
    def labels(self) -> NDArray[np.int64]:
        """The client's labels, shape (n_k,)."""
        labels: NDArray[np.int64] = self.context.data.y_train.numpy()[self.indices]
        return labels

    def samples(self, chosen: NDArray[np.int64] | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of some of the client's samples.

        Args:
            chosen: Positions among the client's own samples. Default: all.
        """
        indices = torch.from_numpy(self.indices[chosen])
        return self.context.data.inputs(indices), self.context.data.y_train[indices]

    def rng(self, purpose: str, round: int) -> np.random.Generator:
        """Return a fresh generator, which depends on the seed, the purpose, the round and the client."""
        return rng(self.context.config.seed, purpose, round, self.number)
