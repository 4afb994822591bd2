"""Answer secure-sum requests with masked or unmasked vectors of integers modulo 2³²."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstrata.base.errors import FedstrataError
from fedstrata.base.records import Message
from fedstrata.clients.client import Client, ClientContext
from fedstrata.clients.handlers.encoded import second_term
from fedstrata.clients.handling import handles
from fedstrata.federation.communication.messages import Coefficients
from fedstrata.federation.secure.factors import SecondForm, with_codec
from fedstrata.federation.secure.fit import Forms
from fedstrata.federation.secure.requests import Dealt, Masked, MaskedReply, SiteStep, Step, StepReply, reply_of

if TYPE_CHECKING:
    from fedstrata.federation.secure.member import Member


@handles(Masked)
def answer(client: Client, request: Masked) -> MaskedReply:
    """Answer a secure-sum request: encode the reply to the inner request as a vector of integers modulo 2³².

    With masks, the client's new state takes effect only when the server reports that it has unmasked the sum.
    """
    from fedstrata.federation.secure.member import question_of
    from fedstrata.federation.secure.protocol import Begin

    inner, before = request.request, dict(client.state)
    form = client.context.cached(forms).get(type(inner))
    if form is None:
        raise FedstrataError(f"secure sums do not support replies to {type(inner).__name__}.")
    if continues := isinstance(form, SecondForm):
        assert isinstance(inner, Coefficients)
        second = second_term(client, inner)
        words = form.encode(inner, second.reply, client.number)
        second.remember(client, form.sent(words, second.reply))
    else:
        reply = client.context.handlers.alone[type(inner)](client, inner)
        words = form.encode(inner, reply, client.number)
    if form.ring.noise:
        words = form.ring.add_noise(words, client.rng("noise share", request.round))
    site = client.context.member
    if not isinstance(request.begin, Begin):
        if site is not None:
            raise FedstrataError("the server asked for a vector without masks. Sites never send such vectors.")
        return reply_of(words)
    member = _member(client)
    # At a real site, a vector to which no samples contributed does not count as a party of the sum, because it does not
    # hide the vectors of other sites. In a simulation it counts, so that sums with and without masks have the same
    # contributors.
    enough = site is None or client.n_contributing > 0
    masked = member.site.mask(request.begin, question_of(inner), words, enough, continues=continues)
    member.pending, client.state = client.state, before
    return MaskedReply(masked.vector, masked.present)


@handles(Step)
def step(client: Client, request: Step) -> StepReply:
    """Answer a message of the masking protocol.

    When the server has unmasked the sum, the client's new state takes effect.
    """
    return StepReply(_answer(client, request))


@handles(SiteStep)
def site_step(client: Client, request: SiteStep) -> StepReply:
    """Answer a message of the masking protocol at a site of a deployment.

    The server sends rosters: sets of sites that take part in sums. The reply to a roster also contains the site's keys
    for the next roster.
    """
    from fedstrata.federation.secure.protocol import Deal

    message = _answer(client, request)
    return StepReply(Dealt(message, _member(client).site.package()) if isinstance(message, Deal) else message)


def _answer(client: Client, request: Step) -> Message | None:
    from fedstrata.federation.secure.protocol import Opened

    member = _member(client)
    if isinstance(request.message, Opened):
        if member.site.opened(request.message) and member.pending is not None:
            client.state = member.pending
        member.pending = None
        return None
    return member.answer(request.message)


def forms(context: ClientContext) -> Forms:
    """Return a mapping from each Python class of requests to the layout (``Form``) of its replies in secure sums."""
    return with_codec(context.forms(context.config), context.communication.up)


def _member(client: Client) -> Member:
    from fedstrata.federation.secure.member import Member

    if client.context.member is not None:
        return client.context.member
    members = client.context.cached(_members)
    if client.number not in members:
        config = client.context.config
        members[client.number] = Member.simulated(client.number, config.seed, config.privacy.parties)
    return members[client.number]


def _members(context: ClientContext) -> dict[int, Member]:
    """Return an empty mapping from clients to their roles in secure sums. The mapping is never stored in a file."""
    return {}
