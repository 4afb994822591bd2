"""A method with its own request to clients and its own handler of the request."""

from __future__ import annotations

from typing import ClassVar

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.clients.client import Client
from fedstrata.clients.handling import handles
from fedstrata.federation.messages import Reply, Request
from fedstrata.methods.fedavg import FedAvg


@record("test/Visits")
class Visits(Reply):
    times: int


@record("test/HowOften")
class HowOften(Request):
    reply_type: ClassVar[type[Reply]] = Visits


@handles(HowOften)
def count(client: Client, request: HowOften) -> Visits:
    """Count the requests to this client."""
    client.state["visits"] = client.state.get("visits", 0) + 1
    return Visits(client.state["visits"])


class Counted(FedAvg):
    """FedAvg that first asks all clients how often they were asked."""

    handlers = (count,)

    def run_round(self, federation, state):
        def seldom(reply: Visits) -> None:
            if reply.times > federation.round:
                raise ReplyRefusedError("so often nobody was asked")

        replies = federation.ask(range(federation.config.clients), HowOften(), check=seldom)
        state, metrics = super().run_round(federation, state)
        return state, {**metrics, "visits": sum(reply.times for reply in replies.values())}
