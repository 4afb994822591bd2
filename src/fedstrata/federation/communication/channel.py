"""The server's side: what clients have of the model, and what their answers stand for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.base.rng import rng
from fedstrata.federation.accounting import Summed
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
from fedstrata.federation.federation import AskOptions, Federation
from fedstrata.federation.messages import ClientId, ModelRequest, Params, Reply, Requests, Weights
from fedstrata.federation.reply_checks import Check, finite

if TYPE_CHECKING:
    from fedstrata.objectives.base import Objective


@record("ChannelState")
class ChannelState:
    """What the server remembers of what travelled; it is part of a checkpoint.

    Args:
        exchange: The number of the last exchange.
        version: Of the model that clients have; −1 before the first.
        digest: Names it.
        params: The model that clients have, as their copies of it are.
        changes: The last changes of it, as they travel, oldest first.
        confirmed: The version of every client, (N,); −1 for who has none that is known of.
        basis: Q of the next exchange.
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
    """Reads the answers to a question.

    Args:
        request: The question, with the server's own model.
        codec: What encoded the change.
        like: Tensors like those of the change.
        forms: Of the payload.
        frame: P, where the payload are coefficients along it.
        first: Whether it is a part of a first sum, which says nothing yet.
        further: What the method expects of the answer beside that.
    """

    request: ModelRequest
    codec: Codec
    like: Params
    forms: Forms
    frame: Payload
    first: bool = False
    further: Check | None = None

    def check(self, answer: EncodedReply) -> None:
        """Refuse a payload of another form, and an answer that is none to the question.

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
        change = self.decoded(answer)
        if not all(map(finite, change.values())):
            raise ReplyRefusedError("a change that is beyond all numbers when it is decoded")
        whole = answer.reply.put_together(self.request.weights, change)
        self.request.check_reply(whole)
        if self.further is not None:
            self.further(whole)

    def decoded(self, answer: EncodedReply) -> Params:
        """The change."""
        return self._decoded(unpack(answer.payload, self.forms))

    def read(self, answer: EncodedReply) -> Reply:
        """The answer as its client would have given it without a codec."""
        assert answer.reply is not None
        return answer.reply.put_together(self.request.weights, self.decoded(answer))

    def rest(self, answer: EncodedReply) -> Reply:
        """The answer without its change, whatever its client put in the place of one."""
        assert answer.reply is not None
        weights = self.request.weights
        return answer.reply.put_together(weights, self.like).taken_apart(weights)[1]

    def read_sum(self, rest: Reply, answers: Iterable[EncodedReply]) -> Reply:
        """The sum of all answers, of a linear codec: decoded once.

        Args:
            rest: The sum of the answers without their changes.
            answers: Them.
        """
        return rest.put_together(self.request.weights, self._decoded(self.summed(answers)))

    def summed(self, answers: Iterable[EncodedReply]) -> Payload:
        """The sum of all payloads, in client order and in full precision."""
        return reduce(records.add, [_wide(unpack(answer.payload, self.forms)) for answer in answers])

    def _decoded(self, payload: Payload) -> Params:
        return self.codec.decode(with_frame(payload, self.frame), self.like)


class Channel:
    """Carries a method's questions and answers by the codecs of a run.

    Args:
        communication: The codecs.
        objective: What clients minimise, which knows its messages and which of them add up as changes do.
        clients: N.
        seed: The experiment's.
    """

    def __init__(self, communication: Communication, objective: Objective, clients: int, seed: int) -> None:
        self.up, self.down, self.objective, self.seed = communication.up, communication.down, objective, seed
        nobody = np.full(clients, -1, dtype=np.int64)
        self.state = ChannelState(0, -1, b"", {}, [], nobody, {})
        self._round, self._source = 0, Params()

    def takes(self, requests: Requests) -> bool:
        """Whether these questions go through it: one about a model, the same for all.

        Raises:
            FedstrataError: They are about models, and not the same for all.
        """
        first = next(iter(requests.values()), None)
        if not isinstance(first, ModelRequest):
            return False
        if len(requests) > 1 and len(requests.distinct) > 1:
            raise FedstrataError(
                "[communication] encodes one question about a model that is the same for all clients; here each "
                f"client is put a {type(first).__name__} of its own: use one request for all, ask(clients, request)"
            )
        return True

    def ask(self, federation: Federation, requests: Requests, **options: Unpack[AskOptions]) -> dict[ClientId, Any]:
        """The answers that can be used; see ``Federation.ask``."""
        answers, reader = self._ask(federation, requests, options)
        return {client: reader.read(answer) for client, answer in answers.items()} if reader else {}

    def ask_sum(self, federation: Federation, requests: Requests, **options: Unpack[AskOptions]) -> Summed | None:
        """The sum of all answers; see ``Federation.ask_sum``."""
        answers, reader = self._ask(federation, requests, options)
        if not answers or reader is None:
            return None
        if federation.listener is not None:
            federation.listener(federation.round, {client: reader.read(answer) for client, answer in answers.items()})
        if not reader.codec.linear:
            return Summed(reduce(records.add, map(reader.read, answers.values())), list(answers))
        rest = reduce(records.add, map(reader.rest, answers.values()))
        return Summed(reader.read_sum(rest, answers.values()), list(answers))

    def _ask(
        self, federation: Federation, requests: Requests, options: AskOptions
    ) -> tuple[dict[ClientId, EncodedReply], Reader | None]:
        """Put one question to clients; their answers, and what reads them."""
        question: Any = next(iter(requests.values()))
        exchange = self.state.exchange + 1
        self.state = replace(self.state, exchange=exchange)
        if not isinstance(self.down, Uncompressed):
            self._renew(federation.round, question.weights.params)
        plain = isinstance(self.up, WithMemory) and federation.round < self.up.start
        codec = Uncompressed() if plain else self.up
        expected = self.objective.expected(question.weights, federation.config)
        like, _ = parted(question.changes(expected), codec, self.objective.additive)
        basis = self._basis(codec, like)
        reader = Reader(question, codec, like, codec.forms(like), {}, further=options.get("check"))
        if not basis or not isinstance(codec, PowerSGD):
            request = Encoded(question, federation.round, exchange, None, plain, pack({}, {}))
            return self._first_sum(federation, requests, request, {**options, "check": reader.check}), reader
        projected = replace(reader, forms=codec.forms_of_frame(like), first=True)
        packed = pack(basis, codec.forms_of_basis(like))
        request = Encoded(question, federation.round, exchange, None, plain, packed)
        answers = self._first_sum(federation, requests, request, {**options, "check": projected.check})
        if not answers:
            return {}, None
        frame = codec.orthonormal(projected.summed(answers.values()))
        reader = replace(reader, forms=codec.forms_of_coefficients(like), frame=frame)
        coefficients = Coefficients(exchange, pack(frame, projected.forms))
        done: AskOptions = {**options, "work": None, "check": reader.check}
        answers = federation.exchange(answers, coefficients, **done)
        if answers:
            self.state = replace(self.state, basis=codec.next_basis(reader.summed(answers.values()), basis))
        return answers, reader

    def _basis(self, codec: Codec, like: Params) -> Payload:
        """Q: that of the last exchange, or random numbers at first."""
        if not isinstance(codec, PowerSGD):
            return {}
        fresh = codec.first_basis(like, rng(self.seed, "codec/basis"))
        before = self.state.basis
        alike = before.keys() == fresh.keys() and all(
            before[name]["q"].shape == q["q"].shape for name, q in fresh.items()
        )
        return before if alike else fresh

    def _first_sum(
        self, federation: Federation, clients: Iterable[ClientId], request: Encoded, options: AskOptions
    ) -> dict[ClientId, EncodedReply]:
        """Ask; each client gets the model in the way that is shortest for it."""
        if isinstance(self.down, Uncompressed):
            return federation.exchange(clients, request, **options)
        question, confirmed = request.request, self.state.confirmed.copy()
        bare = replace(question, weights=Weights({}, question.weights.buffers))
        bases = {client: int(confirmed[client]) for client in clients}
        places = {base: place for place, base in enumerate(dict.fromkeys(bases.values()))}
        ways = [replace(request, request=bare, delivery=self._delivery(base)) for base in places]
        versions = Requests(ways, {client: places[base] for client, base in bases.items()})
        answers: dict[ClientId, EncodedReply] = federation.exchange(versions, versions, **options)
        confirmed[list(answers)] = self.state.version
        # Nobody knows what a client has whose answer failed; one that was never reached has what it had.
        confirmed[[client for client in clients if client in federation.accounting.failed]] = -1
        self.state = replace(self.state, confirmed=confirmed)
        return answers

    def _renew(self, round: int, params: Params) -> None:
        """Let the model that clients get follow the server's.

        Once for each model of a round, whether the run was resumed before it or not.
        """
        if self._round == round and self._source is params:
            return
        self._round, self._source = round, params
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
        """The model for a client that has version ``base``: what it missed, where that is smaller than all of it."""
        state = self.state
        missed = state.version - base
        if base >= 0 and missed <= len(state.changes):
            changes = state.changes[len(state.changes) - missed :]
            return ModelDelivery(state.version, state.digest, base, changes, {})
        return ModelDelivery(state.version, state.digest, -1, [], state.params)


def _wide(payload: Payload) -> Payload:
    # No sum of numbers that float32 can hold is beyond float64: nobody's part makes it infinite.
    return {name: {part: tensor.double() for part, tensor in parts.items()} for name, parts in payload.items()}
