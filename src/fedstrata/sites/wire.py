"""The messages between server and sites: an envelope has acknowledgements of earlier answers, and one question."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, WireError
from fedstrata.base.records import Message, record
from fedstrata.data.fitting import Statistics
from fedstrata.federation.messages import Weights


class SiteLostError(FedstrataError):
    """A site cannot be reached, or did not answer in time."""


class SiteRefusedError(FedstrataError):
    """A site refused a message.

    Args:
        reason: The reason.
        for_good: See ``Refused``.
    """

    def __init__(self, reason: str, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


@record("Survey")
class Survey(Message):
    """The question before a run with the sites' own data: what are the statistics of your training samples?

    Args:
        spec: The experiment as TOML; its ``[data]`` describes the data.
        clients: The number of the client at this site.
        total: N.
        tests: Whether the site must have samples to measure models on.
    """

    spec: str
    clients: list[int]
    total: int
    tests: bool


@record("Surveyed")
class Surveyed(Message):
    """The statistics of a site whose data fit the spec.

    Args:
        statistics: The statistics of its training samples.
        fingerprint: A keyed hash of its file, which does not reveal the content.
    """

    statistics: Statistics
    fingerprint: str = ""


@record("Begin")
class Begin(Message):
    """The first message of a new or resumed run.

    Args:
        run: The name of the run, under which a site keeps its clients' states.
        spec: The experiment as TOML.
        statistics: The statistics of all sites' own training samples; None if the data are those of the spec.
        clients: The clients at this site.
        total: N.
        round: The last round that counts; the site restores its clients' states after it. 0 for a new run.
    """

    run: str
    spec: str
    statistics: Statistics | None
    clients: list[int]
    total: int
    round: int


@record("Begun")
class Begun(Message):
    """A site is ready.

    Args:
        round: The round of its clients' states: the one asked for, or an earlier one if the site lost it.
        lost: Clients that were not at this site in that round, so that it does not have their states.
        fingerprint: The fingerprint of the site's own data file; see ``Surveyed``.
    """

    round: int
    lost: list[int]
    fingerprint: str = ""


@record("Commit")
class Commit(Message):
    """An acknowledgement of the answers that count. Changes of other clients' states are dropped.

    Args:
        exchange: The number of the exchange.
        clients: The clients whose answers count.
    """

    exchange: int
    clients: list[int]


@record("HopCommit")
class HopCommit(Message):
    """An acknowledgement of a hop that counts, unless its model is lost later.

    Args:
        relay_id: The number of the relay.
        hop: The hop.
    """

    relay_id: int
    hop: int


@record("RelayEnd")
class RelayEnd(Message):
    """The end of a relay.

    Args:
        relay_id: The number of the relay.
        void: Clients whose hops do not count.
    """

    relay_id: int
    void: list[int]


@record("Ask")
class Ask(Message):
    """Questions to clients of one site.

    Args:
        exchange: The number of the exchange; ascending.
        clients: The clients.
        requests: The different requests; many clients often share one.
        which: For each client, the place of its request.
        group: The name of the group in which the clients answer together; empty if each answers for itself.
        places: The places of these clients among the members of the group.
    """

    exchange: int
    clients: list[int]
    requests: list[Any]
    which: list[int]
    group: str
    places: list[int]


@record("Failed")
class Failed(Message):
    """The reason for which a client has no answer.

    Args:
        reason: The reason.
        bystander: See ``fedstrata.federation.engine.Failure``.
        refused: See there.
    """

    reason: str
    bystander: bool
    refused: bool = False


@record("Answers")
class Answers(Message):
    """Replies, or ``Failed``, in the order of the clients that were asked.

    Args:
        outcomes: The replies of the next clients.
        left: The number of answers that did not fit; ``More`` asks for them.
        ledger: The head of the site's ledger with these answers; empty without a ledger.
    """

    outcomes: list[Any]
    left: int = 0
    ledger: str = ""


@record("More")
class More(Message):
    """A request for the answers that did not fit into the last message.

    Args:
        exchange: The number of the exchange.
    """

    exchange: int


@record("Hop")
class Hop(Message):
    """A task of one client on the travelling model.

    Args:
        exchange: As for ``Ask``.
        relay_id: The number of the relay; ascending.
        hop: The number of the hop in this relay.
        client: The client.
        task: The task.
        holder: The site that has the model; empty if the model is in this message.
        base: The hop after which the holder has the model.
        weights: The model, if it is in this message.
        back: Whether the model goes back to the server with the reply, and is not kept.
        ticket: The ticket for the model after this hop, which the server gives only to the next site.
        key: The ticket of the hop ``base``, for its holder.
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
    """The answer to a hop.

    Args:
        reply: The reply, or ``Failed``.
        weights: The model, if it goes back.
        ledger: See ``Answers``.
    """

    reply: Any
    weights: Weights | None
    ledger: str = ""


@record("Unmoved")
class Unmoved(Message):
    """The answer to a hop whose model could not be fetched.

    Args:
        reason: The reason.
    """

    reason: str


@record("Fetch")
class Fetch(Message):
    """A request for the model after a hop at this site.

    Args:
        relay_id: The number of the relay.
        hop: The hop.
        ticket: The ticket of the hop.
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
    """An answer without content."""


@record("Refused")
class Refused(Message):
    """The answer to a message that a site refuses.

    Args:
        reason: The reason.
        for_good: Whether the site's policy refuses everything for as long as this job lives.
    """

    reason: str
    for_good: bool = False


@record("Part")
class Part(Message):
    """The terms of one site's clients in a sum over a group.

    Args:
        group: The name of the group.
        places: The places of the clients among the members.
        tensors: The term of each client.
        step: The number of the sum, so that a repeated part gets the same total; 0 for none.
    """

    group: str
    places: list[int]
    tensors: list[Tensor]
    step: int = 0


@record("Total")
class Total(Message):
    """The sum over all members."""

    tensor: Tensor


@record("Envelope")
class Envelope(Message):
    """A message of the server to a site.

    Args:
        acks: Acknowledgements of earlier answers (``Commit``, ``HopCommit``, ``RelayEnd``), repeated until the site has
            answered.
        body: The message itself.
        number: The number of the message, ascending. A site repeats its answer to the same number. 0 for none.
    """

    acks: list[Any]
    body: Any
    number: int = 0


def read(data: object, *kinds: type[Message]) -> Any:
    """Decode a message.

    Args:
        data: The bytes.
        kinds: The expected kinds.

    Raises:
        WireError: The data are damaged, or of another kind.
        SiteRefusedError: The message is ``Refused``.
    """
    if not isinstance(data, bytes):
        raise WireError(f"a {type(data).__name__} arrived where bytes were expected")
    message = records.decode(data)
    if isinstance(message, Refused):
        raise SiteRefusedError(message.reason, message.for_good)
    if not isinstance(message, kinds):
        raise WireError(f"a {type(message).__name__} arrived; expected {', '.join(kind.__name__ for kind in kinds)}")
    return message
