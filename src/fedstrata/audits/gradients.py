"""What the parts of Stratify's batches give away, by how many samples are in them.

The attacker is an honest but curious server. It has each part that it was sent, the gradient of the summed loss over
the part's samples, with their number and the model under which it was computed. Three attacks, from the cheapest on:

- **labels** from the gradient of the last layer's bias, Σ (p − y): a class with n samples has −n in it (iDLG, Zhao et
  al. 2020, for one sample);
- **rows** of the first layer's gradient, where that is linear: with one sample each is a multiple of that sample, and
  so it is wherever a unit was active for one sample of several; its bias's gradient is the factor;
- **inversion**: images whose gradient points where the part's does (Geiping et al. 2020: cosine distance and total
  variation, Adam), under the labels that were recovered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedstrata.audits.attacks import total_variation
from fedstrata.audits.pixels import Pixels
from fedstrata.audits.replay import Watch
from fedstrata.base.errors import CheckpointError, SpecError
from fedstrata.base.jsonl import replace_file, write_json
from fedstrata.base.process import training_process
from fedstrata.base.rng import rng, torch_seeded
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Engine, Failure, RelaySession
from fedstrata.federation.messages import ClientId, Params, Reply, Request, Weights
from fedstrata.models.batchnorm import has_batchnorm
from fedstrata.models.model import Model
from fedstrata.runs import checkpoint
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.run_folder import prepare_again, spec_of
from fedstrata.runs.simulation import Simulation
from fedstrata.stratify.client_batch import STATE
from fedstrata.stratify.messages import Gradient, GradientReply, GradientSteps

NAME = "gradients"
SIZES = (1, 2, 4, 8)
"""Samples of the parts that are attacked."""
PARTS = 12
"""Parts of each size."""
EXACT = 1e-4
"""Mean squared error, on values in [0, 1], up to which a sample counts as read off: 40 dB."""
STRANGERS = 99
"""Test images of the same class among which a sample has to be told from its reconstruction."""
PRIOR = 1e-3
"""Weight of the total variation."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class SentPart:
    """A part of a batch that a client sent, and what only the audit knows about it.

    Args:
        client: Whose.
        round: Of the run.
        weights: The model.
        gradient: Of the summed loss.
        samples: Which of the data set's training samples it is over.
    """

    client: ClientId
    round: int
    weights: Weights
    gradient: Params
    samples: NDArray[np.int64]


class Tap(Engine):
    """Clients of this process, whose parts of batches are counted by their size, and some kept.

    Args:
        engine: Where they live.
        sizes: Of the parts to keep.
        parts: How many of each size, drawn evenly from all that come.
        seed: Of that draw.
    """

    def __init__(self, engine: LocalEngine, sizes: Iterable[int], parts: int, seed: int) -> None:
        self.engine, self.parts = engine, parts
        self.counts: Counter[int] = Counter()
        """How many parts of each size were sent."""
        self.kept: dict[int, list[SentPart]] = {size: [] for size in sizes}
        self._generator = rng(seed, "audit-parts")

    def ask(self, requests: Mapping[ClientId, Request], *, together: bool) -> Mapping[ClientId, Reply | Failure]:
        """Look at what is asked, and let it be answered."""
        self._look(requests)
        return self.engine.ask(requests, together=together)

    def ask_sum(self, requests: Mapping[ClientId, Request]) -> Reply | None:
        """The same of a sum."""
        self._look(requests)
        return self.engine.ask_sum(requests)

    def hop(self, client: ClientId, task: Request, weights: Weights) -> tuple[Weights, Reply] | Failure:
        """As it is."""
        return self.engine.hop(client, task, weights)

    def relay(self, kind: type[Request], weights: Weights) -> RelaySession:
        """As it is."""
        return self.engine.relay(kind, weights)

    def commit(self, accepted: Iterable[ClientId]) -> None:
        """As it is."""
        self.engine.commit(accepted)

    def close(self) -> None:
        """As it is."""
        self.engine.close()

    def _look(self, requests: Mapping[ClientId, Request]) -> None:
        for client, request in requests.items():
            if not isinstance(request, Gradient) or STATE not in (state := self.engine.store.get(client)):
                continue
            places = state[STATE].part(request.batch)
            self.counts[len(places)] += 1
            if (kept := self.kept.get(len(places))) is None:
                continue
            # Reservoir sampling: what came n-th stays with probability parts / n.
            place = len(kept) if len(kept) < self.parts else int(self._generator.integers(self.counts[len(places)]))
            if place >= self.parts:
                continue
            reply = self.engine.ask({client: request}, together=False)[client]
            if isinstance(reply, GradientReply):
                samples = self.engine.context.assignment[client][places]
                kept[place : place + 1] = [SentPart(client, request.round, request.weights, reply.gradient, samples)]


@dataclass(frozen=True)
class Finding:
    """What the attacks got from the parts of one size; means over parts.

    Args:
        size: Samples of each.
        sent: How many such parts the run sent, of the rounds that were played again.
        attacked: How many were attacked.
        labels: Share of the labels that are right.
        labels_chance: The same for labels drawn from all training samples.
        rows: Share of the samples that a row of the first layer's gradient shows exactly; None where that layer is not
            linear.
        error: Mean squared error of the inversion, each sample against the reconstruction that stands for it.
        error_mean: The same for the mean test image of its true class: what needs no gradient at all.
        recognised: Share of the samples to which their reconstruction is nearer than to 99 test images of their class;
            0.01 by chance.
    """

    size: int
    sent: int
    attacked: int
    labels: float | None = None
    labels_chance: float | None = None
    rows: float | None = None
    error: float | None = None
    error_mean: float | None = None
    recognised: float | None = None


@dataclass(frozen=True)
class GradientAudit:
    """What the audit of a run found.

    Args:
        method: The run's method.
        data: Its data set.
        rounds: The first and the last round that was played again.
        min_samples: ``privacy.min_samples`` of its spec.
        counts: Parts of each size that were sent in them.
        steps: Optimisation steps of an inversion.
        seed: Of all draws.
        findings: One for each size.
    """

    method: str
    data: str
    rounds: tuple[int, int]
    min_samples: int
    counts: dict[int, int]
    steps: int
    seed: int
    findings: Sequence[Finding] = field(default_factory=tuple)


def audit_gradients(
    run: str | Path,
    *,
    sizes: Sequence[int] = SIZES,
    parts: int = PARTS,
    steps: int = 300,
    seed: int = 0,
    prepared: Prepared | None = None,
    watch: Watch | None = None,
) -> GradientAudit:
    """Attack the parts of batches that clients sent in the last rounds of a run.

    Args:
        run: The run's folder. What was sent after the checkpoint before the last is computed again.
        sizes: Samples of the parts that are attacked.
        parts: How many of each size, at most.
        steps: Optimisation steps of each inversion.
        seed: Of all draws; two audits with the same seed find the same.
        prepared: The run's experiment, where it had data or a model of your own.
        watch: Told of the progress.

    Raises:
        SpecError: It is no run, sends no such parts, or has no images.
        CheckpointError: It has no checkpoint.
    """
    folder = Path(run)
    spec_of(folder, "audit")
    for name, values in (("sizes", sizes), ("parts", [parts]), ("steps", [steps])):
        if not values or min(values) < 1:
            raise SpecError(name, "expected whole numbers of at least 1", list(values))
    prepared = prepared or prepare_again(folder, "audit")
    last = checkpoint.load(folder / "checkpoint")
    if last is None:
        raise CheckpointError(f"{folder} has no checkpoint; the audit needs a run with evaluation.checkpoint_every > 0")
    if last.remote:
        raise CheckpointError(f"{folder} is a run over sites, which keep what they sent; the audit needs a local run")
    before = checkpoint.load(folder / "checkpoint", last=last.round - 1)
    return attack(prepared, before, last.round, sizes=sizes, parts=parts, steps=steps, seed=seed, watch=watch)


def attack(
    prepared: Prepared,
    before: checkpoint.Checkpoint | None,
    until: int,
    *,
    sizes: Sequence[int] = SIZES,
    parts: int = PARTS,
    steps: int = 300,
    seed: int = 0,
    watch: Watch | None = None,
) -> GradientAudit:
    """Play rounds and attack what is sent in them.

    Args:
        prepared: The experiment.
        before: The checkpoint to begin at; None for the beginning.
        until: The last round.
        sizes: See ``audit_gradients``.
        parts: See there.
        steps: See there.
        seed: See there.
        watch: See there.

    Raises:
        SpecError: The method sends no such parts as they are, or the samples are no images.
    """
    watch = watch or (lambda done, total, text: None)
    pixels = Pixels.of(prepared.data)
    _require_parts(prepared)
    begin = before.round if before else 0
    with training_process(prepared.spec.training.threads), Simulation(prepared, found=before) as simulation:
        tap = Tap(LocalEngine(simulation.context, simulation.store), sizes, parts, seed)
        simulation.federation.engine = tap
        while simulation.round < until:
            watch(simulation.round - begin, until - begin, f"round {simulation.round + 1} again")
            simulation.step()
        attacker = Attacker(prepared, pixels, steps, seed)
        findings: list[Finding] = []
        for size in sizes:
            watch(len(findings), len(sizes), f"parts of {size}")
            findings.append(attacker.found(size, tap.counts[size], tap.kept[size]))
    return GradientAudit(
        prepared.spec.method.name,
        prepared.data.name,
        (begin + 1, until),
        prepared.spec.privacy.min_samples,
        dict(sorted(tap.counts.items())),
        steps,
        seed,
        findings,
    )


def _require_parts(prepared: Prepared) -> None:
    spec = prepared.spec
    if spec.method.name != "stratify" or getattr(spec.method, "mode", "") != "batch":
        problem = "sends no parts of batches; the audit needs stratify, with method.mode = 'batch'"
        raise SpecError("method", problem, spec.method.name)
    if not spec.communication.plain:
        raise SpecError("communication", "the audit looks at gradients that travel as they are; leave codecs out")
    if has_batchnorm(prepared.config.model.module):
        raise SpecError("model", "with BatchNorm a part's gradient depends on the other clients' samples; take another")
    if getattr(spec.method, "local_steps", 1) != 1:
        raise SpecError("method.local_steps", f"a part is a gradient at one model; use 1, not {GradientSteps.__name__}")


class Attacker:
    """Attacks parts of batches.

    Args:
        prepared: The experiment, whose test set the attacker has.
        pixels: The way from images to inputs.
        steps: Of an inversion.
        seed: Of its starts.
    """

    def __init__(self, prepared: Prepared, pixels: Pixels, steps: int, seed: int) -> None:
        self.data, self.pixels, self.steps, self.seed = prepared.data, pixels, steps, seed
        self.model = prepared.config.model.clone()
        self.layers = Layers.of(self.model, int(np.prod(prepared.data.shape)))
        labels = prepared.data.y_test
        chosen = [torch.nonzero(labels == c).flatten() for c in range(prepared.data.classes)]
        every = torch.arange(len(labels))
        self.own = [pixels.images(some if len(some) else every[:1], "test") for some in chosen]
        counts = np.bincount(prepared.data.y_train.numpy(), minlength=prepared.data.classes)
        self.prior = counts / counts.sum()

    def found(self, size: int, sent: int, parts: Sequence[SentPart]) -> Finding:
        """What the attacks get from the parts of a size."""
        if not parts:
            return Finding(size, sent, 0)
        rows = [self._one(part, place) for place, part in enumerate(parts)]
        means = {key: _mean([row[key] for row in rows]) for key in rows[0]}
        return Finding(size, sent, len(parts), **means)

    def _one(self, part: SentPart, place: int) -> dict[str, float | None]:
        where = torch.from_numpy(part.samples)
        images, labels = self.pixels.images(where), self.data.y_train[where]
        guess = labels_from(part.gradient[self.layers.bias], len(labels))
        generator = rng(self.seed, f"audit-chance/{place}", len(labels))
        chance = [
            _right(torch.from_numpy(generator.choice(len(self.prior), len(labels), p=self.prior)), labels)
            for _ in range(200)
        ]
        shown = None
        if self.layers.first is not None:
            weight, bias = (part.gradient[name] for name in self.layers.first)
            candidates = self._images(inputs_from(weight, bias))
            if len(candidates):
                nearest = _errors(images, candidates).min(dim=1).values
                shown = float((nearest < EXACT).float().mean())
            else:
                shown = 0.0
        drawn = self._inverted(part, guess, place)
        errors = _errors(images, drawn)
        mine, theirs = linear_sum_assignment(errors.numpy())
        matched = errors[mine, theirs]
        means = torch.stack([self.own[c].mean(dim=0) for c in labels.tolist()])
        recognised = []
        for own, other in zip(mine, theirs, strict=True):
            unknown = self.own[int(labels[own])][:STRANGERS]
            recognised.append(float(errors[own, other]) < float(_errors(unknown, drawn[other : other + 1]).min()))
        return {
            "labels": _right(guess, labels),
            "labels_chance": float(np.mean(chance)),
            "rows": shown,
            "error": float(matched.mean()),
            "error_mean": float((means - images).square().mean()),
            "recognised": float(np.mean(recognised)),
        }

    def _images(self, inputs: Tensor) -> Tensor:
        """Inputs of the model as images, those of them that can be images at all."""
        data = self.data
        values = inputs.reshape(-1, data.shape[0], *data.shape[1:])
        if data.shift is not None and data.scale is not None:
            values = values / data.scale[:, None, None] + data.shift[:, None, None]
        images = (values - self.pixels.low) / (self.pixels.high - self.pixels.low)
        sound = ((images > -0.02) & (images < 1.02)).flatten(1).all(dim=1)
        return images[sound]

    def _inverted(self, part: SentPart, labels: Tensor, place: int) -> Tensor:
        with (
            torch_seeded(self.seed, f"audit-inversion/{place}", client=part.client),
            self.model.loaded(part.weights.params, part.weights.buffers, train=True) as params,
        ):
            return invert(self.model, params, self.pixels, part.gradient, labels, steps=self.steps)


@dataclass(frozen=True)
class Layers:
    """The parameters that the attacks read.

    Args:
        bias: The last layer's bias.
        first: Weight and bias of the first layer, where it is linear in the inputs; else None.
    """

    bias: str
    first: tuple[str, str] | None

    @classmethod
    def of(cls, model: Model, features: int) -> Layers:
        """Those of a model.

        Raises:
            SpecError: Its last layer has no bias.
        """
        layers = [(name, layer) for name, layer in model.module.named_modules() if [*layer.parameters(recurse=False)]]
        (first, begin), (last, end) = layers[0], layers[-1]
        if getattr(end, "bias", None) is None:
            raise SpecError("model", "the audit reads labels off the bias of the last layer, and it has none", last)
        linear = isinstance(begin, nn.Linear) and begin.in_features == features and begin.bias is not None
        return cls(_of(last, "bias"), (_of(first, "weight"), _of(first, "bias")) if linear else None)


def _of(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


def labels_from(bias: Tensor, samples: int) -> Tensor:
    """The labels of a part by its gradient Σ (p − y) of the last bias, shape (samples,).

    One label after another: that of the most negative entry, which then counts as explained.

    Args:
        bias: Of the summed loss, shape (C,).
        samples: How many.

    >>> labels_from(torch.tensor([0.3, -1.6, 0.2, -0.9]), 3).tolist()
    [1, 3, 1]
    """
    left, found = bias.clone(), []
    for _ in range(samples):
        found.append(int(left.argmin()))
        left[found[-1]] += 1
    return torch.tensor(found)


def inputs_from(weight: Tensor, bias: Tensor) -> Tensor:
    """What the rows of a first layer's gradient show of the inputs, shape (units, features).

    With z = W x + b, ∂L/∂W = Σ δ xᵀ and ∂L/∂b = Σ δ: a row over its bias's entry is a mean of the inputs, weighted by
    δ, and the input itself where a single one of them has a δ.

    Args:
        weight: ∂L/∂W, shape (units, features).
        bias: ∂L/∂b, shape (units,).
    """
    alive = bias.abs() > 1e-6 * bias.abs().max().clamp(min=1e-30)
    return weight[alive] / bias[alive, None]


def invert(
    model: Model, params: Params, pixels: Pixels, gradient: Params, labels: Tensor, *, steps: int, lr: float = 0.1
) -> Tensor:
    """Images (n, C, H, W) whose gradient points where a given one does (Geiping et al. 2020).

    Minimises 1 − cos(∇L(x, y), g) + α TV(x) with Adam over the logits of the pixels, from grey noise.

    Args:
        model: With ``params`` loaded.
        params: What ``Model.loaded`` yielded.
        pixels: The way from images to inputs.
        gradient: g, of the summed or the mean loss alike.
        labels: y, shape (n,).
        steps: Steps of Adam.
        lr: Its learning rate.
    """
    leaves = list(params.values())
    wanted = [gradient[name] for name in params]
    norm = torch.sqrt(sum((g.square().sum() for g in wanted), torch.zeros(()))).clamp(min=1e-30)
    drawn = (0.1 * torch.randn(len(labels), *_image_shape(pixels))).requires_grad_()
    optimiser = torch.optim.Adam([drawn], lr=lr)
    for _ in range(steps):
        images = drawn.sigmoid()
        loss = F.cross_entropy(model(params, pixels.inputs(images)), labels)
        found = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
        along = sum(((a * b).sum() for a, b in zip(found, wanted, strict=True)), torch.zeros(()))
        length = torch.sqrt(sum((a.square().sum() for a in found), torch.zeros(())) + 1e-30)
        distance = 1 - along / (length * norm) + PRIOR * total_variation(images).mean()
        (drawn.grad,) = torch.autograd.grad(distance, [drawn])
        optimiser.step()
    return drawn.detach().sigmoid()


def _image_shape(pixels: Pixels) -> tuple[int, ...]:
    return tuple(pixels.data.shape)


def _errors(one: Tensor, other: Tensor) -> Tensor:
    """Mean squared error of each with each, shape (len(one), len(other))."""
    a, b = one.flatten(1).double(), other.flatten(1).double()
    return torch.cdist(a, b).square() / a.shape[1]


def _right(guess: Tensor, labels: Tensor) -> float:
    """The share of labels that two lists have in common, whatever their order."""
    common = Counter(guess.tolist()) & Counter(labels.tolist())
    return common.total() / len(labels)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


HEADINGS = ("samples in a part", "sent", "attacked", "labels right", "by chance", "exact by a row", "inversion: error",
            "class mean: error", "recognised")  # fmt: skip


def cells(finding: Finding) -> Iterator[str]:
    """A row of the table as text."""
    yield from (str(finding.size), f"{finding.sent:,}", str(finding.attacked))
    for key in ("labels", "labels_chance", "rows"):
        yield _shown(getattr(finding, key), lambda value: f"{value:.0%}")
    for key in ("error", "error_mean"):
        yield _shown(getattr(finding, key), lambda value: f"{value:.3f}")
    yield _shown(finding.recognised, lambda value: f"{value:.0%}")


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return "–" if value is None else form(value)


def caption(audit: GradientAudit) -> str:
    """What was done, in words."""
    total, (first, last) = sum(audit.counts.values()), audit.rounds
    below = sum(count for size, count in audit.counts.items() if size < 5)
    rounds = f"round {first}" if first == last else f"rounds {first} to {last}"
    share = f"{below / total:.0%} of them under 5 samples" if total else "none"
    return (
        f"{audit.method} on {audit.data}, {rounds}, privacy.min_samples = {audit.min_samples}: {total:,} parts were "
        f"sent, {share}; {audit.steps} steps an inversion, seed {audit.seed}."
    )


def to_markdown(audit: GradientAudit) -> str:
    """Caption and table."""
    lines = [caption(audit), "", "| " + " | ".join(HEADINGS) + " |", "|" + "---:|" * len(HEADINGS)]
    return "\n".join([*lines, *("| " + " | ".join(cells(one)) + " |" for one in audit.findings)]) + "\n"


def to_json(audit: GradientAudit) -> dict[str, Any]:
    """Everything, as plain values."""
    return asdict(audit)


def write(audit: GradientAudit, out: Path) -> None:
    """Write ``gradients.json`` and ``gradients.md`` into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{NAME}.json", to_json(audit))
    replace_file(out / f"{NAME}.md", to_markdown(audit).encode())
