"""A partition: who holds which training samples. Try it:

fedstrata partition --trust --set partition={module}:Leaning
fedstrata run --set partition={module}:Leaning
"""

import numpy as np
from pydantic import Field

import fedstrata as fs


class Leaning(fs.Partition):
    """A share of each class goes to the clients that lean towards it, the rest to anybody.

    Args:
        share: That share; 0 is nearly IID.
    """

    share: float = Field(default=0.8, ge=0, le=1)  # a setting: --set partition.share=0.5

    def assign(self, labels, domains, rng):
        """The owner of every sample; here client k leans towards class k mod C."""
        classes = min(int(labels.max()) + 1, self.clients)
        leaning = labels % classes + classes * rng.integers(self.clients // classes, size=len(labels))
        anybody = rng.integers(self.clients, size=len(labels))
        return np.where(rng.random(len(labels)) < self.share, leaning, anybody)
