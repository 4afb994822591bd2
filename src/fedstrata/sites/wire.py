"""Messages between server and sites. The server sends a message and acknowledgements in one ``Envelope``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, WireError
from fedstrata.base.records import Message, record
from fedstrata.data.fitting import Statistics
from fedstrata.federation.messages import Weights


class SiteLostError(FedstrataError):
    """An error for a site that cannot be reached, or did not reply in time."""


class SiteRefusedError(FedstrataError):
    """An error for a message that a site refused.

    Args:
        reason: The reason for the refusal, in words.
        for_good: Whether the site refuses everything until the job ends; see ``Refused``.
    """

    def __init__(self, reason: str, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


@record("Survey")
class Survey(Message):
    """The request for statistics of a site's training samples, before a run on the sites' own data.

    Args:
        spec: The experiment as TOML. The section ``[data]`` of the spec describes the data.
        clients: A list with one element: the id of the client at this site.
        total: The total number of clients.
        tests: Whether the site must have test samples.
    """

    spec: str
    clients: list[int]
    total: int
    tests: bool


@record("Surveyed")
class Surveyed(Message):
    """The reply to ``Survey`` from a site whose data fit the spec.

    Args:
        statistics: The statistics of the site's training samples.
        fingerprint: A keyed hash of the site's data file. The hash does not reveal the file's content.
    """

    statistics: Statistics
    fingerprint: str = ""


@record("Begin")
class Begin(Message):
    """The first message of a new or resumed run.

    Args:
        run: The name of the run. A site stores its clients' states under this name.
        spec: The experiment as TOML.
        statistics: The statistics of all sites' own training samples; None if the spec names the data.
        clients: The ids of the clients at this site.
        total: The total number of clients.
        round: The round after which a resumed run continues; 0 for a new run. The site restores the states that its
            clients had at the end of this round.
    """

    run: str
    spec: str
    statistics: Statistics | None
    clients: list[int]
    total: int
    round: int


@record("BeginOnBase")
class BeginOnBase(Begin):
    """The first message of a run with frozen tensors in the model.

    The frozen tensors are not sent, because each site has its own copies.

    Args:
        frozen: A mapping from the name of each frozen tensor to its fingerprint.
    """

    frozen: dict[str, str]


@record("Begun")
class Begun(Message):
    """The reply of a site that is ready for the run.

    Args:
        round: The round after which the clients' states were stored: the requested round, an earlier round, or 0 if the
            site has not stored states.
        lost: The ids of clients that were not at this site in that round. The site does not have their states.
        fingerprint: The fingerprint of the site's own data file; see ``Surveyed``.
    """

    round: int
    lost: list[int]
    fingerprint: str = ""


@record("BegunWithKeys")
class BegunWithKeys(Begun):
    """The reply of a site that is ready for a run with secure sums.

    Args:
        package: The site's public keys for its first roster (``protocol.Package``).
    """

    package: Message | None = None


@record("Commit")
class Commit(Message):
    """An acknowledgement of the accepted replies of an exchange.

    Sites discard the new states of the clients whose replies were not accepted.

    Args:
        exchange: The sequence number of the exchange (requests to clients and their replies).
        clients: The ids of the clients with accepted replies.
    """

    exchange: int
    clients: list[int]


@record("HopCommit")
class HopCommit(Message):
    """An acknowledgement: the server will use the result of a hop, unless the hop's model is lost later.

    In a relay, clients train the same model, one after another. The training at one client is a hop.

    Args:
        relay_id: The id of the relay.
        hop: The index of the hop in the relay.
    """

    relay_id: int
    hop: int


@record("RelayEnd")
class RelayEnd(Message):
    """An acknowledgement that ends a relay, in which clients trained the same model, one after another.

    Args:
        relay_id: The id of the relay.
        void: The ids of the clients whose training is invalid.
    """

    relay_id: int
    void: list[int]


@record("Ask")
class Ask(Message):
    """Requests to clients of one site.

    Args:
        exchange: The sequence number of the exchange, which is larger than the number of every earlier exchange.
        clients: The ids of the clients.
        requests: The distinct requests. Many clients often get the same request.
        which: The index of each client's request in ``requests``.
        group: The name of the group of clients whose tensors are added up; empty if each client answers separately.
        places: The indices of these clients within the group.
    """

    exchange: int
    clients: list[int]
    requests: list[Any]
    which: list[int]
    group: str
    places: list[int]


@record("Failed")
class Failed(Message):
    """The outcome for a client that did not send a usable reply.

    Args:
        reason: The reason why the reply is missing or cannot be used, in words.
        bystander: Whether the client failed only because another client of its group failed. The clients of a group add
            up tensors together.
        refused: Whether the site or the client refused the request.
    """

    reason: str
    bystander: bool
    refused: bool = False


@record("Answers")
class Answers(Message):
    """The replies of a site's clients to ``Ask``, in the order of the clients in ``Ask``.

    Args:
        outcomes: For each client, its reply or ``Failed``. If this message does not contain the outcomes of all
            clients, the other outcomes follow in the next message.
        left: The number of replies that did not fit into this message. The message ``More`` requests these replies.
        ledger: The head of the site's ledger after these replies; empty if the site does not have a ledger.
    """

    outcomes: list[Any]
    left: int = 0
    ledger: str = ""


@record("More")
class More(Message):
    """A request for the replies that did not fit into the last message.

    Args:
        exchange: The sequence number of the exchange (requests to clients and their replies).
    """

    exchange: int


@record("Hop")
class Hop(Message):
    """The task for one hop of a relay: to train the relay's model at one client, and to pass the model on.

    Args:
        exchange: The sequence number of the exchange, which is larger than the number of every earlier exchange.
        relay_id: The id of the relay, which is larger than the id of every earlier relay.
        hop: The index of the hop in this relay.
        client: The id of the client.
        task: The request to the client.
        holder: The site that has the model; empty if the model is in this message.
        base: The index of the hop after which the site ``holder`` has the model.
        weights: The model, if it is in this message.
        back: Whether the model returns to the server with the reply. Otherwise, the model stays at the site.
        ticket: A secret that is needed to fetch the model after this hop. Later, the server gives this secret to the
            next site, and to nobody else.
        key: The ticket of the hop with index ``base``. This site needs the ticket to fetch the model from ``holder``.
    """

    exchange: int
    relay_id: int
    hop: int
    client: int
    task: Any
    holder: str
    base: int
    weights: Weights | None
    back: bool
    ticket: str = ""
    key: str = ""


@record("Hopped")
class Hopped(Message):
    """A site's reply to ``Hop``. The client's reply is a part of it.

    Args:
        reply: The client's reply, or ``Failed``.
        weights: The model, if it returns to the server.
        ledger: The head of the site's ledger; see ``Answers``.
    """

    reply: Any
    weights: Weights | None
    ledger: str = ""


@record("Unmoved")
class Unmoved(Message):
    """The site's reply to ``Hop`` if the site could not fetch the model.

    Args:
        reason: The reason why the site could not fetch the model, in words.
    """

    reason: str


@record("Fetch")
class Fetch(Message):
    """A request for a relay's model after the given hop, sent to the site whose client trained in this hop.

    Args:
        relay_id: The id of the relay.
        hop: The index of the hop in the relay.
        ticket: The ticket of the hop; see ``Hop``.
    """

    relay_id: int
    hop: int
    ticket: str = ""


@record("Save")
class Save(Message):
    """A request to write the clients' states to the site's disk.

    Args:
        round: The last complete round.
    """

    round: int


@record("Done")
class Done(Message):
    """The reply of a site that has executed the server's message. The reply does not have content."""


@record("Refused")
class Refused(Message):
    """The reply to a message that a site refuses.

    Args:
        reason: The reason for the refusal, in words.
        for_good: Whether the site's policy makes the site refuse everything until this job ends.
    """

    reason: str
    for_good: bool = False


@record("Part")
class Part(Message):
    """The terms that one site adds to a sum over a group of clients at several sites.

    Args:
        group: The name of the group.
        places: The indices of the site's clients within the group.
        tensors: The term of each client.
        step: The sequence number of the sum; 0 if the message is never repeated. If a message is repeated with the same
            number, the reply contains the same total.
    """

    group: str
    places: list[int]
    tensors: list[Tensor]
    step: int = 0


@record("Total")
class Total(Message):
    """The reply to ``Part``, with the sum of the terms of all clients of a group."""

    tensor: Tensor


@record("Envelope")
class Envelope(Message):
    """A message of the server to a site.

    Args:
        acks: Acknowledgements of earlier replies (``Commit``, ``HopCommit``, ``RelayEnd``). The server adds an
            acknowledgement to every message until the site has replied to one of these messages.
        body: The message, such as ``Ask``.
        number: The sequence number of the message. Later messages have larger numbers. If a site receives the same
            number again, it repeats its first reply. The number is 0 for a message that is never repeated.
    """

    acks: list[Any]
    body: Any
    number: int = 0


def read(data: object, *kinds: type[Message]) -> Any:
    """Decode a message.

    Args:
        data: The bytes.
        kinds: The expected classes of messages.

    Raises:
        WireError: The data are damaged, or the message's class is not in ``kinds``.
        SiteRefusedError: The message is ``Refused``.
    """
    if not isinstance(data, bytes):
        raise WireError(f"the message is of the type {type(data).__name__}, but bytes were expected")
    message = records.decode(data)
    if isinstance(message, Refused):
        raise SiteRefusedError(message.reason, message.for_good)
    if not isinstance(message, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise WireError(f"received a message of the class {type(message).__name__} instead of a {expected}")
    return message
