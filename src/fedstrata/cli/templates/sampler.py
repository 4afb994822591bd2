"""A client sampler: who is invited. Try it:

fedstrata run --set method.client_sampler={module}:LongestAway
fedstrata compare --methods fedavg --set method.client_sampler={module}:LongestAway
"""

import numpy as np

import fedstrata as fs


class LongestAway(fs.ClientSampler):
    """Invites those who have not been invited for the longest time; ties are broken at random.

    Args:
        spread: 0 goes strictly by the time away; larger values mix in more chance.
    """

    spread: float = 0.0  # a setting: --set method.client_sampler.spread=2

    def init(self, federation):
        """The state before the first round: the round of each client's last invitation."""
        return np.zeros(federation.config.clients, dtype=np.int64)

    def select(self, federation, state, weights):
        """Who takes part in this round, and the new state."""
        there = federation.candidates()  # the clients that may be invited
        m = federation.config.training.invited(federation.config.clients)  # how many are wanted
        rng = federation.rng("longest-away")  # always the same for a seed and a round
        away = federation.round - state[there] + (self.spread + 0.5) * rng.random(len(there))
        chosen = there[np.argsort(-away)][:m]
        state = state.copy()
        state[chosen] = federation.round
        return fs.Selection.plain(chosen, len(there)), state
