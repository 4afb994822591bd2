"""The server's side of compression: which model the clients have, and how their encoded replies are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.base.rng import rng
from fedstrata.federation.communication.changes import digest_of, parted, renewed
from fedstrata.federation.communication.codecs import (
    Codec,
    Communication,
    Forms,
    Payload,
    PowerSGD,
    Uncompressed,
    WithMemory,
    pack,
    unpack,
    with_frame,
)
from fedstrata.federation.communication.messages import Coefficients, Encoded, EncodedReply, ModelDelivery
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.exchanges import Replies
from fedstrata.federation.federation import Federation, Leg, one_leg
from fedstrata.federation.messages import Extra, ModelRequest, Params, Reply, Requests, Weights
from fedstrata.federation.reply_checks import Check, finite


@record("ChannelState")
class CompressionState:
    """What the server remembers of what travelled; it is part of a checkpoint.

    Args:
        exchange: The number of the last exchange.
        version: The version of the model that clients have; −1 before the first.
        digest: The digest that identifies this version.
        params: The model that clients have, as their copies of it are.
        changes: The last changes of it, as they travel, oldest first.
        confirmed: The version that each client has, (N,); −1 if none is known.
        basis: Q of the next exchange of PowerSGD.
    """

    exchange: int
    version: int
    digest: bytes
    params: Params
    changes: list[Tensor]
    confirmed: NDArray[np.int64]
    basis: Payload


@dataclass(frozen=True)
class Reader:
    """Reads encoded replies to one request.

    Args:
        request: The request, with the server's own model.
        codec: The codec of the change.
        like: Tensors like those of the change.
        forms: The shapes and dtypes of the payload.
        frame: P of PowerSGD, if the payload holds coefficients along it.
        first: Whether the replies are parts of a first sum, which cannot be decoded alone.
        method_check: What the method expects of the decoded reply.
    """

    request: ModelRequest
    codec: Codec
    like: Params
    forms: Forms
    frame: Payload
    first: bool = False
    method_check: Check | None = None

    def check(self, answer: EncodedReply) -> None:
        """Refuse a payload of another form, and a decoded reply that does not fit the request.

        Raises:
            ReplyRefusedError: With what is wrong.
        """
        if self.first:
            unpack(answer.payload, self.forms)
            if answer.reply is not None:
                raise ReplyRefusedError("an answer before the second sum")
            return
        if answer.reply is None:
            raise ReplyRefusedError("the answer is missing beside its change")
        change = self._decode(unpack(answer.payload, self.forms))
        if not all(map(finite, change.values())):
            raise ReplyRefusedError("a change that is beyond all numbers when it is decoded")
        reply = answer.reply.merge_update(self.request.weights, change)
        self.request.check_reply(reply)
        if self.method_check is not None:
            self.method_check(reply)

    def read(self, answer: EncodedReply) -> Reply:
        """Return the reply as the client would have sent it without a codec."""
        assert answer.reply is not None
        return answer.reply.merge_update(self.request.weights, self._decode(unpack(answer.payload, self.forms)))

    def without_change(self, answer: EncodedReply) -> Reply:
        """Return the reply without its change, whatever the client put in the place of one."""
        assert answer.reply is not None
        weights = self.request.weights
        return answer.reply.merge_update(weights, self.like).split_update(weights)[1]

    def total(self, answers: Iterable[EncodedReply]) -> Reply:
        """Return the sum of all replies of a linear codec: the sum of the payloads is decoded once."""
        rest: Reply = reduce(records.add, map(self.without_change, answers))
        return rest.merge_update(self.request.weights, self._decode(self.sum_payloads(answers)))

    def sum_payloads(self, answers: Iterable[EncodedReply]) -> Payload:
        """Return the sum of all payloads, in client order and in double precision."""
        return reduce(records.add, [_double(unpack(answer.payload, self.forms)) for answer in answers])

    def _decode(self, payload: Payload) -> Params:
        return self.codec.decode(with_frame(payload, self.frame), self.like)


class _DecodedReplies(Replies):
    """Decoded replies; those of a linear codec are summed before they are decoded."""

    def __init__(self, reader: Reader, answers: Replies) -> None:
        super().__init__({client: reader.read(answer) for client, answer in answers.items()})
        self._reader, self._answers = reader, answers

    def total(self) -> Any:
        return self._reader.total(self._answers.values()) if self._reader.codec.linear else super().total()


class Compression:
    """Encodes the requests about a model and decodes their replies, by the codecs of a run.

    Args:
        communication: The codecs.
        clients: N.
        seed: The experiment's.
        expected: Returns tensors like those of an objective's message, for a model.
        additive: Names of an objective's messages that add up as changes do.
    """

    def __init__(
        self,
        communication: Communication,
        clients: int,
        seed: int,
        expected: Callable[[Weights, FederationConfig], Extra],
        additive: Collection[str],
    ) -> None:
        self.up, self.down, self.seed = communication.up, communication.down, seed
        self._expected, self._additive = expected, additive
        unconfirmed = np.full(clients, -1, dtype=np.int64)
        self.state = CompressionState(0, -1, b"", {}, [], unconfirmed, {})
        self._renewed_in, self._renewed_from = 0, Params()
        """The round and the model that the clients' model was last renewed for."""

    def legs(self, federation: Federation, requests: Requests, check: Check | None) -> Generator[Leg, Replies, Replies]:
        """Let a request about a model travel encoded, and any other as it is; see ``fedstrata.federation.Legs``.

        Raises:
            FedstrataError: The requests are about models, and not the same for all clients.
        """
        request: Any = next(iter(requests.values()), None)
        if not isinstance(request, ModelRequest):
            return (yield from one_leg(federation, requests, check))
        if len(requests) > 1 and len(requests.distinct) > 1:
            raise FedstrataError(
                "[communication] encodes one question about a model that is the same for all clients; here each "
                f"client is put a {type(request).__name__} of its own: use one request for all, ask(clients, request)"
            )
        round, exchange = federation.round, self.state.exchange + 1
        self.state = replace(self.state, exchange=exchange)
        if not isinstance(self.down, Uncompressed):
            self._renew(round, request.weights.params)
        plain = isinstance(self.up, WithMemory) and round < self.up.start
        codec = Uncompressed() if plain else self.up
        like, _ = parted(request.changes(self._expected(request.weights, federation.config)), codec, self._additive)
        reader = Reader(request, codec, like, codec.forms(like), {}, method_check=check)
        basis = self._basis(codec, like)
        if not basis or not isinstance(codec, PowerSGD):
            whole = Encoded(request, round, exchange, None, plain, pack({}, {}))
            return _DecodedReplies(reader, (yield from self._deliver(federation, requests, whole, reader.check)))
        projected = replace(reader, forms=codec.forms_of_frame(like), first=True)
        first = Encoded(request, round, exchange, None, plain, pack(basis, codec.forms_of_basis(like)))
        answers = yield from self._deliver(federation, requests, first, projected.check)
        if not answers:
            return answers
        frame = codec.orthonormal(projected.sum_payloads(answers.values()))
        reader = replace(reader, forms=codec.forms_of_coefficients(like), frame=frame)
        second = Coefficients(exchange, pack(frame, projected.forms))
        answers = yield Leg(Requests.of(answers, second), reader.check)
        if answers:
            next_basis = codec.next_basis(reader.sum_payloads(answers.values()), basis)
            self.state = replace(self.state, basis=next_basis)
        return _DecodedReplies(reader, answers)

    def _basis(self, codec: Codec, like: Params) -> Payload:
        """Return Q of PowerSGD: that of the last exchange, or random numbers at first."""
        if not isinstance(codec, PowerSGD):
            return {}
        fresh = codec.first_basis(like, rng(self.seed, "codec/basis"))
        before = self.state.basis
        alike = before.keys() == fresh.keys() and all(
            before[name]["q"].shape == q["q"].shape for name, q in fresh.items()
        )
        return before if alike else fresh

    def _deliver(
        self, federation: Federation, clients: Requests, request: Encoded, check: Check
    ) -> Generator[Leg, Replies, Replies]:
        """Send each client the model in the way that is shortest for it."""
        if isinstance(self.down, Uncompressed):
            return (yield Leg(Requests.of(clients, request), check))
        inner, confirmed = request.request, self.state.confirmed.copy()
        bare = replace(inner, weights=Weights({}, inner.weights.buffers))
        bases = {client: int(confirmed[client]) for client in clients}
        index_of = {base: index for index, base in enumerate(dict.fromkeys(bases.values()))}
        versions = [replace(request, request=bare, delivery=self._delivery(base)) for base in index_of]
        answers = yield Leg(Requests(versions, {client: index_of[base] for client, base in bases.items()}), check)
        confirmed[list(answers)] = self.state.version
        # A client whose answer failed may or may not have the model; one that was never reached has what it had.
        confirmed[[client for client in clients if client in federation.log.failed]] = -1
        self.state = replace(self.state, confirmed=confirmed)
        return answers

    def _renew(self, round: int, params: Params) -> None:
        """Let the clients' model follow the server's, once for each model of a round."""
        if self._renewed_in == round and self._renewed_from is params:
            return
        self._renewed_in, self._renewed_from = round, params
        state, version = self.state, self.state.version + 1
        plain = isinstance(self.down, WithMemory) and round < self.down.start
        if version == 0 or plain or not all(map(finite, params.values())):
            params = {name: tensor.clone() for name, tensor in params.items()}
            self.state = replace(state, version=version, digest=digest_of(b"", params), params=params, changes=[])
            return
        # What a codec loses stays in this difference: the server needs no memory of its own.
        missed = {name: tensor - state.params[name] for name, tensor in params.items()}
        encoded = self.down.encode(missed, rng(self.seed, f"codec/down/{version}", round))
        change = pack(encoded, self.down.forms(missed))
        changes = [*state.changes, change]
        while sum(map(records.size, changes)) >= records.size(params):
            changes.pop(0)
        self.state = replace(
            state,
            version=version,
            digest=digest_of(state.digest, change),
            params=renewed(state.params, [change], self.down),
            changes=changes,
        )

    def _delivery(self, base: int) -> ModelDelivery:
        """Return the model for a client that has version ``base``: the changes since then, or the whole model."""
        state = self.state
        missed = state.version - base
        if base >= 0 and missed <= len(state.changes):
            changes = state.changes[len(state.changes) - missed :]
            return ModelDelivery(state.version, state.digest, base, changes, {})
        return ModelDelivery(state.version, state.digest, -1, [], state.params)


def _double(payload: Payload) -> Payload:
    # No sum of numbers that float32 can hold is beyond float64: nobody's part makes it infinite.
    return {name: {part: tensor.double() for part, tensor in parts.items()} for name, parts in payload.items()}
