"""A partition, which divides the training samples among clients. Try it:

fedstrata partition --trust --set partition={module}:Leaning
fedstrata run --set partition={module}:Leaning
"""

import numpy as np
from pydantic import Field

import fedstrata as fs


class Leaning(fs.Partition):
    """Each client prefers one class. A fraction of each class goes to clients that prefer the class, and the other
    samples go to random clients.

    Args:
        share: The fraction of a class for the clients that prefer the class. With 0, the partition is nearly IID.
    """

    share: float = Field(default=0.8, ge=0, le=1)  # a setting; set it with --set partition.share=0.5

    def assign(self, labels, domains, rng):
        """Return the client of each sample, shape (N,). Client k prefers class k mod C."""
        classes = min(int(labels.max()) + 1, self.clients)
        leaning = labels % classes + classes * rng.integers(self.clients // classes, size=len(labels))
        random = rng.integers(self.clients, size=len(labels))
        return np.where(rng.random(len(labels)) < self.share, leaning, random)
