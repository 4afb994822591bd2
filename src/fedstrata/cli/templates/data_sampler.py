"""A data sampler, which chooses the samples that a client uses in a round. Try it:

fedstrata run --set method.data_sampler={module}:Half
"""

from pydantic import Field

import fedstrata as fs


class Half(fs.DataSampler):
    """Each sample is used in a round with the same probability.

    Args:
        share: The probability that a sample is used.
    """

    share: float = Field(default=0.5, gt=0, le=1)  # a setting; set it with --set method.data_sampler.share=0.2

    def keep(self, federation, state, clients):
        """Return the probability with which a sample is used, the state (here unchanged), and values to record."""
        return self.share, state, {"kept": self.share}
