"""An availability that goes with the labels. availability = {name = "drowsy:Drowsy", label = 3}."""

import numpy as np
from pydantic import Field, NonNegativeInt, PrivateAttr

import fedstrata as fs


class Drowsy(fs.Availability):
    """The more of one label a client holds, the less often it is there.

    Args:
        label: The label.
        p: Probability of being there of a client that holds nothing else; without the label it is 1.
    """

    label: NonNegativeInt = 0
    p: float = Field(default=0.1, ge=0, le=1)
    _there: object = PrivateAttr(default=None)

    def check(self, population):
        """Keeps every client's probability; labels are known to a simulation alone."""
        if population.labels is None or self.label >= population.classes:
            raise fs.SpecError("label", f"needs a simulation, and labels 0 to {population.classes - 1}", self.label)
        self._there = 1 - (1 - self.p) * population.labels[:, self.label] / np.maximum(population.sizes, 1)

    def online(self, clients, round, seed):
        """A draw of its own for every client and round."""
        return fs.uniforms(seed, "online", round, clients) < self._there[clients]
