"""An availability model, which chooses the clients that are online in a round. Try it:

fedstrata run --set availability={module}:Nights
"""

import numpy as np
from pydantic import Field, PositiveInt

import fedstrata as fs


class Nights(fs.Availability):
    """Clients are online during the night of their time zone, and with a small probability during the day.

    Args:
        day: The number of rounds in a day.
        night: The fraction of a day that is night.
        by_day: The probability that a client is online in a round during the day.
    """

    day: PositiveInt = 12  # a setting; set it with --set availability.day=24
    night: float = Field(default=0.5, ge=0, le=1)
    by_day: float = Field(default=0.1, ge=0, le=1)

    def online(self, clients, round, seed):
        """Return an array of booleans: whether each of ``clients`` is online in a round."""
        zone = fs.uniforms(seed, "zone", 0, clients)  # a random number in [0, 1) per client, the same in all rounds
        hour = (round / self.day + zone) % 1
        draws = fs.uniforms(seed, "luck", round, clients)  # a new random number per client and round
        return np.where(hour < self.night, True, draws < self.by_day)
