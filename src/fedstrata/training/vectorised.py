"""Clients that are trained side by side: their parameters stacked, one set of operations for a whole group.

On a GPU a small client's step is over before the next one is launched, so that clients one after another leave it
idle. Here ``torch.func.vmap`` runs the objective's loss and its gradient over the clients of a group, and SGD's update
is one operation on the stack. The mathematics, the random numbers and the order of the samples are those of
``fedstrata.training.local``; sums may be added up in another order.

What cannot be done so is left to the plain loop, and the reason is noted once (an event ``looped``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map_only

from fedstrata.clients.client import Client
from fedstrata.clients.context import ClientContext
from fedstrata.federation.engine import Note
from fedstrata.federation.messages import ClientId, Fit, FitReply, Request, Weights
from fedstrata.handlers.fit import OBJECTIVE, fit_reply, samples_kept, starting_point
from fedstrata.objectives.base import Batches, Context
from fedstrata.records import Tree
from fedstrata.rng import rng, torch_seeded
from fedstrata.training.batching import WASTE, grouped
from fedstrata.training.devices import device_of, placed
from fedstrata.training.local import LocalData, Outcome, computing
from fedstrata.training.masked_norms import mask_norms
from fedstrata.training.stacked import Bench, LocalPlan, Run, Samples, Start, alike

CPU_BUDGET, GPU_SHARE = 256 << 20, 0.5
"""Memory that a group may take: bytes on a processor, a share of what a GPU has."""

COPIES = 8
"""Of its parameters that a client in training takes: gradient, velocity, what the objective keeps, temporaries."""


def side_by_side(context: ClientContext) -> SideBySide | None:
    """What answers ``Fit`` by the settings ``device`` and ``vectorise``; None where that is the plain loop.

    Raises:
        SpecError: There is no such device.
    """
    training = context.config.training
    gpu = device_of(training.device).type != "cpu"
    vectorise = gpu if training.vectorise == "auto" else training.vectorise
    return SideBySide(context, vectorise=vectorise) if vectorise or gpu else None


class SideBySide:
    """Answers ``Fit`` for many clients at once.

    Args:
        context: What they share.
        vectorise: Whether in groups; one after another on the device otherwise.

    Raises:
        SpecError: There is no such device.
    """

    def __init__(self, context: ClientContext, *, vectorise: bool = True) -> None:
        place = context.once(placed)
        self.context, self.device, self.model = context, place.device, place.model.clone()
        self.bench = Bench(context, place.device, self.model, mask_norms(self.model.module), place.data)
        self._vectorise, self._honoured = vectorise, False
        self._most: int | None = None
        self._sample_bytes: float | None = None
        self._notes: list[Note] = []
        self._told: set[str] = set()
        self._moved: dict[int, tuple[Tree, Tree]] = {}

    def notes(self) -> list[Note]:
        """What was left to the loop since it was last asked; each reason is told once."""
        notes, self._notes = self._notes, []
        return notes

    def answer(
        self, requests: Mapping[ClientId, Request], client_of: Callable[[ClientId], Client]
    ) -> dict[ClientId, FitReply]:
        """Replies to those requests that are a ``Fit``; whoever is missing is for the plain loop.

        Args:
            requests: Of any kind.
            client_of: Makes a client; what it keeps is in its state afterwards.
        """
        fits = {number: request for number, request in sorted(requests.items()) if type(request) is Fit}
        if not fits:
            return {}
        vectorise, obstacle = self._vectorise, self._obstacle()
        if vectorise and obstacle:
            self._tell(list(fits), obstacle)
            if self.device.type == "cpu":
                return {}
            vectorise = False
        plans = [plan for number, request in fits.items() if (plan := self._plan(client_of(number), request))]
        groups = [[plan] for plan in plans]
        if vectorise and plans:
            try:
                groups = self._groups(plans)
            except Exception as error:
                self._tell(list(fits), _told(error))
                if self.device.type == "cpu":
                    return {}
                vectorise = False
        replies = {number: reply for group in groups for number, reply in self._try(group, vectorise).items()}
        self._moved = {}
        return replies

    # What is trained with whom.

    def _obstacle(self) -> str | None:
        """Why no client of this model can be trained side by side with others."""
        module, model = self.model.module, self.model
        if random := [part for part in module.modules() if isinstance(part, _DropoutNd) and part.p > 0]:
            return f"{random[0]} draws random numbers for each client in turn"
        if any(True for _ in module.get_submodule(model.head_name).buffers()):
            return f"the head {model.head_name!r} has buffers"
        if hidden := dict(module.named_buffers()).keys() - module.state_dict().keys():
            return f"buffers that do not travel: {', '.join(sorted(hidden))}"
        return None

    def _plan(self, client: Client, request: Fit) -> LocalPlan | None:
        """The samples of a client's steps, as the loop draws them; None where there are none, or BatchNorm has one."""
        chosen = samples_kept(client, request)
        order = LocalData(_Numbering(client.number, self.context), np.arange(len(chosen)))
        generator = client.rng("batches", request.round)
        steps = [batch.y.numpy() for batch in order.shuffled(self.context.config.training, generator)]
        normalises = any(isinstance(part, _BatchNorm) for part in self.model.module.modules())
        if not steps or (normalises and min(map(len, steps)) < 2):
            return None
        return LocalPlan(client, request, chosen, steps)

    def _groups(self, plans: list[LocalPlan]) -> list[list[LocalPlan]]:
        if not self._honoured:
            # A sample of every class that somebody has, so that no objective is idle.
            self._honoured = self._honours_mask(max(plans, key=lambda plan: len(np.unique(plan.labels))))
        if self._sample_bytes is None:
            self._sample_bytes = self._activations(plans[0])
        # Contexts of one form: what an objective keeps is not there at a client's first time.
        forms: dict[tuple[int, bool], list[LocalPlan]] = {}
        for plan in plans:
            forms.setdefault((plan.request.round, OBJECTIVE in plan.client.state), []).append(plan)
        return [group for part in forms.values() for group in self._fitting(part)]

    def _fitting(self, plans: list[LocalPlan]) -> list[list[LocalPlan]]:
        """Groups that fit into memory and are of nearly equal batches."""
        size = 4 * sum(w.numel() for w in plans[0].request.weights.params.values())
        features = 4 * int(np.prod(self.context.data.shape))
        activations = 3 * (self._sample_bytes or 0.0)
        costs = [COPIES * size + features * len(plan.chosen) + activations * plan.profile.max() for plan in plans]
        places = grouped(
            [plan.profile for plan in plans],
            costs,
            budget=self._budget(),
            most=self._most,
            waste=WASTE if self._honoured else 0.0,
        )
        return [[plans[place] for place in group] for group in places]

    def _budget(self) -> float:
        if self.device.type == "cpu":
            return CPU_BUDGET
        # Not what is free at the moment: groups, and with them the last bits, would be another on another day.
        return GPU_SHARE * torch.cuda.get_device_properties(self.device).total_memory

    def _activations(self, plan: LocalPlan) -> float:
        """Bytes that a forward pass keeps for the backward pass, by sample."""
        kept = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += 0 if tensor.untyped_storage().data_ptr() in weights else tensor.numel() * tensor.element_size()
            return tensor

        x, _ = Samples([plan], self.bench).batch(slice(0, 2))
        with self.model.loaded(plan.request.weights.params) as params:
            weights = {w.untyped_storage().data_ptr() for w in params.values()}
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                self.model(params, x)
        return kept / len(x)

    def _honours_mask(self, plan: LocalPlan) -> bool:
        """Whether padding leaves gradient and buffers as they are, for this model and this objective.

        It does not where samples of a batch mix in a way of the user's own. Then only batches of one size go together.
        """
        samples = Samples([plan], self.bench)
        start = self._start(plan, samples.of(0))
        where = torch.from_numpy(plan.steps[0])[None].to(self.device)
        padded = torch.cat([where, where[:, :1], where[:, :1], where[:, -1:]], 1)
        real = torch.arange(padded.shape[1], device=self.device)[None] < where.shape[1]
        run = Run(self.bench, [start], vectorise=True)
        with self._training(), warnings.catch_warnings():
            # An operation that PyTorch can only repeat for every client.
            warnings.filterwarnings("error", message="There is a performance drop")
            plain = run.gradient(1, *samples.at(where), None)
            masked = run.gradient(1, *samples.at(padded), real)
        pairs = [(a[name], b[name]) for a, b in ((plain[0], masked[0]), (plain[2], masked[2])) for name in a]
        moves = any(bool(g.any()) for g in plain[0].values())
        return moves and all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs)

    # Training.

    def _try(self, plans: list[LocalPlan], vectorise: bool) -> dict[ClientId, FitReply]:
        """Train a group; smaller ones where memory does not suffice, and nobody where that does not help."""
        numbers = [plan.client.number for plan in plans]
        smaller: list[list[LocalPlan]] = []
        try:
            return self._train(plans, vectorise)
        except torch.OutOfMemoryError as error:
            if len(plans) == 1:
                self._tell(numbers, _told(error))
            else:
                self._most = -(-len(plans) // 2)
                smaller = [plans[: self._most], plans[self._most :]]
        except Exception as error:
            self._tell(numbers, _told(error))
            if vectorise and self.device.type != "cpu":
                smaller, vectorise = [[plan] for plan in plans], False
        # Outside the handlers, whose exceptions hold on to the tensors of what failed.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {number: reply for part in smaller for number, reply in self._try(part, vectorise).items()}

    def _train(self, plans: list[LocalPlan], vectorise: bool) -> dict[ClientId, FitReply]:
        samples = Samples(plans, self.bench)
        starts = [self._start(plan, samples.of(place)) for place, plan in enumerate(plans)]
        done: list[tuple[LocalPlan, Outcome]] = []
        for members in alike(starts):
            run = Run(self.bench, [starts[place] for place in members], vectorise)
            with self._training(), self._seeded(run, vectorise):
                run.go(samples, members)
            done += zip([start.plan for start in run.starts], run.outcomes(), strict=True)
        # Replies change the clients' states: only when all are trained, for where memory runs out all begin again.
        return {
            plan.client.number: fit_reply(plan.client, plan.request, len(plan.chosen), outcome)
            for plan, outcome in done
        }

    def _start(self, plan: LocalPlan, batches: Batches) -> Start:
        """What a client starts with, on the device; the counterpart of the beginning of ``training.train``."""
        with computing(self.context.config.training, self.device.type):
            return self._started(plan, batches)

    def _started(self, plan: LocalPlan, batches: Batches) -> Start:
        request, shared, objective = plan.request, self.context, self.context.objective
        sent = starting_point(plan.client, request)
        weights = Weights(self._there(sent.params, self.model.laid_out), self._there(sent.buffers, self.model.laid_out))
        counts = np.bincount(plan.labels, minlength=shared.config.classes)
        context = Context(
            start=weights.params,
            counts=torch.from_numpy(counts).float().to(self.device),
            received=objective.client_prepare(self.model, weights, batches, self._there(request.message)),
            kept=_on(self.device, plan.client.state.get(OBJECTIVE)),
            lr=shared.config.training.lr_at(request.round),
        )
        return Start(plan, weights, objective.client_init(self.model, context), batches)

    def _there(self, tree: Tree, moved: Callable[[Tree], Tree] | None = None) -> Tree:
        """What came with a request, on the device; the same for the same, so that what clients share stays so.

        Args:
            tree: What came.
            moved: Puts it there. Parameters and buffers need the module's memory format: convolutions add up in
                another order in another one, and a checkpoint or a wire does not keep it.
        """
        if id(tree) not in self._moved:
            there = _on(self.device, tree) if moved is None else moved(tree)
            self._moved[id(tree)] = (tree, there)  # kept alive: an id may be given again
        return self._moved[id(tree)][1]

    @contextmanager
    def _training(self) -> Iterator[None]:
        self.model.train_mode(True)
        try:
            yield
        finally:
            self.model.train_mode(False)
            self.bench.mask.real = None

    @contextmanager
    def _seeded(self, run: Run, vectorise: bool) -> Iterator[None]:
        """PyTorch's generators as the loop has them for a client that is alone; side by side nobody may draw."""
        if vectorise:
            yield
            return
        plan = run.starts[0].plan
        key = (self.context.config.seed, "layers", plan.request.round, plan.client.number)
        with torch_seeded(*key), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            if self.device.type == "cuda":
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(int(rng(*key).integers(2**63)))
            yield

    def _tell(self, clients: list[ClientId], reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            self._notes.append(("looped", clients, f"not trained side by side: {reason}"))


class _Numbering(Client):
    """A client whose samples are their own places."""

    def samples(self, chosen: NDArray[np.int64] | slice = slice(None)) -> tuple[Tensor, Tensor]:
        places = torch.arange(len(self))[chosen if isinstance(chosen, slice) else torch.from_numpy(chosen)]
        return places, places


def _on(device: torch.device, tree: Tree) -> Tree:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
