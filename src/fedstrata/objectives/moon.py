"""MOON's model-contrastive loss (Li, He and Song 2021, Eq. 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Extra, Params, Weights
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Batches, Context, PerSample, Trained
from fedstrata.objectives.prototypes import evaluating


def contrastive(z: Tensor, positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
    """Return −log( e^{sim(z, z⁺)/τ} / (e^{sim(z, z⁺)/τ} + e^{sim(z, z⁻)/τ}) ) with cosine similarity.

    Args:
        z: Features that the model in training computes for a batch, shape (B, …).
        positive: z⁺, the features that the global model computes for the same batch, shape (B, …).
        negative: z⁻, the features that the client's last model computes for the same batch, shape (B, …).
        temperature: τ, positive.

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
    """Cross-entropy plus μ times a loss that moves features towards the global model's, away from the last model's.

    The features are the head's input. The last model is the one that the client trained when it last took part; the
    client stores it between rounds. In a client's first round, the global model takes the place of the last model, so
    that the contrastive loss has no gradient. The global and the last model compute features in evaluation mode, with
    their own buffers.

    Args:
        mu: Weight μ of the contrastive loss. The paper's grid is 0.1, 1, 5 and 10.
        temperature: Temperature τ of the contrastive loss.
    """

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    def check(self, config: FederationConfig) -> None:
        """Require a model with a head, because the features are its input."""
        config.model.require_head()

    @property
    def sends(self) -> str:
        """Empty, because the client does not send its last model."""
        return ""

    def client_prepare(self, model: Model, weights: Weights, batches: Batches, received: Extra) -> Extra:
        """Add the received buffers to the message: ``losses`` needs them, and training changes those in the model."""
        return {**received, "buffers": weights.buffers}

    def client_init(self, model: Model, context: Context) -> Context:
        """Put the global model and the client's last model into ``derived``."""
        received = {**context.start, **context.received["buffers"]}
        # Checkpoints do not store the memory format of tensors. Restore it, because it affects rounding in
        # convolutions.
        last = model.laid_out(context.kept) if isinstance(context.kept, dict) else received
        return context.deriving(positive=received, negative=last)

    def losses(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """Return the cross-entropy plus μ times the contrastive loss of every sample, shape (B,)."""
        features, logits = model.with_features(params, batch.x)
        with torch.no_grad(), evaluating(model):
            positive, negative = (
                model.with_features(context.derived[which], batch.x)[0] for which in ("positive", "negative")
            )
        second = contrastive(features, positive, negative, self.temperature)
        return F.cross_entropy(logits, batch.y, reduction="none") + self.mu * second

    def client_final(self, trained: Trained, context: Context) -> tuple[Extra, Tree]:
        """Keep the trained model as the client's last model; a client that took no step keeps the previous one."""
        if trained.steps == 0:
            return {}, context.kept
        return {}, {**trained.params, **trained.model.current_buffers()}
