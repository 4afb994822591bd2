"""Requests, handlers and objectives with which clients fail in every way; Ray's workers import them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import fedstrata as fs
from fedstrata.base.records import record
from fedstrata.clients.handling import handles
from fedstrata.federation.messages import Reply, Request


@record("test/Trouble")
class Trouble(Request):
    """A request at which clients misbehave."""


@record("test/Count")
class Count(Reply):
    """A reply with the number of requests to a client.

    Args:
        times: The number that the client's state has counted.
        values: Numbers, which are usually finite.
    """

    times: int
    values: Tensor


@handles(Trouble)
def trouble(client, request):
    times = client.state["times"] = client.state.get("times", 0) + 1
    if client.number == 1:
        raise ValueError("no luck")
    if client.number == 2:
        return Count(times, torch.tensor([float("nan")]))
    if client.number == 3:
        return Count(str(times), torch.ones(1))
    return Count(times, torch.ones(1))


@record("test/Deadly")
class Deadly(Request):
    """A request at which the process of client 1 is killed."""

    reply_type: ClassVar[type[Reply]] = Count


@handles(Deadly)
def deadly(client, request):
    if client.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return Count(client.number, torch.ones(1))


class Fatal(fs.Objective):
    """Cross-entropy with an accident: the first client that finds a marker file removes it, and its process is killed.

    Args:
        markers: The folder of the marker files.
    """

    markers: str

    def loss(self, model, params, batch, context):
        for marker in Path(self.markers).iterdir():
            try:
                marker.unlink()
            except FileNotFoundError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(model(params, batch.x), batch.y)
