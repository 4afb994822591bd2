"""An availability model that depends on labels. In a spec: availability = {name = "drowsy:Drowsy", label = 3}."""

import numpy as np
from pydantic import Field, NonNegativeInt, PrivateAttr

import fedstrata as fs


class Drowsy(fs.Availability):
    """Clients are online less often if more of their samples have a certain label.

    Args:
        label: The label.
        p: Probability that a client is online if all of its samples have the label. Without the label: 1.
    """

    label: NonNegativeInt = 0
    p: float = Field(default=0.1, ge=0, le=1)
    _there: object = PrivateAttr(default=None)

    def check(self, population):
        """Store the probability of each client. Only simulations know the labels."""
        if population.labels is None or self.label >= population.classes:
            raise fs.SpecError("label", f"needs a simulation, and labels 0 to {population.classes - 1}", self.label)
        self._there = 1 - (1 - self.p) * population.labels[:, self.label] / np.maximum(population.sizes, 1)

    def online(self, clients, round, seed):
        """Draw for each client and round whether the client is online."""
        return fs.uniforms(seed, "online", round, clients) < self._there[clients]
