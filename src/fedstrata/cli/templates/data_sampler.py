"""A data sampler, which chooses the samples that a client uses in a round. Try it:

fedstrata run --set method.data_sampler={module}:Half
"""

from pydantic import Field

import fedstrata as fs


class Half(fs.DataSampler):
    """In each round, a client uses each of its samples with the same probability.

    Args:
        share: The probability that a sample is used.
    """

    share: float = Field(default=0.5, gt=0, le=1)  # a setting; set it with --set method.data_sampler.share=0.2

    def keep(self, federation, state, clients):
        """Return the probability of using a sample, the unchanged state, and values to record."""
        return self.share, state, {"kept": self.share}
