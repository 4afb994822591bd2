"""A client sampler, which chooses the clients to invite. Try it:

fedstrata run --set method.client_sampler={module}:LongestAway
fedstrata compare --methods fedavg --set method.client_sampler={module}:LongestAway
"""

import numpy as np

import fedstrata as fs


class LongestAway(fs.ClientSampler):
    """Invites the clients that have waited longest since their last invitation. Ties are broken at random.

    Args:
        spread: Size of random changes to waiting times, in rounds. With 0, only the time since the last invitation
            matters.
    """

    spread: float = 0.0  # a setting; set it with --set method.client_sampler.spread=2

    def init(self, federation):
        """Return the initial state, which contains the round of each client's last invitation (0: never)."""
        return np.zeros(federation.config.clients, dtype=np.int64)

    def select(self, federation, state, weights):
        """Return the clients of this round, and the new state."""
        candidates = federation.candidates()  # the clients that may be invited
        m = federation.config.training.invited(federation.config.clients)  # the number of clients to invite
        rng = federation.rng("longest-away")  # a generator that depends only on the seed and the round
        away = federation.round - state[candidates] + (self.spread + 0.5) * rng.random(len(candidates))
        chosen = candidates[np.argsort(-away)][:m]
        state = state.copy()
        state[chosen] = federation.round
        return fs.Selection.plain(chosen, len(candidates)), state
