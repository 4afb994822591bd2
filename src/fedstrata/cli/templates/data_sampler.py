"""A data sampler: which of its samples a client uses. Try it:

fedstrata run --set method.data_sampler={module}:Half
"""

from pydantic import Field

import fedstrata as fs


class Half(fs.DataSampler):
    """Every sample takes part in a round with the same probability.

    Args:
        share: That probability.
    """

    share: float = Field(default=0.5, gt=0, le=1)  # a setting: --set method.data_sampler.share=0.2

    def keep(self, federation, state, clients):
        """The probability, the new state (there is none), and what the round's record gets."""
        return self.share, state, {"kept": self.share}
