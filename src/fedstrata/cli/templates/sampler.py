"""A client sampler: the clients that are invited. Try it:

fedstrata run --set method.client_sampler={module}:LongestAway
fedstrata compare --methods fedavg --set method.client_sampler={module}:LongestAway
"""

import numpy as np

import fedstrata as fs


class LongestAway(fs.ClientSampler):
    """The clients whose last invitation was the longest ago are invited; ties are broken at random.

    Args:
        spread: With 0, only the time counts. Larger values add more randomness.
    """

    spread: float = 0.0  # a setting: --set method.client_sampler.spread=2

    def init(self, federation):
        """Return the state before the first round: the round of each client's last invitation."""
        return np.zeros(federation.config.clients, dtype=np.int64)

    def select(self, federation, state, weights):
        """Return the clients of this round, and the new state."""
        candidates = federation.candidates()  # the clients that may be invited
        m = federation.config.training.invited(federation.config.clients)  # the number of clients to invite
        rng = federation.rng("longest-away")  # draws the same numbers for the same seed and round
        away = federation.round - state[candidates] + (self.spread + 0.5) * rng.random(len(candidates))
        chosen = candidates[np.argsort(-away)][:m]
        state = state.copy()
        state[chosen] = federation.round
        return fs.Selection.plain(chosen, len(candidates)), state
