"""ReBaFL's local objective: relaxed balanced softmax and prototype feature augmentation (Xu et al., §4).

With the augmentation on (μ > 0), prototypes travel as tables (``fedstrata.objectives.prototypes``):

- the server's state, ``RecipeState.objective``, is its table, ``{"means": (C, d), "samples": (C,)}``. ``samples`` is 0
  for a class that no client has ever reported; for the others it counts the samples of the last round in which
  somebody did;
- a client's message is ``{"prototypes": table}`` of its own classes, rows of zeros for the others;
- a client's state under ``"objective"`` is the table that it sent last, with ``keep_prototypes``: for the leakage
  audit, which reads it from a checkpoint. Training never uses it.

With μ = 0 no prototype is computed or sent, and both states are None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Extra, Fact, FitReply, Params, Weights
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Batches, Context, PerSample, Trained
from fedstrata.objectives.calibrated import idle_clients, log_prior
from fedstrata.objectives.prototypes import averaged, class_means, feature_size, merged, no_prototypes, of_enough


class Rebalanced(PerSample):
    """ℓ(w; x) + μ ℓ(φ; h̃) (Eq. 16): both cross-entropies on z + log p̂, the second training the head φ alone.

    p̂(c) = (1 − ε) n_k(c) / n_k + ε / C (Eq. 10). The j-th sample of a batch, of class y and with feature h, becomes
    h̃ = P[c_j] + λ (h − P[y]) of class c_j, which cycles through the classes that P knows (Eq. 15). P is the
    federation's prototypes, overridden by the client's own under the received model (Eq. 18); a class that neither
    knows is skipped. The prior of the augmented labels is that of the batch, relaxed by the same ε. The cycle begins
    anew with each batch: where there are more classes than samples in a batch, the last ones are never augmented.
    Prototypes are means in evaluation mode (Eq. 21), h is what training sees: with BatchNorm or dropout h − P[y] is not
    centred.

    Args:
        epsilon: ε, how far the client's class prior is moved towards the uniform one: 0 is balanced softmax, 1 plain
            softmax.
        mu: μ, the weight of the augmented loss; 0 turns the augmentation off. The text has 0.1, the published
            code's default is 0.5 (with ``training.momentum = 0.5``).
        transfer: λ, how much of a sample's deviation from its prototype goes over to the other class.
        relaxed: False for plain cross-entropy in both losses, for the ablation.
        keep_prototypes: Whether a client remembers the prototypes that it sent last, for the leakage audit.
    """

    epsilon: float = Field(default=0.01, ge=0, le=1)
    mu: NonNegativeFloat = 0.1
    transfer: NonNegativeFloat = 1.0
    relaxed: bool = True
    keep_prototypes: bool = True

    @property
    def sends(self) -> str:
        """The prototypes."""
        return "the mean feature of its samples of each class, with how many there are" if self.mu else ""

    @property
    def discloses(self) -> frozenset[Fact]:
        """Prototypes come with n_k(c)."""
        return frozenset({"labels", "sizes"} if self.mu else ())

    def tells_counts(self, config: FederationConfig) -> bool:
        """Prototypes come with n_k(c)."""
        return self.mu > 0

    # At the server.

    def check(self, config: FederationConfig) -> None:
        """The augmentation needs features of a known length, and a head that a second pass does not change."""
        if not self.mu:
            return
        feature_size(config.model)
        if there := [name for name, _ in config.model.module.get_submodule(config.model.head_name).named_buffers()]:
            problem = f"the head has buffers ({', '.join(there)}), which augmented samples would change; mu = 0 goes"
            raise SpecError("model.head", problem, config.model.head_name)

    def init(self, weights: Weights, config: FederationConfig) -> Tree:
        """No prototype is known."""
        return no_prototypes(config.classes, feature_size(config.model)) if self.mu else None

    def message(self, state: Tree) -> Extra:
        """The federation's prototypes."""
        return {"prototypes": state} if self.mu else {}

    def expected(self, weights: Weights, config: FederationConfig) -> Extra:
        """A table for all classes."""
        return {"prototypes": self.init(weights, config)} if self.mu else {}

    def server_update(
        self, state: Tree, before: Weights, after: Weights, replies: Sequence[FitReply], clients: int
    ) -> tuple[Tree, Weights]:
        """Eq. 23."""
        return averaged(state, [reply.message["prototypes"] for reply in replies]) if self.mu else None, after

    def metrics(self, replies: Sequence[FitReply]) -> dict[str, Any]:
        """``idle_clients``, where ε = 0 makes them possible."""
        return idle_clients(replies) if self.relaxed and self.epsilon == 0 else {}

    # At a client.

    def client_prepare(self, model: Model, weights: Weights, batches: Batches, received: Extra) -> Extra:
        """The client's own prototypes under the received model, for Eq. 18."""
        if not self.mu:
            return received
        with model.loaded(weights.params, weights.buffers) as params:
            classes = len(received["prototypes"]["samples"])
            return {**received, "own": class_means(model, params, batches, classes)}

    def client_init(self, model: Model, context: Context) -> Context:
        """The client's prior, its prototypes P and the cycle of classes that they cover."""
        if self.relaxed:
            context = context.deriving(log_prior=log_prior(context.counts, self.epsilon))
        if self.mu:
            table = merged(context.received["own"], context.received["prototypes"])
            known = table["samples"] > 0
            # Known classes first.
            cycle = torch.argsort(known.logical_not().to(torch.uint8), stable=True)
            context = context.deriving(prototypes=table["means"], cycle=cycle, known=known.sum().clamp(min=1))
        return context

    def losses(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """ℓ + μ ℓ̃ of every sample, shape (B,)."""
        if not self.mu:
            return self._balanced(model(params, batch.x), batch.y, context.derived.get("log_prior"))
        features, logits = model.with_features(params, batch.x)
        augmented, labels = self.augment(features.detach().flatten(1), batch.y, context)
        prior = None
        if self.relaxed:
            counts = torch.bincount(labels, minlength=logits.shape[1]).float()
            prior = log_prior(counts, self.epsilon)
        second = self._balanced(model.head(params, augmented), labels, prior)
        return self._balanced(logits, batch.y, context.derived.get("log_prior")) + self.mu * second

    def augment(self, features: Tensor, labels: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Eq. 15: P[c_j] + λ (h_j − P[y_j]), shape (B, d), and c_j, shape (B,)."""
        P: Tensor = context.derived["prototypes"]
        place = torch.arange(len(labels), device=labels.device)
        targets: Tensor = context.derived["cycle"][place % context.derived["known"]]
        return P[targets] + self.transfer * (features - P[labels]), targets

    def client_final(self, trained: Trained, context: Context) -> tuple[Extra, Tree]:
        """Class means of features under the trained model (Eq. 21)."""
        if not self.mu:
            return {}, None
        table = class_means(trained.model, trained.params, trained.batches, len(context.counts))
        table = of_enough(table, trained.least)
        return {"prototypes": table}, table if self.keep_prototypes else None

    @staticmethod
    def _balanced(logits: Tensor, labels: Tensor, prior: Tensor | None) -> Tensor:
        return F.cross_entropy(logits if prior is None else logits + prior, labels, reduction="none")
