"""Simulate secure sums; deployments use ``fedstrata.sites``. Masks are optional and do not change the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, ReplyRefusedError
from fedstrata.base.records import Message
from fedstrata.federation.engine import Failure
from fedstrata.federation.exchanges import Replies
from fedstrata.federation.federation import Federation
from fedstrata.federation.messages import ClientId, Request, Requests, Work
from fedstrata.federation.secure import protocol, shamir
from fedstrata.federation.secure.fit import ModelForm
from fedstrata.federation.secure.member import KeyIsCertificate, job_of, question_of
from fedstrata.federation.secure.primitives import KEY_BYTES
from fedstrata.federation.secure.requests import (
    FAILED,
    Masked,
    MaskedReply,
    SecureSum,
    Step,
    StepReply,
    check_vector,
    words_of,
)
from fedstrata.federation.secure.ring import Ring, Words, add
from fedstrata.federation.secure.server import Exchange, Server

SIGNATURE_BYTES = 64
TAG_BYTES = 16


def ask_sums(
    federation: Federation, clients: Iterable[ClientId], request: Request, form: ModelForm, *, work: Work | None = None
) -> SecureSum | None:
    """Send clients a request with a model, and return only the sum of their (possibly compressed) replies.

    Args:
        federation: The federation.
        clients: The clients to ask.
        request: The request.
        form: The layout that replies have without a codec.
        work: See ``Federation.ask``.

    Returns:
        The sum in the layout of ``form``; None if too few clients answered (an event records why).
    """
    legs = federation.summed_legs(federation, request, form)
    leg = next(legs)
    while True:
        summed = ask_sum(federation, clients, leg.request, leg.ring, work=work, continues=leg.continues)
        if summed is None:
            return None
        try:
            leg = legs.send(summed.total)
        except StopIteration as end:
            return SecureSum(end.value, summed.clients)
        clients, work = summed.clients, None


def ask_sum(
    federation: Federation,
    clients: Iterable[ClientId],
    request: Request,
    ring: Ring,
    *,
    work: Work | None = None,
    continues: bool = False,
) -> SecureSum | None:
    """Send clients a request, and return only the sum of their replies.

    The log includes the bytes of all messages of the protocol, even if the masks are not simulated.

    Args:
        federation: The federation. If its engine has ``secure_sums``, the clients are sites of a deployment.
        clients: The clients to ask.
        request: The request.
        ring: The layout of the replies.
        work: See ``Federation.ask``.
        continues: Whether all clients must answer, so that this sum has the same contributors as the previous sum.

    Returns:
        The sum; None if too few clients answered (an event records why).
    """
    privacy, engine, exchanges = federation.config.privacy, federation.engine, federation.exchanges
    if engine.secure_sums is not None:
        return engine.secure_sums.ask(federation, clients, request, ring, work, continues)
    asked = Requests.of(clients, Masked(request))
    reached = exchanges.reach(asked, work)
    # Late clients have exchanged keys and shares like the others, so they count in the threshold.
    online = sorted(set(asked) - federation.log.dropped)
    needed = len(asked) if continues else max(privacy.parties, protocol.default_threshold(len(online)))
    check = partial(check_vector, length=ring.length)
    if len(online) < needed:
        exchanges.collect(reached, {}, False, check)
        _fail(federation, online, "are online", needed)
        return None
    masks = Masks(federation, online, continues) if privacy.simulate_masks else None
    outcomes = engine.ask(reached, together=False) if masks is None else masks.ask(reached, request, ring.length)
    answers = exchanges.collect(reached, outcomes, False, check)
    count_messages(federation, Masked(request), ring.length, online, list(answers), len(answers) >= needed)
    if len(answers) < needed:
        engine.commit([])
        _fail(federation, answers, "answered", needed)
        return None
    total = add(map(words_of, answers.values())) if masks is None else masks.open(answers)
    try:
        decoded = ring.decode(total, len(answers))
    except ReplyRefusedError as error:
        engine.commit([])
        federation.note(FAILED, answers, f"{error}.")
        return None
    engine.commit(answers)
    return SecureSum(decoded, list(answers))


def _fail(federation: Federation, clients: Collection[ClientId], did: str, needed: int) -> None:
    federation.note(FAILED, clients, f"{len(clients)} clients {did}, but the sum needs {needed}.")


class Masks:
    """A run of the protocol for one sum, with the clients of an engine.

    Args:
        federation: The federation.
        clients: The clients that are online.
        continues: Whether all clients must answer, so that this sum has the same contributors as the previous sum.
    """

    def __init__(self, federation: Federation, clients: Sequence[ClientId], continues: bool) -> None:
        self._engine, self._clients, self._continues = federation.engine, clients, continues
        config = federation.config
        self._server = Server(job_of(config.seed), KeyIsCertificate(), parties=config.privacy.parties, exchanges=1)
        self._exchange: Exchange | None = None
        self._present: dict[ClientId, Message | None] = {}

    def ask(self, requests: Requests, request: Request, length: int) -> Mapping[ClientId, MaskedReply | Failure]:
        """Let all online clients exchange keys and shares. Return the masked vectors of clients that answer in time.

        Args:
            requests: The requests to the clients that answer in time.
            request: The request.
            length: Number of elements of a vector.
        """
        roster = self._server.enrol(self._step(dict.fromkeys(self._clients)))
        if roster is not None:
            self._server.deliver(self._step(dict.fromkeys(self._clients, roster)))
        if self._server.members != sorted(map(str, self._clients)):
            problem = "the secure sum has failed, because the clients could not exchange keys and shares"
            raise FedstrataError(f"{problem}. {self._reasons()}")
        only = list(map(str, self._clients)) if self._continues else None
        self._exchange = self._server.begin(question_of(request), length, only)
        assert self._exchange is not None
        begun = {
            client: Masked(request, begin)
            for client in requests
            if (begin := self._exchange.outgoing.get(str(client))) is not None
        }
        asked = Requests.of(begun, begun)
        outcomes = self._engine.ask(Requests(asked.distinct, asked.which, requests.work), together=False)
        result: dict[ClientId, MaskedReply | Failure] = {}
        for client, outcome in outcomes.items():
            if isinstance(outcome, MaskedReply):
                self._present[client] = outcome.present
                result[client] = replace(outcome, present=None)
            else:
                missing = Failure("it did not send a vector", refused=True)
                result[client] = outcome if isinstance(outcome, Failure) else missing
        return result

    def open(self, answers: Replies) -> Words:
        """Let the clients reveal their shares, and return the unmasked sum of the vectors that the server accepted."""
        exchange = self._exchange
        assert exchange is not None
        exchange.receive(
            {
                str(client): protocol.MaskedVector(reply.vector, self._present[client])  # type: ignore[arg-type]
                for client, reply in answers.items()
            }
        )
        while exchange.stage not in ("opened", "failed"):
            exchange.receive(self._step({int(name): message for name, message in exchange.outgoing.items()}))
        if exchange.total is None or self._server.events:
            problem = "the secure sum has failed, because the server could not unmask it"
            raise FedstrataError(f"{problem}. {self._reasons()}")
        self._step({int(name): exchange.outgoing[name] for name in exchange.contributors})
        return exchange.total

    def _step(self, messages: Mapping[ClientId, Message | None]) -> dict[str, Any]:
        outcomes = self._engine.ask(Requests.of(messages, {c: Step(m) for c, m in messages.items()}), together=False)
        return {str(c): each.message for c, each in outcomes.items() if isinstance(each, StepReply)}

    def _reasons(self) -> str:
        return " ".join(event.reason for event in self._server.events)


def count_messages(
    federation: Federation,
    question: Masked,
    length: int,
    clients: Sequence[ClientId],
    answered: Sequence[ClientId],
    opened: bool,
) -> None:
    """Log those messages of the protocol whose size depends only on the number of clients.

    Args:
        federation: The federation.
        question: The request, before the message ``Begin`` is added to it. The log already includes the bytes of the
            request and of the vectors.
        length: Number of elements of a vector.
        clients: The clients of the roster.
        answered: The clients that sent their vectors.
        opened: Whether the clients in ``answered`` were enough to unmask the sum.
    """
    names, present = sorted(map(str, clients)), {str(client): _IN for client in answered}
    key, share = bytes(KEY_BYTES), bytes(shamir.SHARE_BYTES)
    signature, box = bytes(SIGNATURE_BYTES), bytes(2 * shamir.SHARE_BYTES + TAG_BYTES)
    packages = [protocol.Package(name, key, key, signature, key, key, key, key, signature) for name in names]
    sizes = records.size
    down = len(names) * (sizes(Step(None)) + sizes(Step(protocol.Roster(packages, 0))) - sizes(question))
    up = 0
    # Clients whose names are equally long send and receive equally long messages, so compute the sizes once per length.
    lengths = Counter(map(len, names))
    for package in {len(package.name): package for package in packages}.values():
        count = lengths[len(package.name)]
        boxes = {name: box for name in names if name != package.name}
        begin = protocol.Begin(key, 0, protocol.Delivery(names, boxes))
        down += count * sizes(replace(question, begin=begin))
        up += count * (sizes(StepReply(package)) + sizes(StepReply(protocol.Deal(boxes))))
    vector = torch.empty(length, dtype=torch.int32)
    up += len(answered) * (sizes(MaskedReply(vector, _IN)) - sizes(MaskedReply(vector)))
    exchanges = 2
    if opened:
        selfs = dict.fromkeys(present, share)
        steps: list[tuple[Message, Message | None]] = [(protocol.RevealAll(0, present), protocol.Shares(selfs, {}))]
        if len(answered) < len(clients):
            pairs = {name: share for name in names if name not in present}
            votes = dict.fromkeys(present, signature)
            steps = [
                (protocol.Propose(0, present), protocol.Vote(signature)),
                (protocol.RevealSet(0, votes), protocol.Shares(selfs, pairs)),
            ]
        steps.append((protocol.Opened(0, sorted(present)), None))
        for message, reply in steps:
            down += len(answered) * sizes(Step(message))
            up += len(answered) * sizes(StepReply(reply))
        exchanges += len(steps)
    log = federation.log
    log.bytes_down, log.bytes_up, log.exchanges = log.bytes_down + down, log.bytes_up + up, log.exchanges + exchanges


_IN = protocol.In(True, bytes(SIGNATURE_BYTES))
