"""Train with Stratify so that the server learns only the sum of the clients' gradients (``privacy.sums``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from typing_extensions import override

from fedstrata.base.errors import SpecError
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.federation import Federation, Summed
from fedstrata.federation.messages import Params, Weights, Work
from fedstrata.federation.secure.fit import (
    EQUAL,
    LOSS_RANGE,
    Count,
    ModelForm,
    Numbers,
    Summands,
    Sums,
    Update,
    largest_size,
    size_of_weights,
    weight_by_size,
)
from fedstrata.stratify.messages import Gradient, GradientReply, WeightedGradientReply


class GradientForm(ModelForm):
    """Encodes each reply to ``Gradient`` for secure sums, as a mean gradient whose weight is the number of samples.

    Args:
        config: The settings that server and clients share.
        batch_size: Number of samples in a batch.
        steps: Number of local steps whose gradients are added up. Each gradient is in the range ``privacy.range``.
    """

    def __init__(self, config: FederationConfig, batch_size: int, steps: int) -> None:
        # A client that moves samples between batches can have more samples in a batch than the batch size.
        most = max(batch_size, largest_size(config)) if config.privacy.gathers else batch_size
        weight = weight_by_size(config, most)
        loss = {"loss": torch.zeros(1, dtype=torch.float64)}
        wide = config.privacy.range * steps
        # A codec compresses the sum over the client's samples (plus the error of earlier batches) instead of the mean.
        # The range of this sum is ``weight.largest`` times as large as the range of the mean.
        update = Update("", wide * weight.largest, EQUAL)
        summands: Summands = {
            "gradient": Numbers(_mean_gradient, config.model.params(), wide, weight, update),
            "loss": Numbers(_mean_loss, loss, LOSS_RANGE, weight, needs_model=False),
            "drawn": Count(lambda reply: reply.samples, most),
        }
        self.weighted = config.task.weighted
        super().__init__(config, config.clients, summands | (size_of_weights(weight) if self.weighted else {}))

    @override
    def exchange(self, request: Any) -> int:
        return int(request.batch)

    def reply(self, sums: Sums) -> GradientReply:
        """Return the sum of the replies."""
        reply = GradientReply(sums.of("gradient"), sums.count("drawn"), sums.number("loss"), {})
        return WeightedGradientReply(**vars(reply), weight=sums.number("samples")) if self.weighted else reply


def ask_gradients(
    federation: Federation, clients: Iterable[int], request: Gradient, form: GradientForm, work: Work
) -> Summed | None:
    """Return the sum of the gradients of a batch's clients, or None if too few clients reply."""
    from fedstrata.federation.secure.simulated import ask_sums

    summed = ask_sums(federation, clients, request, form, work=work)
    if summed is None:
        return None
    reply = form.reply(Sums(form.summands, len(summed.clients), summed.total))
    return Summed(reply, summed.clients, summed.total.scaled)


def check_secure_batches(config: FederationConfig, mode: str) -> None:
    """Check that Stratify's mode and the model support secure sums (``privacy.sums``).

    Raises:
        SpecError: The model has buffers, or training does not use batches.
    """
    if config.privacy.sums != "secure":
        return
    if mode != "batch":
        problem = "trains on single samples, but with privacy.sums = 'secure' the server sees only sums."
        raise SpecError("method.mode", f"{problem} Use method.mode = 'batch', or privacy.sums = 'plain'.", mode)
    if config.model.buffers():
        problem = "BatchNorm adds up the clients' statistics in each batch, but secure sums do not support this."
        raise SpecError("model", f"{problem} Use a model without BatchNorm.")


def _mean_gradient(sent: Weights, reply: GradientReply) -> Params:
    return {name: gradient / max(reply.size, 1e-12) for name, gradient in reply.gradient.items()}


def _mean_loss(sent: Weights, reply: GradientReply) -> Params:
    return {"loss": torch.tensor([reply.loss / max(reply.size, 1e-12)], dtype=torch.float64)}
