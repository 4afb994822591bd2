"""A data sampler that uses few samples at first, then all samples. In a spec: method.data_sampler = "warmup:Warmup"."""

from pydantic import Field, PositiveInt

import fedstrata as fs


class Warmup(fs.DataSampler):
    """Clients use each sample with a probability that increases from ``start`` to 1.

    Args:
        start: Probability in the first round.
        rounds: First round in which the probability is 1.
    """

    start: float = Field(default=0.2, gt=0, le=1)
    rounds: PositiveInt = 10

    def keep(self, federation, state, clients):
        """Return the probability, the state (which is not used), and the metrics of the round."""
        p = min(1.0, self.start + (1 - self.start) * (federation.round - 1) / max(self.rounds - 1, 1))
        return p, state, {"kept": p}
