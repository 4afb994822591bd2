"""The requests of the conformance suite: clients count questions, pass a model on, add up numbers, or misbehave."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.clients.client import Client
from fedstrata.clients.handling import handles, handles_hop
from fedstrata.federation.messages import Reply, Request, Weights

TAKES = {"slow": 0.1, "hang": 24.0}
"""The seconds for which a culprit (a client that must misbehave) sleeps before it answers."""


@record("test/Counted")
class Counted(Reply):
    """The answer to a probe.

    Args:
        times: The number of answers that the client's state has counted.
        values: Finite numbers; the request sets how many.
    """

    times: int
    values: Tensor


@record("test/Probe")
class Probe(Request):
    """A request to count this question, at which some clients misbehave.

    Args:
        culprits: The clients that misbehave.
        how: ``raise``, ``nan``, ``kind`` (answer with another record), ``type`` (a field has another type), ``check``
            (an answer that the request refuses), ``slow``, ``hang``, ``die`` (with the process) or ``garble`` (the next
            message of the process is unreadable).
        size: The number of values in the answer.
    """

    reply_type: ClassVar[type[Reply]] = Counted

    culprits: tuple[int, ...] = ()
    how: str = ""
    size: int = 1

    def check(self, reply: Counted) -> None:
        if reply.times < 0:
            raise ReplyRefusedError("a negative count")


@record("test/Walk")
class Walk(Probe):
    """A probe that travels with a model, to which every hop adds 1."""


@record("test/Meet")
class Meet(Probe):
    """A probe of a group, whose clients add up numbers.

    Args:
        late: Whether the culprits misbehave after the sum, not before it.
    """

    late: bool = False


@record("test/Other")
class Other(Reply):
    """A reply that none of these requests accepts."""


def misbehave(client: Client, request: Probe, reply: Counted) -> Any:
    if client.number not in request.culprits:
        return reply
    time.sleep(TAKES.get(request.how, 0.0))
    if request.how in TAKES:
        return reply
    if request.how == "die":
        os._exit(1)
    if request.how == "garble":
        garble()
        return reply
    if request.how == "raise":
        raise ValueError("on purpose")
    if request.how == "nan":
        return replace(reply, values=torch.full_like(reply.values, float("nan")))
    if request.how == "type":
        return replace(reply, times="many")
    return Other() if request.how == "kind" else replace(reply, times=-1)


def garble() -> None:
    """Let this process send unreadable messages after its next answer, up to and including the answer after that."""
    encode = records.encode

    def garbled(value: object) -> bytes:
        if type(value).__name__ in ("Answers", "Hopped"):  # these messages are answers of sites
            records.encode = encode
        return b"\x80\x04garbage"

    def answer(value: object) -> bytes:
        records.encode = garbled
        return encode(value)

    records.encode = answer


def counted(client: Client, request: Probe, value: float = 0.0) -> Counted:
    client.state["times"] = client.state.get("times", 0) + 1
    return Counted(client.state["times"], torch.full((request.size,), value))


@handles(Probe)
def probe(client: Client, request: Probe) -> Counted:
    return misbehave(client, request, counted(client, request))


@handles_hop(Walk)
def walk(client: Client, request: Walk, weights: Weights) -> tuple[Weights, Counted]:
    reply = counted(client, request)
    moved = Weights({name: w + 1 for name, w in weights.params.items()}, weights.buffers)
    if client.number in request.culprits and request.how == "model":
        return Weights({name: w * float("inf") for name, w in moved.params.items()}, moved.buffers), reply
    return moved, misbehave(client, request, reply)


@handles(Meet)
def meet(client: Client, request: Meet) -> Counted:
    reply = counted(client, request)
    if not request.late:
        reply = misbehave(client, request, reply)
    total = client.group.all_reduce_sum(torch.tensor([float(client.number)]))
    reply = replace(reply, values=total.repeat(request.size)) if isinstance(reply, Counted) else reply
    return misbehave(client, request, reply) if request.late else reply


class Probes(fs.FedAvg):
    """A method with the handlers of the probes."""

    handlers = (probe, walk, meet)


def normalised(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """Return a small model with BatchNorm, which trains quickly."""
    nn = torch.nn
    width = torch.Size(shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))
