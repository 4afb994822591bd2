"""How a client answers where models and updates are encoded.

It makes the model of what it missed, encodes the change, and remembers what that lost.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import torch

from fedstrata.base.errors import FedstrataError
from fedstrata.base.records import Tree, record
from fedstrata.clients.client import Client
from fedstrata.clients.context import ClientContext
from fedstrata.clients.handling import handles
from fedstrata.federation.communication.changes import digest_of, parted, renewed
from fedstrata.federation.communication.codecs import PowerSGD, Uncompressed, WithMemory, pack, unpack, with_frame
from fedstrata.federation.communication.messages import Coefficients, Encoded, EncodedReply, ModelDelivery
from fedstrata.federation.messages import Params, Reply, Weights
from fedstrata.federation.reply_checks import finite

MODEL, MEMORY, PENDING = "model", "codec", "pending"
"""Names under which a client keeps the model that it has, what its changes lost, and an exchange that is not over."""

_MODELS = 8
"""Versions of the model that the clients of a process share."""


@record("HeldModel")
class HeldModel:
    """The last model that came.

    Args:
        version: Its number.
        digest: Its name.
        params: Its parameters.
    """

    version: int
    digest: bytes
    params: Params


@record("Residual")
class Residual:
    """What a client's changes lost so far.

    Args:
        round: Of the last change.
        lost: By name.
    """

    round: int
    lost: Params


@record("Pending")
class Pending:
    """What a client did for the first sum of an exchange; it counts with the second.

    Args:
        exchange: Which.
        round: Its round.
        state: The client's state after it.
        reply: The answer without its change.
        change: What is encoded of the change, and of what earlier ones lost.
        behind: Samples behind the answer.
    """

    exchange: int
    round: int
    state: dict[str, Tree]
    reply: Reply
    change: Params
    behind: int = 0


@handles(Encoded)
def answer(client: Client, request: Encoded) -> EncodedReply:
    """Answer the question inside; its change goes back encoded."""
    client.state.pop(PENDING, None)  # of an exchange that was never finished
    question, before = request.request, dict(client.state)
    if request.delivery is not None:
        question = replace(question, weights=Weights(_received(client, request.delivery), question.weights.buffers))
        before[MODEL] = client.state[MODEL]
    codec = Uncompressed() if request.plain else client.context.communication.up
    whole: Reply = client.context.handlers.alone(type(question))(client, question)
    change, reply = whole.split_update(question.weights)
    change, as_it_is = parted(change, codec, client.context.objective.additive)
    if not all(map(finite, change.values())):
        raise FedstrataError("its change holds NaN or infinity, which a codec would hide")
    reply = reply.merge_update(question.weights, as_it_is)
    # Who changes nothing, having nothing to train on or being asked something else, keeps what earlier changes lost.
    remembers = isinstance(codec, WithMemory) and bool(change) and whole.has_update()
    if isinstance(codec, WithMemory) and remembers:
        change = _with_residual(client, codec, request.round, change)
    if isinstance(codec, PowerSGD) and len(request.basis):
        basis = unpack(request.basis, codec.forms_of_basis(change))
        pending = Pending(request.exchange, request.round, dict(client.state), reply, change, client.behind)
        client.state = {**before, PENDING: pending}
        return EncodedReply(None, pack(codec.project(change, basis), codec.forms_of_frame(change)))
    payload = codec.encode(change, client.rng(f"codec/{request.exchange}", request.round))
    if remembers:
        _remember(client, request.round, change, codec.decode(payload, change))
    return EncodedReply(reply, pack(payload, codec.forms(change)))


@handles(Coefficients)
def answer_second(client: Client, request: Coefficients) -> EncodedReply:
    """Finish what the first sum of the exchange began."""
    pending, codec = client.state.get(PENDING), client.context.communication.up
    if not isinstance(pending, Pending) or pending.exchange != request.exchange or not isinstance(codec, PowerSGD):
        raise FedstrataError(f"no first sum of exchange {request.exchange} was answered here")
    client.release(pending.behind)
    change = pending.change
    frame = unpack(request.frame, codec.forms_of_frame(change))
    payload = codec.coefficients(change, frame)
    client.state = dict(pending.state)
    if pending.reply.has_update():
        _remember(client, pending.round, change, codec.decode(with_frame(payload, frame), change))
    return EncodedReply(pending.reply, pack(payload, codec.forms_of_coefficients(change)))


def _with_residual(client: Client, codec: WithMemory, round: int, change: Params) -> Params:
    """A change, and what earlier ones lost."""
    before = client.state.get(MEMORY)
    if not isinstance(before, Residual):
        return change
    factor = codec.kept(round - before.round)
    return {name: tensor + factor * before.lost[name] for name, tensor in change.items()}


def _remember(client: Client, round: int, change: Params, decoded: Params) -> None:
    client.state[MEMORY] = Residual(round, {name: tensor - decoded[name] for name, tensor in change.items()})


def _received(client: Client, delivery: ModelDelivery) -> Params:
    """The model that was delivered.

    Raises:
        FedstrataError: The changes build on another model than the one that is here, or another one has its name.
    """
    held, shared = client.state.get(MODEL), client.context.once(_models)
    if delivery.base < 0:
        found = delivery.params
        named = isinstance(held, HeldModel) and (held.version, held.digest) == (delivery.version, delivery.digest)
        known = held.params if isinstance(held, HeldModel) and named else shared.get(delivery.digest)
        if known is not None and not _alike(found, known):
            raise FedstrataError(f"version {delivery.version} is another model than the one of that name before")
    else:
        if not isinstance(held, HeldModel) or held.version != delivery.base:
            there = f"version {held.version}" if isinstance(held, HeldModel) else "no model"
            raise FedstrataError(f"the changes build on version {delivery.base} of the model; here is {there}")
        digest = held.digest
        for change in delivery.changes:
            digest = digest_of(digest, change)
        if digest != delivery.digest:
            raise FedstrataError(f"the changes lead to another model than version {delivery.version}")
        if digest not in shared:
            shared[digest] = renewed(held.params, delivery.changes, client.context.communication.down)
            while len(shared) > _MODELS:
                shared.popitem(last=False)
        found = shared[digest]
    client.state[MODEL] = HeldModel(delivery.version, delivery.digest, found)
    return found


def _alike(one: Params, other: Params) -> bool:
    """Whether it is one model, for all that processors differ in the last bits when they compute it."""
    return one is other or (
        one.keys() == other.keys()
        and all(one[name].shape == other[name].shape for name in one)
        and all(torch.allclose(one[name], other[name], rtol=1e-3, atol=1e-5, equal_nan=True) for name in one)
    )


def _models(context: ClientContext) -> OrderedDict[bytes, Params]:
    """The last versions of the model by their digests: many clients of a process have the same."""
    return OrderedDict()
