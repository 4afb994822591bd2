"""MOON's model-contrastive loss (Li, He and Song 2021, Eq. 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Extra, Params, Weights
from fedstrata.models.model import Model, evaluating
from fedstrata.objectives.base import Batch, Batches, Context, PerSample, Trained


def contrastive(z: Tensor, positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
    """Return the model-contrastive loss of every sample.

    The loss is −log( e^{sim(z, z⁺)/τ} / (e^{sim(z, z⁺)/τ} + e^{sim(z, z⁻)/τ}) ), where sim is the cosine similarity.

    Args:
        z: The features z that the trained model computes for a batch, shape (B, …).
        positive: The features z⁺ that the global model computes for the same batch, shape (B, …).
        negative: The features z⁻ that the client's previous model computes for the same batch, shape (B, …).
        temperature: The temperature τ, which is positive.

    Returns:
        The loss of each sample, shape (B,).

    >>> z = torch.tensor([[2.0, 0.0]])
    >>> contrastive(z, z, -z, 1.0).exp() - 1  # e⁻²
    tensor([0.1353])
    """
    near = F.cosine_similarity(z.flatten(1), positive.flatten(1))
    far = F.cosine_similarity(z.flatten(1), negative.flatten(1))
    # The loss equals log(1 + e^x) with x = (far − near) / τ.
    return F.softplus((far - near) / temperature)


class Contrastive(PerSample):
    """Cross-entropy plus μ times a contrastive loss on the features, which are the head's input.

    The contrastive loss pulls the features towards the global model's features, and pushes them away from the features
    of the client's previous model. The previous model is the result of the client's most recent training, and is stored
    at the client between rounds. In a client's first round, the global model is also the previous model, so the
    contrastive loss has no gradient. Both models compute features in evaluation mode, with their own buffers.

    Args:
        mu: Weight μ of the contrastive loss. The paper tries 0.1, 1, 5 and 10.
        temperature: Temperature τ of the contrastive loss.
    """

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the model has no head, because the features are the head's input."""
        _ = config.model.head_name  # raises SpecError if the model has no head

    @property
    def sends(self) -> str:
        """An empty string, because clients do not send their previous models."""
        return ""

    def client_prepare(self, model: Model, weights: Weights, batches: Batches, received: Extra) -> Extra:
        """Add the received buffers to the server's message, because training changes the model's buffers."""
        return {**received, "buffers": weights.buffers}

    def client_init(self, model: Model, context: Context) -> Context:
        """Put the global model and the client's previous model into ``derived``."""
        received = {**context.start, **context.received["buffers"]}
        # Checkpoints do not store the memory format of tensors. Restore it, because it affects rounding in
        # convolutions.
        last = model.laid_out(context.kept) if isinstance(context.kept, dict) else received
        return context.deriving(positive=received, negative=last)

    def losses(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """Return the cross-entropy plus μ times the contrastive loss for every sample, shape (B,)."""
        features, logits = model.with_features(params, batch.x)
        with torch.no_grad(), evaluating(model):
            positive, negative = (
                model.with_features(context.derived[which], batch.x)[0] for which in ("positive", "negative")
            )
        second = contrastive(features, positive, negative, self.temperature)
        return F.cross_entropy(logits, batch.y, reduction="none") + self.mu * second

    def client_final(self, trained: Trained, context: Context) -> tuple[Extra, Tree]:
        """Store the trained model as the client's previous model, unless the client took no step."""
        if trained.steps == 0:
            return {}, context.kept
        return {}, {**trained.params, **trained.model.current_buffers()}
