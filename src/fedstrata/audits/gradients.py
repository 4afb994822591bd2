"""Attack the gradients that clients send in Stratify.

In Stratify, a batch contains samples of several clients. A client's samples in a batch are called a *part* of the
batch. The client sends the gradient of the loss, summed over the client's part. The attacker is an honest but curious
server. The attacker knows this gradient, the number of samples in the part, and the model. There are three attacks:

- **labels** are recovered from the gradient of the last layer's bias. This gradient is Σ (p − y), where p are predicted
  probabilities and y are one-hot labels. Each sample adds −1 to the entry of its class. Zhao et al. (2020) published
  this attack for parts with one sample.

- **rows** of the first layer's gradient reveal samples, if this layer is linear. If a unit was active for only one
  sample, the unit's row is this sample, multiplied by the gradient of the unit's bias.

- **inversion** uses the recovered labels to find images whose gradient has the same direction as the part's gradient.
  Adam minimises the cosine distance and the total variation (Geiping et al. 2020).

The results are grouped by the number of samples in a part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from typing_extensions import override

from fedstrata.audits.attacks import total_variation
from fedstrata.audits.pixels import Pixels
from fedstrata.audits.replay import Watch, last_checkpoints, step_until
from fedstrata.audits.similarity import mean_of
from fedstrata.base.errors import SpecError
from fedstrata.base.inputs import single
from fedstrata.base.jsonl import replace_file, write_json
from fedstrata.base.printable import printable
from fedstrata.base.process import training_process
from fedstrata.base.rng import rng, torch_seeded
from fedstrata.clients.client import ClientContext, StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import ClientId, Params, Reply, Request, Weights
from fedstrata.models.batchnorm import LocalGroup
from fedstrata.models.model import Model
from fedstrata.reporting.tables import markdown_table
from fedstrata.runs import checkpoint
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.run_folder import prepare_again, spec_of
from fedstrata.runs.simulation import Simulation
from fedstrata.stratify.client_batch import STATE
from fedstrata.stratify.messages import Gradient, GradientReply

NAME = "gradients"
SIZES = (1, 2, 4, 8)
"""The default sizes (numbers of samples) of the batch parts whose gradients are attacked."""
PARTS = 12
"""The default maximum number of gradients to attack for each size of a part."""
EXACT = 1e-4
"""Below this mean squared error of values in [0, 1], we consider a sample to be recovered exactly (40 dB PSNR)."""
STRANGERS = 99
"""The maximum number of test images of a sample's class with which the sample's reconstruction is compared."""
PRIOR = 1e-3
"""The weight of the total variation in the loss that an inversion minimises."""


@dataclass(frozen=True, eq=False)
class SentPart:
    """A gradient that a client sent for its samples in a batch. The attacker does not know these samples.

    Args:
        client: The id of the client.
        round: The round in which the client sent the gradient.
        weights: The model for which the gradient was computed.
        gradient: The gradient of the loss, summed over the samples.
        samples: The indices of the samples in the training set.
    """

    client: ClientId
    round: int
    weights: Weights
    gradient: Params
    samples: NDArray[np.int64]


class Tap(LocalEngine):
    """A local engine that counts the gradients that clients send for parts of batches, and stores some gradients.

    A part is a client's samples in a batch.

    Args:
        context: See ``LocalEngine``.
        store: See ``LocalEngine``.
        sizes: The sizes, in samples, of the parts whose gradients are stored.
        parts: The maximum number of stored gradients per size in ``sizes``. These gradients are drawn at random.
        seed: The seed with which the stored gradients are drawn.
    """

    def __init__(self, context: ClientContext, store: StateStore, sizes: Iterable[int], parts: int, seed: int) -> None:
        super().__init__(context, store)
        self.parts = parts
        self.counts: Counter[int] = Counter()
        """A mapping from each size of a part to the number of gradients that clients sent for parts of this size."""
        self.kept: dict[int, list[SentPart]] = {size: [] for size in sizes}
        self._generator = rng(seed, "audit-parts")

    @override
    def ask(
        self, requests: Mapping[ClientId, Request], *, together: bool, group: LocalGroup | None = None
    ) -> Mapping[ClientId, Reply | Failure]:
        self._keep_parts(requests)
        return super().ask(requests, together=together, group=group)

    @override
    def ask_sum(self, requests: Mapping[ClientId, Request]) -> Reply | None:
        self._keep_parts(requests)
        return super().ask_sum(requests)

    def _keep_parts(self, requests: Mapping[ClientId, Request]) -> None:
        for client, request in requests.items():
            if not isinstance(request, Gradient) or STATE not in (state := self.store.get(client)):
                continue
            places = state[STATE].part(request.batch)
            self.counts[len(places)] += 1
            if (kept := self.kept.get(len(places))) is None:
                continue
            # Reservoir sampling, with one reservoir per number of samples: the nth gradient replaces one of the
            # ``parts`` stored gradients with probability parts / n.
            place = len(kept) if len(kept) < self.parts else int(self._generator.integers(self.counts[len(places)]))
            if place >= self.parts:
                continue
            reply = super().ask({client: request}, together=False)[client]
            if isinstance(reply, GradientReply):
                samples = self.context.assignment[client][places]
                kept[place : place + 1] = [SentPart(client, request.round, request.weights, reply.gradient, samples)]


@dataclass(frozen=True)
class Finding:
    """The mean results of the attacks on gradients of parts with ``size`` samples.

    Args:
        size: The number of samples.
        sent: The number of gradients, each from ``size`` samples, that clients sent in the replayed rounds.
        attacked: The number of gradients that were attacked.
        labels: The fraction of labels that were recovered.
        labels_chance: The expected fraction of correct labels if guesses are drawn at random from the labels of all
            training samples.
        rows: The fraction of samples that a row of the first layer's gradient reveals exactly; None if this layer is
            not linear.
        error: The mean squared error of the inversion. Samples and reconstructions are paired so that their total error
            is minimal.
        error_mean: For comparison, the mean squared error if each sample is replaced by the mean test image of its
            class.
        recognised: The fraction of recognised samples. A sample is recognised if its reconstruction is nearer to the
            sample than to each of 99 test images of the same class. With random reconstructions, the expected fraction
            is 0.01.
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
    """The results of an audit of Stratify's gradients.

    Args:
        method: The name of the run's method.
        data: The name of the run's data set.
        rounds: The first and the last round that the audit ran again.
        min_samples: The value of ``privacy.min_samples`` in the run's spec.
        counts: A mapping from the number of samples in a part to the number of gradients that clients sent for such
            parts in the replayed rounds.
        steps: The number of optimisation steps per inversion.
        seed: The seed of all draws.
        findings: The results, one for each number of samples per gradient.
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
    """Attack the gradients that clients sent for parts of batches in the last rounds of a run.

    A part is a client's samples in a batch.

    Args:
        run: The run folder. Rounds since the run's second-to-last checkpoint are run again ("replayed").
        sizes: The sizes, in samples, of the parts whose gradients are attacked.
        parts: The maximum number of gradients to attack for each size in ``sizes``.
        steps: The number of optimisation steps per inversion.
        seed: The seed of all draws. Two audits with the same seed have the same results.
        prepared: The run's experiment; needed only if the run used your own data or model.
        watch: A function that shows progress; see ``fedstrata.audits.replay.Watch``.

    Raises:
        SpecError: ``run`` is not a run folder, clients do not send gradients for parts of batches, or the samples are
            not images.
        CheckpointError: The run does not have a checkpoint.
    """
    folder = Path(run)
    spec_of(folder, "audit")
    for name, values in (("sizes", sizes), ("parts", [parts]), ("steps", [steps])):
        if not values or min(values) < 1:
            raise SpecError(name, "must contain integers of at least 1.", list(values))
    prepared = prepared or prepare_again(folder, "audit")
    before, last = last_checkpoints(folder)
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
    """Run the rounds after a checkpoint, and attack the gradients that clients send for parts of batches.

    Args:
        prepared: The experiment.
        before: The checkpoint from which to start; None to start at the beginning of the run.
        until: The last round to run.
        sizes: The sizes, in samples, of the parts whose gradients are attacked.
        parts: The maximum number of gradients to attack for each size in ``sizes``.
        steps: The number of optimisation steps per inversion.
        seed: The seed of all draws.
        watch: A function that shows progress; see ``fedstrata.audits.replay.Watch``.

    Raises:
        SpecError: Clients do not send gradients of batches, clients compress the gradients, or the samples are not
            images.
    """
    watch = watch or (lambda done, total, text: None)
    pixels = Pixels.of(prepared.data)
    _require_parts(prepared)
    spec, findings = prepared.spec, list[Finding]()
    with training_process(spec.training.threads), Simulation(prepared, "local", before) as simulation:
        tap = Tap(simulation.context, simulation.store, sizes, parts, seed)
        simulation.federation.engine = tap
        rounds = simulation.round + 1, until
        step_until(simulation, until, watch)
        attacker = Attacker(prepared, pixels, steps, seed)
        for size in sizes:
            watch(len(findings), len(sizes), f"gradients over {size} samples")
            findings.append(attacker.attack(size, tap.counts[size], tap.kept[size]))
    counts = dict(sorted(tap.counts.items()))
    least = spec.privacy.min_samples
    return GradientAudit(spec.method.name, prepared.data.name, rounds, least, counts, steps, seed, findings)


def _require_parts(prepared: Prepared) -> None:
    spec, task = prepared.spec, prepared.data.task
    if not task.plain:
        problem = (
            "the attacks require classification without class weights or label smoothing. Audit a run without them."
        )
        raise SpecError("task", problem, task.name)
    if spec.method.name != "stratify" or getattr(spec.method, "mode", "") != "batch":
        problem = (
            "the audit requires that clients send a gradient for each batch. Audit a run of stratify with "
            "method.mode = 'batch'."
        )
        raise SpecError("method", problem, spec.method.name)
    if not spec.communication.plain:
        raise SpecError("communication", "the audit requires uncompressed gradients. Audit a run without codecs.")
    if prepared.config.model.has_batchnorm:
        raise SpecError(
            "model",
            "has BatchNorm layers, so a client's gradient depends on other clients' samples. Audit a run of a model "
            "without BatchNorm.",
        )
    if getattr(spec.method, "local_steps", 1) != 1:
        problem = "the audit requires one step per batch. Audit a run with method.local_steps = 1."
        raise SpecError("method.local_steps", problem)


class Attacker:
    """The attacks on gradients that clients send for their samples in a batch.

    Args:
        prepared: The experiment. The attacker knows the test set.
        pixels: The conversion from images to the model's inputs.
        steps: The number of optimisation steps per inversion.
        seed: The seed of the noise in the initial images of inversions.
    """

    def __init__(self, prepared: Prepared, pixels: Pixels, steps: int, seed: int) -> None:
        self.data, self.pixels, self.steps, self.seed = prepared.data, pixels, steps, seed
        self.model = prepared.config.model.clone()
        self.layers = Layers.of(self.model, single(prepared.data.x_train)[0].numel())
        labels = prepared.data.y_test
        chosen = [torch.nonzero(labels == c).flatten() for c in range(prepared.data.outputs)]
        every = torch.arange(len(labels))
        self.own = [pixels.images(some if len(some) else every[:1], "test") for some in chosen]
        counts = np.bincount(prepared.data.y_train.numpy(), minlength=prepared.data.outputs)
        self.prior = counts / counts.sum()

    def attack(self, size: int, sent: int, parts: Sequence[SentPart]) -> Finding:
        """Attack each gradient in ``parts``, and return the results, averaged over the gradients.

        Args:
            size: The number of samples.
            sent: The number of gradients that clients computed from ``size`` samples.
            parts: The gradients to attack, each computed from ``size`` samples.
        """
        if not parts:
            return Finding(size, sent, 0)
        rows = [self._one(part, place) for place, part in enumerate(parts)]
        means = {key: mean_of(row[key] for row in rows) for key in rows[0]}
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
            exact = (_errors(images, candidates) < EXACT).any(dim=1)
            shown = float(exact.float().mean())
        drawn = self._inverted(part, guess, place)
        errors = _errors(images, drawn)
        samples, reconstructions = linear_sum_assignment(errors.numpy())
        matched = errors[samples, reconstructions]
        means = torch.stack([self.own[c].mean(dim=0) for c in labels.tolist()])
        recognised = []
        for sample, image in zip(samples, reconstructions, strict=True):
            unknown = self.own[int(labels[sample])][:STRANGERS]
            nearest = float(_errors(unknown, drawn[image : image + 1]).min())
            recognised.append(float(errors[sample, image]) < nearest)
        return {
            "labels": _right(guess, labels),
            "labels_chance": float(np.mean(chance)),
            "rows": shown,
            "error": float(matched.mean()),
            "error_mean": float((means - images).square().mean()),
            "recognised": float(np.mean(recognised)),
        }

    def _images(self, inputs: Tensor) -> Tensor:
        """Convert model inputs (n, features) to images. Drop images with values that are clearly outside [0, 1]."""
        data = self.data
        values = inputs.reshape(-1, *data.shape)
        if data.shift is not None and data.scale is not None:
            values = values / single(data.scale)[:, None, None] + single(data.shift)[:, None, None]
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
    """The names of the parameters whose gradients the attacks use to recover labels and samples.

    Args:
        bias: The name of the last layer's bias.
        first: The names of the first layer's weight and bias; None if the first layer is not linear in the inputs.
    """

    bias: str
    first: tuple[str, str] | None

    @classmethod
    def of(cls, model: Model, features: int) -> Layers:
        """Find the first and the last layer of a model.

        Raises:
            SpecError: The last layer does not have a bias.
        """
        layers = [(name, layer) for name, layer in model.module.named_modules() if [*layer.parameters(recurse=False)]]
        (first, begin), (last, end) = layers[0], layers[-1]
        if getattr(end, "bias", None) is None:
            raise SpecError(
                "model",
                "the audit recovers labels from the last layer's bias, but this layer does not have a bias. Audit a "
                "run with another model.",
                last,
            )
        linear = isinstance(begin, nn.Linear) and begin.in_features == features and begin.bias is not None
        # If a layer is the whole model, its name is empty, and parameter names have no prefix.
        first, last = (f"{name}." if name else "" for name in (first, last))
        return cls(f"{last}bias", (f"{first}weight", f"{first}bias") if linear else None)


def labels_from(bias: Tensor, samples: int) -> Tensor:
    """Recover the labels of a client's samples in a batch from the gradient Σ (p − y) of the last layer's bias.

    The result has the shape (samples,).

    In each step, the class with the most negative gradient entry is chosen as a label, and 1 is added to this entry.

    Args:
        bias: The gradient of the summed loss with respect to the bias, shape (C,).
        samples: The number of samples.

    >>> labels_from(torch.tensor([0.3, -1.6, 0.2, -0.9]), 3).tolist()
    [1, 3, 1]
    """
    rest, labels = bias.clone(), []
    for _ in range(samples):
        labels.append(int(rest.argmin()))
        rest[labels[-1]] += 1
    return torch.tensor(labels)


def inputs_from(weight: Tensor, bias: Tensor) -> Tensor:
    """Recover at most one candidate input per unit from the gradient of a linear first layer.

    The layer computes z = W x + b. With δ = ∂L/∂z for each sample, the sums over samples are ∂L/∂W = Σ δ xᵀ and ∂L/∂b =
    Σ δ. A row of ∂L/∂W, divided by the unit's entry in ∂L/∂b, is therefore a mean of the inputs x, weighted by δ. If δ
    ≠ 0 for only one input, the mean is this input. Units whose entry in ∂L/∂b is near 0 are left out.

    Args:
        weight: The gradient ∂L/∂W, shape (units, features).
        bias: The gradient ∂L/∂b, shape (units,).
    """
    alive = bias.abs() > 1e-6 * bias.abs().max().clamp(min=1e-30)
    return weight[alive] / bias[alive, None]


def invert(
    model: Model, params: Params, pixels: Pixels, gradient: Params, labels: Tensor, *, steps: int, lr: float = 0.1
) -> Tensor:
    """Find images (n, C, H, W) whose gradient has the same direction as a given gradient (Geiping et al. 2020).

    The attack minimises 1 − cos(∇L(x, y), g) + α TV(x) with Adam over the logits of the pixels. TV is the total
    variation, and α is ``PRIOR``. The optimisation starts from grey images with noise.

    Args:
        model: The model into which ``params`` are loaded.
        params: The parameters, from ``Model.loaded``.
        pixels: The conversion from images to the model's inputs.
        gradient: The given gradient g of the summed loss or of the mean loss.
        labels: The labels y of the images, shape (n,).
        steps: The number of steps of Adam.
        lr: Adam's learning rate.
    """
    leaves = list(params.values())
    wanted = [gradient[name] for name in params]
    norm = torch.sqrt(sum((g.square().sum() for g in wanted), torch.zeros(()))).clamp(min=1e-30)
    drawn = (0.1 * torch.randn(len(labels), *pixels.data.shape)).requires_grad_()
    optimiser = torch.optim.Adam([drawn], lr=lr)
    for _ in range(steps):
        images = drawn.sigmoid()
        loss = F.cross_entropy(model(params, pixels.inputs(images)), labels)
        current = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
        along = sum(((a * b).sum() for a, b in zip(current, wanted, strict=True)), torch.zeros(()))
        length = torch.sqrt(sum((a.square().sum() for a in current), torch.zeros(())) + 1e-30)
        distance = 1 - along / (length * norm) + PRIOR * total_variation(images).mean()
        (drawn.grad,) = torch.autograd.grad(distance, [drawn])
        optimiser.step()
    return drawn.detach().sigmoid()


def _errors(one: Tensor, other: Tensor) -> Tensor:
    """Return a matrix of the mean squared errors between each image in ``one`` and each image in ``other``."""
    a, b = one.flatten(1).double(), other.flatten(1).double()
    return torch.cdist(a, b).square() / a.shape[1]


def _right(guess: Tensor, labels: Tensor) -> float:
    """Return the fraction of the labels that also occur in ``guess``, regardless of the order."""
    common = Counter(guess.tolist()) & Counter(labels.tolist())
    return common.total() / len(labels)


HEADINGS = ("samples per gradient", "sent", "attacked", "labels right", "by chance", "exact by a row",
            "inversion: error", "class mean: error", "recognised")  # fmt: skip


def cells(finding: Finding) -> list[str]:
    """Return the strings in the table's cells for one finding."""
    cells = [str(finding.size), f"{finding.sent:,}", str(finding.attacked)]
    for key in ("labels", "labels_chance", "rows", "error", "error_mean", "recognised"):
        value = getattr(finding, key)
        cells.append("–" if value is None else f"{value:.3f}" if key.startswith("error") else f"{value:.0%}")
    return cells


def caption(audit: GradientAudit) -> str:
    """Return a caption with the run, the replayed rounds and the settings of the audit."""
    total, (first, last) = sum(audit.counts.values()), audit.rounds
    below = sum(count for size, count in audit.counts.items() if size < 5)
    rounds = f"round {first}" if first == last else f"rounds {first} to {last}"
    share = f", {below / total:.0%} of them over fewer than 5 samples" if total else ""
    return (
        f"{audit.method} on {audit.data}, {rounds}, privacy.min_samples = {audit.min_samples}: clients sent {total:,} "
        f"gradients{share}. Each inversion took {audit.steps} steps, with seed {audit.seed}."
    )


def to_markdown(audit: GradientAudit) -> str:
    """Return the caption and the table in Markdown."""
    return f"{printable(caption(audit))}\n\n{markdown_table(HEADINGS, map(cells, audit.findings), left=0)}"


def print_table(audit: GradientAudit) -> None:
    """Print the caption and the table."""
    print(to_markdown(audit), end="")


to_json = asdict


def write(audit: GradientAudit, out: Path) -> None:
    """Write ``gradients.json`` and ``gradients.md`` into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{NAME}.json", to_json(audit))
    replace_file(out / f"{NAME}.md", to_markdown(audit).encode())
