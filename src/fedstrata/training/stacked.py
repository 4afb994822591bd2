"""A group of clients as one: their parameters stacked, and SGD's steps on the stack.

See ``fedstrata.training.vectorised``, which decides who is in a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fedstrata.clients.client import Client
from fedstrata.clients.context import ClientContext
from fedstrata.data.dataset import Dataset
from fedstrata.federation.messages import Fit, Params, Weights
from fedstrata.handlers.fit import OBJECTIVE, starting_point
from fedstrata.nn.model import Model
from fedstrata.objectives.base import Batch, Batches, Context, Trained
from fedstrata.settings import Training
from fedstrata.training.local import Outcome, computing, is_plain
from fedstrata.training.masked_norms import Mask


@dataclass(frozen=True)
class Bench:
    """What a group is trained with.

    Args:
        context: What its clients share.
        device: Where.
        model: The architecture there, with norms that take a mask.
        mask: That mask.
        data: The data set, there or not.
    """

    context: ClientContext
    device: torch.device
    model: Model
    mask: Mask
    data: Dataset


@dataclass(frozen=True)
class LocalPlan:
    """What a client will do: its samples of the round, and for every step their places among these."""

    client: Client
    request: Fit
    chosen: NDArray[np.int64]
    steps: list[NDArray[np.int64]]

    @property
    def profile(self) -> NDArray[np.int64]:
        """The sizes of its batches."""
        return np.array([len(step) for step in self.steps], dtype=np.int64)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The labels of its samples."""
        return self.client.labels[self.chosen]


@dataclass(frozen=True)
class Start:
    """Where a client stands before its first step, on the device."""

    plan: LocalPlan
    weights: Weights
    context: Context
    batches: Batches


class Samples:
    """The samples of a group's clients on the device, one client after another."""

    def __init__(self, plans: Sequence[LocalPlan], bench: Bench) -> None:
        indices = torch.from_numpy(np.concatenate([plan.client.indices[plan.chosen] for plan in plans]))
        x = bench.data.inputs(indices).to(bench.device)
        # Pixel by pixel, as they lie, so that gathering reads whole samples.
        self.x = x.permute(0, 2, 3, 1) if x.dim() == 4 else x
        self.y = bench.data.labels(indices).to(bench.device)
        self.ends = np.cumsum([len(plan.chosen) for plan in plans])
        self.begins = self.ends - [len(plan.chosen) for plan in plans]

    def batch(self, places: slice) -> tuple[Tensor, Tensor]:
        """Samples in a row."""
        return _channels_first(self.x[places]), self.y[places]

    def of(self, place: int, size: int = 512) -> Batches:
        """All samples of one client, as ``LocalData.in_order`` gives them."""
        begin, end = int(self.begins[place]), int(self.ends[place])

        def batches() -> Iterable[Batch]:
            for first in range(begin, end, size):
                yield Batch(*self.batch(slice(first, min(first + size, end))))

        return batches

    def at(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """Samples by their place, (m, B); of shape (m, B, …)."""
        x = self.x.index_select(0, where.flatten()).view(*where.shape, *self.x.shape[1:])
        return _channels_first(x), self.y[where]


def _channels_first(x: Tensor) -> Tensor:
    return x.movedim(-1, -3) if x.dim() > 3 else x


class Run:
    """A group's training: stacks of parameters, buffers and velocities, and one step of all clients after another.

    Args:
        bench: What they are trained with.
        starts: Clients whose contexts have the same form, those with more steps first.
        vectorise: False for a single client without ``vmap``.
    """

    def __init__(self, bench: Bench, starts: list[Start], vectorise: bool) -> None:
        self.bench, self.starts = bench, starts
        self.model, self.objective = bench.model, bench.context.objective
        training = self.training = bench.context.config.training
        first = starts[0].weights
        names = [name for name in first.params if self.objective.trains(name, self.model)]
        changing = dict(self.model.module.named_buffers()).keys()
        self.params = {name: _stack([s.weights.params[name] for s in starts]) for name in names}
        self.buffers = {
            name: torch.stack([s.weights.buffers[name] for s in starts]) for name in first.buffers if name in changing
        }
        self.velocity = [torch.zeros_like(p) for p in self.params.values()] if training.momentum else []
        self.losses = torch.zeros(len(starts), device=bench.device)
        self._stack_contexts()
        self._one = self._vectorised if vectorise else self._alone

    def _stack_contexts(self) -> None:
        """Contexts as one tree: what all share stays as it is, what differs is stacked."""
        flat = [_flattened(start) for start in self.starts]
        self._form, self._shared = flat[0][1], list(flat[0][0])
        self._varied: dict[int, Tensor] = {}
        done: dict[tuple[int, ...], Tensor] = {}
        for place, leaves in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
            if isinstance(leaves[0], Tensor) and any(leaf is not leaves[0] for leaf in leaves):
                key = tuple(map(id, leaves))
                if key not in done:
                    done[key] = torch.stack(leaves)
                self._varied[place] = done[key]
                self._shared[place] = None

    def go(self, samples: Samples, places: Sequence[int]) -> None:
        """All steps.

        Args:
            samples: Of the clients.
            places: Which of the clients there are those of this run.
        """
        plans = [start.plan for start in self.starts]
        tables = list(_tables([plan.steps for plan in plans], [int(samples.begins[place]) for place in places]))
        # All at once: a copy to a GPU costs more than what it copies.
        where = torch.from_numpy(np.concatenate([table.ravel() for table, _ in tables])).to(self.bench.device)
        real = torch.from_numpy(np.concatenate([mask.ravel() for _, mask in tables])).to(self.bench.device)
        lr, begin = self.starts[0].context.lr, 0
        for table, mask in tables:
            active, end = len(table), begin + table.size
            x, y = samples.at(where[begin:end].view(table.shape))
            padded = None if mask.all() else real[begin:end].view(table.shape)
            gradient, loss, buffers = self.gradient(active, x, y, padded)
            descend(
                self.training,
                lr,
                [p[:active] for p in self.params.values()],
                [gradient[name] for name in self.params],
                [v[:active] for v in self.velocity],
            )
            for name, new in buffers.items():
                self.buffers[name][:active] = new
            self.losses[:active] += loss
            begin = end

    def gradient(self, active: int, x: Tensor, y: Tensor, real: Tensor | None) -> tuple[Params, Tensor, Params]:
        """Gradient with correction, loss and new buffers of the first ``active`` clients, stacked."""
        own = {name: p[:active] for name, p in self.params.items()}
        buffers = {name: b[:active] for name, b in self.buffers.items()}
        return self._one(own, buffers, x, y, real, {place: leaf[:active] for place, leaf in self._varied.items()})

    def _vectorised(self, *stacked: Any) -> tuple[Params, Tensor, Params]:
        # What is None or empty has no axis to go over.
        axes = tuple(None if part is None or (isinstance(part, dict) and not part) else 0 for part in stacked)
        found: tuple[Params, Tensor, Params] = torch.func.vmap(self._of_one, axes, randomness="error")(*stacked)
        return found

    def _alone(self, *stacked: Any) -> tuple[Params, Tensor, Params]:
        only = tree_map_only(Tensor, lambda tensor: tensor[0], stacked)
        found: tuple[Params, Tensor, Params] = tree_map_only(Tensor, lambda t: t.unsqueeze(0), self._of_one(*only))
        return found

    def _of_one(
        self, own: Params, buffers: Params, x: Tensor, y: Tensor, real: Tensor | None, varied: dict[int, Tensor]
    ) -> tuple[Params, Tensor, Params]:
        """One client's gradient, loss and new buffers: pure, for ``vmap``."""
        leaves = [varied.get(place, leaf) for place, leaf in enumerate(self._shared)]
        tree = tree_unflatten(leaves, self._form)
        context, frozen = Context(**tree["context"], lr=self.starts[0].context.lr), tree["frozen"]
        everything = {name: own.get(name, w) for name, w in context.start.items()}
        bf16 = torch.autocast(
            self.bench.device.type, torch.bfloat16, enabled=self.training.precision == "bf16", cache_enabled=False
        )

        def loss_of(own: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
            after = {name: buffer.clone() for name, buffer in buffers.items()}
            self.bench.mask.real = real
            with bf16:
                loss = self.objective.loss(
                    self.model, {**everything, **own, **frozen, **after}, Batch(x, y, real), context
                )
            return loss, (loss.detach(), after)

        gradient, (loss, after) = torch.func.grad(loss_of, has_aux=True)(own)
        correction = self.objective.correction(everything, context)
        if correction is not None:
            gradient = {name: g + correction[name] for name, g in gradient.items()}
        return gradient, loss, after

    def outcomes(self) -> list[Outcome]:
        """What training led to at each client, on the processor."""
        params, buffers = self.params, self.buffers
        home = {name: p.cpu() for name, p in (params | buffers).items()}
        losses = self.losses.tolist()
        return [self._outcome(place, start, home, losses[place]) for place, start in enumerate(self.starts)]

    def _outcome(self, place: int, start: Start, home: Params, total: float) -> Outcome:
        plan, sent = start.plan, starting_point(start.plan.client, start.plan.request)
        extra: Any = {}
        kept = plan.client.state.get(OBJECTIVE)
        if not is_plain(self.objective, "client_final"):
            there = {
                name: _laid_out(self.params[name][place], w) if name in self.params else w
                for name, w in start.weights.params.items()
            }
            buffers = {n: self.buffers[n][place] if n in self.buffers else b for n, b in start.weights.buffers.items()}
            bf16 = computing(self.training, self.bench.device.type)
            with torch.no_grad(), bf16, self.model.loaded(there, buffers, train=True):
                trained = Trained(there, len(plan.steps), self.model, start.batches)
                found = self.objective.client_final(trained, start.context)
            extra, kept = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), found)
        weights = Weights(
            {name: _laid_out(home[name][place] if name in home else w, w) for name, w in sent.params.items()},
            {name: _laid_out(home[name][place] if name in home else b, b) for name, b in sent.buffers.items()},
        )
        steps = len(plan.steps)
        return Outcome(weights, steps, int(plan.profile.sum()), total / steps, extra, kept)


def descend(
    training: Training, lr: float, params: list[Tensor], gradient: list[Tensor], velocity: list[Tensor]
) -> None:
    """One step of SGD of several clients, in place; see ``training.train``.

    Args:
        training: Momentum, weight decay and clip.
        lr: η.
        params: Stacked over the clients, (m, …) each.
        gradient: The same shapes.
        velocity: The same shapes; nothing without momentum.
    """
    if training.clip is not None:
        norms = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in gradient]).norm(dim=0)
        shrinkage = torch.clamp(training.clip / (norms + 1e-12), max=1.0)
        gradient = [g * shrinkage.view(-1, *[1] * (g.dim() - 1)) for g in gradient]
    if training.weight_decay:
        gradient = list(torch._foreach_add(gradient, params, alpha=training.weight_decay))
    if training.momentum:
        torch._foreach_mul_(velocity, training.momentum)
        torch._foreach_add_(velocity, gradient)
        gradient = velocity
    torch._foreach_add_(params, gradient, alpha=-lr)


def _flattened(start: Start) -> tuple[list[Any], Any]:
    """What a client's loss may look at besides parameters, buffers and batch, as leaves and their form."""
    context = {key: value for key, value in vars(start.context).items() if key != "lr"}
    leaves, form = tree_flatten({"context": context, "frozen": start.weights.buffers})
    return leaves, form


def alike(starts: Sequence[Start]) -> list[list[int]]:
    """Clients whose contexts have one form and one value of everything that is no tensor."""
    parts: list[tuple[Any, list[int]]] = []
    for place, start in enumerate(starts):
        leaves, form = _flattened(start)
        what = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        key = (start.context.lr, form, what)
        for other, members in parts:
            if other == key:
                members.append(place)
                break
        else:
            parts.append((key, [place]))
    return [members for _, members in parts]


def _tables(
    steps: Sequence[Sequence[NDArray[np.int64]]], begins: Sequence[int]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """For every step, the samples of the clients that take it, (m, B), and which of these are no padding.

    Args:
        steps: By client, the places of the samples of each step; clients with more steps come first.
        begins: Where each client's samples begin.
    """
    for step in range(len(steps[0])):
        rows = [own[step] for own in steps if len(own) > step]
        table = np.repeat(np.array(begins[: len(rows)], dtype=np.int64)[:, None], max(map(len, rows)), axis=1)
        mask = np.zeros(table.shape, dtype=np.bool_)
        for line, row in enumerate(rows):
            table[line, : len(row)] += row
            mask[line, : len(row)] = True
        yield table, mask


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """A stack of tensors, shape (K, …), each of which lies as the first does (channels last)."""
    first = tensors[0]
    dense = first.numel() == 1 + sum((n - 1) * step for n, step in zip(first.shape, first.stride(), strict=True))
    if not dense:
        return torch.stack(list(tensors))
    made = first.new_empty_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(list(tensors), out=made)


def _laid_out(value: Tensor, like: Tensor) -> Tensor:
    """A copy in the memory format of another tensor."""
    return torch.empty_like(like).copy_(value)
