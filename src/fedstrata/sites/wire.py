"""What server and sites say to each other: an envelope with what became of earlier answers, and one question."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, WireError
from fedstrata.base.records import Message, record
from fedstrata.data.fitting import Statistics
from fedstrata.federation.messages import Weights


class SiteLostError(FedstrataError):
    """A site that cannot be reached, or did not answer in time."""


class SiteRefusedError(FedstrataError):
    """A site answered that it cannot do what it was asked.

    Args:
        reason: In words.
        for_good: See ``Refused``.
    """

    def __init__(self, reason: str, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


@record("Survey")
class Survey(Message):
    """The one question before a run in which each site brings its own data: what do they come to?

    Args:
        spec: The experiment as TOML, whose ``[data]`` says what they must be.
        clients: The number of the client that lives at this site.
        total: N.
        tests: Whether the site must have samples to measure models on.
    """

    spec: str
    clients: list[int]
    total: int
    tests: bool


@record("Surveyed")
class Surveyed(Message):
    """A site's data are what the spec says.

    Args:
        statistics: What the samples that it trains on come to.
        fingerprint: Of its file; tells nothing of what is in it.
    """

    statistics: Statistics
    fingerprint: str = ""


@record("Begin")
class Begin(Message):
    """The first message of a run, and of one that goes on.

    Args:
        run: Names the run; a site keeps its clients' states under this name.
        spec: The experiment as TOML.
        statistics: What all sites' training samples come to, where each brings its own; None where they are the spec's,
            by its partition.
        clients: The numbers of the clients that live at this site.
        total: N.
        round: The last round that counts; the site goes back to its clients' states after it. 0 to start anew.
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
        round: The round of its clients' states: the one asked for, or an earlier one if the site lost that.
        lost: Those of its clients that did not live at this site then, so that their states are not there.
        fingerprint: Of the file that the site has now, where it brings its own; see ``Surveyed``.
    """

    round: int
    lost: list[int]
    fingerprint: str = ""


@record("Commit")
class Commit(Message):
    """Which answers of an exchange count. What the others changed in their clients' states is dropped.

    Args:
        exchange: Its number.
        clients: Whose answers count.
    """

    exchange: int
    clients: list[int]


@record("HopCommit")
class HopCommit(Message):
    """One hop of a relay counts, as far as is known now.

    Args:
        relay_id: Its number.
        hop: The hop.
    """

    relay_id: int
    hop: int


@record("RelayEnd")
class RelayEnd(Message):
    """A relay is over.

    Args:
        relay_id: Its number.
        void: Clients whose parts turned out not to count.
    """

    relay_id: int
    void: list[int]


@record("Ask")
class Ask(Message):
    """Questions to clients of one site.

    Args:
        exchange: Its number; ascending.
        clients: Who is asked.
        requests: The different requests; many clients are often sent the very same one.
        which: For each client, the place of its request.
        group: Names the group in which all clients answer at once; empty where each answers for itself.
        places: Of these clients among the members of the group.
    """

    exchange: int
    clients: list[int]
    requests: list[Any]
    which: list[int]
    group: str
    places: list[int]


@record("Failed")
class Failed(Message):
    """Why one client has no answer.

    Args:
        reason: In words.
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
        outcomes: What came of the next clients.
        left: How many clients' answers did not fit; ``More`` asks for them.
        ledger: The head of the site's ledger with these answers in it; empty where it keeps none.
    """

    outcomes: list[Any]
    left: int = 0
    ledger: str = ""


@record("More")
class More(Message):
    """Send the answers that did not fit into the last message.

    Args:
        exchange: Of ``Ask``.
    """

    exchange: int


@record("Hop")
class Hop(Message):
    """A task of one client on the travelling model.

    Args:
        exchange: As for ``Ask``.
        relay_id: Which relay; ascending.
        hop: Its number in this relay.
        client: Who works.
        task: At what.
        holder: The site where the model is; empty where it comes along.
        base: The hop that left it there.
        weights: The model, where it comes along.
        back: Whether the model goes back to the server with the reply, and is forgotten here.
        ticket: Whoever shows it gets the model that this hop leaves; the server gives it to the next in turn alone.
        key: The ticket of the hop ``base``, to be shown to its holder.
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
    """What became of a hop.

    Args:
        reply: The reply, or ``Failed``.
        weights: The model, where it was asked for.
        ledger: See ``Answers``.
    """

    reply: Any
    weights: Weights | None
    ledger: str = ""


@record("Unmoved")
class Unmoved(Message):
    """The model could not be had from where it is.

    Args:
        reason: In words.
    """

    reason: str


@record("Fetch")
class Fetch(Message):
    """Send the model that a hop left at this site.

    Args:
        relay_id: Which relay.
        hop: Which hop.
        ticket: That of the hop.
    """

    relay_id: int
    hop: int
    ticket: str = ""


@record("Save")
class Save(Message):
    """Write the clients' states to the site's own disk.

    Args:
        round: The round that is complete.
    """

    round: int


@record("Done")
class Done(Message):
    """Nothing more to say."""


@record("Refused")
class Refused(Message):
    """The site cannot do it.

    Args:
        reason: In words.
        for_good: Whether nothing else will be answered either as long as this job lives: its policy says so.
    """

    reason: str
    for_good: bool = False


@record("Part")
class Part(Message):
    """What the clients of one site bring to a sum over a group.

    Args:
        group: Its name.
        places: Of the clients among the members.
        tensors: What each brings.
        step: Counts the sums of this site's clients; asked again, the same total comes. 0 for none.
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
        acks: What became of earlier answers (``Commit``, ``HopCommit``, ``RelayEnd``); again until an answer has come.
        body: The message itself.
        number: Ascending; a site that is asked the same number again gives the same answer again. 0 for none.
    """

    acks: list[Any]
    body: Any
    number: int = 0


def read(data: object, *kinds: type[Message]) -> Any:
    """The message in ``data``.

    Raises:
        WireError: It is no bytes of ours, or of another kind than expected.
        SiteRefusedError: It is ``Refused``.
    """
    if not isinstance(data, bytes):
        raise WireError(f"a {type(data).__name__} arrived where bytes were expected")
    message = records.decode(data)
    if isinstance(message, Refused):
        raise SiteRefusedError(message.reason, message.for_good)
    if not isinstance(message, kinds):
        raise WireError(f"a {type(message).__name__} arrived; expected {', '.join(kind.__name__ for kind in kinds)}")
    return message
