"""A client sampler that invites clients in turn. In a spec: method.client_sampler = "rotating:Rotating"."""

import numpy as np

import fedstrata as fs


class Rotating(fs.ClientSampler):
    """Invites clients in the order of their numbers. After the last client, the sampler continues with the first.

    Args:
        step: Difference between the first clients of successive rounds. Default: the number of invited clients.
    """

    step: int | None = None

    def select(self, federation, state, weights):
        """Return the next m available clients, and the new state: the client with which the next round begins."""
        total, place, there = federation.config.clients, state or 0, federation.candidates()
        m = federation.config.training.invited(total)
        turn = there[np.argsort((there - place) % total)][:m]
        return fs.Selection.plain(turn, len(there)), (place + (self.step or m)) % total
