"""Client-level differential privacy in secure sums: each client clips its update, and adds a share of the noise."""

from __future__ import annotations

import math

import numpy as np

from fedstrata.base.arrays import Floats
from fedstrata.base.errors import SpecError
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import ClientId, Fit, FitReply, Params
from fedstrata.federation.secure.ring import Part, Ring, Words, rounding
from fedstrata.federation.vectors import changes

UPDATE = "update"
"""The name of the only part of a vector. Noise is added to this part."""


class NoisyForm:
    """The layout of clipped updates, to which clients add Skellam noise (Agarwal et al. 2021).

    A sum needs at least t clients, of which m may collude. In units of the ring, each client adds noise with the
    variance σ² / (t − m). The noise of the honest clients in a sum therefore has at least the variance σ², even if some
    clients are missing.

    Args:
        config: The settings that server and clients share. ``privacy.parties`` is t.
        clients: The maximum number of clients in a sum.
        params: The parameters that clients train, with their names and shapes.

    Raises:
        SpecError: The masks do not protect against m colluding clients, or the noise is too large for the ring.
    """

    def __init__(self, config: FederationConfig, clients: int, params: Params) -> None:
        dp, least = config.privacy.clients, config.privacy.parties
        assert dp is not None
        most = max(0, min(least - 2, 2 * least - clients - 1))  # see the proof in ``protocol``
        if dp.colluding > most:
            problem = f"with {clients} clients per round, a sum may have as few as {least} clients. The masks protect "
            problem += f"these clients only if at most {most} clients collude. Use at most {most}, or increase "
            problem += "privacy.parties."
            raise SpecError("privacy.clients.colluding", problem, dp.colluding)
        self.dp, self.least, self.seed, self.params = dp, least, config.seed, params
        size, share = sum(tensor.numel() for tensor in params.values()), math.sqrt(least - dp.colluding)
        try:
            self.ring = Ring(clients, {UPDATE: Part(size, dp.clip)}, noise=dp.noise / share)
        except SpecError as error:
            raise SpecError("privacy.clients.noise", error.problem, dp.noise) from None

    @property
    def variance(self) -> float:
        """The minimum variance σ² = (noise · Q)² of the noise in a sum, in units of the ring."""
        return (self.dp.noise * self.ring.scale) ** 2

    @property
    def sensitivity(self) -> tuple[float, float]:
        """The maximum L1 norm Δ₁ and the maximum L2 norm Δ₂ of a client's rounded update, in units of the ring.

        Each of the d elements is rounded by less than 1, so Δ₂ = Q + √d. The elements are integers, so Δ₁ is at most
        Δ₂², and at most √d Δ₂.
        """
        size = math.sqrt(self.ring.parts[UPDATE].size)
        longest = self.ring.scale + size
        return longest * min(size, longest), longest

    def encode(self, request: Fit, reply: FitReply, client: ClientId) -> Words:
        """Return a client's vector without noise. The client then adds its noise with ``Ring.add_noise``."""
        before = {name: request.weights.params[name] for name in self.params}
        update = clipped(changes(before, reply.weights.params).double().numpy(), self.dp.clip)
        return self.ring.encode({UPDATE: update}, {}, rounding(self.seed, request.round, client, 0))


def clipped(update: Floats, clip: float) -> Floats:
    """Scale an update of shape (d,) down to an L2 norm of at most ``clip``.

    An update with NaN or infinity becomes zero. A missing reply would tell the server that the update is not finite.
    """
    norm = float(np.linalg.norm(update))
    if not math.isfinite(norm):
        return np.zeros_like(update)
    # Without np.clip, a rounding error could make an element slightly larger than the bound. ``Ring.encode`` would then
    # count the update as scaled down.
    return np.clip(update * min(1.0, clip / norm), -clip, clip) if norm else update
