"""A data sampler: few samples first, all of them later. method.data_sampler = "warmup:Warmup"."""

from pydantic import Field, PositiveInt

import fedstrata as fs


class Warmup(fs.DataSampler):
    """Each sample takes part with a probability that grows from ``start`` to 1.

    Args:
        start: The probability in the first round.
        rounds: From this round on it is 1.
    """

    start: float = Field(default=0.2, gt=0, le=1)
    rounds: PositiveInt = 10

    def keep(self, federation, state, clients):
        """The probability, the state (there is none) and what the round's record gets."""
        p = min(1.0, self.start + (1 - self.start) * (federation.round - 1) / max(self.rounds - 1, 1))
        return p, state, {"kept": p}
