"""Answer requests with codecs, which compress the model, the update in the reply, or both.

The client computes the server's model: it applies the request's changes to the most recent model that it received.
The client then answers the inner request, encodes the update in its reply, and stores the encoding error.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import torch

from fedstrata.base.errors import FedstrataError
from fedstrata.base.records import Tree, record
from fedstrata.clients.client import Client, ClientContext
from fedstrata.clients.handling import handles
from fedstrata.federation.communication.changes import digest_of, parted, renewed
from fedstrata.federation.communication.codecs import (
    Payload,
    PowerSGD,
    Uncompressed,
    WithMemory,
    pack,
    unpack,
    with_frame,
)
from fedstrata.federation.communication.messages import Coefficients, Encoded, EncodedReply, ModelDelivery
from fedstrata.federation.messages import Params, Reply, Weights
from fedstrata.federation.reply_checks import DIVERGED, finite

MODEL, MEMORY, PENDING = "model", "codec", "pending"
"""Keys of a client's state: the latest received model, the encoding error, and values for PowerSGD's second request."""

_MODELS = 8
"""Maximum number of model versions that a process stores. Clients with the same version share the version's tensors."""


@record("HeldModel")
class HeldModel:
    """The latest model that a client received.

    Args:
        version: The version of the model, as in ``ModelDelivery``.
        digest: The digest of the model's parameters.
        params: The model's parameters.
    """

    version: int
    digest: bytes
    params: Params


@record("Residual")
class Residual:
    """The encoding error, which is added to the client's next update (error feedback).

    Args:
        round: The round of the latest update.
        lost: The encoding error as named tensors: the latest update, plus the previous error, minus the update that the
            server decodes.
    """

    round: int
    lost: Params


@record("Pending")
class Pending:
    """A reply that the client stores after the first request of PowerSGD, and sends after the second request.

    Args:
        exchange: The id of both requests.
        round: The round of both requests.
        state: The client's new state, which takes effect when the client answers the second request.
        reply: The reply without its update.
        change: The update to encode, including the encoding error of earlier updates.
        behind: Number of samples that contribute to the reply.
    """

    exchange: int
    round: int
    state: dict[str, Tree]
    reply: Reply
    change: Params
    behind: int = 0


@handles(Encoded)
def answer(client: Client, request: Encoded) -> EncodedReply:
    """Answer the inner request of an ``Encoded`` request, and encode the update in the reply."""
    client.state.pop(PENDING, None)  # left over from an earlier exchange that was not finished
    inner, before = request.request, dict(client.state)
    if request.delivery is not None:
        inner = replace(inner, weights=Weights(_received(client, request.delivery), inner.weights.buffers))
        before[MODEL] = client.state[MODEL]
    codec = Uncompressed() if request.plain else client.context.communication.up
    whole: Reply = client.context.handlers.alone[type(inner)](client, inner)
    change, reply = whole.split_update(inner.weights)
    change, unencoded = parted(change, codec, client.context.objective.additive)
    if not all(map(finite, change.values())):
        raise FedstrataError(f"the update contains NaN or infinity. {DIVERGED}")
    reply = reply.merge_update(inner.weights, unencoded)
    # If the reply has no update (no samples, or a request without training), the stored encoding error does not change.
    remembers = isinstance(codec, WithMemory) and bool(change) and whole.has_update()
    if isinstance(codec, WithMemory) and remembers:
        change = _with_residual(client, codec, request.round, change)
    if isinstance(codec, PowerSGD) and len(request.basis):
        basis = unpack(request.basis, codec.forms_of_basis(change))
        pending = Pending(request.exchange, request.round, dict(client.state), reply, change, client.n_contributing)
        client.state = {**before, PENDING: pending}
        return EncodedReply(None, pack(codec.project(change, basis), codec.forms_of_frame(change)))
    payload = codec.encode(change, client.rng(f"codec/{request.exchange}", request.round))
    if remembers:
        _remember(client, request.round, change, codec.decode(payload, change))
    return EncodedReply(reply, pack(payload, codec.forms(change)))


@handles(Coefficients)
def answer_second(client: Client, request: Coefficients) -> EncodedReply:
    """Return the client's term of PowerSGD's second sum, and the reply that was computed for the first request."""
    second = second_term(client, request)
    second.remember(client, second.payload)
    return second.reply


@dataclass(frozen=True)
class SecondTerm:
    """A client's reply to PowerSGD's second request. ``remember`` then stores the encoding error.

    Args:
        pending: The values that the client stored when it answered the first request.
        frame: The factors P of PowerSGD.
        payload: The client's term of the second sum.
        reply: The reply to the server.
    """

    pending: Pending
    frame: Payload
    payload: Payload
    reply: EncodedReply

    def remember(self, client: Client, sent: Payload) -> None:
        """Set the client's state to the new state, and store the encoding error of the update.

        Args:
            client: The client.
            sent: The client's term that the server receives. With a secure sum, this term is rounded.
        """
        codec, pending = client.context.communication.up, self.pending
        assert isinstance(codec, PowerSGD)
        client.state = dict(pending.state)
        if pending.reply.has_update():
            decoded = codec.decode(with_frame(sent, self.frame), pending.change)
            _remember(client, pending.round, pending.change, decoded)


def second_term(client: Client, request: Coefficients) -> SecondTerm:
    """Compute the client's reply to PowerSGD's second request. The client's state does not change."""
    pending, codec = client.state.get(PENDING), client.context.communication.up
    if not isinstance(pending, Pending) or pending.exchange != request.exchange or not isinstance(codec, PowerSGD):
        problem = f"cannot answer PowerSGD's second request (id {request.exchange})"
        raise FedstrataError(f"this client {problem}, because it did not answer the first request.")
    client.authorize_release(pending.behind)
    change = pending.change
    frame = unpack(request.frame, codec.forms_of_frame(change))
    payload = codec.coefficients(change, frame)
    packed = pack(payload, codec.forms_of_coefficients(change))
    return SecondTerm(pending, frame, payload, EncodedReply(pending.reply, packed))


def _with_residual(client: Client, codec: WithMemory, round: int, change: Params) -> Params:
    """Return an update plus the stored encoding error times a factor that depends on the age of the error."""
    before = client.state.get(MEMORY)
    if not isinstance(before, Residual):
        return change
    factor = codec.kept(round - before.round)
    return {name: tensor + factor * before.lost[name] for name, tensor in change.items()}


def _remember(client: Client, round: int, change: Params, decoded: Params) -> None:
    client.state[MEMORY] = Residual(round, {name: tensor - decoded[name] for name, tensor in change.items()})


def _received(client: Client, delivery: ModelDelivery) -> Params:
    """Return the parameters of the delivered model, and store them in the client's state.

    Raises:
        FedstrataError: The client lacks the version to which the changes apply, the changed model has a wrong digest,
            or a whole model differs from an earlier model with the same digest.
    """
    state, shared = client.state.get(MODEL), client.context.cached(_models)
    held = state if isinstance(state, HeldModel) else None
    if delivery.base < 0:
        params = delivery.params
        same = held is not None and (held.version, held.digest) == (delivery.version, delivery.digest)
        known = held.params if held is not None and same else shared.get(delivery.digest)
        if known is not None and not _close(params, known):
            raise FedstrataError(
                f"version {delivery.version} of the model has the digest of an earlier model, but different parameters"
            )
    else:
        if held is None or held.version != delivery.base:
            has = "no model" if held is None else f"version {held.version}"
            raise FedstrataError(
                f"the changes apply to version {delivery.base} of the model, but this client has {has}"
            )
        digest = held.digest
        for change in delivery.changes:
            digest = digest_of(digest, change)
        if digest != delivery.digest:
            raise FedstrataError(
                f"after applying the changes, this client's model differs from the server's version {delivery.version}"
            )
        if digest not in shared:
            shared[digest] = renewed(held.params, delivery.changes, client.context.communication.down)
            while len(shared) > _MODELS:
                shared.popitem(last=False)
        params = shared[digest]
    client.state[MODEL] = HeldModel(delivery.version, delivery.digest, params)
    return params


def _close(one: Params, other: Params) -> bool:
    """Return True if two models are equal except for rounding errors, which may differ between processors."""
    return one is other or (
        one.keys() == other.keys()
        and all(one[name].shape == other[name].shape for name in one)
        and all(torch.allclose(one[name], other[name], rtol=1e-3, atol=1e-5, equal_nan=True) for name in one)
    )


def _models(context: ClientContext) -> OrderedDict[bytes, Params]:
    """Return an empty mapping from digests to models, to which the clients of this process add decoded models."""
    return OrderedDict()
