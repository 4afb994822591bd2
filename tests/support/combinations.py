"""Every choice of every method: which go together, and whether one is seen to act.

A *row* says what stands for each factor. A row is refused before anything runs (``refusal``), or it runs for two
rounds (``observe``), and each of its choices is compared with another choice, all else equal (``acts``).
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
from fedstrata.clients.store import StateStore
from fedstrata.data.dataset import Dataset
from fedstrata.data.sources import Data
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Failure, FederationConfig
from fedstrata.methods.base import CHOICES, METHODS
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import Simulation, make_context

Row = dict[str, str]
OWN = "own"
"""Nothing is said: the method's own choice, or the default."""

SIZES = (4, 8, 26, 5, 7, 10)
"""Samples of each client: the third has more than a third of all, so that it is drawn for certain among three."""

FAMILIES = ((0, 5), (5, 10))
"""The first three clients hold some classes, the others the rest, so that there are clusters to be found."""

SAMPLERS: dict[str, Any] = {
    "uniform": "uniform",
    "uniform again": {"name": "uniform", "replacement": True},
    "weighted": "weighted",
    "weighted once": {"name": "weighted", "replacement": False},
    "all": "all",
    "fedsts": {"name": "fedsts", "strata": 2},
    "fedsts again": {"name": "fedsts", "strata": 2, "replacement": True},
    "fedsts updates": {"name": "fedsts", "strata": 2, "refresh": "participants"},
    "fedssar": "fedssar",
    "clustered": "clustered",
    "clustered by size": {"name": "clustered", "algorithm": 1},
    "power-of-choice": {"name": "power-of-choice", "candidates": 5},
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
)
AGGREGATORS = ("size", "mean", "stratum", "horvitz-thompson")
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
"""Its rounds are epochs of the schedule: as its docstring says, neither local epochs nor local steps mean anything."""
SPACES = (RECIPES, RELAYS, SCHEDULES)
EVERYTHING: dict[str, tuple[str, ...]] = {
    "method": tuple(METHODS),
    "client_sampler": tuple(SAMPLERS),
    "data_sampler": tuple(DATA_SAMPLERS),
    "objective": OBJECTIVES,
    "aggregator": AGGREGATORS,
    "masking": MASKINGS,
    **_COMMON,
}
"""All factors at once: where the static refusals are counted."""

PLAIN: Row = {"availability": "always", "norm": "none", "effort": "epochs", "mode": "batch", "selection": "uniform"}
"""What stands for a factor that is not looked at; ``OWN`` for the others."""

METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "fedsts": {"strata": 2},
    "fedstas": {"strata": 2, "fraction": 0.4},
    "fedsampling": {"samples": 20},
    "power-of-choice": {"candidates": 5},
    "fedavg-ft": {"per_class": 1, "steps": 2},
    "stratify": {"cap": 4},
}
"""What makes a method fit so few clients; left out where the choice that it belongs to is replaced."""

_BELONGS = {"fedsts": "client_sampler", "fedsampling": "data_sampler", "power-of-choice": "client_sampler"}


def tiny_norm(shape: Sequence[int], classes: int) -> nn.Module:
    """A model with BatchNorm that trains in no time."""
    wide = int(np.prod(shape))
    body = nn.Sequential(nn.Flatten(), nn.Linear(wide, 8), nn.BatchNorm1d(8), nn.ReLU())
    module = nn.Sequential()
    module.add_module("body", body)
    module.add_module("head", nn.Linear(8, classes))
    return module


@cache
def data() -> Dataset:
    """Ninety digits."""
    return Data("digits", limit=90).load(0)


@cache
def indices() -> list[list[int]]:
    """Clients of unequal sizes and few classes; samples of each class are left for the server."""
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
"""Of six clients five are there at all, and three in both rounds."""


@cache
def trace_file() -> str:
    """The file that the availability ``trace`` reads; it goes when the process ends."""
    file = tempfile.NamedTemporaryFile("w", suffix=".csv")  # noqa: SIM115
    file.write(TRACE)
    file.flush()
    _KEPT.append(file)
    return file.name


_KEPT: list[Any] = []


def table_of(row: Mapping[str, str], seed: int = 0) -> dict[str, Any]:
    """The spec of a row, as nested tables."""
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
"""Every method, sampler and mode of masking, by what a test calls it."""


def spec_of(name: str, **row: str) -> fs.Experiment:
    """The spec of one of ``EVERY_CHOICE``, whose results are the same bytes on every engine."""
    table = table_of({**PLAIN, **EVERY_CHOICE[name], **row})
    table["training"] |= {"execution": "per-client"}
    table["data"] = {"name": "digits", "limit": 90}
    return fs.Experiment.from_table(table)


def _availability(name: str) -> dict[str, Any] | str:
    chosen = AVAILABILITIES[name]
    return {**chosen, "file": trace_file()} if name.startswith("trace") else chosen


def _training(row: Mapping[str, str]) -> dict[str, Any]:
    effort = {"local_steps": 3} if row.get("effort") == "steps" else {"local_epochs": 1}
    norm = {"batch_norm": "local"} if row["norm"] == "local" else {}
    return {"rounds": 2, "clients_per_round": 3, "batch_size": 4, "lr": 0.05, "workers": 1, **effort, **norm}


def method_of(row: Mapping[str, str]) -> dict[str, Any]:
    """The section ``[method]`` of a row."""
    chosen = {
        "client_sampler": SAMPLERS,
        "data_sampler": DATA_SAMPLERS,
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
    """What server and clients agree on, whatever the method."""
    row = {**PLAIN, "method": "fedavg", "norm": norm, "effort": effort}
    return prepare(fs.Experiment.from_table(table_of(row)), data=data()).config


def refusal(row: Mapping[str, str]) -> str | None:
    """Why a row is refused before it runs; None where it is not."""
    return refusals(row, [(row["norm"], row.get("effort", "epochs"))])[0]


def refusals(row: Mapping[str, str], agreed: Sequence[tuple[str, str]]) -> list[str | None]:
    """``refusal`` of the same choices under several settings of norm and effort."""
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


OPEN = "BatchNorm needs more than 1 to train"
"""Stratify with BatchNorm: who is alone in a batch because the others are late counts as failed."""


@dataclass
class Seen:
    """What a run did, as somebody sees who stands between the server and its clients.

    Args:
        drawn: Who was reached with which request, in the order of the rounds.
        answers: The bytes of every answer to a request to train, by round and client, as digests.
        after: The global model after each round, as digests.
        records: The metrics of the rounds.
        events: What happened besides.
    """

    drawn: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    answers: dict[tuple[int, str, int], str] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def told(self, *keys: str) -> list[list[Any]]:
        """Some metrics of each round."""
        return [[record.get(key) for key in keys] for record in self.records]

    def answers_of(self, round: int) -> dict[tuple[int, str, int], str]:
        return {key: value for key, value in self.answers.items() if key[0] == round}

    def note(self, round: int, client: int, request: object, answer: object) -> None:
        if not isinstance(answer, Failure):
            self.answers[round, type(request).__name__, client] = digest(answer)


def digest(tree: Any) -> str:
    return hashlib.sha256(records.encode(tree)).hexdigest()


class Spy(LocalEngine):
    """A local engine that writes down what passes."""

    seen: Seen

    def ask(self, requests: Any, *, together: bool, group: Any = None) -> Any:
        outcomes = super().ask(requests, together=together, group=group)
        round = getattr(next(iter(requests.values())), "round", 0)  # enrolling has none
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
    """Run two rounds.

    Raises:
        SpecError: The row is refused.
        AssertionError: A client failed, or a reply could not be used: no choice may lead to that.
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
    """Equal replies, and another model."""
    first = next((t for t, pair in enumerate(zip(new.after, old.after, strict=True), 1) if pair[0] != pair[1]), None)
    return first is not None and all(new.answers_of(t) == old.answers_of(t) for t in range(1, first + 1))


def _availability_acts(new: Seen, old: Seen) -> bool:
    return new.drawn != old.drawn


def _model(new: Seen, old: Seen) -> bool:
    return new.after != old.after or new.told("accuracy", "loss") != old.told("accuracy", "loss")


def _masking(new: Seen, old: Seen) -> bool:
    """Other messages, and to the bit the same training."""
    enrolled = [[kind for round, kind, _ in seen.drawn if round == 0] for seen in (new, old)]
    trained = [[part for part in seen.drawn if part[0]] for seen in (new, old)]
    return enrolled[0] != enrolled[1] and new.after == old.after and trained[0] == trained[1]


SIGNS: dict[str, Callable[[Seen, Seen], bool]] = {
    "client_sampler": _client_sampler,
    "data_sampler": _data_sampler,
    "objective": _data_sampler,  # a client that both asked answers otherwise
    "aggregator": _aggregator,
    "availability": _availability_acts,
    "norm": _model,
    "effort": _model,
    "masking": _masking,
    "mode": _model,
    "selection": _availability_acts,
    "method": _model,
}
"""By what one sees that a factor's level acts, against another level of it."""

SEEDS = range(6)
"""Chance may choose alike, and nobody may be there: a choice acts where one of these shows it."""

LEAVES_ALONE = {"masking": ("none",), "availability": ("always",)}
"""With what a level is compared; else with all others, one after another, until one shows it."""


def told(row: Mapping[str, str], factor: str) -> bool:
    """Whether the row says something about a factor that is to be seen."""
    return factor != "method" and row[factor] != OWN and row[factor] not in LEAVES_ALONE.get(factor, ())


def here(row: Mapping[str, str]) -> bool:
    """Whether what the row needs is installed."""
    return "ckks" not in row.get("masking", "") or importlib.util.find_spec("tenseal") is not None


def alternatives(row: Mapping[str, str], space: Mapping[str, Sequence[str]], factor: str) -> list[str]:
    """Other levels of a factor with which the row is not refused."""
    others = [level for level in LEAVES_ALONE.get(factor, space[factor]) if level != row[factor]]
    return [level for level in others if refusal({**row, factor: level}) is None]


def acts(
    row: Mapping[str, str],
    space: Mapping[str, Sequence[str]],
    factor: str,
    seen: Callable[[Mapping[str, str], int], Seen] = observe,
) -> bool | None:
    """Whether the row's level of a factor is seen to act; None where there is nothing to compare it with.

    Args:
        row: Not refused.
        space: The factors and their levels.
        factor: Which.
        seen: What runs a row; for a caller that remembers what it has seen.
    """
    others = [level for level in alternatives(row, space, factor) if not _same(row, factor, level)]
    pairs = itertools.product(SEEDS, others)
    sign = SIGNS[factor]
    return any(sign(seen(row, seed), seen({**row, factor: level}, seed)) for seed, level in pairs) if others else None


ONE_FORMULA = {
    **{name: {"mean", "stratum", "horvitz-thompson"} for name in ("uniform", "all", "power-of-choice")},
    **{name: {"size", "mean", "stratum"} for name in ("weighted", "clustered")},
}
"""Aggregators that give the same weights to what a sampler draws: from one stratum, uniformly or by size."""


def _same(row: Mapping[str, str], factor: str, level: str) -> bool:
    """Whether another level says the same in other words: a method's own choice by its name, or the same formula."""
    if factor not in CHOICES:
        return False
    one, two = (METHODS.parse(method_of({**row, factor: each})) for each in (row[factor], level))
    if one == two or factor != "aggregator":
        return one == two
    alike = ONE_FORMULA.get(one.client_sampler.name, set())
    if getattr(one.client_sampler, "replacement", True) is False and one.client_sampler.name == "weighted":
        alike = set()  # who is drawn for certain is a stratum of its own
    return {one.aggregator.name, two.aggregator.name} <= alike


def plain(space: Mapping[str, Sequence[str]], **levels: str) -> Row:
    """A row that says nothing but what is given."""
    usual = {factor: PLAIN.get(factor, OWN if OWN in all_of else all_of[0]) for factor, all_of in space.items()}
    return {**usual, **levels}


def pairwise(space: Mapping[str, Sequence[str]], seed: int = 0) -> tuple[list[Row], dict[tuple[Any, ...], str]]:
    """Rows in which every pair of levels that is not refused stands at least once, and the pairs that are.

    Greedy: a row begins with a pair that no row has yet, and is the one of many completions that covers most of the
    pairs that are left. A pair counts as refused where every completion that was tried is, the plainest among them.

    Returns:
        The rows, and why a pair ``(factor, level, factor, level)`` is refused.
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
    """A row that is not refused."""
    while True:
        row = _completed(space, {}, chance)
        if refusal(row) is None:
            return row


def pairs_of(row: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    for (a, x), (b, y) in itertools.combinations(row.items(), 2):
        yield a, x, b, y
