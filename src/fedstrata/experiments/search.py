"""Search for good settings: Optuna proposes settings, and validation samples determine which settings are best."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import statistics
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedstrata.base.config import LARGEST
from fedstrata.base.errors import ExtraMissingError, SpecError, nearest
from fedstrata.base.locking import occupied
from fedstrata.base.processes import TaskPool
from fedstrata.base.rng import SERVER, rng
from fedstrata.evaluation.history import History, numbers
from fedstrata.experiments.compare import (
    Watcher,
    check_trackers,
    checked_seeds,
    folder_of,
    forks,
    is_done,
    raise_for_lost,
    report_rounds,
    run_to_end,
)
from fedstrata.experiments.sweep import Cell, Sweep, judge, measure, refuse_unvalidated, validated, write
from fedstrata.reporting.progress import Progress
from fedstrata.reporting.runs import keep_order
from fedstrata.runs.preparation import prepare
from fedstrata.runs.run_folder import SUMMARY, refuse_foreign, rounds_done
from fedstrata.spec.callbacks import Callback
from fedstrata.spec.experiment import Experiment, parse_value, split_values

if TYPE_CHECKING:
    import optuna

    from fedstrata.runs.simulation import Simulation

STUDY, NAME = "study.db", "sweep"
"""The names of Optuna's file in a search's folder, and of the study in this file. Optuna's dashboard reads the file."""

PRUNED = "pruned"
"""If a trial is pruned (stopped early because of bad results), the reason why its run ended begins with this word."""

STARTUP = 5
"""The number of trials that must run to their end before Optuna prunes any trial."""

REFUSED = "refused"
"""The name of a trial's attribute in Optuna's file. The attribute contains an error if the settings are invalid."""


@dataclass(frozen=True)
class Range:
    """The values that a search may try for a setting.

    Args:
        kind: The kind of range: ``uniform`` or ``log`` for numbers, ``int`` for integers (including both ends), or
            ``choice``.
        low: The minimum value; not used by the kind ``choice``.
        high: The maximum value; not used by the kind ``choice``.
        choices: The values to try with the kind ``choice``, written as in a spec.
    """

    kind: Literal["uniform", "log", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()

    @classmethod
    def parse(cls, key: str, text: str) -> Range:
        """Parse a range: ``log:0.001..0.5``, ``uniform:0..1``, ``int:1..8`` or ``choice:16,32,64``.

        Raises:
            SpecError: ``text`` is not a valid range.

        >>> Range.parse("training.lr", "log:0.001..0.5")
        Range(kind='log', low=0.001, high=0.5, choices=())
        >>> Range.parse("model.hidden", "choice:[8],[8, 8]").choices
        ('[8]', '[8, 8]')
        """
        kind, _, rest = text.strip().partition(":")
        kinds = ("uniform", "log", "int", "choice")
        if kind not in kinds:
            problem = f"is not a range for {key}{nearest(kind, kinds)} Use one of: "
            problem += f"{', '.join(f'{each}:…' for each in kinds)}, such as log:0.001..0.5."
            raise SpecError("--search", problem, text)
        if kind == "choice":
            choices = tuple(map(str.strip, split_values(rest)))
            if len(choices) < 2 or len(set(choices)) < len(choices):
                raise SpecError(
                    "--search",
                    f"{key} must have at least two values, all different. Use, for example, choice:16,32.",
                    text,
                )
            return cls("choice", choices=choices)
        low, dots, high = rest.partition("..")
        try:
            ends = (int(low), int(high)) if kind == "int" else (float(low), float(high))
        except ValueError:
            ends = (0, -1)
        finite = all(-LARGEST <= end <= LARGEST for end in ends) and ends[0] < ends[1]
        if not dots or not finite or (kind == "log" and ends[0] <= 0):
            least = " and LOW > 0" if kind == "log" else " (integers)" if kind == "int" else ""
            raise SpecError("--search", f"is not a range for {key}. Use {kind}:LOW..HIGH with LOW < HIGH{least}.", text)
        return cls(kind, *ends)  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.kind == "choice":
            return f"choice:{','.join(self.choices)}"
        return f"{self.kind}:{self.low:g}..{self.high:g}"

    @property
    def ends(self) -> list[Any]:
        """Both ends of the range, or all choices. A search checks these values before it begins."""
        return [self.value(end) for end in self.choices or (self.low, self.high)]

    def value(self, proposed: Any) -> Any:
        """Convert Optuna's proposal to a value of the setting. Numbers are rounded to four significant digits."""
        if self.kind == "choice":
            return parse_value(proposed)
        if self.kind == "int":
            return int(proposed)
        return min(max(float(f"{proposed:.4g}"), self.low), self.high)

    def propose(self, trial: optuna.trial.Trial, key: str) -> Any:
        """Return the value that Optuna proposes for a setting in a trial.

        Later calls for the same trial return the same value.
        """
        if self.kind == "choice":
            return self.value(trial.suggest_categorical(key, self.choices))
        if self.kind == "int":
            return self.value(trial.suggest_int(key, int(self.low), int(self.high)))
        return self.value(trial.suggest_float(key, self.low, self.high, log=self.kind == "log"))


def search(
    table: Mapping[str, Any],
    space: Mapping[str, str],
    *,
    out: str | Path,
    trials: int = 20,
    seeds: Sequence[int] | None = None,
    jobs: int | None = None,
    prune: bool = True,
    watch: Watcher | None = None,
    progress: bool = False,
) -> Sweep:
    """Try settings that Optuna proposes; write a table, the best spec of all trials and the best spec of each method.

    A trial runs one combination of proposed settings with every seed. The result of a trial is the mean of the metric
    ``evaluation.primary`` over the seeds. The metric is measured on the validation samples, with the model that each
    run saves. A trial is pruned (stopped early) if, in some round, its first run is worse than the median of earlier
    trials. If the process is killed, repeat the call to continue the search. Finished trials are not repeated, and
    interrupted trials continue from their last checkpoints. With ``jobs=1``, a search that was killed and continued has
    the same result as an uninterrupted search. With more jobs, the proposals depend on the order in which trials end.

    Args:
        table: The spec as nested dicts, as ``tomllib`` returns them. The spec must set ``evaluation.validation``.
        space: A mapping from each ``section.key`` to its range, such as ``"log:0.001..0.5"``, ``"uniform:0..1"``,
            ``"int:1..8"`` or ``"choice:16,32"``.
        out: The folder of the search. The files of a run are in ``trial-N/seed-S/``.
        trials: The number of trials, including the trials that the folder already contains.
        seeds: Each trial runs once with each seed. Default: the spec's seed.
        jobs: The number of simultaneous trials. Default: the number of processors.
        prune: Whether to stop bad trials early.
        watch: A function that is called during each run with the run's label, seed and number of finished rounds.
        progress: Whether to show progress.

    Raises:
        ExtraMissingError: The extra ``sweep`` is not installed.
        SpecError: A setting is wrong, no samples are held out for validation, or the folder contains another search.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ExtraMissingError("a search", "sweep")
    if trials < 1:
        raise SpecError("--trials", "must be an integer of at least 1. Use, for example, --trials 20.", trials)
    ranges = {key: Range.parse(key, text) for key, text in space.items()}
    spec = checked(table, ranges)
    setup = Setup(dict(table), ranges, checked_seeds([spec.seed] if seeds is None else seeds), Path(out), prune)
    direction = "minimize" if spec.evaluation.primary in spec.evaluation.lower else "maximize"
    opening, bars = opened(setup.out / STUDY, setup.identity, direction), Progress(quiet=not progress)
    with occupied(setup.out), opening as study, bars:
        if progress:
            most = max(trials, len(study.get_trials(deepcopy=False)))
            keys = [(called(number), seed) for number in range(most) for seed in setup.seeds]
            watch = bars.of_runs(dict.fromkeys(keys, spec.training.rounds))
        run_trials(setup, study, trials, jobs or os.cpu_count() or 1, watch or (lambda *_: None))
        result = results(setup, study)
        write(result, setup.out)
    return result


@dataclass(frozen=True)
class Setup:
    """The settings of a search; see ``search``.

    Args:
        table: The spec as nested dicts.
        space: A mapping from the key of each setting to the setting's range.
        seeds: The seeds of every trial.
        out: The folder of the search.
        prune: Whether bad trials are stopped early.
    """

    table: dict[str, Any]
    space: dict[str, Range]
    seeds: tuple[int, ...]
    out: Path
    prune: bool

    @property
    def identity(self) -> dict[str, Any]:
        """The arguments that must not change when a search continues, as a mapping from options to strings."""
        spec = {key: value for key, value in Experiment.from_table(self.table).to_spec().items() if key != "tracking"}
        ranges = {key: str(span) for key, span in self.space.items()}
        return {"SPEC": json.dumps(spec), "--search": json.dumps(ranges), "--seeds": json.dumps(self.seeds)}

    def folder(self, number: int, seed: int) -> Path:
        """Return the folder of a trial's run, given the trial's number and the run's seed."""
        return folder_of(self.out, (called(number), seed))


def called(number: int) -> str:
    """Return the label of a trial, given the trial's number.

    >>> called(7)
    'trial-007'
    """
    return f"trial-{number:03}"


def checked(table: Mapping[str, Any], space: Mapping[str, Range]) -> Experiment:
    """Check the spec and the search space, and return the experiment.

    For each range, the check tries both ends, or all choices. The other settings have the first value of their ranges.

    Raises:
        SpecError: The space is empty, a setting is wrong, or no samples are held out for validation.
    """
    if not space:
        raise SpecError(
            "--search", "is required, but not given. Give a setting and its range, such as training.lr=log:0.001..0.5."
        )
    first = {key: span.ends[0] for key, span in space.items()}
    for settings in [first, *({**first, key: end} for key, span in space.items() for end in span.ends[1:])]:
        spec = Cell.of(table, settings).spec
        refuse_unvalidated(spec)
        check_trackers(prepare(spec))
    return Experiment.from_table(table)


@contextmanager
def opened(
    path: Path, identity: Mapping[str, Any] | None = None, direction: str = "maximize"
) -> Iterator[optuna.Study]:
    """Open the file of Optuna's study (the record of all trials) during the ``with`` block.

    Args:
        path: The file. If the file does not exist and ``identity`` is given, the file is created.
        identity: The attributes that the study must have, so that a different search cannot continue the study.
        direction: ``"maximize"`` or ``"minimize"`` for a new study. An existing study keeps its direction.

    Raises:
        SpecError: The file contains a study whose attributes differ from ``identity``.
    """
    import optuna
    from sqlalchemy import URL

    def load(path: Path, **options: Any) -> optuna.Study:
        url = URL.create("sqlite", database=str(path)).render_as_string()
        storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
        closing.callback(storage.engine.dispose)
        closing.callback(storage.remove_session)
        return optuna.create_study(storage=storage, study_name=NAME, direction=direction, **options)

    logger = logging.getLogger("optuna")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        if identity is not None and not path.exists():
            # Write a temporary file and rename it, so that a kill never leaves a study without its attributes.
            new = path.with_suffix(".new")
            new.unlink(missing_ok=True)
            with ExitStack() as closing:
                for key, value in identity.items():
                    load(new, load_if_exists=True).set_user_attr(key, value)
            new.replace(path)
        with ExitStack() as closing:
            study = load(path, load_if_exists=True)
            for key, value in (identity or {}).items():
                if (stored := study.user_attrs.get(key)) != value:
                    raise SpecError(
                        key,
                        (
                            f"the search in this folder was started with {stored}. Use this value, or choose another "
                            "folder with --out."
                        ),
                        value,
                    )
            yield study
    finally:
        logger.setLevel(before)


def trial_of(study: optuna.Study, number: int) -> optuna.trial.Trial:
    """Return the trial with the given number from a study."""
    import optuna

    storage = study._storage
    study_id = storage.get_study_id_from_name(NAME)
    return optuna.trial.Trial(study, storage.get_trial_id_from_study_id_trial_number(study_id, number))


def run_trials(setup: Setup, study: optuna.Study, trials: int, jobs: int, watch: Watcher) -> None:
    """Finish interrupted trials, and then run new trials until the study has the requested number of trials.

    Args:
        setup: The settings of the search.
        study: Optuna's study.
        trials: The total number of trials in the study after this call.
        jobs: The number of simultaneous trials.
        watch: A function that is called during each run with the run's label, seed and number of finished rounds.

    Raises:
        FedstrataError: The process of a trial was killed. Repeat the call to continue the trial.
    """
    from optuna.trial import TrialState

    waiting = [trial.number for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))]
    fork = forks([Experiment.from_table(setup.table)], in_memory=False) if jobs > 1 else None
    failures, busy = dict[Path, str](), dict[int, Cell]()

    def tasks() -> Iterator[tuple[int, partial[None]]]:
        while waiting or len(study.get_trials(deepcopy=False)) < trials:
            if not waiting:
                study.sampler = _sampler(setup, len(study.get_trials(deepcopy=False)))
                waiting.append(study.ask().number)
            number = waiting.pop(0)
            if (cell := propose(setup, study, number)) is not None:
                busy[number] = cell
                yield number, partial(run_trial, setup, number, cell.spec.to_toml())

    def watch_all() -> None:
        for number in busy:
            for seed in setup.seeds:
                watch(called(number), seed, rounds_done(setup.folder(number, seed)))

    if jobs == 1 or fork is None:
        for number, task in tasks():
            task(watch)
            tell(setup, study, number, watch, busy[number])
        return
    with TaskPool[int](jobs, fork=fork) as pool:
        for number, reason in pool.run(tasks(), watch_all):
            cell = busy.pop(number)
            if reason:
                failures[setup.out / called(number)] = reason
            else:
                tell(setup, study, number, watch, cell)
    raise_for_lost(failures, len(study.get_trials(deepcopy=False)))


def propose(setup: Setup, study: optuna.Study, number: int) -> Cell | None:
    """Return the experiment with the settings that Optuna proposes for a trial.

    If this combination of settings is invalid, mark the trial as failed in the study and return None.
    """
    from optuna.trial import TrialState

    study.sampler = _sampler(setup, number)
    trial = trial_of(study, number)
    settings = {}
    for key, span in setup.space.items():
        study.sampler = _sampler(setup, number, key)
        settings[key] = span.propose(trial, key)
    try:
        cell = Cell.of(setup.table, settings)
        prepared = prepare(cell.spec.model_copy(update={"seed": setup.seeds[0]}))
    except SpecError as error:
        trial.set_user_attr(REFUSED, str(error))
        study.tell(number, state=TrialState.FAIL)
        return None
    folder = setup.folder(number, setup.seeds[0])
    if folder.exists():
        refuse_foreign(folder, prepared, resume=True)
    return cell


def _sampler(setup: Setup, number: int, key: str = "") -> optuna.samplers.BaseSampler:
    """Return Optuna's sampler, a tree-structured Parzen estimator.

    The sampler's seed depends on the trial and on ``key``. A proposal therefore depends on the trials that have ended,
    but not on interruptions of the search.
    """
    from optuna.samplers import TPESampler

    return TPESampler(seed=int(rng(setup.seeds[0], f"search {key}", number, SERVER).integers(2**32)))


def run_trial(setup: Setup, number: int, text: str, watch: Watcher | None = None) -> None:
    """Run a trial with every seed. If the run with the first seed is pruned, skip the other seeds.

    Args:
        setup: The settings of the search.
        number: The trial's number.
        text: The experiment as TOML. The trial's seeds replace the seed in the TOML.
        watch: A function that is called during each run with the run's label, seed and number of finished rounds.
    """
    spec = Experiment.from_table(tomllib.loads(text))
    for seed in setup.seeds:
        folder = setup.folder(number, seed)
        if not is_done(folder, spec):
            prunes = setup.prune and seed == setup.seeds[0]
            pruning = [Pruning(study=str(setup.out / STUDY), number=number)] if prunes else []
            watching = [] if watch is None else [report_rounds(watch, (called(number), seed))]
            run_to_end(spec.model_copy(update={"seed": seed}), folder, callbacks=[*pruning, *watching])
        if is_pruned(History.load(folder)):
            return


def is_pruned(history: History) -> bool:
    """Return True if a run was pruned."""
    return history.stopped.startswith(PRUNED)


def tell(setup: Setup, study: optuna.Study, number: int, watch: Watcher, cell: Cell) -> None:
    """Record the outcome of a trial in the study: the mean of the primary metric, or ``PRUNED`` or ``FAIL``."""
    from optuna.trial import TrialState

    histories = runs_of(setup, number)
    primary = cell.spec.evaluation.primary
    values = [value for history in histories if (value := validated(history, primary)) is not None]
    if is_pruned(histories[0]):
        study.tell(number, state=TrialState.PRUNED)
    elif len(values) < len(histories):
        study.tell(number, state=TrialState.FAIL)
    else:
        study.tell(number, statistics.fmean(values))
    for seed in setup.seeds:  # Show all runs as finished, even runs that were stopped early or never started.
        watch(called(number), seed, cell.spec.training.rounds)


def runs_of(setup: Setup, number: int) -> list[History]:
    """Return the histories of a trial's finished runs, in the order of the seeds.

    A pruned trial has only the run of the first seed.
    """
    folders = [setup.folder(number, seed) for seed in setup.seeds]
    return [History.load(folder) for folder in folders if (folder / SUMMARY).exists()]


def results(setup: Setup, study: optuna.Study) -> Sweep:
    """Return the results of all trials and the best trial, as a ``Sweep``."""
    planned, histories, notes = dict[str, Cell](), dict[str, list[History]](), dict[str, str]()
    for trial in study.get_trials(deepcopy=False):
        label = called(trial.number)
        settings = {key: span.value(trial.params[key]) for key, span in setup.space.items()}
        histories[label] = runs_of(setup, trial.number)
        if REFUSED in trial.user_attrs:
            planned[label] = Cell(settings, Experiment.from_table(setup.table))
            notes[label] = trial.user_attrs[REFUSED]
        else:
            planned[label] = Cell.of(setup.table, settings)
        if histories[label] and is_pruned(histories[label][0]):
            notes[label] = f"pruned after round {len(histories[label][0])}"
    keep_order(setup.out, planned)
    return judge(planned, histories, notes)


class Pruning(Callback):
    """A callback that stops a trial's run if, in some round, the run is worse than the median of earlier trials.

    Args:
        study: The path of the study's file.
        number: The trial's number.
    """

    study: str
    number: int

    def on_start(self, simulation: Simulation) -> None:
        """Open the file of Optuna's study."""
        from optuna.pruners import MedianPruner

        rounds: int = simulation.spec.training.rounds
        self.closing = ExitStack()
        study = self.closing.enter_context(opened(Path(self.study)))
        study.pruner = MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=rounds // 4)
        self.trial = trial_of(study, self.number)

    def on_round(self, simulation: Simulation, record: Mapping[str, Any]) -> None:
        """Report the round's result to the study, and stop the run if Optuna prunes the trial."""
        primary, rounds = simulation.spec.evaluation.primary, simulation.spec.training.rounds
        value = numbers(record).get(measure(primary))
        if value is None or record["round"] == rounds:
            return
        with warnings.catch_warnings():  # Ignore Optuna's warning that a resumed run reports a round again.
            warnings.simplefilter("ignore")
            self.trial.report(value, record["round"])
        if self.trial.should_prune():
            side = "above" if primary in simulation.spec.evaluation.lower else "below"
            simulation.stop(f"{PRUNED}: the validation {primary} is {side} the median of earlier trials")

    def on_close(self, simulation: Simulation, history: History, error: BaseException | None) -> None:
        """Close the file of Optuna's study."""
        if hasattr(self, "closing"):
            self.closing.close()
