"""Define the base class of objectives for local training, and the plain cross-entropy objective.

An objective consists of *hooks*: methods that clients and the server call at certain points of a round. On a client,
hooks compute the loss, a correction of the gradient, and a message to the server. On the server, hooks compute a
message to the clients, and process the clients' messages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from torch import Tensor

from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.inputs import Inputs
from fedstrata.base.records import Tree
from fedstrata.data.tasks.base import Task
from fedstrata.data.tasks.classification import Classification
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Extra, Fact, FitReply, Params, Weights
from fedstrata.federation.secure.fit import Bounds, Summands, Sums
from fedstrata.federation.settings import Training
from fedstrata.models.model import Model


@dataclass(frozen=True)
class Batch:
    """Samples of one client.

    Args:
        x: Inputs, shape (B, …), float32. With several inputs, ``x`` is a mapping from the name of each input to such a
            tensor.
        y: Targets, shape (B, …). For classification, the targets are class labels of shape (B,), int64.
    """

    x: Inputs
    y: Tensor

    def __getitem__(self, where: Any) -> Batch:
        """Return the samples at the given positions.

        Args:
            where: The positions: a slice, or a tensor or array of integers.
        """
        x = self.x[where] if isinstance(self.x, Tensor) else {name: each[where] for name, each in self.x.items()}
        return Batch(x, self.y[where])


Batches = Callable[[], Iterable[Batch]]
"""A function that iterates once over all samples that a client uses in the round, in batches and in a fixed order."""


@dataclass(frozen=True)
class Context:
    """The values that a client's loss needs. These values do not change during local training.

    Args:
        start: The parameters w_t of the global model, with which local training starts.
        counts: The number n_k(c) of training samples of each class c at client k, shape (C,), float32. Without classes,
            the tensor is empty.
        received: The server's message, with the entries that ``client_prepare`` added.
        kept: The state that ``client_final`` returned in the client's previous round; None in its first round.
        lr: The learning rate η of this round.
        derived: Values that ``client_init`` computed once, before the first step.
        task: The task, which defines the default loss.
    """

    start: Params
    counts: Tensor
    received: Extra
    kept: Tree
    lr: float
    derived: Mapping[str, Any] = field(default_factory=dict)
    task: Task = field(default_factory=Classification)

    def deriving(self, **derived: Any) -> Context:
        """Return a copy of the context with more entries in ``derived``."""
        return replace(self, derived={**self.derived, **derived})


@dataclass(frozen=True)
class Trained:
    """The result of local training.

    Args:
        params: The parameters after the last step.
        steps: The number K of steps that were taken.
        model: The client's model in evaluation mode, for hooks that compute features.
        batches: A function that iterates over the local data, in batches and in a fixed order.
        least: Each value that a client sends must depend on at least this many samples (``privacy.min_samples``).
    """

    params: Params
    steps: int
    model: Model
    batches: Batches
    least: int = 1


@dataclass(frozen=True)
class Stage:
    """A phase of local training with its own objective.

    Args:
        objective: The objective of the stage, which must not have a state between rounds.
        epochs: Number of epochs. Default: the number of epochs or steps in the spec's section ``training``.
    """

    objective: Objective
    epochs: int | None = None


class Objective(Setting):
    """Base class of the objectives.

    Subclasses override hooks. By default, clients minimise the loss of the task.
    """

    handlers: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """The functions that handle the objective's own requests on a client; see ``fedstrata.clients.handling``."""

    additive: ClassVar[frozenset[str]] = frozenset()
    """The names of the tensor groups in a client's message that the server may add up over rounds.

    Codecs with error feedback encode only these groups.
    """

    needs_sgd: ClassVar[str] = ""
    """A sentence, without a full stop, that says why clients must use SGD; empty if they may use any optimiser."""

    needs_replies: ClassVar[str] = ""
    """The reason why the server needs individual replies, such as "compares updates"; empty if it needs only sums.

    A subclass that overrides ``server_update``, ``metrics`` or ``expected`` must declare this attribute.
    """

    @property
    def sends(self) -> str:
        """A description of the message from ``client_final``, for ``fedstrata asks``; empty without a message.

        A subclass that overrides ``client_final`` must also override ``sends``. If ``sends`` is not overridden, sites
        refuse to train with the objective.
        """
        return ""

    @property
    def discloses(self) -> frozenset[Fact]:
        """The facts about a client that the message of ``client_final`` discloses."""
        return frozenset()

    single_samples: ClassVar[bool] = False
    """Whether the loss of a sample depends only on this sample, as sample-level differential privacy requires.

    If True, a sample's loss depends neither on other samples nor on sample counts, and the message to the server is
    computed only from parameters.
    """

    tasks: ClassVar[frozenset[str] | None] = frozenset({"classification"})
    """The names of the tasks that the objective supports; None for all tasks.

    An objective that supports all tasks must compute its loss from ``context.task.mean_loss``.
    """

    # The following hooks run on the server.

    def check(self, config: FederationConfig) -> None:
        """Raise ``SpecError`` if the objective is not compatible with the model or the training settings."""

    def tells_counts(self, config: FederationConfig) -> bool:
        """Return True if messages disclose a client's number of samples, which some data samplers hide."""
        return False

    def init(self, weights: Weights, config: FederationConfig) -> Tree:
        """Return the server's state before the first round."""
        return None

    def message(self, state: Tree) -> Extra:
        """Return the message that clients receive together with the global model."""
        return {}

    def expected(self, weights: Weights, config: FederationConfig) -> Extra:
        """Return an example of a client's message, with the names, shapes and dtypes that the server requires."""
        return {}

    def server_update(
        self, state: Tree, before: Weights, after: Weights, replies: Sequence[FitReply], clients: int
    ) -> tuple[Tree, Weights]:
        """Update the server's state and the global model with the clients' messages.

        Args:
            state: This objective's state on the server.
            before: The global model w_t before the round.
            after: The aggregated model.
            replies: The accepted replies, in client order.
            clients: The number N of clients in the federation.

        Returns:
            The new state and the new global model.
        """
        return state, after

    def metrics(self, replies: Sequence[FitReply]) -> dict[str, Any]:
        """Return the metrics that the objective records for a round."""
        return {}

    # With secure sums (``privacy.sums``), the following hooks replace ``server_update`` and ``metrics``.

    def summands(self, bounds: Bounds) -> Summands:
        """Return the parts of a reply whose sums the objective needs. The aggregator names its own parts."""
        return {}

    def server_update_sums(
        self, state: Tree, before: Weights, after: Weights, sums: Sums, clients: int
    ) -> tuple[Tree, Weights]:
        """Return the same values as ``server_update``, computed from the sums of ``summands``."""
        return state, after

    def metrics_of_sums(self, sums: Sums) -> dict[str, Any]:
        """Return the same metrics as ``metrics``, computed from the sums of ``summands``."""
        return {}

    # The following hooks run on a client.

    @cached_property
    def has_stages(self) -> bool:
        """Whether clients train in several stages or keep personal layers."""
        return not is_plain(self, "first_stage", "personal_stage", "stays")

    @cached_property
    def freezes(self) -> bool:
        """Whether some parameters are not trained, or not sent to the server."""
        return not is_plain(self, "trains", "stays")

    def first_stage(self) -> Stage | None:
        """Return the stage of training that precedes this objective's stage; None by default."""
        return None

    def personal_stage(self) -> Stage | None:
        """Return the stage in which each client trains and keeps a personal model; None by default.

        The stage comes after the training of the global model, and starts with the client's most recent personal model.
        In this stage, ``Context.received["global"]`` contains the parameters of the global model.
        """
        return None

    def sample_gradients(self, training: Training, samples: float, keep: float = 1.0) -> float:
        """Return how many per-sample gradients a client computes per round; see ``Training.sample_gradients``."""
        stages = filter(None, [self.first_stage(), self.personal_stage()])
        more = sum(training.lasting(stage.epochs).sample_gradients(samples, keep) for stage in stages)
        return more + self.gradients_per_step * training.sample_gradients(samples, keep)

    def client_prepare(self, model: Model, weights: Weights, batches: Batches, received: Extra) -> Extra:
        """Compute values from the client's data before training, and return ``received`` with these values added.

        Args:
            model: The client's model, into which ``weights`` are not loaded yet.
            weights: The received parameters and buffers. With ``batch_norm = "local"``, the buffers are the client's
                own buffers.
            batches: A function that iterates over the local data.
            received: The server's message.
        """
        return received

    def client_init(self, model: Model, context: Context) -> Context:
        """Add to ``context.derived`` the values that stay constant during the client's training."""
        return context

    def loss(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """Return the mean loss over a batch as a scalar."""
        return context.task.mean_loss(model(params, batch.x), batch.y)

    def correction(self, params: Params, context: Context) -> Params | None:
        """Return the correction that is added to the gradient of each parameter; None for no correction."""
        return None

    def displacement(self, params: Params, gradient: Callable[[], Params], context: Context) -> Params | None:
        """Return the displacement δ; None for δ = 0. A step uses the gradient at w + δ, not at w.

        The correction and the optimiser's own terms, such as weight decay, are computed at w. A subclass that
        calls ``gradient`` must override ``gradients_per_step``.

        Args:
            params: The trained parameters w.
            gradient: A function that returns the gradient of the batch's loss at w.
            context: The values that the loss needs.
        """
        return None

    @cached_property
    def gradients_per_step(self) -> int:
        """The number of gradients that a client computes on the batch of each step."""
        return 1

    def trains(self, name: str, model: Model) -> bool:
        """Return True if clients train the parameter ``name``."""
        return True

    def stays(self, name: str, model: Model) -> bool:
        """Return True if the parameter ``name`` is personal: each client keeps the trained value for the next round.

        The client sends back the received value instead of the trained value.
        """
        return False

    def client_final(self, trained: Trained, context: Context) -> tuple[Extra, Tree]:
        """Return the client's message to the server after training, and the client's state for its next round."""
        return {}, context.kept


class CrossEntropy(Objective):
    """The loss of the task, such as the cross-entropy for classification."""

    single_samples = True


class PerSample(Objective):
    """An objective whose loss is a mean over samples. Subclasses define only the loss of each sample."""

    def loss(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """Return the mean of ``losses``."""
        return self.losses(model, params, batch, context).mean()

    @abstractmethod
    def losses(self, model: Model, params: Params, batch: Batch, context: Context) -> Tensor:
        """Return the loss of every sample of a batch, shape (B,)."""


def is_plain(objective: Objective, *hooks: str) -> bool:
    """Return True if the class of an objective does not override any of the given hooks."""
    return all(getattr(type(objective), hook) is getattr(Objective, hook) for hook in hooks)


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
        "fedper": "fedstrata.objectives.personal:PersonalLayers",
        "fedntd": "fedstrata.objectives.fedntd:NotTrue",
        "fedrep": "fedstrata.objectives.personal:HeadThenBody",
        "ditto": "fedstrata.objectives.personal:PersonalModel",
        "feddecorr": "fedstrata.objectives.feddecorr:Decorrelated",
        "fedvls": "fedstrata.objectives.fedvls:Vacant",
        "fedsam": "fedstrata.objectives.sharpness:SharpnessAware",
        "fedlesam": "fedstrata.objectives.sharpness:GloballySharpnessAware",
    },
)

AnyObjective = Annotated[Objective, FromRegistry(OBJECTIVES)]
