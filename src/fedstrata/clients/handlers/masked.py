"""Handlers of secure sums: clients answer with vectors of the ring, masked or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstrata.base.errors import FedstrataError
from fedstrata.clients.client import Client, ClientContext
from fedstrata.clients.handling import handles
from fedstrata.federation.secure.fit import Forms
from fedstrata.federation.secure.requests import Masked, MaskedReply, Step, StepReply

if TYPE_CHECKING:
    from fedstrata.federation.secure.simulated import SimulatedSite


@handles(Masked)
def answer(client: Client, request: Masked) -> MaskedReply:
    """Answer the inner request with a vector of the ring.

    With masks, the client's new state is kept apart until the server says that the sum was opened.
    """
    from fedstrata.federation.secure.protocol import Begin
    from fedstrata.federation.secure.simulated import question_of, reply_of

    inner, before = request.request, dict(client.state)
    form = client.context.cached(forms).get(type(inner))
    if form is None:
        raise FedstrataError(f"secure sums: replies to {type(inner).__name__} cannot be summed.")
    words = form.encode(inner, client.context.handlers.alone[type(inner)](client, inner), client.number)
    if not isinstance(request.begin, Begin):
        return reply_of(words)
    simulated = _site(client)
    masked = simulated.site.mask(request.begin, question_of(inner), words, True)
    simulated.pending, client.state = client.state, before
    return MaskedReply(masked.vector, masked.present)


@handles(Step)
def step(client: Client, request: Step) -> StepReply:
    """Answer a message of the protocol. When the sum is opened, the client's new state becomes valid."""
    from fedstrata.federation.secure.protocol import Opened

    simulated = _site(client)
    if isinstance(request.message, Opened):
        if simulated.site.opened(request.message) and simulated.pending is not None:
            client.state = simulated.pending
        simulated.pending = None
        return StepReply(None)
    return StepReply(simulated.answer(request.message))


def forms(context: ClientContext) -> Forms:
    """Return the forms in which the clients' replies are summed."""
    return context.forms(context.config)


def _site(client: Client) -> SimulatedSite:
    from fedstrata.federation.secure.simulated import SimulatedSite

    sites = client.context.cached(_sites)
    if client.number not in sites:
        config = client.context.config
        sites[client.number] = SimulatedSite.of(client.number, config.seed, config.privacy.parties)
    return sites[client.number]


def _sites(context: ClientContext) -> dict[int, SimulatedSite]:
    """Return an empty mapping from clients to their sites, which is never saved."""
    return {}
