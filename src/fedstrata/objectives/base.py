"""What a client minimises: the contract, and the plain case.

An objective has a side at the client (a loss, an additive correction of the gradient, what to send back) and a side
at the server (what to send out, what to do with what came back). Most override one or two methods. ``loss`` and
``correction`` are pure functions of tensors, so the same code runs in a plain loop and at a remote site.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.records import Tree
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Extra, FitReply, Params, Weights
from fedstrata.federation.questions import Fact
from fedstrata.models.model import Model


@dataclass(frozen=True)
class Batch:
    """Samples of one client.

    Args:
        x: Inputs, shape (B, …), float32.
        y: Labels, shape (B,), int64.
    """

    x: Tensor
    y: Tensor


Batches = Callable[[], Iterable[Batch]]
"""Calls to get all of a client's samples of the round once, batch by batch, in a fixed order."""


@dataclass(frozen=True)
class Context:
    """What a client's loss may look at besides parameters and batch; constant during its local training.

    Args:
        start: The global parameters w_t that it started at.
        counts: n_k(c), how many samples of each class it trains on, shape (C,), float32.
        received: What the objective's server side sent, with what ``client_prepare`` added to it.
        kept: The client's own state of this objective, as ``client_final`` left it; None the first time.
        lr: η of this round.
        derived: What ``client_init`` prepared, so that no step computes it again.
    """

    start: Params
    counts: Tensor
    received: Extra
    kept: Tree
    lr: float
    derived: Mapping[str, Any] = field(default_factory=dict)

    def deriving(self, **derived: Any) -> Context:
        """The same context with more in ``derived``."""
        return replace(self, derived={**self.derived, **derived})


@dataclass(frozen=True)
class Trained:
    """What local training led to.

    Args:
        params: The parameters after the last step.
        steps: K, the steps really taken.
        model: The client's model, for features under ``params``.
        batches: Calls to get the local data batch by batch, in a fixed order.
        least: Fewest samples behind anything that is sent.
    """

    params: Params
    steps: int
    model: Model
    batches: Batches
    least: int = 1


class Objective(Setting):
    """Cross-entropy on the local data, and the hooks that other objectives override."""

    handlers: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """How clients answer requests of its own; see ``fedstrata.clients.handling``."""

    additive: ClassVar[frozenset[str]] = frozenset()
    """Groups of a client's message that are changes, of which one may say later what another left out: only these
    travel by a codec with a memory."""

    @property
    def sends(self) -> str:
        """What ``client_final`` sends beside the trained model, in words for ``fedstrata asks``; empty for nothing.

        Who overrides that hook overrides this one too, or no site answers.
        """
        return ""

    @property
    def tells(self) -> frozenset[Fact]:
        """What a client's message says in the clear."""
        return frozenset()

    # At the server.

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` for a model or training settings under which the objective would be wrong."""

    def tells_counts(self, config: FederationConfig) -> bool:
        """Whether clients' messages tell how many samples they hold, which a private data sampler forbids."""
        return False

    def init(self, weights: Weights, config: FederationConfig) -> Tree:
        """The server's state before the first round."""
        return None

    def message(self, state: Tree) -> Extra:
        """What goes out with the global model."""
        return {}

    def expected(self, weights: Weights, config: FederationConfig) -> Extra:
        """Tensors of the names, shapes and dtypes that a client's message must have."""
        return {}

    def server_update(
        self, state: Tree, before: Weights, after: Weights, replies: Sequence[FitReply], clients: int
    ) -> tuple[Tree, Weights]:
        """Take in the replies' messages.

        Args:
            state: The server's state.
            before: w_t.
            after: The aggregated model.
            replies: The replies that count, in client order.
            clients: N, all clients of the federation.

        Returns:
            The new state and the new global model.
        """
        return state, after

    def metrics(self, replies: Sequence[FitReply]) -> dict[str, Any]:
        """What the objective adds to the metrics of a round."""
        return {}

    # At a client.

    def client_prepare(self, model: Model, weights: Weights, batches: Batches, received: Extra) -> Extra:
        """Before training: what was received, with what the client's data under the received model add to it.

        Args:
            model: The client's model, not loaded.
            weights: The received model; its buffers are the client's own under ``batch_norm = "local"``.
            batches: Calls to get the local data.
            received: What the objective's server side sent.
        """
        return received

    def client_init(self, model: Model, context: Context) -> Context:
        """Prepare what is constant during this client's training."""
        return context

    def loss(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """The mean loss over a batch, a scalar."""
        return F.cross_entropy(model(params, batch.x), batch.y)

    def correction(self, params: Params, context: Context) -> Params | None:
        """What is added to the loss's gradient, by parameter; None for nothing."""
        return None

    def trains(self, name: str, model: Model) -> bool:
        """Whether the parameter ``name`` is trained by clients."""
        return True

    def client_final(self, trained: Trained, context: Context) -> tuple[Extra, Tree]:
        """After training: what to send to the server, and the client's new state."""
        return {}, context.kept


class CrossEntropy(Objective):
    """Plain cross-entropy: FedAvg's local objective."""


class PerSample(Objective):
    """An objective whose loss is the mean of the samples' own losses, which is all that it writes."""

    def loss(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """The mean of ``losses``."""
        return self.losses(model, params, batch, context).mean()

    @abstractmethod
    def losses(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """The loss of every sample of a batch, shape (B,)."""


OBJECTIVES: Registry[Objective] = Registry(
    "objective",
    Objective,
    {
        "cross-entropy": "fedstrata.objectives.base:CrossEntropy",
        "fedprox": "fedstrata.objectives.fedprox:Proximal",
        "scaffold": "fedstrata.objectives.scaffold:Scaffold",
        "feddyn": "fedstrata.objectives.feddyn:Dynamic",
        "moon": "fedstrata.objectives.moon:Contrastive",
        "fedrs": "fedstrata.objectives.calibrated:Restricted",
        "fedlc": "fedstrata.objectives.calibrated:LogitMargins",
        "bsm": "fedstrata.objectives.calibrated:Balanced",
        "rebafl": "fedstrata.objectives.rebafl:Rebalanced",
        "fedbabu": "fedstrata.objectives.fedbabu:BodyOnly",
    },
)

AnyObjective = Annotated[Objective, FromRegistry(OBJECTIVES)]
