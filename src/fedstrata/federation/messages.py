"""What server and clients say to each other: frozen records of tensors and plain values.

All tensors are on the CPU. ``Params`` maps a parameter's name to its value. A method that needs to ask something else
declares a ``Request`` and a ``Reply`` of its own, and how a client answers (``fedstrata.clients.handling``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import Message, record
from fedstrata.federation.reply_checks import require_like

ClientId = int
Work = Callable[[int], float] | Mapping[int, float]
"""Sample-gradients that answering takes: of a client with so many samples, or of each client."""
Params = dict[str, Tensor]
Extra = dict[str, dict[str, Tensor]]
"""What an objective sends along: a name for each group of tensors."""


Phase = Literal["enrolment", "round", "evaluation"]
"""Before the first round; in a round; after a round, to measure a model."""
PHASES: tuple[Phase, ...] = ("enrolment", "round", "evaluation")

Fact = Literal["labels", "sizes"]
"""What a reply may disclose in the clear: which labels a client holds, and how many samples."""


class Order:
    """Decides from a client's earlier requests in a phase whether it may answer the next one.

    There is one instance per client and phase, which all request classes with the same order share.
    """

    def refusal(self, request: Any) -> str:
        """Return why a request may not be answered now; empty if it may."""
        return ""

    def asked(self, request: Any) -> None:
        """Note a request that is about to be answered."""

    def answered(self, request: Any, reply: Any) -> None:
        """Note the reply to a request."""


@dataclass(frozen=True)
class RequestRule:
    """What holds for every request of a class, whatever the spec.

    Args:
        description: What leaves the site with the reply: the rest of a sentence that begins with "It sends".
        phase: When the request comes.
        order: The order in which requests may come; any order by default.
        after: The request of enrolment that a client must have answered before this one, if the job asks it at all.
        relay: Whether the request comes with a travelling model.
        together: Whether clients may answer as a group, whose sums the server forms. If a group breaks, the same
            request may come again.
        forms: The forms in which the same request may come again, beginning with its form now; by default only that.
        merges: Whether replies over fewer samples than ``privacy.min_samples`` are merged if that holds them back.
        discloses: What the reply discloses in the clear.
        epsilon: The ε of local differential privacy that a reply costs; None for none.
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
    """A client's answer."""

    def split_update(self, sent: Weights) -> tuple[Params, Self]:
        """The change that it tells of, by name, which may travel encoded, and the answer without it.

        Args:
            sent: The model that came with the question.
        """
        return {}, self

    def merge_update(self, sent: Weights, change: Params) -> Self:
        """What ``split_update`` took apart, or a part of it."""
        return self

    def has_update(self) -> bool:
        """Whether it comes of data at all, and not from a client that had none to train on."""
        return True


class Request(Message):
    """What the server asks a client."""

    reply_type: ClassVar[type[Reply]] = Reply
    """What the answer is."""

    rule: ClassVar[RequestRule]
    """What a site is told of the class before it takes part. Needed only if a job is to run at real sites."""

    def check(self, reply: Any) -> None:
        """Refuse an answer that is well-formed and still wrong; that all numbers are finite is checked anyway.

        Raises:
            ReplyRefusedError: With what is wrong and what was expected.
        """

    def check_reply(self, reply: Any) -> None:
        """``check``, after the answer's type.

        Raises:
            ReplyRefusedError: It is no answer to this request.
        """
        if not isinstance(reply, self.reply_type):
            wanted = f"{type(self).__name__}, which wants {self.reply_type.__name__}"
            raise ReplyRefusedError(f"a {type(reply).__name__} is no answer to {wanted}")
        self.check(reply)


class Requests(dict[ClientId, Request]):
    """The request of each client; those that are the same for several clients are there once.

    Args:
        distinct: The requests.
        which: For each client, the place of its request in ``distinct``.
        work: Sample-gradients that each client's answer takes; none where it is left out.
    """

    def __init__(
        self, distinct: Sequence[Request], which: Mapping[ClientId, int], work: Mapping[ClientId, float] | None = None
    ) -> None:
        super().__init__({client: distinct[place] for client, place in which.items()})
        self.distinct, self.which, self.work = distinct, which, work or {}

    @classmethod
    def of(cls, clients: Iterable[ClientId], request: Request | Mapping[ClientId, Request]) -> Requests:
        """One request for all clients, or one for each by a mapping."""
        if isinstance(request, Request):
            return cls([request], dict.fromkeys(map(int, clients), 0))
        if isinstance(request, Requests):
            return request if clients is request else request.among(clients)
        own = {int(client): request[client] for client in clients}
        return cls(list(own.values()), {client: place for place, client in enumerate(own)})

    def among(self, clients: Iterable[ClientId], work: Mapping[ClientId, float] | None = None) -> Requests:
        """The requests of some of the clients, with the work that they take."""
        return Requests(self.distinct, {client: self.which[client] for client in clients}, work or self.work)


@record("Weights")
class Weights(Message):
    """A model's parameters and buffers.

    Args:
        params: What is trained.
        buffers: What is not, such as BatchNorm's running statistics.
    """

    params: Params
    buffers: Params

    def require_like(self, like: Weights) -> None:
        """Refuse tensors whose names, shapes or dtypes differ from those of ``like``.

        Raises:
            ReplyRefusedError: With the first difference.
        """
        require_like(self.params, like.params, "params")
        if self.buffers or like.buffers:
            require_like(self.buffers, like.buffers, "buffers")


class ModelRequest(Request):
    """A question about a model that comes along.

    The model may travel as what its client missed of it, and the change that an answer tells of may travel encoded:
    ``fedstrata.federation.communication``.
    """

    weights: Weights

    def changes(self, message: Extra) -> Params:
        """Tensors like those of the change that an answer tells of; empty where it tells of none.

        Args:
            message: Tensors like those of the objective's message.
        """
        return {}


@record("FitReply")
class FitReply(Reply):
    """A locally trained model.

    Args:
        weights: After local training.
        samples: Samples that were used (n_k, or those kept); 0, as ``steps`` and ``seen``, where ``Fit`` wanted no
            counts.
        steps: Mini-batch steps really taken, K.
        seen: Sample-gradients computed.
        loss: Mean training loss over the steps.
        message: What the objective's client side sends.
        trained: Whether it took a step at all. A client that took none sends the model back as it came, which says
            nothing about its data.
    """

    weights: Weights
    samples: int
    steps: int
    seen: int
    loss: float
    message: Extra
    trained: bool = True

    def split_update(self, sent: Weights) -> tuple[Params, FitReply]:
        """What training made of the parameters, and the objective's message."""
        after = self.weights.params
        moved = {name: after[name] - before for name, before in sent.params.items() if before.is_floating_point()}
        still = {name: tensor for name, tensor in after.items() if name not in moved}
        said = {f"message/{group}/{name}": t for group, part in self.message.items() for name, t in part.items()}
        said = {name: tensor for name, tensor in said.items() if tensor.is_floating_point()}
        left = {
            group: {name: t for name, t in part.items() if not t.is_floating_point()}
            for group, part in self.message.items()
        }
        change = {f"params/{name}": tensor for name, tensor in moved.items()} | said
        return change, replace(self, weights=Weights(still, self.weights.buffers), message=left)

    def merge_update(self, sent: Weights, change: Params) -> FitReply:
        """A model that is as far from ``sent`` as the client's was from what it had."""
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
        """Not where no step was taken."""
        return self.trained


def fit_changes(weights: Weights, message: Extra) -> Params:
    """Tensors like the change of a ``FitReply``.

    Args:
        weights: The model that was sent.
        message: Tensors like those of the reply's message.
    """
    said = {f"message/{group}/{name}": t for group, part in message.items() for name, t in part.items()}
    every = {f"params/{name}": tensor for name, tensor in weights.params.items()} | said
    return {name: tensor for name, tensor in every.items() if tensor.is_floating_point()}


@record("Fit")
class Fit(ModelRequest):
    """Train locally, starting at ``weights``.

    Args:
        round: The round, counted from 1.
        weights: The global model.
        message: What the objective's server side sends.
        keep: Probability with which each sample is used this round (data-level sampling).
        counts: Whether the reply may tell how many samples were used. Under local differential privacy of the
            clients' sizes it must not: with the public ``keep`` it would give them away.
    """

    reply_type: ClassVar[type[Reply]] = FitReply
    rule = RequestRule("the model as its own training changed it")

    round: int
    weights: Weights
    message: Extra
    keep: float
    counts: bool = True

    def changes(self, message: Extra) -> Params:
        """Of the parameters, and the objective's message."""
        return fit_changes(self.weights, message)

    def check(self, reply: FitReply) -> None:
        """A model like the one that was sent, and counts that can be."""
        check_fit(reply, self.weights)


def check_fit(reply: FitReply, weights: Weights) -> None:
    """Refuse a trained model that is not like ``weights``, and counts that cannot be.

    Raises:
        ReplyRefusedError: With what is wrong.
    """
    reply.weights.require_like(weights)
    if reply.samples < 0 or reply.steps < 0 or reply.seen < 0:
        raise ReplyRefusedError("a negative count")


def check_message(reply: FitReply, expected: Extra) -> None:
    """Refuse a trained model whose message is not like ``expected``.

    Raises:
        ReplyRefusedError: With what is wrong.
    """
    if reply.message.keys() != expected.keys():
        raise ReplyRefusedError(f"message has {sorted(reply.message)}, expected {sorted(expected)}")
    for name, tensors in expected.items():
        require_like(reply.message[name], tensors, name)
