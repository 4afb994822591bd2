"""Audit differential privacy: compute a lower bound on ε with canaries in one run (Steinke, Nasr & Jagielski 2023).

Canaries are artificial samples. With probability 1/2, a canary is in a client's data; see
``fedstrata.audits.planting``. Training uses the run's own code for sampling, clipping, noise and updates. The attacker
sees what the server sees: the client's updates or, with ``privacy.sums = "secure"``, sums over all clients. From each
update, the attacker subtracts the part that can be predicted from test samples. Each canary belongs to one parameter.
If the canary was in the data, training decreases this parameter. The attacker sorts the canaries by the changes of
their parameters. The attacker guesses "in the data" for the largest decreases, and "not in the data" for the largest
increases.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fedstrata.audits.intervals import best_bound
from fedstrata.audits.pixels import Pixels
from fedstrata.audits.planting import MOST, Canaries, CanaryTap
from fedstrata.audits.replay import Watch
from fedstrata.audits.server_view import UpdateRound, mean_update, require_updates, without_masks
from fedstrata.base.errors import SpecError
from fedstrata.base.jsonl import replace_file, write_json
from fedstrata.base.printable import printable
from fedstrata.base.process import training_process
from fedstrata.federation.messages import ClientId, Params
from fedstrata.methods.recipe import Recipe
from fedstrata.objectives.base import CrossEntropy
from fedstrata.reporting.tables import markdown_table
from fedstrata.runs.accountant import Accountant
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.run_folder import prepare_again, spec_of
from fedstrata.runs.simulation import Simulation

NAME = "canaries"
CANARIES = 1000
"""The default number of canaries."""
TESTS = 1000
"""The maximum number of test samples from which the attacker predicts the effect of ordinary samples on an update."""
DELTA = 1e-5
"""The δ to which the bound refers in runs without ``privacy.dp``."""


@dataclass(frozen=True)
class CanaryAudit:
    """The result of an audit with canaries.

    Args:
        method: The name of the run's method.
        data: The name of the run's data set.
        sums: The value of ``privacy.sums`` in the run's spec.
        client: The id of the client that has the canaries.
        samples: The number of the client's samples without the canaries.
        canaries: The number of canaries.
        rounds: The number of rounds in which the client trained.
        noise: The standard deviation of the noise in training, as a multiple of ``clip``; None without noise. This
            noise has already been divided by ``divided``.
        divided: The number by which the noise was divided; 1 in an audit, larger in a control (a check of the audit).
        epsilon: The ε that the accountant computes for the run's noise; None without noise.
        delta: The δ to which ``epsilon`` and ``bound`` refer.
        guesses: The number of guesses that gave the best bound.
        right: The number of correct guesses among ``guesses``.
        bound: The lower bound on ε.
        most: The largest bound that an audit with this number of canaries can give.
        confidence: The confidence level of the bound.
        seed: The seed with which the canaries were drawn.
    """

    method: str
    data: str
    sums: str
    client: ClientId
    samples: int
    canaries: int
    rounds: int
    noise: float | None
    divided: float
    epsilon: float | None
    delta: float
    guesses: int
    right: int
    bound: float
    most: float
    confidence: float
    seed: int


def audit_canaries(
    run: str | Path,
    *,
    canaries: int = CANARIES,
    client: ClientId | None = None,
    confidence: float = 0.95,
    divide_noise: float = 1.0,
    seed: int = 0,
    prepared: Prepared | None = None,
    watch: Watch | None = None,
) -> CanaryAudit:
    """Add canaries (artificial samples), train again from the first round, and compute a lower bound on ε.

    Args:
        run: The run folder.
        canaries: The number of canaries.
        client: The client that has the canaries. Default: the client with the most samples.
        confidence: The confidence level of the bound.
        divide_noise: The divisor of the noise. Use a divisor above 1 to test the audit itself (as a control). The
            accountant's ε still refers to the run's original noise. If the number is large, the bound should therefore
            exceed ε.
        seed: The seed with which the canaries are drawn. Two audits with the same seed have the same result.
        prepared: The run's experiment; needed only if the run used your own data or model.
        watch: A function that shows progress; see ``fedstrata.audits.replay.Watch``.

    Raises:
        SpecError: ``run`` is not a run folder, a setting is out of range, or the run cannot be audited.
    """
    folder = Path(run)
    spec_of(folder, "audit")
    prepared = prepared or prepare_again(folder, "audit")
    return attack(
        prepared,
        canaries=canaries,
        client=client,
        confidence=confidence,
        divide_noise=divide_noise,
        seed=seed,
        watch=watch,
    )


def attack(
    prepared: Prepared,
    *,
    canaries: int = CANARIES,
    client: ClientId | None = None,
    confidence: float = 0.95,
    divide_noise: float = 1.0,
    seed: int = 0,
    watch: Watch | None = None,
) -> CanaryAudit:
    """Train with canaries, and compute a lower bound on ε; see ``audit_canaries``."""
    watch = watch or (lambda done, total, text: None)
    method = require_canaries(prepared)
    prepared = without_masks(prepared)
    spec, sizes = prepared.spec, prepared.assignment.sizes
    client = int(np.argmax(sizes)) if client is None else client
    require_settings(prepared, canaries, client, confidence, divide_noise)
    drawn = Canaries.drawn(canaries, prepared.config.model.params(), seed)
    scores, tap = train(prepared, method, drawn, client, divide_noise, watch)
    dp, training = spec.privacy.dp, tap.audited.context.config.training
    delta = DELTA if dp is None else dp.delta
    guesses, right, bound = best_bound(scores, drawn.present, delta, confidence)
    most = max(bound, best_bound(-drawn.present.astype(float), drawn.present, delta, confidence)[2])
    about = (spec.method.name, prepared.data.name, spec.privacy.sums, client, int(sizes[client]), canaries, tap.asked)
    noise = epsilon = None
    if dp is not None:
        accountant = Accountant(dp, training, np.array([sizes[client] + canaries]))
        noise, epsilon = dp.noise / divide_noise, accountant.largest(np.array([tap.asked]))
    result = (guesses, right, bound, most, confidence, seed)
    return CanaryAudit(*about, noise, divide_noise, epsilon, delta, *result)


def train(
    prepared: Prepared, method: Recipe, canaries: Canaries, client: ClientId, divide_noise: float, watch: Watch
) -> tuple[NDArray[np.float64], CanaryTap]:
    """Add canaries, and train from round 1.

    Args:
        prepared: The experiment.
        method: The method of the experiment.
        canaries: The canaries.
        client: The client that has the canaries.
        divide_noise: See ``audit_canaries``.
        watch: A function that shows progress; see ``fedstrata.audits.replay.Watch``.

    Returns:
        For each canary, the changes of its parameter as the attacker sees them, summed over all rounds, shape
        (canaries,). The second value is the engine that ran the clients.
    """
    scores, rounds = np.zeros(len(canaries.places)), prepared.spec.training.rounds
    secure = prepared.spec.privacy.sums == "secure"

    def listen(round: UpdateRound) -> None:
        if client in round.replies:
            update = mean_update(method, prepared.config, round) if secure else round.update(client)
            scores[:] += canaries.entries(unexpected(prepared, round, update)).double().numpy()

    with training_process(prepared.spec.training.threads), Simulation(prepared) as simulation:
        tap = CanaryTap(simulation.context, simulation.store, method, listen)
        tap.plant(canaries, client, divide_noise)
        simulation.federation.engine = tap
        while not simulation.done:
            watch(simulation.round, rounds, f"round {simulation.round + 1} with canaries")
            simulation.step()
    return scores, tap


def unexpected(prepared: Prepared, round: UpdateRound, update: Params) -> Params:
    """Subtract from an update the component that the attacker can predict from the gradient of the test loss.

    Args:
        prepared: The experiment.
        round: The round to which the update belongs.
        update: The update.
    """
    data, model, weights = prepared.data, prepared.config.model, round.request.weights
    chosen = slice(0, TESTS)
    with model.loaded(weights.params, weights.buffers) as params:
        loss = F.cross_entropy(model(params, data.inputs(chosen, "test")), data.targets(chosen, "test"))
        known = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    along = sum(float((update[name] * g).sum()) for name, g in known.items())
    length = sum(float(g.square().sum()) for g in known.values()) or 1.0
    return {name: update[name] - along / length * g for name, g in known.items()}


def require_canaries(prepared: Prepared) -> Recipe:
    """Return the run's method, if the run can be audited with canaries.

    Raises:
        SpecError: The run cannot be audited.
    """
    Pixels.of(prepared.data)
    method = require_updates(prepared)
    if type(method.objective) is not CrossEntropy:
        problem = "the audit requires the objective 'cross-entropy'. Audit a run of a method such as fedavg."
        raise SpecError("method.objective", problem, method.objective.name or type(method.objective).__name__)
    if prepared.config.augment is not None:
        raise SpecError("data.augment", "would change the canaries. Audit a run without augmentation.")
    return method


def require_settings(
    prepared: Prepared, canaries: int, client: ClientId, confidence: float, divide_noise: float
) -> None:
    """Raise ``SpecError`` if a setting of the audit is out of range, or has no effect."""
    sizes = prepared.assignment.sizes
    parameters = min(MOST, sum(w.numel() for w in prepared.config.model.params().values()))
    if not 1 <= canaries <= parameters:
        problem = f"must be from 1 to {parameters}, because each canary needs its own parameter of the model."
        raise SpecError("canaries", problem, canaries)
    if not 0 <= client < len(sizes) or sizes[client] < 1:
        problem = f"is not the id of a client with samples. Use an id from 0 to {len(sizes) - 1}."
        raise SpecError("client", problem, client)
    if not 0 < confidence < 1:
        raise SpecError("confidence", "must be between 0 and 1. Use, for example, 0.95.", confidence)
    if not divide_noise >= 1:
        raise SpecError("divide-noise", "must be at least 1. Use 1 to leave the run's noise unchanged.", divide_noise)
    if divide_noise > 1 and prepared.spec.privacy.dp is None:
        raise SpecError(
            "divide-noise", "has no effect, because the run does not use privacy.dp. Remove the option.", divide_noise
        )


HEADINGS = ("ε of the accountant", "lower bound of ε", "largest possible bound", "right guesses", "guesses")


def cells(audit: CanaryAudit) -> list[str]:
    """Return the strings in the table's cells."""
    epsilon = "none" if audit.epsilon is None else f"{audit.epsilon:.3g}"
    return [epsilon, f"{audit.bound:.2f}", f"{audit.most:.2f}", str(audit.right), str(audit.guesses)]


def verdict(audit: CanaryAudit) -> str:
    """Return a sentence that compares the bound with the accountant's ε."""
    if audit.epsilon is None:
        return "The run does not use privacy.dp, so ε does not limit what updates reveal."
    if audit.bound > audit.epsilon:
        return "The lower bound is above the accountant's ε, so training reveals more than this ε allows."
    return "The lower bound is not above the accountant's ε, so the audit does not contradict this ε."


def caption(audit: CanaryAudit) -> str:
    """Return a caption with the run and the settings of the audit."""
    control = "" if audit.divided == 1 else f", noise divided by {audit.divided:g} (control)"
    return (
        f"{audit.method} on {audit.data}, privacy.sums = {audit.sums!r}{control}: client {audit.client} with "
        f"{audit.samples} samples and {audit.canaries:,} canaries trained in {audit.rounds} rounds. The bound has δ = "
        f"{audit.delta:g}, confidence {audit.confidence:g} and seed {audit.seed}."
    )


def to_markdown(audit: CanaryAudit) -> str:
    """Return the caption, the table and the verdict in Markdown."""
    return f"{printable(caption(audit))}\n\n{markdown_table(HEADINGS, [cells(audit)], left=0)}\n{verdict(audit)}\n"


def print_table(audit: CanaryAudit) -> None:
    """Print the caption, the table and the verdict."""
    print(to_markdown(audit), end="")


def to_json(audit: CanaryAudit) -> dict[str, Any]:
    """Return the audit's results as values that JSON can represent."""
    return asdict(audit)


def write(audit: CanaryAudit, out: Path) -> None:
    """Write ``canaries.json`` and ``canaries.md`` into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{NAME}.json", to_json(audit))
    replace_file(out / f"{NAME}.md", to_markdown(audit).encode())
