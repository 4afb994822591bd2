"""Define ReBaFL's local objective: relaxed balanced softmax and prototype feature augmentation (Xu et al., §4).

A prototype is the mean feature vector of a class, over the samples of one client or of the whole federation. With
augmentation (μ > 0), prototypes are stored and sent as tables of two tensors. The tensor ``means``, shape (C, d),
contains the prototypes. The tensor ``samples``, shape (C,), contains each prototype's number of samples. A
class without a prototype has 0 samples and a row of zeros in ``means``.

- The server's state, ``RecipeState.objective``, is the table of the federation's prototypes. In this table, ``samples``
  is 0 for a class that no client has ever reported. For any other class, ``samples`` is the number of the class's
  samples in the most recent round in which clients reported the class.

- A client's message is ``{"prototypes": table}``, with zeros for classes that the client lacks.

- With ``keep_prototypes``, the table that a client sent most recently is kept in the client's state, as
  ``"objective"``. Training never uses the clients' tables, but the leakage audit reads them from a checkpoint.

With μ = 0, prototypes are not computed, and the states of the server and of the clients are None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor
from typing_extensions import override

from fedstrata.base.errors import SpecError
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Extra, Fact, FitReply, Params, Weights
from fedstrata.federation.secure.fit import Bounds, Count, Numbers, Summands, Sums
from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Batches, Context, Trained
from fedstrata.objectives.calibrated import CountsIdle, log_prior

Table = dict[str, Tensor]
"""A table of prototypes: the keys ``means``, shape (C, d), and ``samples``, shape (C,), both float32."""


class Rebalanced(CountsIdle):
    """ReBaFL's loss on samples, plus μ times the loss of the head on augmented features.

    The loss is ℓ(w; x) + μ ℓ(φ; h̃) (Eq. 16), where h̃ are the augmented features and φ is the head. Both losses are
    cross-entropies of the logits z + log p̂. For samples, the prior is p̂(c) = (1 − ε) n_k(c) / n_k + ε / C (Eq. 10).
    For augmented features, n_k(c) is the number of new labels c in the batch, and n_k is the batch size.

    Augmentation (Eq. 15) moves the features of each sample to a new class. The features h of sample j with class y
    become h̃ = P[c_j] + λ (h − P[y]), and get the label c_j. The prototype of class c is P[c], which the client
    computes with the received model. For a class that the client lacks, P[c] is the federation's prototype (Eq. 18).
    The labels c_1, c_2, … of a batch are the classes that have a prototype, in ascending order and repeated as needed.
    If a batch has fewer samples than there are classes with a prototype, the last classes get no augmented features.
    Prototypes are computed in evaluation mode (Eq. 21), but h is computed in training mode. With BatchNorm or dropout,
    the mean of h − P[y] is therefore not 0.

    Args:
        epsilon: Smoothing ε of the class prior. 0 means the client's class fractions, and 1 means a uniform prior.
        mu: Weight μ of the loss on augmented features. The published code uses 0.5, and ``training.momentum = 0.5``.
        transfer: Factor λ. Features h of class y become augmented features P[c] + λ (h − P[y]) of class c, where P[c]
            is the prototype of class c.
        relaxed: Whether the loss uses the class prior. If false, the loss is plain cross-entropy.
        keep_prototypes: Whether each client stores its latest prototypes, which ``fedstrata audit prototypes`` needs.
        prototype_momentum: Weight β of the previous prototype in a moving average over rounds. With 0, only prototypes
            of the current round are used, as in the paper.
    """

    later_settings = ("prototype_momentum",)
    needs_replies = ""

    epsilon: float = Field(default=0.01, ge=0, le=1)
    mu: NonNegativeFloat = 0.1
    transfer: NonNegativeFloat = 1.0
    relaxed: bool = True
    keep_prototypes: bool = True
    prototype_momentum: float = Field(default=0.0, ge=0, lt=1)

    @property
    def sends(self) -> str:
        """A description of the prototypes that clients send; empty without augmentation."""
        return "for each class, the mean feature vector and the number of its samples" if self.mu else ""

    @property
    def discloses(self) -> frozenset[Fact]:
        """The facts that the prototypes' sample counts disclose: the client's class counts and number of samples."""
        return frozenset({"labels", "sizes"} if self.mu else ())

    @override
    def tells_counts(self, config: FederationConfig) -> bool:
        return self.mu > 0

    # The following hooks run on the server.

    def check(self, config: FederationConfig) -> None:
        """With augmentation, raise ``SpecError`` if the number of features is unknown or the head has buffers."""
        if not self.mu:
            return
        _ = config.model.feature_size  # raises SpecError if the head has no nn.Linear
        if buffers := [name for name, _ in config.model.module.get_submodule(config.model.head_name).named_buffers()]:
            problem = f"the head has buffers ({', '.join(buffers)}), which augmented samples would change. Use "
            problem += "mu = 0 in the settings of ReBaFL, or a head without buffers."
            raise SpecError("model.head", problem, config.model.head_name)

    @override
    def init(self, weights: Weights, config: FederationConfig) -> Tree:
        return no_prototypes(config.strata, config.model.feature_size) if self.mu else None

    def message(self, state: Tree) -> Extra:
        """Return the message to clients, which contains the federation's prototypes."""
        return {"prototypes": state} if self.mu else {}

    def expected(self, weights: Weights, config: FederationConfig) -> Extra:
        """Return a template of a client's message: a table of zeros with the required shapes."""
        return {"prototypes": no_prototypes(config.strata, config.model.feature_size)} if self.mu else {}

    def server_update(
        self, state: Tree, before: Weights, after: Weights, replies: Sequence[FitReply], clients: int
    ) -> tuple[Tree, Weights]:
        """Average the clients' prototypes (Eq. 23)."""
        if not self.mu:
            return None, after
        return averaged(state, [reply.message["prototypes"] for reply in replies], self.prototype_momentum), after

    @property
    def counts_idle(self) -> bool:
        """Whether clients that learn nothing are counted. Such clients exist only if ε = 0."""
        return self.relaxed and self.epsilon == 0

    @override
    def summands(self, bounds: Bounds) -> Summands:
        config, summed = bounds.config, super().summands(bounds)
        if not self.mu:
            return summed
        table = no_prototypes(config.strata, config.model.feature_size)
        # The sum over clients of n_k(c) times the prototype of class c. A client's term is at most ``bounds.largest``
        # times its prototype.
        summed["means"] = Numbers(_totals, {"means": table["means"]}, config.privacy.message_range * bounds.largest)
        return summed | {f"class {c}": Count(partial(_samples, c), bounds.largest) for c in range(config.strata)}

    @override
    def server_update_sums(
        self, state: Tree, before: Weights, after: Weights, sums: Sums, clients: int
    ) -> tuple[Tree, Weights]:
        if not self.mu:
            return None, after
        samples = torch.tensor([sums.count(f"class {c}") for c in range(len(state["samples"]))], dtype=torch.float32)
        means = sums.of("means")["means"] / samples.clamp(min=1)[:, None]
        return updated(state, {"means": means, "samples": samples}, self.prototype_momentum), after

    # The following hooks run on a client.

    def client_prepare(self, model: Model, weights: Weights, batches: Batches, received: Extra) -> Extra:
        """Compute the client's own prototypes (Eq. 18) with the received model, and add them to the message."""
        if not self.mu:
            return received
        with model.loaded(weights.params, weights.buffers) as params:
            classes = len(received["prototypes"]["samples"])
            return {**received, "own": class_means(model, params, batches, classes)}

    def client_init(self, model: Model, context: Context) -> Context:
        """Put the client's log prior, the prototypes P and the classes that have a prototype into ``derived``."""
        shift = log_prior(context.counts, self.epsilon) if self.relaxed else 0.0
        if not self.mu:
            return context.deriving(log_prior=shift)
        table = updated(context.received["prototypes"], context.received["own"])
        known = table["samples"] > 0
        # List the classes with a prototype first, in ascending order.
        cycle = torch.argsort(known.logical_not().to(torch.uint8), stable=True)
        return context.deriving(log_prior=shift, prototypes=table["means"], cycle=cycle, known=known.sum().clamp(min=1))

    def loss(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """Return the mean loss of the samples plus μ times the mean loss of the augmented features, as a scalar."""
        prior = context.derived["log_prior"]
        if not self.mu:
            return F.cross_entropy(model(params, batch.x) + prior, batch.y, reduction="none").mean()
        features, logits = model.with_features(params, batch.x)
        augmented, labels = self.augment(features.detach().flatten(1), batch.y, context)
        augmented_logits = model.head(params, augmented)
        if self.relaxed:
            counts = torch.bincount(labels, minlength=logits.shape[1]).float()
            augmented_logits = augmented_logits + log_prior(counts, self.epsilon)
        second = F.cross_entropy(augmented_logits, labels, reduction="none")
        return (F.cross_entropy(logits + prior, batch.y, reduction="none") + self.mu * second).mean()

    def augment(self, features: Tensor, labels: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Move the features of each sample from its own class to another class (Eq. 15).

        Returns:
            The augmented features P[c_j] + λ (h_j − P[y_j]), shape (B, d), and their new labels c_j, shape (B,). The
            docstring of ``Rebalanced`` defines the symbols.
        """
        P: Tensor = context.derived["prototypes"]
        positions = torch.arange(len(labels), device=labels.device)
        targets: Tensor = context.derived["cycle"][positions % context.derived["known"]]
        return P[targets] + self.transfer * (features - P[labels]), targets

    def client_final(self, trained: Trained, context: Context) -> tuple[Extra, Tree]:
        """Compute prototypes with the trained model (Eq. 21), and return them as the message and as the state."""
        if not self.mu:
            return {}, None
        table = class_means(trained.model, trained.params, trained.batches, len(context.counts), trained.least)
        return {"prototypes": table}, table if self.keep_prototypes else None


def _totals(sent: Weights, reply: FitReply) -> Params:
    """For each class c, return the sum of the features, which is n_k(c) times the client's prototype of the class."""
    table = reply.message["prototypes"]
    return {"means": table["means"] * table["samples"][:, None]}


def _samples(label: int, reply: FitReply) -> int:
    """Return n_k(c), the number of samples from which client k computed its prototype of class c."""
    return int(reply.message["prototypes"]["samples"][label])


def no_prototypes(classes: int, size: int) -> Table:
    """Return a table of zeros, in which no class has a prototype. A prototype has the length ``size``."""
    return {"means": torch.zeros(classes, size), "samples": torch.zeros(classes)}


@torch.no_grad()
def class_means(model: Model, params: Params, batches: Batches, classes: int, least: int = 1) -> Table:
    """Return a client's prototypes, that is, the mean feature vector of each class (Eq. 21).

    Args:
        model: The model in evaluation mode, with the buffers that belong to ``params``.
        params: The parameters with which features are computed.
        batches: A function that iterates over the client's samples.
        classes: The number C of classes.
        least: The minimum number of samples per prototype. Classes with fewer samples are left out.
    """
    device = next(iter(params.values())).device
    sums = torch.zeros(classes, model.feature_size, dtype=torch.float64, device=device)
    samples = torch.zeros(classes, device=device)
    for batch in batches():
        features = model.with_features(params, batch.x)[0].flatten(1)
        if features.shape[1] != sums.shape[1]:
            given, taken = features.shape[1], sums.shape[1]
            problem = f"the head's input has {given} features, but the head's first nn.Linear takes {taken}. "
            problem += "Use a head that begins with nn.Linear, or with nn.Flatten and nn.Linear."
            raise SpecError("model.head", problem, model.head_name)
        sums.index_add_(0, batch.y, features.double())
        samples += torch.bincount(batch.y, minlength=classes)
    means, enough = (sums / samples.clamp(min=1)[:, None]).float(), samples >= least
    return {"means": torch.where(enough[:, None], means, 0.0), "samples": torch.where(enough, samples, 0.0)}


def updated(before: Table, new: Table, momentum: float = 0.0) -> Table:
    """Replace the prototypes in ``before`` by new prototypes, or by moving averages (not in the paper).

    A class without a new prototype keeps its prototype from ``before``. A class without a prototype in ``before`` gets
    the new prototype.

    Args:
        before: The prototypes before the update, such as the federation's prototypes before a round.
        new: The new prototypes.
        momentum: Weight β of the prototypes in ``before``. The new prototypes have the weight 1 − β.

    >>> before = {"means": torch.tensor([[8.0], [0.0], [7.0]]), "samples": torch.tensor([1.0, 0.0, 1.0])}
    >>> new = {"means": torch.tensor([[4.0], [5.0], [0.0]]), "samples": torch.tensor([2.0, 3.0, 0.0])}
    >>> updated(before, new, 0.75)
    {'means': tensor([[7.],
            [5.],
            [7.]]), 'samples': tensor([2., 3., 1.])}
    """
    if momentum:
        # With this formula, rounding does not change a prototype that is equal in ``before`` and ``new``.
        blended = new["means"] + momentum * (before["means"] - new["means"])
        new = {**new, "means": torch.where(before["samples"][:, None] > 0, blended, new["means"])}
    known = new["samples"] > 0
    return {
        "means": torch.where(known[:, None], new["means"], before["means"]),
        "samples": torch.where(known, new["samples"], before["samples"]),
    }


def averaged(before: Table, tables: Iterable[Table], momentum: float = 0.0) -> Table:
    """Return the mean of the clients' prototypes for each class, weighted by sample counts (Eq. 23).

    If no client reported a class, the class keeps its prototype from ``before``.

    Args:
        before: The federation's prototypes before the round.
        tables: One table for each client that replied.
        momentum: Weight of the prototypes in ``before``; see ``updated``.

    >>> one = {"means": torch.tensor([[1.0], [0.0]]), "samples": torch.tensor([3.0, 0.0])}
    >>> two = {"means": torch.tensor([[5.0], [0.0]]), "samples": torch.tensor([1.0, 0.0])}
    >>> averaged({"means": torch.tensor([[9.0], [7.0]]), "samples": torch.tensor([1.0, 1.0])}, [one, two])["means"]
    tensor([[2.],
            [7.]])
    """
    sums, samples = torch.zeros_like(before["means"], dtype=torch.float64), torch.zeros_like(before["samples"])
    for table in tables:
        counts = table["samples"].clamp(min=0)
        sums += counts[:, None] * table["means"].double()
        samples += counts
    new = {"means": (sums / samples.clamp(min=1)[:, None]).float(), "samples": samples}
    return updated(before, new, momentum)
