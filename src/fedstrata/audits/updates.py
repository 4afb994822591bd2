"""Attack the updates that clients send in methods such as FedAvg, and the sum of all updates of a round.

With ``privacy.sums = "secure"``, the server sees only the sum. The audit always attacks both updates and sums, to show
what secure sums hide. With ``privacy.dp``, the updates contain noise. There are two attacks:

- **gradient inversion**: with one step of SGD, an update is a multiple of a gradient. ``fedstrata.audits.gradients``
  describes the attacks on labels, rows and images. As a control, the same attacks are run on random numbers.
- **membership inference**: see ``fedstrata.audits.membership``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedstrata.audits.gradients import PARTS, Attacker, Finding, SentPart
from fedstrata.audits.intervals import Rate
from fedstrata.audits.membership import right_pairs
from fedstrata.audits.pixels import Pixels
from fedstrata.audits.replay import Watch, last_checkpoints, step_until
from fedstrata.audits.server_view import UpdateRound, UpdateTap, mean_update, require_updates, without_masks
from fedstrata.base.errors import SpecError
from fedstrata.base.jsonl import replace_file, write_json
from fedstrata.base.printable import printable
from fedstrata.base.process import training_process
from fedstrata.base.rng import SERVER, rng
from fedstrata.federation.messages import ClientId, Params
from fedstrata.reporting.tables import markdown_table
from fedstrata.runs import checkpoint
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.run_folder import prepare_again, spec_of
from fedstrata.runs.simulation import Simulation

NAME = "updates"
SINGLE, SUM = "one client", "sum"
"""The names of the two views: the update of one client, and the sum of all updates of a round."""
IMAGES = 128
"""The maximum number of training samples of an update. Gradient inversion skips updates from more samples."""


@dataclass(frozen=True)
class View:
    """The results of the attacks on one kind of value: updates of individual clients, or sums of updates.

    Args:
        name: ``SINGLE`` or ``SUM``.
        seen: Whether the server of this run sees these values.
        sent: The number of updates or sums in the replayed rounds.
        samples: The mean number of training samples per attacked update or sum; None without attacks.
        inversion: The mean results of gradient inversion. Updates and sums with more than ``IMAGES`` samples are left
            out.
        control: The mean results of the same attacks on random numbers. These numbers do not reveal anything.
        membership: The fraction of sample pairs, over all attacked updates or sums, in which the attack finds the
            member. The confidence interval of this fraction assumes that pairs are independent.
    """

    name: str
    seen: bool
    sent: int
    samples: float | None
    inversion: Finding
    control: Finding
    membership: Rate


@dataclass(frozen=True)
class UpdateAudit:
    """The results of an audit of updates.

    Args:
        method: The name of the run's method.
        data: The name of the run's data set.
        rounds: The first and the last replayed round.
        sums: The value of ``privacy.sums`` in the run's spec.
        epsilon: The ε that the accountant computes for a client up to the last round; None without ``privacy.dp``.
        steps: The number of optimisation steps per inversion.
        seed: The seed of all draws.
        views: The results for updates of individual clients, and for sums.
    """

    method: str
    data: str
    rounds: tuple[int, int]
    sums: str
    epsilon: float | None
    steps: int
    seed: int
    views: Sequence[View]


def audit_updates(
    run: str | Path,
    *,
    parts: int = PARTS,
    steps: int = 300,
    seed: int = 0,
    prepared: Prepared | None = None,
    watch: Watch | None = None,
) -> UpdateAudit:
    """Attack the updates that clients sent in the last rounds of a run, and each round's sum of updates.

    Args:
        run: The run folder. Rounds since the run's second-to-last checkpoint are run again ("replayed").
        parts: The maximum number of updates to attack, and also of sums to attack; both are drawn at random.
        steps: The number of optimisation steps per inversion.
        seed: The seed of all draws. Two audits with the same seed have the same results.
        prepared: The run's experiment; needed only if the run used your own data or model.
        watch: A function that shows progress; see ``fedstrata.audits.replay.Watch``.

    Raises:
        SpecError: ``run`` is not a run folder, clients do not send updates that can be attacked, or the samples are not
            images.
        CheckpointError: The run does not have a checkpoint.
    """
    folder = Path(run)
    spec_of(folder, "audit")
    for name, value in (("parts", parts), ("steps", steps)):
        if value < 1:
            raise SpecError(name, "must be an integer of at least 1.", value)
    prepared = prepared or prepare_again(folder, "audit")
    before, last = last_checkpoints(folder)
    return attack(prepared, before, last.round, parts=parts, steps=steps, seed=seed, watch=watch)


def attack(
    prepared: Prepared,
    before: checkpoint.Checkpoint | None,
    until: int,
    *,
    parts: int = PARTS,
    steps: int = 300,
    seed: int = 0,
    watch: Watch | None = None,
) -> UpdateAudit:
    """Run the rounds after a checkpoint, and attack the updates that clients send.

    Args:
        prepared: The experiment.
        before: The checkpoint from which to start; None for the beginning of the run.
        until: The last round to run.
        parts: The maximum number of updates to attack, and also the maximum number of sums to attack.
        steps: The number of optimisation steps per inversion.
        seed: The seed of all draws.
        watch: A function that shows progress; see ``fedstrata.audits.replay.Watch``.

    Raises:
        SpecError: Clients do not send updates that can be attacked, or the samples are not images.
    """
    watch = watch or (lambda done, total, text: None)
    pixels, method = Pixels.of(prepared.data), require_updates(prepared)
    prepared = without_masks(prepared)
    spec, single, summed = prepared.spec, Reservoir(SINGLE, parts, seed), Reservoir(SUM, parts, seed)

    def listen(round: UpdateRound) -> None:
        for client in round.replies:
            single.add(round, round.update(client), [client])
        summed.add(round, mean_update(method, prepared.config, round), [*round.replies])

    with training_process(spec.training.threads), Simulation(prepared, "local", before) as simulation:
        simulation.federation.engine = UpdateTap(simulation.context, simulation.store, method, listen)
        rounds = simulation.round + 1, until
        record = step_until(simulation, until, watch)
        attacker, views = Attacker(prepared, pixels, steps, seed), list[View]()
        for place, kept in enumerate((single, summed)):
            watch(place, 2, f"attacking {kept.name}")
            seen = (kept is summed) == (spec.privacy.sums == "secure")
            views.append(attacked(prepared, attacker, kept, seen=seen, seed=seed))
    epsilon = None if spec.privacy.dp is None else record["epsilon"]
    return UpdateAudit(spec.method.name, prepared.data.name, rounds, spec.privacy.sums, epsilon, steps, seed, views)


@dataclass(frozen=True, eq=False)
class SeenUpdate:
    """A client's update, or the weighted mean of all updates of a round.

    Args:
        round: All updates of the round.
        update: The update or the mean, as a mapping from parameter names to tensors.
        clients: The clients whose samples contributed to the update.
    """

    round: UpdateRound
    update: Params
    clients: Sequence[ClientId]


class Reservoir:
    """A uniform sample of the updates or sums of a run, drawn by reservoir sampling.

    Args:
        name: The name of the view, ``SINGLE`` or ``SUM``.
        parts: The maximum number of updates to keep.
        seed: The seed of the draws.
    """

    def __init__(self, name: str, parts: int, seed: int) -> None:
        self.name, self.parts, self.count, self.kept = name, parts, 0, list[SeenUpdate]()
        self._generator = rng(seed, f"audit-updates/{name}")

    def add(self, round: UpdateRound, update: Params, clients: Sequence[ClientId]) -> None:
        """Add an update to the reservoir. If the reservoir is full, decide at random whether to keep the update.

        Updates of clients that did not take a step are ignored.
        """
        if not any(round.replies[client].steps for client in clients):
            return
        self.count += 1
        place = len(self.kept) if len(self.kept) < self.parts else int(self._generator.integers(self.count))
        if place < self.parts:
            self.kept[place : place + 1] = [SeenUpdate(round, update, clients)]


def attacked(prepared: Prepared, attacker: Attacker, kept: Reservoir, *, seen: bool, seed: int) -> View:
    """Attack randomly drawn updates, or randomly drawn sums of updates.

    Args:
        prepared: The experiment.
        attacker: The object that performs gradient inversion.
        kept: The updates or sums.
        seen: Whether the server sees these updates or sums.
        seed: The seed of the draws.
    """
    generator, right, pairs = rng(seed, f"audit-members/{kept.name}"), 0, 0
    parts, sizes = list[SentPart](), list[int]()
    for each in kept.kept:
        members = np.concatenate([prepared.assignment[client] for client in each.clients])
        weights = each.round.request.weights
        won, compared = right_pairs(attacker.model, weights, each.update, prepared.data, members, generator)
        right, pairs = right + won, pairs + compared
        sizes.append(len(members))
        if len(members) <= IMAGES:
            parts.append(as_gradient(prepared, each, members))
    size = round(float(np.mean(sizes))) if sizes else 0
    inversion = attacker.attack(size, kept.count, parts)
    control = attacker.attack(size, kept.count, [noise_instead(part, generator) for part in parts])
    mean = float(np.mean(sizes)) if sizes else None
    return View(kept.name, seen, kept.count, mean, inversion, control, Rate.of(right, pairs))


def as_gradient(prepared: Prepared, seen: SeenUpdate, members: NDArray[np.int64]) -> SentPart:
    """Convert an update to the gradient of the total loss over the update's training samples.

    With one SGD step, a client's update is −η times the mean gradient. With more steps, the result is the mean of the
    steps' gradients.

    Args:
        prepared: The experiment.
        seen: The update.
        members: The indices of the training samples of the update.
    """
    request = seen.round.request
    steps = float(np.mean([seen.round.replies[client].steps for client in seen.clients]))
    factor = -len(members) / (prepared.spec.training.lr_at(request.round) * steps)
    gradient = {name: w * factor for name, w in seen.update.items()}
    client = seen.clients[0] if len(seen.clients) == 1 else SERVER
    return SentPart(client, request.round, request.weights, gradient, members)


def noise_instead(part: SentPart, generator: np.random.Generator) -> SentPart:
    """Replace each tensor of a gradient with Gaussian random numbers of equal norm, as a control."""
    drawn = {}
    for name, g in part.gradient.items():
        noise = torch.from_numpy(generator.standard_normal(tuple(g.shape), dtype=np.float32))
        drawn[name] = noise * (g.norm() / noise.norm().clamp(min=1e-30))
    return replace(part, gradient=drawn)


HEADINGS = ("attacked", "seen by the server", "number", "samples", "labels right", "by chance", "exact by a row",
            "recognised", "from random numbers", "member found", "95 % interval")  # fmt: skip


def cells(view: View) -> list[str]:
    """Return the strings in the table's cells for one view."""

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{value:.0%}"

    rates, pairs = view.inversion, view.membership
    samples = "–" if view.samples is None else f"{view.samples:.0f}"
    attacks = (rates.labels, rates.labels_chance, rates.rows, rates.recognised, view.control.recognised, pairs.rate)
    interval = f"{pairs.low:.0%} to {pairs.high:.0%}" if pairs.trials else "–"
    return [view.name, "yes" if view.seen else "no", f"{view.sent:,}", samples, *map(percent, attacks), interval]


def caption(audit: UpdateAudit) -> str:
    """Return a caption with the run, the replayed rounds and the settings of the audit."""
    first, last = audit.rounds
    rounds = f"round {first}" if first == last else f"rounds {first} to {last}"
    noise = "without noise" if audit.epsilon is None else f"ε = {audit.epsilon:.3g}"
    return (
        f"{audit.method} on {audit.data}, {rounds}, privacy.sums = {audit.sums!r}, {noise}. Each inversion took "
        f"{audit.steps} steps, with seed {audit.seed}."
    )


def to_markdown(audit: UpdateAudit) -> str:
    """Return the caption and the table in Markdown."""
    return f"{printable(caption(audit))}\n\n{markdown_table(HEADINGS, map(cells, audit.views))}"


def print_table(audit: UpdateAudit) -> None:
    """Print the caption and the table."""
    print(to_markdown(audit), end="")


def to_json(audit: UpdateAudit) -> dict[str, Any]:
    """Return the audit's results as values that JSON can represent."""
    return asdict(audit)


def write(audit: UpdateAudit, out: Path) -> None:
    """Write ``updates.json`` and ``updates.md`` into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{NAME}.json", to_json(audit))
    replace_file(out / f"{NAME}.md", to_markdown(audit).encode())
