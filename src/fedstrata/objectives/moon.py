"""MOON's model-contrastive loss (Li, He and Song 2021, Eq. 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedstrata.base.records import Tree
from fedstrata.federation.messages import Extra, Params, Weights
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Batches, Context, PerSample, Trained
from fedstrata.objectives.prototypes import evaluating


def contrastive(z: Tensor, positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
    """Return −log( e^{sim(z, z⁺)/τ} / (e^{sim(z, z⁺)/τ} + e^{sim(z, z⁻)/τ}) ) with cosine similarity.

    Args:
        z: Features of the model in training, shape (B, …).
        positive: z⁺, of the global model.
        negative: z⁻, of the client's last model.
        temperature: τ.

    Returns:
        Shape (B,).

    >>> z = torch.tensor([[2.0, 0.0]])
    >>> contrastive(z, z, -z, 1.0).exp() - 1  # e⁻² more than 1
    tensor([0.1353])
    """
    near = F.cosine_similarity(z.flatten(1), positive.flatten(1))
    far = F.cosine_similarity(z.flatten(1), negative.flatten(1))
    # The loss equals log(1 + e^x) with x = (far − near) / τ.
    return F.softplus((far - near) / temperature)


class Contrastive(PerSample):
    """Cross-entropy + μ · contrastive loss: towards the global model's features, away from the client's last ones.

    The features are the head's input. The two frozen models run in evaluation mode, with their own buffers. In a
    client's first round, its last model is the global model, and the contrastive loss has no gradient. A client stores
    a whole model between the rounds.

    Args:
        mu: μ, the weight of the contrastive loss. The paper's grid is 0.1, 1, 5 and 10.
        temperature: τ of the contrastive loss.
    """

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    @property
    def sends(self) -> str:
        """Empty: the client's last model stays with the client."""
        return ""

    def client_prepare(self, model: Model, weights: Weights, batches: Batches, received: Extra) -> Extra:
        """Add the received buffers, because training changes them."""
        return {**received, "buffers": weights.buffers}

    def client_init(self, model: Model, context: Context) -> Context:
        """Load the global model and the client's last model."""
        received = {**context.start, **context.received["buffers"]}
        # A state from a checkpoint has lost its memory format, which affects the rounding in convolutions.
        last = model.laid_out(context.kept) if isinstance(context.kept, dict) else received
        return context.deriving(positive=received, negative=last)

    def losses(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """Return the sum of both losses of every sample, shape (B,)."""
        features, logits = model.with_features(params, batch.x)
        with torch.no_grad(), evaluating(model):
            positive, negative = (
                model.with_features(context.derived[which], batch.x)[0] for which in ("positive", "negative")
            )
        second = contrastive(features, positive, negative, self.temperature)
        return F.cross_entropy(logits, batch.y, reduction="none") + self.mu * second

    def client_final(self, trained: Trained, context: Context) -> tuple[Extra, Tree]:
        """Keep the trained model as the next negative; a client without steps keeps its previous one."""
        if trained.steps == 0:
            return {}, context.kept
        return {}, {**trained.params, **trained.model.current_buffers()}
