"""What runs in a process of Ray's: clients, as in the local engine, with messages and states that come as bytes."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base import records
from fedstrata.base.process import prepare_process
from fedstrata.clients.context import ClientContext
from fedstrata.clients.store import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import ClientId, Reply, Request, Weights
from fedstrata.stratify.masking.key_store import KeyRing

Payload = bytes | NDArray[np.uint8]
"""An encoded tree: bytes, or an array where it lies in Ray's object store."""

VERSIONS = f"fedstrata {version('fedstrata')}, PyTorch {torch.__version__}"
"""What must be alike everywhere."""


@dataclass(frozen=True)
class WorkerPayload:
    """A world as it travels: once to each machine, where its workers read the arrays in place.

    Args:
        context: Without the data set's tensors.
        arrays: The training samples and what normalises them, by field of the data set.
        declared: Records that other packages declare, by wire name.
    """

    context: ClientContext
    arrays: dict[str, NDArray[Any]]
    declared: dict[str, type]

    @classmethod
    def of(cls, context: ClientContext, keys: KeyRing) -> WorkerPayload:
        """Pack a world, with the keys of its clients."""
        data = context.data
        tensors = {
            field.name: value
            for field in dataclasses.fields(data)
            if isinstance(value := getattr(data, field.name), Tensor)
        }
        # Clients see neither the test set nor what the server may have.
        arrays = {name: t.numpy() for name, t in tensors.items() if not name.endswith("_test")}
        nothing: dict[str, Any] = {name: tensor[:0].clone() for name, tensor in tensors.items()}
        shell = dataclasses.replace(data, **nothing)
        # A module that workers can import declares its own again; what a notebook declares goes along.
        declared = {name: cls for name, cls in records.RECORDS.items() if not cls.__module__.startswith("fedstrata.")}
        # A worker is one process of many: it starts none of its own, and no GPU is its own.
        training = context.config.training.model_copy(update={"workers": 1, "device": "cpu"})
        config = dataclasses.replace(context.config, training=training, server_data=None)
        return cls(dataclasses.replace(context, config=config, data=shell, keys=keys, prepared={}), arrays, declared)

    def unpack(self) -> ClientContext:
        """The world, whose data set reads the arrays where they lie."""
        records.register(self.declared)
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in self.arrays.items()}
        return dataclasses.replace(self.context, data=dataclasses.replace(self.context.data, **tensors))


@dataclass(frozen=True)
class EncodedAnswer:
    """What became of one client's request.

    Args:
        reply: The encoded reply; None for none.
        state: The client's encoded state where it changed.
        failure: Why there is no reply.
        raised: The traceback of the exception, where there was one.
        moved: The encoded model after a hop.
    """

    reply: bytes | None = None
    state: bytes | None = None
    failure: Failure | None = None
    raised: str = ""
    moved: bytes | None = None


class Worker:
    """Answers for whichever clients it is given.

    Args:
        paths: Where modules are looked for besides, such as that of a method of the user's own.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        sys.path += [path for path in paths if path not in sys.path]

    def enter(self, worker_payload: WorkerPayload) -> tuple[str, str]:
        """Enter a world; the versions that run here, and who this is."""
        # The object store is read-only, and nothing writes to a data set.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        context = worker_payload.unpack()
        prepare_process(context.config.training.threads)
        self._engine = LocalEngine(context, StateStore())
        self._exchange, self._requests = -1, dict[int, Request]()
        self._weights: Weights | None = None
        return VERSIONS, f"process {os.getpid()} on {platform.node()}"

    def ask(
        self,
        exchange: int,
        calls: Sequence[tuple[ClientId, int, bytes]],
        together: bool,
        *payloads: Payload,
    ) -> tuple[list[EncodedAnswer], float]:
        """The answers of some clients, in order, and how many seconds they took.

        Args:
            exchange: Counts exchanges: what came earlier in this one is not decoded again.
            calls: Client, number of its request in the exchange, and its encoded state; ``b""`` for none.
            together: Whether they answer at the same time, as a group.
            payloads: One for each different request of ``calls``, in the order in which they first appear.
        """
        if exchange != self._exchange:
            self._exchange, self._requests = exchange, {}
        for which, payload in zip(dict.fromkeys(which for _, which, _ in calls), payloads, strict=True):
            if which not in self._requests:
                self._requests[which] = records.decode(bytes(payload))
        self._engine.store = store = StateStore()
        for client, _, state in calls:
            if state:
                store.put(client, records.decode(state))
        store.changed.clear()
        requests = {client: self._requests[which] for client, which, _ in calls}
        began = time.perf_counter()
        outcomes = self._engine.ask(requests, together=together)
        seconds = time.perf_counter() - began
        self._engine.commit(requests)
        return [self._answer(client, outcomes[client]) for client in requests], seconds

    def hop(self, client: ClientId, task: bytes, state: bytes, sent: bytes | None) -> EncodedAnswer:
        """Let a client work on the travelling model; None for ``sent`` is the model that the last hop led to."""
        weights: Weights | None = self._weights if sent is None else records.decode(sent)
        assert weights is not None
        self._engine.store = store = StateStore()
        if state:
            store.put(client, records.decode(state))
        store.changed.clear()
        outcome = self._engine.hop(client, records.decode(task), weights)
        if isinstance(outcome, Failure):
            return self._answer(client, outcome)
        self._engine.commit([client])
        self._weights, reply = outcome
        return self._answer(client, reply, self._weights)

    def _answer(self, client: ClientId, outcome: Reply | Failure, moved: Weights | None = None) -> EncodedAnswer:
        if isinstance(outcome, Failure):
            # An exception may hold anything; its text travels.
            raised = "".join(traceback.format_exception(outcome.error)) if outcome.error is not None else ""
            return EncodedAnswer(failure=dataclasses.replace(outcome, error=None), raised=raised)
        try:
            reply = records.encode(outcome)
            weights = None if moved is None else records.encode(moved)
            store = self._engine.store
            state = records.encode(dict(store.get(client))) if client in store.changed else None
        except Exception as error:
            return self._answer(client, Failure(f"{type(error).__name__}: {error}", error))
        return EncodedAnswer(reply, state, moved=weights)
