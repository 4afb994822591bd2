"""A client sampler: everybody in turn. method.client_sampler = "rotating:Rotating"."""

import numpy as np

import fedstrata as fs


class Rotating(fs.ClientSampler):
    """The next clients of the ring in every round, among those who may be invited.

    Args:
        step: How far the ring turns in a round; by as many as are invited unless given.
    """

    step: int | None = None

    def select(self, federation, state, weights):
        """The m clients from the ring's place on; the state is that place."""
        total, place, there = federation.config.clients, state or 0, federation.candidates()
        m = federation.config.training.invited(total)
        turn = there[np.argsort((there - place) % total)][:m]
        return fs.Selection.plain(turn, len(there)), (place + (self.step or m)) % total
