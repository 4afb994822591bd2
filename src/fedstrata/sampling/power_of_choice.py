"""Power-of-choice (Cho et al. 2020, Client Selection in Federated Learning): the candidates with the largest loss."""

from __future__ import annotations

import numpy as np
from pydantic import PositiveInt

from fedstrata.errors import ReplyRefusedError, SpecError
from fedstrata.federation.messages import LossReply, LossReport, Weights
from fedstrata.federation.seam import Federation, Job
from fedstrata.records import Tree
from fedstrata.sampling.base import ClientSampler, Selection
from fedstrata.sampling.sizes import ask_sizes


class PowerOfChoice(ClientSampler):
    """d candidates, drawn by size without replacement, say how bad the global model is for them; the m worst take part.

    It is meant to be biased: a contrast to the samplers that keep the expected aggregate.

    Args:
        candidates: d; twice the clients of a round (or all, where there are fewer) unless given.
    """

    candidates: PositiveInt | None = None

    def check(self, job: Job) -> None:
        """M ≤ d ≤ N."""
        super().check(job)
        m, key = job.training.invited(job.clients), "method.client_sampler.candidates"
        if self.candidates is not None and self.candidates > job.clients:
            raise SpecError(key, f"the partition has {job.clients} clients; give at most that", self.candidates)
        if self.candidates is not None and self.candidates < m:
            raise SpecError(key, f"a round invites {m} of the candidates; give at least that", self.candidates)

    @property
    def tells_sizes(self) -> bool:
        """Clients are drawn by size."""
        return True

    def init(self, federation: Federation) -> Tree:
        """The sizes."""
        return ask_sizes(federation)

    def select(self, federation: Federation, state: Tree, weights: Weights) -> tuple[Selection, Tree]:
        """Draw the candidates, ask them for their loss, take the m largest; equal losses in random order."""
        job = federation.job
        clients, sizes = state.among(federation.candidates())
        m = min(job.training.invited(job.clients), len(clients))
        d = min(self.candidates or 2 * m, len(clients))
        if d == 0:
            return Selection.plain(clients, 0), state
        chosen = federation.rng("candidates").choice(clients, size=d, replace=False, p=sizes / sizes.sum())

        def check(reply: LossReply) -> None:
            if reply.loss < 0:
                raise ReplyRefusedError(f"loss {reply.loss} is impossible")

        request = LossReport(federation.round, weights)
        replies = federation.ask(dict.fromkeys(chosen.tolist(), request), check=check)
        asked = np.fromiter(replies, dtype=np.int64)
        losses = np.array([reply.loss for reply in replies.values()])
        worst = np.lexsort((federation.rng("client-sampling").permutation(len(asked)), -losses))[:m]
        selection = Selection.plain(asked[worst], len(clients))
        return selection, state
