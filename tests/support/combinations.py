"""Find out which choices of methods can be combined, and whether each choice has an effect.

A factor is a setting with several choices ("levels"); a row is a mapping from each factor to a level. A row is refused
before it runs (``refusal``), or it runs for two rounds (``observe``). Then the run is compared with runs that differ in
one level (``acts``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from torch import nn

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import SpecError
from fedstrata.clients.client import StateStore
from fedstrata.data.dataset import Dataset
from fedstrata.data.sources import Data
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Failure, FederationConfig
from fedstrata.methods.base import METHODS
from fedstrata.methods.recipe import CHOICES
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import Simulation, make_context

Row = dict[str, str]
OWN = "own"
"""The level for which the spec does not set the factor, so that the choice of the method or the default is used."""

SIZES = (4, 8, 26, 5, 7, 10)
"""The number of samples of each client. The third has more than a third of all samples, so that a sampler by size that
draws three clients always draws it."""

FAMILIES = ((0, 5), (5, 10))
"""The ranges of classes of the first three clients and of the others, so that clustering can find two groups."""

SAMPLERS: dict[str, Any] = {
    "uniform": "uniform",
    "uniform again": {"name": "uniform", "replacement": True},
    "poisson": "poisson",
    "weighted": "weighted",
    "weighted once": {"name": "weighted", "replacement": False},
    "all": "all",
    "fedsts": {"name": "fedsts", "strata": 2},
    "fedsts again": {"name": "fedsts", "strata": 2, "replacement": True},
    "fedsts systematic": {"name": "fedsts", "strata": 2, "draws": "systematic"},
    "fedsts updates": {"name": "fedsts", "strata": 2, "refresh": "participants"},
    "fedssar": "fedssar",
    "clustered": "clustered",
    "clustered by size": {"name": "clustered", "algorithm": 1},
    "power-of-choice": {"name": "power-of-choice", "candidates": 5},
    "fedentopt": "fedentopt",
    "fedgs": "fedgs",
}
DATA_SAMPLERS: dict[str, Any] = {
    "all": "all",
    "fedstas": {"name": "fedstas", "fraction": 0.4},
    "fedstas private": {"name": "fedstas", "fraction": 0.4, "epsilon": 3.0, "bound": 20},
    "fedsampling": {"name": "fedsampling", "samples": 20},
}
OBJECTIVES = (
    "cross-entropy",
    "fedprox",
    "scaffold",
    "feddyn",
    "moon",
    "fedrs",
    "fedlc",
    "bsm",
    "rebafl",
    "fedbabu",
    "fedper",
    "fedntd",
    "fedrep",
    "ditto",
    "feddecorr",
    "fedvls",
    "fedsam",
    "fedlesam",
)
AGGREGATORS: dict[str, Any] = {
    **{
        name: name
        for name in (
            "size",
            "mean",
            "stratum",
            "horvitz-thompson",
            "fednova",
            "fedexp",
            "fedau",
            "mifa",
            "fedvarp",
            "fedawe",
            "median",
            "trimmed-mean",
        )
    },
    "krum": {"name": "krum", "attackers": 0},
    "multi-krum": {"name": "multi-krum", "attackers": 0, "chosen": 2},
    "geometric-median": "geometric-median",
    "centred-clipping": {"name": "centred-clipping", "radius": 0.01},
}
AVAILABILITIES: dict[str, Any] = {
    "always": "always",
    "bernoulli": {"name": "bernoulli", "p": 0.6},
    "bernoulli announced": {"name": "bernoulli", "p": 0.6, "announced": True},
    "bernoulli late": {"name": "bernoulli", "p": 0.8, "deadline": 0.012, "speed_spread": 2.0},
    "persistent": {"name": "persistent", "p": 0.6, "period": 2},
    "persistent announced": {"name": "persistent", "p": 0.6, "period": 2, "announced": True},
    "groups": {"name": "groups", "groups": [{"clients": 3, "p": 0.9}, {"clients": 3, "p": 0.5}]},
    "groups announced": {
        "name": "groups",
        "groups": [{"clients": 3, "p": 0.9}, {"clients": 3, "p": 0.5}],
        "announced": True,
    },
    "markov": {"name": "markov", "online_rounds": 2, "offline_rounds": 2},
    "cyclic": {"name": "cyclic", "p": 0.5, "period": 3},
    "diurnal": {"name": "diurnal", "lowest": 0.3, "period": 4},
    "label-correlated": {"name": "label-correlated", "mean": 0.4, "least": 0.3},
    "size-correlated": {"name": "size-correlated", "mean": 0.6, "pattern": "cyclic", "period": 3},
    "several": [{"name": "persistent", "p": 0.8, "period": 2}, {"name": "bernoulli", "p": 0.7}],
    "trace": {"name": "trace"},
    "trace announced": {"name": "trace", "announced": True},
    "late": {"name": "always", "deadline": 0.012, "speed_spread": 2.0},
}
NORMS = ("none", "average", "local")
"""A model without BatchNorm, and one with it under both settings of ``training.batch_norm``."""
EFFORTS = ("epochs", "steps")
MASKINGS = ("none", "prf", "ckks")
MODES = ("batch", "single", "hybrid")
SELECTIONS = ("uniform", "weighted")

_COMMON: dict[str, tuple[str, ...]] = {
    "availability": tuple(AVAILABILITIES),
    "norm": NORMS,
    "effort": EFFORTS,
}
RECIPES: dict[str, tuple[str, ...]] = {
    "method": tuple(name for name in METHODS if name not in ("sfl", "stratify")),
    "client_sampler": (OWN, *SAMPLERS),
    "data_sampler": (OWN, *DATA_SAMPLERS),
    "objective": (OWN, *OBJECTIVES),
    "aggregator": (OWN, *AGGREGATORS),
    **_COMMON,
}
RELAYS: dict[str, tuple[str, ...]] = {"method": ("sfl",), "client_sampler": (OWN, *SAMPLERS), **_COMMON}
SCHEDULES: dict[str, tuple[str, ...]] = {
    "method": ("stratify",),
    "mode": MODES,
    "selection": SELECTIONS,
    "masking": MASKINGS,
    "availability": tuple(AVAILABILITIES),
    "norm": NORMS,
}
"""The factors of Stratify. ``effort`` is not one of them, because a round is an epoch of the schedule."""
SPACES = (RECIPES, RELAYS, SCHEDULES)
EVERYTHING: dict[str, tuple[str, ...]] = {
    "method": tuple(METHODS),
    "client_sampler": tuple(SAMPLERS),
    "data_sampler": tuple(DATA_SAMPLERS),
    "objective": OBJECTIVES,
    "aggregator": tuple(AGGREGATORS),
    "masking": MASKINGS,
    **_COMMON,
}
"""All factors with all levels, to count the refused combinations."""

PLAIN: Row = {"availability": "always", "norm": "none", "effort": "epochs", "mode": "batch", "selection": "uniform"}
"""The levels of factors that a test does not vary; all other factors have the level ``OWN``."""

METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "fedsts": {"strata": 2},
    "fedstas": {"strata": 2, "fraction": 0.4},
    "fedsampling": {"samples": 20},
    "power-of-choice": {"candidates": 5},
    "fedavg-ft": {"per_class": 1, "steps": 2},
    "ccvr": {"per_class": 5, "steps": 2},
    "stratify": {"cap": 4},
}
"""Settings with which methods work with few clients; left out if the choice that a setting belongs to is replaced."""

_BELONGS = {"fedsts": "client_sampler", "fedsampling": "data_sampler", "power-of-choice": "client_sampler"}


def tiny_norm(shape: Sequence[int], classes: int) -> nn.Module:
    """Return a model with BatchNorm that trains quickly."""
    wide = int(np.prod(shape))
    body = nn.Sequential(nn.Flatten(), nn.Linear(wide, 8), nn.BatchNorm1d(8), nn.ReLU())
    module = nn.Sequential()
    module.add_module("body", body)
    module.add_module("head", nn.Linear(8, classes))
    return module


@cache
def data() -> Dataset:
    """Return a data set of ninety digits."""
    return Data("digits", limit=90).load(0)


@cache
def indices() -> list[list[int]]:
    """Return the samples of clients with different sizes and few classes; the server keeps two samples per class."""
    labels = data().y_train.numpy()
    generator = np.random.default_rng(0)
    kept = np.concatenate([np.flatnonzero(labels == c)[:2] for c in range(10)])
    rest = np.setdiff1d(np.arange(len(labels)), kept)
    parts: list[list[int]] = []
    for first, last in FAMILIES:
        theirs = rest[(labels[rest] >= first) & (labels[rest] < last)]
        order = theirs[np.argsort(labels[theirs] + generator.uniform(0, 3, len(theirs)))]
        sizes = SIZES[len(parts) :][: len(SIZES) // len(FAMILIES)]
        parts += [part.tolist() for part in np.split(order, np.cumsum(sizes))[: len(sizes)]]
    return parts


TRACE = "client,first,last\n0,1,1\n1,1,2\n2,2,2\n3,1,2\n5,1,1\n"
"""A trace in which five of six clients are available: four in round 1, and three in round 2."""


@cache
def trace_file() -> str:
    """Return the file for the availability ``trace``, which is removed when the process ends."""
    file = tempfile.NamedTemporaryFile("w", suffix=".csv")  # noqa: SIM115
    file.write(TRACE)
    file.flush()
    _KEPT.append(file)
    return file.name


_KEPT: list[Any] = []


def table_of(row: Mapping[str, str], seed: int = 0) -> dict[str, Any]:
    """Return the spec of a row as nested tables."""
    return {
        "seed": seed,
        "partition": {"name": "given", "indices": indices()},
        "model": {"name": "mlp", "hidden": [8]} if row["norm"] == "none" else f"{__name__}:tiny_norm",
        "availability": _availability(row["availability"]),
        "method": method_of(row),
        "training": _training(row),
        "evaluation": {"every": 0, "batch_size": 500},
    }


EVERY_CHOICE: dict[str, Row] = {
    **{name: {"method": name, **({"norm": "average"} if name == "fedtan" else {})} for name in METHODS},
    **{f"sampler {name}": {"method": "fedavg", "client_sampler": name} for name in SAMPLERS},
    **{f"data {name}": {"method": "fedavg", "data_sampler": name, "aggregator": "mean"} for name in DATA_SAMPLERS},
    **{f"stratify {mode}": {"method": "stratify", "mode": mode} for mode in ("single", "hybrid")},
    **{f"stratify {masking}": {"method": "stratify", "masking": masking} for masking in MASKINGS},
    "stratify with BatchNorm": {"method": "stratify", "norm": "average"},
}
"""A mapping from names for tests to rows, for every method, sampler and mode of masking."""


def spec_of(name: str, **row: str) -> fs.Experiment:
    """Return the spec of a name in ``EVERY_CHOICE``, whose results must have the same bits with every engine."""
    table = table_of({**PLAIN, **EVERY_CHOICE[name], **row})
    table["training"] |= {"execution": "per-client"}
    table["data"] = {"name": "digits", "limit": 90}
    return fs.Experiment.from_table(table)


def _availability(name: str) -> Any:
    chosen = AVAILABILITIES[name]
    return {**chosen, "file": trace_file()} if name.startswith("trace") else chosen


def _training(row: Mapping[str, str]) -> dict[str, Any]:
    effort = {"local_steps": 3} if row.get("effort") == "steps" else {"local_epochs": 1}
    norm = {"batch_norm": "local"} if row["norm"] == "local" else {}
    return {"rounds": 2, "clients_per_round": 3, "batch_size": 4, "lr": 0.05, "workers": 1, **effort, **norm}


def method_of(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the section ``[method]`` of a row's spec."""
    chosen = {
        "client_sampler": SAMPLERS,
        "data_sampler": DATA_SAMPLERS,
        "aggregator": AGGREGATORS,
    }
    table: dict[str, Any] = {"name": row["method"]}
    for factor in CHOICES:
        level = row.get(factor, OWN)
        if level != OWN:
            table[factor] = chosen[factor][level] if factor in chosen else level
    for factor, default in (("masking", "none"), ("mode", "batch"), ("selection", "uniform")):
        if row.get(factor, default) != default:
            table[factor] = row[factor]
    settings = dict(METHOD_SETTINGS.get(row["method"], {}))
    if row["method"] == "fedstas":
        if "client_sampler" in table:
            del settings["strata"]
        if "data_sampler" in table:
            del settings["fraction"]
    elif _BELONGS.get(row["method"]) in table:
        settings = {}
    return table | settings


@cache
def config_of(norm: str, effort: str) -> FederationConfig:
    """Return the configuration that the server and the clients share, which does not depend on the method."""
    row = {**PLAIN, "method": "fedavg", "norm": norm, "effort": effort}
    return prepare(fs.Experiment.from_table(table_of(row)), data=data()).config


def refusal(row: Mapping[str, str]) -> str | None:
    """Return the reason why a row is refused before it runs; None if it is accepted."""
    return refusals(row, [(row["norm"], row.get("effort", "epochs"))])[0]


def refusals(row: Mapping[str, str], agreed: Sequence[tuple[str, str]]) -> list[str | None]:
    """Return the results of ``refusal`` for a row with several pairs of norm and effort."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            method = METHODS.parse(method_of(row))
        except SpecError as error:
            return [str(error)] * len(agreed)
        found: list[str | None] = []
        for norm, effort in agreed:
            try:
                method.check(config_of(norm, effort))
            except SpecError as error:
                found.append(str(error))
            else:
                found.append(None)
        return found


OPEN = "BatchNorm needs at least 2 values per channel for training"
"""The failure of a client that is alone in a batch with BatchNorm, because the others are late. It is allowed."""


@dataclass
class Seen:
    """The messages and results of a run, as an observer between the server and its clients sees them.

    Args:
        drawn: The round, the kind and the clients of each request, in order.
        answers: A mapping from round, kind and client to the hash of the answer, for requests to train.
        after: The hash of the global model after each round.
        records: The records of the rounds.
        events: The events of the run.
    """

    drawn: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    answers: dict[tuple[int, str, int], str] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def told(self, *keys: str) -> list[list[Any]]:
        """Return some values of each round's record."""
        return [[record.get(key) for key in keys] for record in self.records]

    def answers_of(self, round: int) -> dict[tuple[int, str, int], str]:
        return {key: value for key, value in self.answers.items() if key[0] == round}

    def note(self, round: int, client: int, request: object, answer: object) -> None:
        if not isinstance(answer, Failure):
            self.answers[round, type(request).__name__, client] = digest(answer)


def digest(tree: Any) -> str:
    return hashlib.sha256(records.encode(tree)).hexdigest()


class Spy(LocalEngine):
    """A local engine that records all requests and answers."""

    seen: Seen

    def ask(self, requests: Any, *, together: bool, group: Any = None) -> Any:
        outcomes = super().ask(requests, together=together, group=group)
        round = getattr(next(iter(requests.values())), "round", 0)  # requests of the enrolment have no round
        self.seen.drawn.append((round, type(next(iter(requests.values()))).__name__, tuple(sorted(requests))))
        for client, outcome in outcomes.items():
            self.seen.note(round, client, requests[client], outcome)
        return outcomes

    def ask_sum(self, requests: Any) -> Any:
        request = next(iter(requests.values()))
        self.seen.drawn.append((request.round, type(request).__name__, tuple(sorted(requests))))
        return super().ask_sum(requests)

    def relay(self, kind: Any, weights: Any) -> Any:
        session, seen = super().relay(kind, weights), self.seen
        hop = session.hop

        def watched(client: int, task: Any) -> Any:
            seen.drawn.append((task.round, type(task).__name__, (client,)))
            return hop(client, task)

        session.hop = watched
        return session


def observe(row: Mapping[str, str], seed: int = 0) -> Seen:
    """Run two rounds of a row.

    Raises:
        SpecError: The row is refused.
        AssertionError: A client failed, or a reply could not be used, which must not happen with any choice.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare(fs.Experiment.from_table(table_of(row, seed)), data=data())
        spy = Spy(make_context(prepared), StateStore())
        spy.seen = seen = Seen()
        with Simulation(prepared, spy) as simulation:
            seen.events += simulation.events
            while not simulation.done:
                record = simulation.step()
                del record["seconds"]
                seen.records.append(record)
                seen.events += simulation.events
                seen.after.append(digest(simulation.state.weights))
    broken = [event for event in seen.events if event["kind"] in ("failed", "refused") and OPEN not in event["reason"]]
    assert not broken, f"{dict(row)}: {broken}"
    return seen


def _client_sampler(new: Seen, old: Seen) -> bool:
    return new.drawn != old.drawn or (new.answers_of(1) == old.answers_of(1) and new.after[0] != old.after[0])


def _data_sampler(new: Seen, old: Seen) -> bool:
    return any(new.answers.get(key, value) != value for key, value in old.answers.items())


def _aggregator(new: Seen, old: Seen) -> bool:
    """Return True if the models differ although the replies are equal."""
    first = next((t for t, pair in enumerate(zip(new.after, old.after, strict=True), 1) if pair[0] != pair[1]), None)
    return first is not None and all(new.answers_of(t) == old.answers_of(t) for t in range(1, first + 1))


def _availability_acts(new: Seen, old: Seen) -> bool:
    return new.drawn != old.drawn


def _model(new: Seen, old: Seen) -> bool:
    return new.after != old.after or new.told("accuracy", "loss") != old.told("accuracy", "loss")


def _masking(new: Seen, old: Seen) -> bool:
    """Return True if the messages differ although the training has the same bits."""
    enrolled = [[kind for round, kind, _ in seen.drawn if round == 0] for seen in (new, old)]
    trained = [[part for part in seen.drawn if part[0]] for seen in (new, old)]
    return enrolled[0] != enrolled[1] and new.after == old.after and trained[0] == trained[1]


def _effort(new: Seen, old: Seen) -> bool:
    """Return True if the models differ, or the answers, which count even if a robust aggregator gets too few."""
    return _model(new, old) or _data_sampler(new, old)


SIGNS: dict[str, Callable[[Seen, Seen], bool]] = {
    "client_sampler": _client_sampler,
    "data_sampler": _data_sampler,
    "objective": _data_sampler,  # a client that both runs ask gives different answers
    "aggregator": _aggregator,
    "availability": _availability_acts,
    "norm": _model,
    "effort": _effort,
    "masking": _masking,
    "mode": _model,
    "selection": _availability_acts,
    "method": _model,
}
"""A mapping from each factor to a function that compares runs with two of its levels, and sees the effect or not."""

SEEDS = range(6)
"""The seeds to try. One that shows the effect is enough, because two levels may by chance give equal results."""

LEAVES_ALONE = {"masking": ("none",), "availability": ("always",)}
"""The level with which other levels of these factors are compared. For other factors, all levels are tried."""


def told(row: Mapping[str, str], factor: str) -> bool:
    """Return True if the row sets a factor to a level that must have an effect."""
    return factor != "method" and row[factor] != OWN and row[factor] not in LEAVES_ALONE.get(factor, ())


def here(row: Mapping[str, str]) -> bool:
    """Return True if the optional packages that the row needs are installed."""
    return "ckks" not in row.get("masking", "") or importlib.util.find_spec("tenseal") is not None


def alternatives(row: Mapping[str, str], space: Mapping[str, Sequence[str]], factor: str) -> list[str]:
    """Return the other levels of a factor with which the row is accepted."""
    others = [level for level in LEAVES_ALONE.get(factor, space[factor]) if level != row[factor]]
    return [level for level in others if refusal({**row, factor: level}) is None]


def acts(
    row: Mapping[str, str],
    space: Mapping[str, Sequence[str]],
    factor: str,
    seen: Callable[[Mapping[str, str], int], Seen] = observe,
) -> bool | None:
    """Return True if the row's level of a factor has an effect; None if there is no other level to compare with.

    Args:
        row: A row that is not refused.
        space: The factors and their levels.
        factor: The factor.
        seen: A function that runs a row; a caller may pass one that caches results.
    """
    others = [level for level in alternatives(row, space, factor) if not _same(row, factor, level)]
    pairs = itertools.product(SEEDS, others)
    sign = SIGNS[factor]
    return any(sign(seen(row, seed), seen({**row, factor: level}, seed)) for seed, level in pairs) if others else None


ONE_FORMULA = {
    **{name: {"mean", "stratum", "horvitz-thompson"} for name in ("uniform", "poisson", "power-of-choice")},
    "all": {"mean", "stratum", "horvitz-thompson", "fedau", "mifa", "fedvarp", "fedawe"},  # if all clients reply
    **{name: {"size", "mean", "stratum"} for name in ("weighted", "clustered")},
}
"""A mapping from a sampler to aggregators that compute the same weights for its draws, so that they have no effect."""


def _same(row: Mapping[str, str], factor: str, level: str) -> bool:
    """Return True if another level means the same: the name of the method's own choice, or the same formula."""
    if factor not in CHOICES:
        return False
    one, two = (METHODS.parse(method_of({**row, factor: each})) for each in (row[factor], level))
    if one == two or factor != "aggregator":
        return one == two
    alike = ONE_FORMULA.get(one.client_sampler.name, set())
    if getattr(one.client_sampler, "replacement", True) is False and one.client_sampler.name == "weighted":
        alike = set()  # here, clients that are always drawn form their own stratum, so formulas differ
    return {one.aggregator.name, two.aggregator.name} <= alike


def plain(space: Mapping[str, Sequence[str]], **levels: str) -> Row:
    """Return a row with given levels, and the usual levels for all other factors."""
    usual = {factor: PLAIN.get(factor, OWN if OWN in all_of else all_of[0]) for factor, all_of in space.items()}
    return {**usual, **levels}


def pairwise(space: Mapping[str, Sequence[str]], seed: int = 0) -> tuple[list[Row], dict[tuple[Any, ...], str]]:
    """Return rows that together contain every accepted pair of levels, and the refused pairs.

    The algorithm is greedy: it begins a row with a pair that is not in a row yet, tries many completions of the row,
    and keeps the one with the most such pairs. A pair counts as refused if all completions that were tried are.

    Returns:
        The rows, and a mapping from each refused pair ``(factor, level, factor, level)`` to the reason.
    """
    chance = random.Random(seed)
    factors = list(space)
    left = {
        (a, x, b, y) for a, b in itertools.combinations(factors, 2) for x, y in itertools.product(space[a], space[b])
    }
    order = sorted(left)
    chance.shuffle(order)
    rows: list[Row] = []
    refused: dict[tuple[Any, ...], str] = {}
    for pair in order:
        if pair not in left:
            continue
        fixed = {pair[0]: pair[1], pair[2]: pair[3]}
        best, why = None, ""
        tries = [plain(space, **fixed)] + [_completed(space, fixed, chance) for _ in range(24)]
        usual = plain(space, **fixed)
        efforts = [{"norm": norm, "effort": effort} for norm in NORMS for effort in EFFORTS]
        tries += [{**usual, **{key: each[key] for key in each if key in usual}, **fixed} for each in efforts]
        for row in sorted(tries, key=lambda row: -sum(each in left for each in pairs_of(row))):
            if (problem := refusal(row)) is None:
                best = row
                break
            why = problem
        if best is None:
            refused[pair] = why
            left.discard(pair)
            continue
        rows.append(best)
        left -= set(pairs_of(best))
    return rows, refused


def _completed(space: Mapping[str, Sequence[str]], fixed: Mapping[str, str], chance: random.Random) -> Row:
    return {factor: fixed.get(factor) or chance.choice(levels) for factor, levels in space.items()}


def allowed_by_chance(space: Mapping[str, Sequence[str]], chance: random.Random) -> Row:
    """Draw a row that is not refused."""
    while True:
        row = _completed(space, {}, chance)
        if refusal(row) is None:
            return row


def pairs_of(row: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    for (a, x), (b, y) in itertools.combinations(row.items(), 2):
        yield a, x, b, y
