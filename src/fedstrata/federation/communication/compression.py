"""The server's part of compression: encode requests, decode replies, and store which model version each client has."""

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
from fedstrata.federation.federation import Federation, Leg, SummedLeg, one_leg
from fedstrata.federation.messages import Extra, ModelRequest, Params, Reply, Requests, Weights
from fedstrata.federation.reply_checks import Check, finite
from fedstrata.federation.secure.factors import FirstForm, SecondForm
from fedstrata.federation.secure.fit import ModelForm
from fedstrata.federation.secure.ring import Total


@record("ChannelState")
class CompressionState:
    """The server's state for encoding and decoding messages. The state is part of a checkpoint.

    Args:
        exchange: Id of the latest exchange of requests and replies.
        version: The number of the latest model version that clients get; −1 before the first version.
        digest: The digest of the latest version.
        params: The parameters of the latest version, which differ from the server's model by the error of the codec.
        changes: The encoded changes that led to the most recent versions, one for each version, oldest first.
        confirmed: The version of the model that each client has, shape (N,); −1 if the server does not know the
            version.
        basis: The matrices Q with which the next exchange begins, for the codec ``PowerSGD``; otherwise empty.
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
    """A decoder that checks and decodes the encoded replies to one request.

    Args:
        request: The request, with the model that the server has.
        codec: The codec with which clients encode their model updates.
        like: Tensors with the names, shapes and dtypes of an update.
        forms: The shapes and dtypes of an encoded update (payload).
        frame: The factors P of PowerSGD's product P Qᵀ if replies contain only Q; otherwise empty.
        first: Whether the replies are summands of PowerSGD's first sum. Such summands cannot be decoded individually.
        method_check: The method's check of a decoded reply; None if there is no such check.
    """

    request: ModelRequest
    codec: Codec
    like: Params
    forms: Forms
    frame: Payload
    first: bool = False
    method_check: Check | None = None

    def check(self, answer: EncodedReply) -> None:
        """Raise an error if an encoded update has the wrong size, or if a decoded reply does not fit the request.

        Raises:
            ReplyRefusedError: The reply is refused; the message contains the reason.
        """
        if self.first:
            unpack(answer.payload, self.forms)
            if answer.reply is not None:
                raise ReplyRefusedError(
                    "the client answered the method's request before it received PowerSGD's second request"
                )
            return
        if answer.reply is None:
            raise ReplyRefusedError("the client sent its encoded update, but not its reply to the method's request")
        change = self._decode(unpack(answer.payload, self.forms))
        if not all(map(finite, change.values())):
            raise ReplyRefusedError("the decoded update contains NaN or infinity")
        reply = answer.reply.merge_update(self.request.weights, change)
        self.request.check_reply(reply)
        if self.method_check is not None:
            self.method_check(reply)

    def read(self, answer: EncodedReply) -> Reply:
        """Decode the model update in an encoded reply, and return the reply with the decoded update."""
        assert answer.reply is not None
        return answer.reply.merge_update(self.request.weights, self._decode(unpack(answer.payload, self.forms)))

    def without_change(self, answer: EncodedReply) -> Reply:
        """Return the reply without its model update, and without the tensors that encode the update."""
        assert answer.reply is not None
        weights = self.request.weights
        return answer.reply.merge_update(weights, self.like).split_update(weights)[1]

    def total(self, answers: Iterable[EncodedReply]) -> Reply:
        """Return the sum of all replies. For a linear codec, updates are added up before they are decoded."""
        rest: Reply = reduce(records.add, map(self.without_change, answers))
        return rest.merge_update(self.request.weights, self._decode(self.sum_payloads(answers)))

    def sum_payloads(self, answers: Iterable[EncodedReply]) -> Payload:
        """Return the sum of all encoded updates, added in double precision and in the order of the clients."""
        return reduce(records.add, [_double(unpack(answer.payload, self.forms)) for answer in answers])

    def _decode(self, payload: Payload) -> Params:
        return self.codec.decode(with_frame(payload, self.frame), self.like)


class _DecodedReplies(Replies):
    """Decoded replies. With a linear codec, ``total`` decodes only the sum of the encoded updates."""

    def __init__(self, reader: Reader, answers: Replies) -> None:
        super().__init__({client: reader.read(answer) for client, answer in answers.items()})
        self._reader, self._answers = reader, answers

    def total(self) -> Any:
        return self._reader.total(self._answers.values()) if self._reader.codec.linear else super().total()


class Compression:
    """The compression of a run: it encodes requests that contain a model, and decodes the replies.

    Args:
        communication: The codecs.
        clients: Number of clients, N.
        seed: The experiment's seed.
        expected: A function that takes the model and the settings, and returns tensors with the names, shapes and
            dtypes of the objective's message.
        additive: Names of the objective's tensor groups that may be added up over rounds.
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
        """The round in which the latest version of the clients' model was computed, and the server's parameters in this
        round."""

    def legs(self, federation: Federation, requests: Requests, check: Check | None) -> Generator[Leg, Replies, Replies]:
        """Yield one or two exchanges in which clients answer encoded requests; see ``Legs``.

        Requests without a model are not encoded.

        Raises:
            FedstrataError: The requests contain a model, but differ between clients.
        """
        request: Any = next(iter(requests.values()), None)
        if not isinstance(request, ModelRequest):
            return (yield from one_leg(federation, requests, check))
        if len(requests) > 1 and len(requests.distinct) > 1:
            raise FedstrataError(
                "the codecs in [communication] require one request for all clients, but each client gets its own "
                f"{type(request).__name__}. Pass one request to Federation.ask."
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

    def summed_legs(self, federation: Federation, request: Any, form: ModelForm) -> Generator[SummedLeg, Total, Total]:
        """Yield two secure sums, one for each of PowerSGD's factors; see ``SummedLegs``."""
        codec = self.up
        if not isinstance(codec, PowerSGD):
            problem = "does not work with secure sums. Use 'powersgd' or 'none'."
            raise FedstrataError(f"communication.up = {self.up.name!r}: {problem}")
        first, second = FirstForm(form, codec), SecondForm(form, codec)
        exchange = self.state.exchange + 1
        self.state = replace(self.state, exchange=exchange)
        # ``next_basis`` divides each matrix Q by its norm, so that no column has a norm above 1, as ``FirstForm``
        # requires. The decoded update does not change, because the columns of Q's products are made orthonormal later.
        basis = self._basis(codec, second.like)
        basis = codec.next_basis(basis, basis)
        packed = pack(basis, codec.forms_of_basis(second.like))
        opened = yield SummedLeg(Encoded(request, federation.round, exchange, None, False, packed), first.ring)
        frame = codec.orthonormal(first.payload(opened))
        packed = pack(frame, codec.forms_of_frame(second.like))
        total = yield SummedLeg(Coefficients(exchange, packed), second.ring, continues=True)
        self.state = replace(self.state, basis=codec.next_basis(second.payload(total), basis))
        return second.decoded(opened, total, frame)

    def _basis(self, codec: Codec, like: Params) -> Payload:
        """Return the matrices Q with which ``PowerSGD`` begins an exchange; empty for other codecs.

        The matrices come from the previous exchange. In the first exchange and after a change of shapes, the
        matrices Q are random.
        """
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
        """Yield one exchange in which each client gets the whole model or only changes, whichever is smaller.

        Args:
            federation: The federation.
            clients: The method's requests, of which only the client ids are used.
            request: The envelope, whose inner request contains the model.
            check: A function that refuses unusable encoded replies.
        """
        if isinstance(self.down, Uncompressed):
            return (yield Leg(Requests.of(clients, request), check))
        inner, confirmed = request.request, self.state.confirmed.copy()
        bare = replace(inner, weights=Weights({}, inner.weights.buffers))
        bases = {client: int(confirmed[client]) for client in clients}
        index_of = {base: index for index, base in enumerate(dict.fromkeys(bases.values()))}
        versions = [replace(request, request=bare, delivery=self._delivery(base)) for base in index_of]
        answers = yield Leg(Requests(versions, {client: index_of[base] for client, base in bases.items()}), check)
        confirmed[list(answers)] = self.state.version
        # A client that failed may or may not have the new version, so forget its version. A client that was not reached
        # still has its old version.
        confirmed[[client for client in clients if client in federation.log.failed]] = -1
        self.state = replace(self.state, confirmed=confirmed)
        return answers

    def _renew(self, round: int, params: Params) -> None:
        """Store the server's parameters as the next version of the clients' model, once per round."""
        if self._renewed_in == round and self._renewed_from is params:
            return
        self._renewed_in, self._renewed_from = round, params
        state, version = self.state, self.state.version + 1
        plain = isinstance(self.down, WithMemory) and round < self.down.start
        if version == 0 or plain or not all(map(finite, params.values())):
            params = {name: tensor.clone() for name, tensor in params.items()}
            self.state = replace(state, version=version, digest=digest_of(b"", params), params=params, changes=[])
            return
        # ``missed`` also contains the codec's errors in earlier versions, so the server does not need separate error
        # feedback.
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
        """Return what a client with version ``base`` receives: the changes since ``base``, or the whole model."""
        state = self.state
        missed = state.version - base
        if base >= 0 and missed <= len(state.changes):
            changes = state.changes[len(state.changes) - missed :]
            return ModelDelivery(state.version, state.digest, base, changes, {})
        return ModelDelivery(state.version, state.digest, -1, [], state.params)


def _double(payload: Payload) -> Payload:
    # In float64, a sum of float32 values cannot overflow, so no client can make the sum infinite.
    return {name: {part: tensor.double() for part, tensor in parts.items()} for name, parts in payload.items()}
