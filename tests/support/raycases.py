"""What Ray's workers import for the tests: clients that fail in every way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import fedstrata as fs
from fedstrata.clients.handling import handles
from fedstrata.federation.messages import Reply, Request
from fedstrata.records import record


@record
class Trouble(Request):
    """Do what makes trouble."""


@record
class Count(Reply):
    """How often a client was asked.

    Args:
        times: By the client's own state.
        values: Something finite, as a rule.
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


class Fatal(fs.Objective):
    """Cross-entropy; whoever finds the file first removes it and is killed.

    Args:
        marker: The file.
    """

    marker: str

    def loss(self, model, params, batch, context):
        try:
            Path(self.marker).unlink()
        except FileNotFoundError:
            return F.cross_entropy(model(params, batch.x), batch.y)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a dead process does not come here")
