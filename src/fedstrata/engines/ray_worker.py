"""A Ray worker process, which runs a local engine, and exchanges messages and states as bytes."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base import records
from fedstrata.base.inputs import Inputs, each
from fedstrata.base.process import prepare_process
from fedstrata.clients.client import ClientContext, StateStore
from fedstrata.data.mapped import MappedFile
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import ClientId, Reply, Request, Weights
from fedstrata.stratify.masking.key_store import KeyRing

Payload = bytes | NDArray[np.uint8]
"""An encoded request, as bytes or, if the request is in Ray's object store, as an array of bytes."""

VERSIONS = f"fedstrata {version('fedstrata')}, PyTorch {torch.__version__}"
"""The versions of fedstrata and PyTorch, which must be the same in all processes."""


@dataclass(frozen=True)
class WorkerPayload:
    """The clients' context (data, model and settings) in the form that is sent to workers.

    Ray copies the payload once to each machine. All workers of the machine read the arrays from this copy.

    Args:
        context: The context with empty tensors instead of data.
        arrays: A mapping from fields of the data set, such as ``y_train`` or ``x_train.ids``, to arrays or
            memory-mapped files. The test set is not included.
        declared: A mapping from wire names to Python classes, for records that other packages or notebooks declare.
    """

    context: ClientContext
    arrays: dict[str, NDArray[Any] | MappedFile]
    declared: dict[str, type]

    @classmethod
    def of(cls, context: ClientContext, keys: KeyRing) -> WorkerPayload:
        """Convert a context and the clients' shared keys to the form that is sent to workers."""
        data = context.data
        tensors = data.tensors()
        # Leave out the test set and the server's data, which clients do not see.
        arrays = {
            name: file.of_shape(tensor.shape) if (file := data.mapped.get(name)) else tensor.numpy()
            for field, x in tensors.items()
            if not field.endswith("_test")
            for name, tensor in _named(field, x)
        }
        empty: dict[str, Any] = {name: each(x, lambda tensor: tensor[:0].clone()) for name, x in tensors.items()}
        shell = dataclasses.replace(data, **empty)
        # Workers do not run the user's program, so send them the Python classes of messages that this program declares.
        declared = {name: cls for name, cls in records.RECORDS.items() if not cls.__module__.startswith("fedstrata.")}
        # A worker starts no processes of its own and does not use the GPU.
        training = context.config.training.model_copy(update={"workers": 1, "device": "cpu"})
        config = dataclasses.replace(context.config, training=training, server_data=None)
        return cls(dataclasses.replace(context, config=config, data=shell, keys=keys, prepared={}), arrays, declared)

    def unpack(self) -> ClientContext:
        """Restore the context. Its data set uses the arrays of the payload without copying them."""
        records.register(self.declared)
        tensors: dict[str, Any] = {}
        for name, array in self.arrays.items():
            tensor = array.open() if isinstance(array, MappedFile) else torch.from_numpy(array)
            field, _, part = name.partition(".")
            if part:
                tensors.setdefault(field, {})[part] = tensor
            else:
                tensors[field] = tensor
        return dataclasses.replace(self.context, data=dataclasses.replace(self.context.data, **tensors))


def _named(field: str, x: Inputs) -> list[tuple[str, Tensor]]:
    return [(field, x)] if isinstance(x, Tensor) else [(f"{field}.{name}", tensor) for name, tensor in x.items()]


@dataclass(frozen=True)
class EncodedAnswer:
    """A client's encoded reply to a request, with the client's new state.

    Args:
        reply: The encoded reply; empty if there is a ``failure``.
        state: The client's encoded new state; None if the state did not change.
        failure: The reason why the reply is missing; None if there is a reply.
        raised: The traceback of the client's exception; empty without an exception.
        moved: The encoded model after the client's turn in a relay; None outside a relay.
    """

    reply: bytes = b""
    state: bytes | None = None
    failure: Failure | None = None
    raised: str = ""
    moved: bytes | None = None


class Worker:
    """A Ray actor, which can compute the replies of any client.

    Args:
        paths: Folders from which to import modules, such as the folder of a user's own method.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        sys.path += [path for path in paths if path not in sys.path]

    def enter(self, worker_payload: WorkerPayload) -> tuple[str, str]:
        """Set the context for later requests, and return the versions and the name of this process."""
        # PyTorch warns that arrays in the object store are read-only, but nothing writes to a data set.
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
        """Return the clients' encoded replies, in the order of ``calls``, and the computing time in seconds.

        Args:
            exchange: The id of the exchange (requests to clients and their replies). The worker decodes each distinct
                request of an exchange only once.
            calls: For each client: the id, the index of the client's request in the exchange, and the encoded state
                (``b""`` without a state).
            together: Whether the clients run at the same time, as a group that adds up tensors.
            payloads: One encoded request per distinct index in ``calls``, in the order in which indices first occur.
        """
        if exchange != self._exchange:
            self._exchange, self._requests = exchange, {}
        for which, payload in zip(dict.fromkeys(which for _, which, _ in calls), payloads, strict=True):
            if which not in self._requests:
                self._requests[which] = records.decode(bytes(payload))
        self._load({client: state for client, _, state in calls})
        requests = {client: self._requests[which] for client, which, _ in calls}
        began = time.perf_counter()
        outcomes = self._engine.ask(requests, together=together)
        seconds = time.perf_counter() - began
        self._engine.commit(requests)
        return [self._answer(client, outcomes[client]) for client in requests], seconds

    def hop(self, client: ClientId, task: bytes, state: bytes, sent: bytes | None) -> EncodedAnswer:
        """Let a client train the model in a relay.

        Args:
            client: The client.
            task: The encoded task.
            state: The client's encoded state.
            sent: The encoded model; None to continue with the latest model that this worker has returned.
        """
        weights: Weights | None = self._weights if sent is None else records.decode(sent)
        assert weights is not None
        self._load({client: state})
        outcome = self._engine.hop(client, records.decode(task), weights)
        if isinstance(outcome, Failure):
            return self._answer(client, outcome)
        self._engine.commit([client])
        self._weights, reply = outcome
        return self._answer(client, reply, self._weights)

    def _load(self, states: Mapping[ClientId, bytes]) -> None:
        """Replace the engine's store with a new store that contains only ``states``."""
        self._engine.store = StateStore()
        for client, state in states.items():
            if state:
                self._engine.store.put(client, records.decode(state))
        self._engine.store.changed.clear()

    def _answer(self, client: ClientId, outcome: Reply | Failure, moved: Weights | None = None) -> EncodedAnswer:
        if isinstance(outcome, Failure):
            # Only the text of an exception is sent, because the exception itself may not be picklable.
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
