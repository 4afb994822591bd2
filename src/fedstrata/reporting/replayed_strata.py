"""Find the strata (client groups) that a run's client sampler formed, and the clients' class labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.base.arrays import Floats32, Ints
from fedstrata.base.errors import CheckpointError, SpecError
from fedstrata.methods.recipe import Recipe, RecipeState
from fedstrata.runs import checkpoint
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.run_folder import prepare_again
from fedstrata.runs.simulation import Simulation
from fedstrata.spec.experiment import Experiment


@dataclass(frozen=True)
class View:
    """The strata of a run after a round.

    Args:
        round: The number of finished rounds.
        clients: The sorted ids of the clients that the sampler has grouped, shape (n,).
        points: The vectors by which the sampler groups the clients, one per client, shape (n, d).
        strata: The id of each client's stratum, counted from 0, shape (n,).
        labels: The number of samples of each class at each client, shape (n, C). The server does not know these
            numbers.
        title: The title of the picture.
        class_names: The names of the classes. If the list is empty, pictures show class labels as integers.
    """

    round: int
    clients: Ints
    points: Floats32
    strata: Ints
    labels: Ints
    title: str = ""
    class_names: tuple[str, ...] = ()

    def sizes(self) -> list[int]:
        """Return the number of clients in each stratum."""
        sizes: list[int] = np.bincount(self.strata).tolist()
        return sizes

    def purity(self) -> float:
        """Return the purity in [0, 1]: the fraction of samples whose class is the most frequent in their stratum."""
        largest = [self.labels[self.strata == h].sum(axis=0).max() for h in range(int(self.strata.max()) + 1)]
        return float(sum(largest)) / max(int(self.labels.sum()), 1)


def strata_after(prepared: Prepared, rounds: int = 1) -> View:
    """Run ``rounds`` rounds without a run folder, and return the client sampler's strata (client groups) at the end.

    Args:
        prepared: The experiment.
        rounds: The number of rounds to run.

    Raises:
        SpecError: The method's client sampler does not form strata.
    """
    _sampler(prepared.spec)
    with Simulation(prepared) as simulation:
        for _ in range(rounds):
            simulation.step()
        return strata_of(prepared, simulation.state, rounds)


def strata_of_folder(folder: Path) -> View:
    """Return the strata (client groups) of a run's client sampler, as stored in the run's last checkpoint.

    Raises:
        SpecError: The folder does not contain a run, or the run's client sampler does not form strata.
        CheckpointError: The run does not have a checkpoint.
    """
    prepared = prepare_again(folder, "strata")
    _sampler(prepared.spec)
    last = checkpoint.load(folder / "checkpoint")
    if last is None:
        raise CheckpointError(
            f"{folder} does not have a checkpoint. Run with evaluation.checkpoint_every > 0, or give the spec instead "
            "of the folder."
        )
    return strata_of(prepared, last.state, last.round)


def strata_of(prepared: Prepared, state: Any, round: int) -> View:
    """Return the strata (client groups) that the state of a method's client sampler contains.

    Args:
        prepared: The experiment.
        state: The method's state at the server.
        round: The number of finished rounds.

    Raises:
        SpecError: The method's client sampler does not form strata.
    """
    spec, data = prepared.spec, prepared.data
    sampler = _sampler(spec)
    strata = sampler.stratification(prepared.config, state.clients, round) if isinstance(state, RecipeState) else None
    if strata is None:
        raise _no_strata(spec)
    table = prepared.assignment.counts(*data.strata_or_one)
    title = f"{spec.method.name} on {data.name}, {prepared.config.clients} clients, after round {round}"
    return View(round, strata.clients, strata.points, strata.strata, table[strata.clients], title, data.stratum_names)


def _sampler(spec: Experiment) -> Any:
    if not isinstance(spec.method, Recipe):
        raise _no_strata(spec)
    return spec.method.choices()[0]


def _no_strata(spec: Experiment) -> SpecError:
    problem = "does not form strata. Use the client sampler fedsts, fedssar, or clustered with algorithm = 2."
    return SpecError("method", problem, spec.method.name)
