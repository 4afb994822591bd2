"""A search for good settings: Optuna proposes them, and the samples held out for validation judge."""

from __future__ import annotations

import copy
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
    check,
    checked_seeds,
    folder_of,
    forks,
    is_done,
    refuse_lost,
    run_to_end,
)
from fedstrata.experiments.sweep import MEASURE, Cell, Sweep, judge, refuse_unvalidated, validated, write
from fedstrata.reporting.runs import keep_order
from fedstrata.runs.preparation import prepare
from fedstrata.runs.run_folder import SUMMARY, refuse_foreign, rounds_done
from fedstrata.spec.callbacks import Callback, Watched
from fedstrata.spec.experiment import Experiment, parse_value, set_key, split_values

if TYPE_CHECKING:
    import optuna

STUDY, NAME = "study.db", "sweep"
"""Optuna's own file in a search's folder, which its dashboard reads, and what the study is called in it."""

PRUNED = "pruned"
"""How the reason begins for which a trial's run was ended."""

STARTUP = 5
"""Trials that run to their end before any is pruned."""

REFUSED = "refused"
"""The attribute of a trial that says why its settings do not go together."""


@dataclass(frozen=True)
class Range:
    """What a setting is searched in.

    Args:
        kind: ``uniform`` or ``log`` (numbers), ``int`` (whole numbers, both ends included) or ``choice``.
        low: The least value; of a choice nothing.
        high: The largest.
        choices: The values of a choice, as a spec writes them.
    """

    kind: Literal["uniform", "log", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()

    @classmethod
    def parse(cls, key: str, text: str) -> Range:
        """From ``log:0.001..0.5``, ``uniform:0..1``, ``int:1..8`` or ``choice:16,32,64``.

        Raises:
            SpecError: It is none of these.

        >>> Range.parse("training.lr", "log:0.001..0.5")
        Range(kind='log', low=0.001, high=0.5, choices=())
        >>> Range.parse("model.hidden", "choice:[8],[8, 8]").choices
        ('[8]', '[8, 8]')
        """
        kind, _, rest = text.strip().partition(":")
        kinds = ("uniform", "log", "int", "choice")
        if kind not in kinds:
            problem = f"{key} takes {', '.join(f'{each}:…' for each in kinds)}, such as log:0.001..0.5"
            raise SpecError("--search", problem + nearest(kind, kinds), text)
        if kind == "choice":
            choices = tuple(map(str.strip, split_values(rest)))
            if len(choices) < 2 or len(set(choices)) < len(choices):
                raise SpecError("--search", f"{key}: a choice is of at least two different values", text)
            return cls("choice", choices=choices)
        low, dots, high = rest.partition("..")
        try:
            ends = (int(low), int(high)) if kind == "int" else (float(low), float(high))
        except ValueError:
            ends = (0, -1)
        finite = all(-LARGEST <= end <= LARGEST for end in ends) and ends[0] < ends[1]
        if not dots or not finite or (kind == "log" and ends[0] <= 0):
            least = " with 0 < LOW" if kind == "log" else " of whole numbers" if kind == "int" else ""
            raise SpecError("--search", f"{key}: expected {kind}:LOW..HIGH with LOW < HIGH{least}", text)
        return cls(kind, *ends)  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.kind == "choice":
            return f"choice:{','.join(self.choices)}"
        return f"{self.kind}:{self.low:g}..{self.high:g}"

    @property
    def ends(self) -> list[Any]:
        """Values that have to be possible: the ends, or all choices."""
        return [self.value(end) for end in self.choices or (self.low, self.high)]

    def value(self, proposed: Any) -> Any:
        """The setting for what Optuna proposed; of a number four digits are enough."""
        if self.kind == "choice":
            return parse_value(proposed)
        if self.kind == "int":
            return int(proposed)
        return min(max(float(f"{proposed:.4g}"), self.low), self.high)

    def propose(self, trial: optuna.trial.Trial, key: str) -> Any:
        """What Optuna proposes for a trial, or has proposed to it before."""
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
    """Let Optuna propose settings, run them, and write one table and the best spec.

    Trials are judged by the mean accuracy on the validation samples over the seeds, in the last evaluated round. One
    whose first seed does worse than the median of those before it, at the same round, is pruned. A search that was
    killed goes on by the same call: what was tried is in the folder, no trial that has ended runs again, and one that
    was going on goes on from its last checkpoint. With ``jobs=1`` it ends as if it had not been killed; side by side,
    what is proposed depends on which trial ends first.

    Args:
        table: The spec's tables, as ``tomllib`` reads them; ``evaluation.validation`` is needed.
        space: What to search of each ``section.key``: ``"log:0.001..0.5"``, ``"uniform:0..1"``, ``"int:1..8"`` or
            ``"choice:16,32"``.
        out: The folder; a run goes to ``trial-N/seed-S/``.
        trials: How many, with those that the folder has.
        seeds: Each trial runs once with each; the spec's own one unless given.
        jobs: Trials at the same time; as many as there are processors unless given.
        prune: Whether trials are pruned.
        watch: Told label, seed and rounds done.
        progress: Show how far it is.

    Raises:
        ExtraMissingError: The extra ``sweep`` is not installed.
        SpecError: A setting is wrong, nothing is held out for validation, or the folder has another search.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ExtraMissingError("a search", "sweep")
    if trials < 1:
        raise SpecError("--trials", "expected a whole number of at least 1", trials)
    ranges = {key: Range.parse(key, text) for key, text in space.items()}
    spec = checked(table, ranges)
    setup = Setup(dict(table), ranges, checked_seeds([spec.seed] if seeds is None else seeds), Path(out), prune)
    with occupied(setup.out), ExitStack() as shown:
        study = shown.enter_context(opened(setup.out / STUDY, setup.about))
        if progress:
            from fedstrata.reporting.progress import Progress

            most = max(trials, len(study.get_trials(deepcopy=False)))
            keys = [(called(number), seed) for number in range(most) for seed in setup.seeds]
            watch = shown.enter_context(Progress()).of_runs(dict.fromkeys(keys, spec.training.rounds))
        go_on(setup, study, trials, jobs or os.cpu_count() or 1, watch or (lambda *_: None))
        found = results(setup, study)
        write(found, setup.out)
    return found


@dataclass(frozen=True)
class Setup:
    """What is searched.

    Args:
        table: The spec's tables.
        space: By key.
        seeds: Of every trial.
        out: The folder.
        prune: Whether trials are pruned.
    """

    table: dict[str, Any]
    space: dict[str, Range]
    seeds: tuple[int, ...]
    out: Path
    prune: bool

    @property
    def about(self) -> dict[str, Any]:
        """What must be the same when a search goes on, by what the command line calls it."""
        spec = {key: value for key, value in Experiment.from_table(self.table).to_spec().items() if key != "tracking"}
        searched = {key: str(each) for key, each in self.space.items()}
        return {"SPEC": json.dumps(spec), "--search": json.dumps(searched), "--seeds": json.dumps(self.seeds)}

    def cell(self, settings: Mapping[str, Any]) -> Cell:
        """The experiment with some settings."""
        tables = copy.deepcopy(self.table)
        for key, value in settings.items():
            set_key(tables, key, value, f"{key}={value}")
        return Cell(dict(settings), Experiment.from_table(tables))

    def folder(self, number: int, seed: int) -> Path:
        """Where a run of a trial goes."""
        return folder_of(self.out, (called(number), seed))


def called(number: int) -> str:
    """The label of a trial.

    >>> called(7)
    'trial-007'
    """
    return f"trial-{number:03}"


def checked(table: Mapping[str, Any], space: Mapping[str, Range]) -> Experiment:
    """The experiment, where all ends of the space are possible; each is tried with the others' first ends.

    Raises:
        SpecError: There is nothing to search, a setting is wrong, or nothing is held out for validation.
    """
    if not space:
        raise SpecError("--search", "a search needs a setting and its range, such as training.lr=log:0.001..0.5")
    setup = Setup(dict(table), dict(space), (), Path(), prune=False)
    first = {key: each.ends[0] for key, each in space.items()}
    corners = [first, *({**first, key: end} for key, each in space.items() for end in each.ends[1:])]
    for settings in corners:
        spec = setup.cell(settings).spec
        refuse_unvalidated(spec)
        check(prepare(spec))
    return Experiment.from_table(table)


@contextmanager
def opened(path: Path, about: Mapping[str, Any] | None = None) -> Iterator[optuna.Study]:
    """Optuna's study in a file; without ``about`` it must be there.

    Raises:
        SpecError: It is there and is about something else.
    """
    import optuna
    from sqlalchemy import URL

    def load(path: Path, **how: Any) -> optuna.Study:
        url = URL.create("sqlite", database=str(path)).render_as_string()
        storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
        closing.callback(storage.engine.dispose)
        closing.callback(storage.remove_session)
        return optuna.create_study(storage=storage, study_name=NAME, direction="maximize", **how)

    logger = logging.getLogger("optuna")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        if about is not None and not path.exists():
            # All of it or nothing: a kill must not leave half a study.
            new = path.with_suffix(".new")
            new.unlink(missing_ok=True)
            with ExitStack() as closing:
                for key, value in about.items():
                    load(new, load_if_exists=True).set_user_attr(key, value)
            new.replace(path)
        with ExitStack() as closing:
            study = load(path, load_if_exists=True)
            for key, value in (about or {}).items():
                if study.user_attrs.get(key) != value:
                    problem = (
                        f"this folder's search has {study.user_attrs.get(key)}; go on with that, or give another --out"
                    )
                    raise SpecError(key, problem, value)
            yield study
    finally:
        logger.setLevel(before)


def trial_of(study: optuna.Study, number: int) -> optuna.trial.Trial:
    """A trial that was begun, to be gone on with."""
    import optuna

    storage = study._storage
    return optuna.trial.Trial(
        study, storage.get_trial_id_from_study_id_trial_number(storage.get_study_id_from_name(NAME), number)
    )


def go_on(setup: Setup, study: optuna.Study, trials: int, jobs: int, watch: Watcher) -> None:
    """Run trials until there are so many, those first that were broken off.

    Raises:
        FedstrataError: A trial's process was killed; the same call goes on with it.
    """
    from optuna.trial import TrialState

    waiting = [trial.number for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))]
    fork = forks([setup.cell({}).spec], own=False) if jobs > 1 else None
    lost, busy = dict[Path, str](), dict[int, Cell]()

    def next_one() -> tuple[int, Cell] | None:
        while waiting or len(study.get_trials(deepcopy=False)) < trials:
            number = waiting.pop(0) if waiting else begun(setup, study)
            if (cell := proposed(setup, study, number)) is not None:
                return number, cell
        return None

    if jobs == 1 or fork is None:
        while (found := next_one()) is not None:
            number, cell = found
            try_out(setup, number, cell.spec.to_toml(), watch)
            judged(setup, study, number, watch, cell)
        return
    with TaskPool[int](jobs, fork=fork) as pool:
        while True:
            while pool.free and (found := next_one()) is not None:
                number, busy[number] = found
                pool.begin(number, partial(try_out, setup, number, busy[number].spec.to_toml()))
            if not busy:
                break
            for number, how in pool.finished(timeout=0.5):
                cell = busy.pop(number)
                if how:
                    lost[setup.out / called(number)] = how
                else:
                    judged(setup, study, number, watch, cell)
            for number in busy:
                for seed in setup.seeds:
                    watch(called(number), seed, rounds_done(setup.folder(number, seed)))
    refuse_lost(lost, len(study.get_trials(deepcopy=False)))


def begun(setup: Setup, study: optuna.Study) -> int:
    """The number of a new trial."""
    number = len(study.get_trials(deepcopy=False))
    study.sampler = _sampler(setup, number)
    found: int = study.ask().number
    return found


def proposed(setup: Setup, study: optuna.Study, number: int) -> Cell | None:
    """The experiment of a trial; None where its settings do not go together, which the study then knows."""
    from optuna.trial import TrialState

    study.sampler = _sampler(setup, number)
    trial = trial_of(study, number)
    settings = {}
    for key, each in setup.space.items():
        study.sampler = _sampler(setup, number, key)
        settings[key] = each.propose(trial, key)
    try:
        cell = setup.cell(settings)
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
    """Optuna's tree-structured Parzen estimator, whose random numbers are those of a trial and a key.

    What it proposes then depends on the trials that have ended, and on no kill.
    """
    from optuna.samplers import TPESampler

    seed = setup.seeds[0]
    return TPESampler(seed=int(rng(seed, f"search {key}", number, SERVER).integers(2**32)))


def try_out(setup: Setup, number: int, text: str, watch: Watcher | None = None) -> None:
    """Run a trial with every seed; where the first one is pruned the others are not run."""
    spec = Experiment.from_table(tomllib.loads(text))
    for place, seed in enumerate(setup.seeds):
        folder = setup.folder(number, seed)
        if not is_done(folder, spec):
            pruning = [Pruning(study=str(setup.out / STUDY), number=number)] if setup.prune and place == 0 else []
            watching = [] if watch is None else [partial(_tell, watch, called(number), seed)]
            run_to_end(spec.model_copy(update={"seed": seed}), folder, callbacks=[*pruning, *watching])
        if is_pruned(History.load(folder)):
            return


def _tell(watch: Watcher, label: str, seed: int, record: Mapping[str, Any]) -> None:
    watch(label, seed, record["round"])


def is_pruned(history: History) -> bool:
    """Whether a run was ended because it did worse than others."""
    return history.stopped.startswith(PRUNED)


def judged(setup: Setup, study: optuna.Study, number: int, watch: Watcher, cell: Cell) -> None:
    """Tell the study how a trial has ended."""
    from optuna.trial import TrialState

    histories = runs_of(setup, number)
    values = [validated(history) for history in histories]
    if is_pruned(histories[0]):
        study.tell(number, state=TrialState.PRUNED)
    elif any(value is None for value in values):
        study.tell(number, state=TrialState.FAIL)
    else:
        study.tell(number, statistics.fmean(value for value in values if value is not None))
    for seed in setup.seeds:  # pruned or not, nothing is left of it
        watch(called(number), seed, cell.spec.training.rounds)


def runs_of(setup: Setup, number: int) -> list[History]:
    """The runs of a trial that has ended; one that was pruned has only the first."""
    folders = [setup.folder(number, seed) for seed in setup.seeds]
    return [History.load(folder) for folder in folders if (folder / SUMMARY).exists()]


def results(setup: Setup, study: optuna.Study) -> Sweep:
    """All trials that have ended, and the best of them."""
    planned, histories, notes = dict[str, Cell](), dict[str, list[History]](), dict[str, str]()
    for trial in study.get_trials(deepcopy=False):
        label = called(trial.number)
        settings = {key: each.value(trial.params[key]) for key, each in setup.space.items()}
        histories[label] = runs_of(setup, trial.number)
        if REFUSED in trial.user_attrs:
            planned[label] = Cell(settings, setup.cell({}).spec)
            notes[label] = trial.user_attrs[REFUSED]
        else:
            planned[label] = setup.cell(settings)
        if histories[label] and is_pruned(histories[label][0]):
            notes[label] = f"pruned after round {len(histories[label][0])}"
    keep_order(setup.out, planned)
    return judge(planned, histories, notes)


class Pruning(Callback):
    """Ends the run of a trial that does worse than half of those before it did in the same round.

    Args:
        study: The file of the study.
        number: The trial.
    """

    study: str
    number: int

    def on_start(self, simulation: Watched) -> None:
        """Open the study."""
        from optuna.pruners import MedianPruner

        rounds: int = simulation.spec.training.rounds
        self.closing = ExitStack()
        study = self.closing.enter_context(opened(Path(self.study)))
        study.pruner = MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=rounds // 4)
        self.trial = trial_of(study, self.number)

    def on_round(self, simulation: Watched, record: Mapping[str, Any]) -> None:
        """Report the round, and stop where it is not good enough."""
        value, rounds = numbers(record).get(MEASURE), simulation.spec.training.rounds
        if value is None or record["round"] == rounds:
            return
        with warnings.catch_warnings():  # of a round that was reported before the run was killed
            warnings.simplefilter("ignore")
            self.trial.report(value, record["round"])
        if self.trial.should_prune():
            simulation.stop(f"{PRUNED}: its validation accuracy is below the median of the trials before it")

    def on_close(self, simulation: Watched, history: History, error: BaseException | None) -> None:
        """Close the study."""
        if hasattr(self, "closing"):
            self.closing.close()
