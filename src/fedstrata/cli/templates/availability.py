"""A drop-out model: who is there in which round. Try it:

fedstrata run --set availability={module}:Nights
"""

import numpy as np
from pydantic import Field, PositiveInt

import fedstrata as fs


class Nights(fs.Availability):
    """Clients in different time zones: each is there at night, and by day with a small probability.

    Args:
        day: Rounds in a day.
        night: The share of a day that is night.
        by_day: The probability of being there by day.
    """

    day: PositiveInt = 12  # a setting: --set availability.day=24
    night: float = Field(default=0.5, ge=0, le=1)
    by_day: float = Field(default=0.1, ge=0, le=1)

    def online(self, clients, round, seed):
        """Whether each of ``clients`` is there in a round: an array of booleans of the same length."""
        zone = fs.uniforms(seed, "zone", 0, clients)  # one number in [0, 1) for each client, for the whole run
        hour = (round / self.day + zone) % 1
        luck = fs.uniforms(seed, "luck", round, clients)  # and one for each round
        return np.where(hour < self.night, True, luck < self.by_day)
