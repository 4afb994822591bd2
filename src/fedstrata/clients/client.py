"""Define clients (which answer the server's requests), their shared context, and the store of their states."""

from __future__ import annotations

import secrets
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import is_not
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base import records
from fedstrata.base.errors import WithheldError
from fedstrata.base.inputs import Inputs
from fedstrata.base.records import Tree
from fedstrata.base.rng import rng
from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import Assignment
from fedstrata.evaluation.holdouts import HeldOut
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.communication.codecs import Communication
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import ClientId
from fedstrata.federation.secure.fit import Forms
from fedstrata.federation.settings import Privacy
from fedstrata.models.batchnorm import ReduceGroup
from fedstrata.models.model import Model
from fedstrata.objectives.base import CrossEntropy, Objective

if TYPE_CHECKING:
    from fedstrata.clients.handling import Handlers
    from fedstrata.federation.secure.member import Member

T = TypeVar("T")

DEFAULT_MEMORY = 1 << 30
"""Maximum total size, in bytes, of the clients' states in memory. Further states are stored on the disk."""


def no_forms(config: FederationConfig) -> Forms:
    """Return an empty mapping, for runs without secure sums."""
    return {}


@dataclass(frozen=True)
class ClientContext:
    """The data set, the model and the settings that all clients of a process share.

    Args:
        config: The settings that server and clients share.
        data: The data set; a client reads only its own samples.
        assignment: The indices of each client's training samples.
        objective: The objective that clients minimise.
        handlers: The functions with which clients answer requests.
        held: The samples that are held out of training, such as each client's own test samples.
        evaluation: The settings of evaluation, such as the metrics.
        communication: The codecs that compress models and updates.
        personal: The objective for fine-tuning a client's copy of the global model before the copy is evaluated.
        tells_values: Whether the reply to an evaluation request contains the metrics on the client's own samples. The
            reply always contains sums, from which the server computes the metrics over all clients.
        privacy: The privacy settings. The clients' site may require more samples per reply than the spec requires.
        forms: A function that returns the layout of replies in sums (``privacy.sums``), for each class of requests.
        prepared: The results that ``cached`` stores, as a mapping from each function to its result.
        keys: Secret keys that are known to all clients but not to the server. Only Stratify uses these keys.
        secret: Whether the clients' random numbers come from the operating system instead of the spec's seed, which the
            server knows. Sites of a deployment need secret random numbers for ``privacy.dp`` and ``privacy.clients``.
        member: The object that takes part in secure sums for the site; None in simulations, and in runs without secure
            sums.
    """

    config: FederationConfig
    data: Dataset
    assignment: Assignment
    objective: Objective
    handlers: Handlers
    held: HeldOut = field(default_factory=HeldOut)
    evaluation: Evaluation = field(default_factory=Evaluation)
    communication: Communication = field(default_factory=Communication)
    personal: Objective = field(default_factory=CrossEntropy)
    tells_values: bool = True
    privacy: Privacy = field(default_factory=Privacy)
    forms: Callable[[FederationConfig], Forms] = no_forms
    prepared: dict[Callable[[ClientContext], Any], Any] = field(default_factory=dict, compare=False, repr=False)
    keys: Any = field(default=None, compare=False, repr=False)
    secret: bool = False
    member: Member | None = field(default=None, compare=False, repr=False)

    def cached(self, factory: Callable[[ClientContext], T]) -> T:
        """Return ``factory(self)``. The value is computed at the first call, and all clients share it."""
        if factory not in self.prepared:
            self.prepared[factory] = factory(self)
        prepared: T = self.prepared[factory]
        return prepared


class Client:
    """A client that answers one request. Each request gets a new ``Client`` object.

    Args:
        number: The client's id, from 0 to N − 1.
        context: The data, the model and the settings that all clients of this process share.
        state: The values that the client stored during earlier requests. A handler may replace values, but must not
            change a value in place: if the reply is refused, the old state remains valid.
        group: The connection to the clients that run at the same time, for adding up tensors (``all_reduce_sum``); None
            if the client runs alone.
        model: The client's own copy of the model if the client runs in a group. Default: the model of the context.
    """

    def __init__(
        self,
        number: ClientId,
        context: ClientContext,
        state: Mapping[str, Tree] | None = None,
        group: ReduceGroup | None = None,
        model: Model | None = None,
    ) -> None:
        self.number, self.context, self.group = number, context, group
        self._before: Mapping[str, Tree] = state or {}
        self.state: dict[str, Tree] = dict(self._before)
        self.model = model or context.config.model
        begin, end = context.assignment.offsets[number : number + 2]
        self.indices: NDArray[np.int64] = context.assignment.indices[begin:end]
        self.seed = secrets.randbits(256) if context.secret else context.config.seed
        """The seed of the client's random numbers: the spec's seed, or a new secret (see ``ClientContext.secret``)."""
        self.n_contributing = 0
        """Number of samples that contribute to the reply, for the site's audit log. ``authorize_release`` sets this
        number."""

    def authorize_release(self, samples: int) -> None:
        """Check that enough samples contribute to a reply.

        Handlers call this method before they read the samples. Only two kinds of replies skip this check: noisy size
        reports and masked labels.

        If ``privacy.min_samples`` is 1, a reply is allowed even if it is based on 0 samples.

        Args:
            samples: Number of samples that contribute to the reply.

        Raises:
            WithheldError: The number of samples is smaller than ``privacy.min_samples``. The message does not disclose
                the number of samples.
        """
        if samples < (least := self.context.privacy.min_samples) and least > 1:
            problem = f"the reply is based on fewer than privacy.min_samples = {least} samples"
            raise WithheldError(f"the client did not send its reply, because {problem}.")
        self.n_contributing = samples

    def authorize_update(self, samples: int) -> None:
        """Check that enough samples contribute to an update.

        With ``training.local_steps``, at most ``samples_per_step`` samples contribute per local step.

        Args:
            samples: Number of samples that are available for training.
        """
        training = self.context.config.training
        seen = samples if training.local_steps is None else training.local_steps * training.samples_per_step
        self.authorize_release(min(samples, seen))

    def __len__(self) -> int:
        return len(self.indices)

    def changed(self) -> bool:
        """Return True if a handler replaced, added or removed an entry of the state."""
        state, before = self.state, self._before
        return state.keys() != before.keys() or any(map(is_not, state.values(), map(before.get, state)))

    @property
    def labels(self) -> NDArray[np.int64]:
        """The stratum (such as the label) of each of the client's samples, shape (n_k,)."""
        return self.context.data.require_strata("method", "stratify")[self.indices]

    def samples(self, chosen: NDArray[np.int64] | slice = slice(None)) -> tuple[Inputs, Tensor]:
        """Return the inputs (n, …) and the targets (n, …) of some of the client's samples.

        Args:
            chosen: Positions of the chosen samples among the client's own n_k samples, from 0 to n_k − 1. Default: all
                samples.
        """
        indices = torch.from_numpy(self.indices[chosen])
        return self.context.data.inputs(indices), self.context.data.y_train[indices]

    def rng(self, purpose: str, round: int) -> np.random.Generator:
        """Return a new random generator that depends only on ``seed``, the purpose, the round and the client."""
        return rng(self.seed, purpose, round, self.number)


class StateStore:
    """The states that clients keep between requests.

    If the states exceed ``memory``, the least recently used states move to the disk.

    Args:
        memory: Maximum total size of the states in memory, in bytes.
        folder: Folder for the states on the disk. Default: a temporary folder, which is created when it is first
            needed.
    """

    def __init__(self, memory: int = DEFAULT_MEMORY, folder: Path | None = None) -> None:
        self.memory, self._folder = memory, folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._held: OrderedDict[ClientId, Mapping[str, Tree]] = OrderedDict()
        self._sizes: dict[ClientId, int] = {}
        self._used = 0
        self.clients: set[ClientId] = set()
        """The clients with a stored state, in memory or on the disk."""
        self.changed: set[ClientId] = set()
        """The clients whose state has changed since this set was last cleared."""

    def get(self, client: ClientId) -> Mapping[str, Tree]:
        """Return a client's state, or an empty state if no state is stored."""
        if client not in self.clients:
            return {}
        if client not in self._held:
            self._hold(client, records.decode(self._path(client).read_bytes(), limit=None))
        self._held.move_to_end(client)
        return self._held[client]

    def put(self, client: ClientId, state: Mapping[str, Tree]) -> None:
        """Store a client's new state."""
        if state or client in self.clients:
            self.clients.add(client)
            self.changed.add(client)
            self._hold(client, state)

    def _hold(self, client: ClientId, state: Mapping[str, Tree]) -> None:
        # The size is approximate: 256 bytes per state, all bytes of tensors and arrays, and 16 bytes per other value.
        size = 256
        for leaf in records.leaves_of(state):
            size += getattr(leaf, "nbytes", 16)
        self._used += size - self._sizes.pop(client, 0)
        self._sizes[client] = size
        self._held[client] = state
        self._held.move_to_end(client)
        while self._used > self.memory and len(self._held) > 1:
            oldest, spilled = self._held.popitem(last=False)
            self._path(oldest).write_bytes(records.encode(dict(spilled)))
            self._used -= self._sizes.pop(oldest)

    def _path(self, client: ClientId) -> Path:
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="fedstrata-states-")
            self._folder = Path(self._temporary.name)
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{client}.state"

    def close(self) -> None:
        """Remove the temporary folder. A folder that the caller chose is not removed."""
        if self._temporary is not None:
            self._temporary.cleanup()
