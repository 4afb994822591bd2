"""A partition: the division of training samples among clients. Try it:

fedstrata partition --trust --set partition={module}:Leaning
fedstrata run --set partition={module}:Leaning
"""

import numpy as np
from pydantic import Field

import fedstrata as fs


class Leaning(fs.Partition):
    """Each client leans towards one class. A part of each class goes to these clients, the rest to random clients.

    Args:
        share: The fraction of samples that go to clients that lean towards their class; 0 is nearly IID.
    """

    share: float = Field(default=0.8, ge=0, le=1)  # a setting: --set partition.share=0.5

    def assign(self, labels, domains, rng):
        """Return the client that gets each sample, (N,). Here, client k leans towards class k mod C."""
        classes = min(int(labels.max()) + 1, self.clients)
        leaning = labels % classes + classes * rng.integers(self.clients // classes, size=len(labels))
        random = rng.integers(self.clients, size=len(labels))
        return np.where(rng.random(len(labels)) < self.share, leaning, random)
