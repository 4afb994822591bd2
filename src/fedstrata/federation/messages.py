"""Messages between server and clients: immutable records of tensors (on the CPU) and plain values.

A method that needs another kind of request defines subclasses of ``Request`` and ``Reply``. The method also defines a
handler: a function that computes a client's reply (``fedstrata.clients.handling``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import Message, record

ClientId = int
Work = Callable[[int], float] | Mapping[int, float]
"""The number of per-sample gradients that a client computes for its reply.

The work is either a mapping from clients to numbers, or a function of the client's number of samples.
"""
Params = dict[str, Tensor]
"""A mapping from names to tensors, such as a model's parameters."""
Extra = dict[str, dict[str, Tensor]]
"""The tensors that a training objective sends in addition to the model: named groups of named tensors."""


Phase = Literal["enrolment", "round", "evaluation"]
"""The phase of a run: before the first round (``enrolment``), in a round, or in an evaluation (``evaluation``)."""
PHASES: tuple[Phase, ...] = ("enrolment", "round", "evaluation")

Fact = Literal["labels", "sizes"]
"""A fact that a reply may disclose: which labels a client has (``labels``), or how many samples it has (``sizes``)."""


class Order:
    """A check of the sequence of requests. Earlier requests determine whether a client may answer the next request.

    For each client and phase, there is one ``Order`` object, which all request classes with this order share.
    """

    def refusal(self, request: Any) -> str:
        """Return the reason why a request may not be answered now; an empty string if the request may be answered."""
        return ""

    def asked(self, request: Any) -> None:
        """Store a request that is about to be answered."""

    def answered(self, request: Any, reply: Any) -> None:
        """Store the reply to a request."""


@dataclass(frozen=True)
class RequestRule:
    """The properties that all requests of one Python class have in every job.

    Args:
        description: A description of the reply's content that completes a sentence beginning with "It sends".
        phase: The phase of a run in which the server sends the request.
        order: The Python class that checks the sequence of requests. Default: any sequence is allowed.
        after: The Python class of an earlier request, which a client must answer before this request. The server sends
            the earlier request before the first round. This condition does not apply to jobs without that request.
        relay: Whether the request belongs to a relay, in which a model travels from client to client.
        together: Whether several clients may answer at the same time, while the server adds up their tensors. With
            True, the server may send the same request again after a client has failed.
        forms: A function that returns all equivalent variants of a request, beginning with the request itself. Default:
            only the request itself.
        merges: Whether a client adds the samples of a small batch (fewer than ``privacy.min_samples``) to a later
            batch. This flag has an effect only if ``privacy.below`` is "hold-back".
        discloses: The facts about the client that the server can read in the reply.
        epsilon: The ε of local differential privacy that each reply spends; None without local differential privacy.
    """

    description: str
    phase: Phase = "round"
    order: type[Order] | None = None
    after: type[Request] | None = None
    relay: bool = False
    together: bool = False
    forms: Callable[[Any], Sequence[Request]] | None = field(default=None, compare=False)
    merges: bool = False
    discloses: frozenset[Fact] = frozenset()
    epsilon: float | None = None


class Reply(Message):
    """Base class of clients' replies."""

    def split_update(self, sent: Weights) -> tuple[Params, Self]:
        """Split this reply into its model update, which a codec can encode, and the reply without the update.

        Args:
            sent: The model of the request.
        """
        return {}, self

    def merge_update(self, sent: Weights, change: Params) -> Self:
        """Put an update back into the reply, as the inverse of ``split_update``.

        Args:
            sent: The model of the request.
            change: The update, or some of its tensors.
        """
        return self

    def has_update(self) -> bool:
        """Return True if the reply contains an update. A client without samples sends no update."""
        return True


class Request(Message):
    """Base class of requests to clients."""

    reply_type: ClassVar[type[Reply]] = Reply
    """The Python class of the reply to this request."""

    rule: ClassVar[RequestRule]
    """The properties that all requests of this Python class have; a site checks these properties. Only jobs in a
    deployment need a rule."""

    def check(self, reply: Any) -> None:
        """Raise an error if a reply of the right type has wrong values.

        Subclasses need not check for NaN and infinity, because replies with such values are always refused.

        Raises:
            ReplyRefusedError: A value is wrong.
        """

    def check_reply(self, reply: Any) -> None:
        """Raise an error if a reply has the wrong type, or if ``check`` refuses the reply.

        Raises:
            ReplyRefusedError: The reply is refused.
        """
        if not isinstance(reply, self.reply_type):
            wanted = f"the reply to {type(self).__name__} must be a {self.reply_type.__name__}"
            raise ReplyRefusedError(f"{wanted}, not a {type(reply).__name__}")
        self.check(reply)


class Requests(dict[ClientId, Request]):
    """A mapping from clients to their requests. A request to several clients is stored only once.

    Args:
        distinct: The distinct requests.
        which: The index of each client's request in ``distinct``.
        work: The number of per-sample gradients that each client computes for its reply. Default: zero.
    """

    def __init__(
        self, distinct: Sequence[Request], which: Mapping[ClientId, int], work: Mapping[ClientId, float] | None = None
    ) -> None:
        super().__init__({client: distinct[index] for client, index in which.items()})
        self.distinct, self.which, self.work = distinct, which, work or {}

    @classmethod
    def of(cls, clients: Iterable[ClientId], request: Request | Mapping[ClientId, Request]) -> Requests:
        """Return a ``Requests`` mapping for the given clients.

        Args:
            clients: The clients.
            request: One request for all clients, or a mapping from each client to its request.
        """
        if isinstance(request, Request):
            return cls([request], dict.fromkeys(map(int, clients), 0))
        if isinstance(request, Requests):
            return cls(request.distinct, {client: request.which[client] for client in clients}, request.work)
        by_client = {int(client): request[client] for client in clients}
        return cls(list(by_client.values()), {client: index for index, client in enumerate(by_client)})


@record("Weights")
class Weights(Message):
    """A model's parameters and buffers.

    Args:
        params: The tensors that are trained.
        buffers: The tensors that are not trained, such as BatchNorm's running statistics.
    """

    params: Params
    buffers: Params

    def require_like(self, like: Weights) -> None:
        """Raise an error if the tensors have other names, shapes or dtypes than the tensors in ``like``.

        Raises:
            ReplyRefusedError: A name, a shape or a dtype differs. The error message describes the first difference.
        """
        require_like(self.params, like.params, "params")
        if self.buffers or like.buffers:
            require_like(self.buffers, like.buffers, "buffers")


def require_like(got: Mapping[str, Tensor], like: Mapping[str, Tensor], what: str) -> None:
    """Raise an error if the tensors have other names, shapes or dtypes than the tensors in ``like``.

    Raises:
        ReplyRefusedError: A name, a shape or a dtype differs. The error message describes the first difference.
    """
    if got.keys() != like.keys():
        if missing := [name for name in like if name not in got]:
            raise ReplyRefusedError(f"{what} lacks the tensor {missing[0]!r}")
        raise ReplyRefusedError(f"{what} has an unknown tensor {next(name for name in got if name not in like)!r}")
    for name, tensor in like.items():
        other = got[name]
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise ReplyRefusedError(
                f"{what}[{name!r}] has shape {tuple(other.shape)} and type {other.dtype}, but must have shape "
                f"{tuple(tensor.shape)} and type {tensor.dtype}"
            )


class ModelRequest(Request):
    """A request that contains a model.

    A codec may encode the model and the update in the reply; see ``fedstrata.federation.communication``.
    """

    weights: Weights

    def changes(self, message: Extra) -> Params:
        """Return tensors with the names, shapes and dtypes of the reply's update; ``{}`` if the reply has no update.

        Args:
            message: Tensors with the names, shapes and dtypes of the objective's message. A client sends this message
                in addition to the model.
        """
        return {}


@record("FitReply")
class FitReply(Reply):
    """A locally trained model.

    Args:
        weights: The model after local training.
        samples: Number of samples used in training. ``samples``, ``steps`` and ``seen`` are 0 if the request has
            ``counts = False``.
        steps: Number of mini-batch steps, K.
        seen: Number of per-sample gradients that the client computed.
        loss: Mean training loss over the steps.
        message: The message that the objective sends from the client to the server.
        trained: Whether the client took at least one training step. Otherwise, the client returns the model unchanged.
    """

    weights: Weights
    samples: int
    steps: int
    seen: int
    loss: float
    message: Extra
    trained: bool = True

    def split_update(self, sent: Weights) -> tuple[Params, FitReply]:
        """Return the floating-point tensors of the update and of ``message``, and the reply without these tensors."""
        after = self.weights.params
        moved = {name: after[name] - before for name, before in sent.params.items() if before.is_floating_point()}
        others = {name: tensor for name, tensor in after.items() if name not in moved}
        change, message = {f"params/{name}": tensor for name, tensor in moved.items()}, Extra()
        for group, part in self.message.items():
            change |= {f"message/{group}/{name}": t for name, t in part.items() if t.is_floating_point()}
            message[group] = {name: t for name, t in part.items() if not t.is_floating_point()}
        return change, replace(self, weights=Weights(others, self.weights.buffers), message=message)

    def merge_update(self, sent: Weights, change: Params) -> FitReply:
        """Return the reply with the model (``sent`` plus the update) and all tensors of the objective's message."""
        params, message = dict(self.weights.params), {group: dict(part) for group, part in self.message.items()}
        for name, tensor in change.items():
            kind, _, rest = name.partition("/")
            if kind == "params":
                params[rest] = sent.params[rest] + tensor
            else:
                group, _, rest = rest.partition("/")
                message.setdefault(group, {})[rest] = tensor
        return replace(self, weights=Weights(params, self.weights.buffers), message=message)

    def has_update(self) -> bool:
        """Return True if the client took at least one training step, so that the reply contains an update."""
        return self.trained

    @property
    def size(self) -> float:
        """The client's averaging weight before normalisation."""
        return self.samples


@record("WeightedFitReply")
class WeightedFitReply(FitReply):
    """A locally trained model, for tasks in which samples have different weights.

    Args:
        weight: The sum of the weights of the samples used in training. For example, a sample's weight may be its number
            of tokens.
    """

    weight: float = 0.0

    @property
    def size(self) -> float:
        """The client's averaging weight before normalisation: the sum of the weights of the client's samples."""
        return self.weight


def fit_changes(weights: Weights, message: Extra) -> Params:
    """Return tensors with the names, shapes and dtypes that the update in a ``FitReply`` must have.

    Args:
        weights: The model that was sent.
        message: Tensors with the names, shapes and dtypes of those that the objective adds to the reply.
    """
    tensors = {f"params/{name}": tensor for name, tensor in weights.params.items()}
    tensors |= {f"message/{group}/{name}": t for group, part in message.items() for name, t in part.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


class TrainingRequest(ModelRequest):
    """A request to train locally, starting at ``weights``; the reply is a ``FitReply``."""

    reply_type: ClassVar[type[Reply]] = FitReply

    def changes(self, message: Extra) -> Params:
        """Return tensors with the names, shapes and dtypes that the update in a ``FitReply`` must have."""
        return fit_changes(self.weights, message)

    def check(self, reply: FitReply) -> None:
        """Raise an error if a count is negative, or if the model's tensors do not match the model that was sent."""
        reply.weights.require_like(self.weights)
        if reply.samples < 0 or reply.steps < 0 or reply.seen < 0:
            raise ReplyRefusedError("the reply contains a negative count")


@record("Fit")
class Fit(TrainingRequest):
    """A request to train locally, starting at ``weights``.

    Args:
        round: The round, counted from 1.
        weights: The global model.
        message: The message that the objective sends from the server to the client.
        keep: Probability with which each sample is used in this round (data-level sampling).
        counts: Whether the reply may contain the number of samples used in training. Use False if clients keep their
            numbers of samples private.
    """

    rule = RequestRule("the model after its local training")

    round: int
    weights: Weights
    message: Extra
    keep: float
    counts: bool = True


def check_message(reply: FitReply, expected: Extra) -> None:
    """Raise an error if the message in a reply has other names, shapes or dtypes than ``expected``.

    Raises:
        ReplyRefusedError: The names, shapes or dtypes differ.
    """
    if reply.message.keys() != expected.keys():
        raise ReplyRefusedError(
            f"the message has the entries {sorted(reply.message)}, but must have the entries {sorted(expected)}"
        )
    for name, tensors in expected.items():
        require_like(reply.message[name], tensors, name)
