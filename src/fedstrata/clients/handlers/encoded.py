"""Handlers of encoded requests.

The client computes the model from the changes that it missed, answers the request, encodes the change of its answer,
and remembers the error of the encoding.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import torch

from fedstrata.base.errors import FedstrataError
from fedstrata.base.records import Tree, record
from fedstrata.clients.client import Client, ClientContext
from fedstrata.clients.handling import handles
from fedstrata.federation.communication.changes import digest_of, parted, renewed
from fedstrata.federation.communication.codecs import PowerSGD, Uncompressed, WithMemory, pack, unpack, with_frame
from fedstrata.federation.communication.messages import Coefficients, Encoded, EncodedReply, ModelDelivery
from fedstrata.federation.messages import Params, Reply, Weights
from fedstrata.federation.reply_checks import finite

MODEL, MEMORY, PENDING = "model", "codec", "pending"
"""State entries: the model that the client has, the error of its encoded changes, and an unfinished exchange."""

_MODELS = 8
"""Number of model versions that the clients of a process share."""


@record("HeldModel")
class HeldModel:
    """The last model that a client received.

    Args:
        version: The model's number.
        digest: The model's digest.
        params: The model's parameters.
    """

    version: int
    digest: bytes
    params: Params


@record("Residual")
class Residual:
    """The error of a client's encoded changes so far.

    Args:
        round: Round of the last change.
        lost: The sum of the changes minus the sum of what they decode to, by name.
    """

    round: int
    lost: Params


@record("Pending")
class Pending:
    """An answer after the first sum of an exchange; it becomes valid with the second sum.

    Args:
        exchange: Number of the exchange.
        round: Round of the exchange.
        state: The client's state after the answer.
        reply: The answer without its change.
        change: The change to encode, with the error of earlier changes.
        behind: Number of samples that contribute to the answer.
    """

    exchange: int
    round: int
    state: dict[str, Tree]
    reply: Reply
    change: Params
    behind: int = 0


@handles(Encoded)
def answer(client: Client, request: Encoded) -> EncodedReply:
    """Answer the inner request, and encode the change of the answer."""
    client.state.pop(PENDING, None)  # from an exchange that was never finished
    inner, before = request.request, dict(client.state)
    if request.delivery is not None:
        inner = replace(inner, weights=Weights(_received(client, request.delivery), inner.weights.buffers))
        before[MODEL] = client.state[MODEL]
    codec = Uncompressed() if request.plain else client.context.communication.up
    whole: Reply = client.context.handlers.alone[type(inner)](client, inner)
    change, reply = whole.split_update(inner.weights)
    change, unencoded = parted(change, codec, client.context.objective.additive)
    if not all(map(finite, change.values())):
        raise FedstrataError("its change holds NaN or infinity, which a codec would hide")
    reply = reply.merge_update(inner.weights, unencoded)
    # Without a change (no samples, or another kind of request) the client keeps the error of earlier changes.
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
    """Answer the second sum of an exchange, and finish the answer of the first."""
    pending, codec = client.state.get(PENDING), client.context.communication.up
    if not isinstance(pending, Pending) or pending.exchange != request.exchange or not isinstance(codec, PowerSGD):
        raise FedstrataError(f"this client did not answer the first sum of exchange {request.exchange}")
    client.authorize_release(pending.behind)
    change = pending.change
    frame = unpack(request.frame, codec.forms_of_frame(change))
    payload = codec.coefficients(change, frame)
    client.state = dict(pending.state)
    if pending.reply.has_update():
        _remember(client, pending.round, change, codec.decode(with_frame(payload, frame), change))
    return EncodedReply(pending.reply, pack(payload, codec.forms_of_coefficients(change)))


def _with_residual(client: Client, codec: WithMemory, round: int, change: Params) -> Params:
    """Return a change plus the error of earlier changes."""
    before = client.state.get(MEMORY)
    if not isinstance(before, Residual):
        return change
    factor = codec.kept(round - before.round)
    return {name: tensor + factor * before.lost[name] for name, tensor in change.items()}


def _remember(client: Client, round: int, change: Params, decoded: Params) -> None:
    client.state[MEMORY] = Residual(round, {name: tensor - decoded[name] for name, tensor in change.items()})


def _received(client: Client, delivery: ModelDelivery) -> Params:
    """Return the model of a delivery, and keep it.

    Raises:
        FedstrataError: The changes apply to another model than the client has, or another model has the same digest.
    """
    state, shared = client.state.get(MODEL), client.context.cached(_models)
    held = state if isinstance(state, HeldModel) else None
    if delivery.base < 0:
        params = delivery.params
        same = held is not None and (held.version, held.digest) == (delivery.version, delivery.digest)
        known = held.params if held is not None and same else shared.get(delivery.digest)
        if known is not None and not _close(params, known):
            raise FedstrataError(f"version {delivery.version} differs from the earlier model with the same digest")
    else:
        if held is None or held.version != delivery.base:
            has = "no model" if held is None else f"version {held.version}"
            raise FedstrataError(f"the changes apply to version {delivery.base} of the model; this client has {has}")
        digest = held.digest
        for change in delivery.changes:
            digest = digest_of(digest, change)
        if digest != delivery.digest:
            raise FedstrataError(f"the changes lead to another model than version {delivery.version}")
        if digest not in shared:
            shared[digest] = renewed(held.params, delivery.changes, client.context.communication.down)
            while len(shared) > _MODELS:
                shared.popitem(last=False)
        params = shared[digest]
    client.state[MODEL] = HeldModel(delivery.version, delivery.digest, params)
    return params


def _close(one: Params, other: Params) -> bool:
    """Return True if two models are equal up to rounding, which may differ between processors."""
    return one is other or (
        one.keys() == other.keys()
        and all(one[name].shape == other[name].shape for name in one)
        and all(torch.allclose(one[name], other[name], rtol=1e-3, atol=1e-5, equal_nan=True) for name in one)
    )


def _models(context: ClientContext) -> OrderedDict[bytes, Params]:
    """Return the table of the last model versions by digest, which the clients of a process share."""
    return OrderedDict()
