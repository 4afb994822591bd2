"""A family of random specs, some of them valid: these are trained, and the others must be refused."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import combinations
import tomli_w
from tests.fuzz.cases import RAN, REFUSED, Family
from tests.fuzz.corpus import BIG, HUGE, SPEC_SETTINGS, SPEC_TEXTS

from fedstrata.base.config import Registry
from fedstrata.base.errors import FedstrataError
from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import PARTITIONS
from fedstrata.data.sources import Data
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.availability import AVAILABILITIES
from fedstrata.federation.communication.codecs import CODECS
from fedstrata.federation.settings import Training
from fedstrata.methods.base import METHODS
from fedstrata.models.zoo import MODELS
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import Simulation
from fedstrata.spec.experiment import Experiment

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

TINY: dict[str, Any] = {
    "data": {"name": "digits", "limit": 60},
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 5},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 2, "clients_per_round": 3, "local_epochs": 1, "batch_size": 8, "workers": 1},
    "evaluation": {"every": 0},
}

SMALL: list[Any] = [0, 1, 2, 3, 5, 7, 0.0, 0.1, 0.5, 0.9, 1.0, 1.5, True, False]
EXTREME: list[Any] = [
    -1,
    -0.0,
    10**9,
    2**31,
    2**63,
    2**64,
    10**18,
    HUGE,
    BIG,
    -BIG,
    5e-324,
    1e-300,
    1e300,
    1.7e308,
    -1e308,
    float("inf"),
    float("nan"),
]
ODD: list[Any] = [
    "",
    " ",
    "a",
    "ünïcödé",
    "\u202e\u0301",
    "a\0b",
    "\n",
    "../..",
    ":",
    "a:b",
    "os:system",
    "x" * 5000,
    "none",
    "auto",
    "nan",
    "1e400",
    [],
    {},
    [[]],
    [1, "a"],
    [[1, 2], [3]],
    [{}],
    {"name": "always"},
    {"": 1},
    {"a": {"b": {"c": {}}}},
]
LONG_WORK = {"local_epochs", "local_steps", "steps", "rounds", "exponent"}
"""Settings of which large values are valid but take very long; they are kept small."""
SECTIONS: dict[str, Registry[Any]] = {
    "partition": PARTITIONS,
    "availability": AVAILABILITIES,
    "method": METHODS,
    "model": MODELS,
}
LIGHT_MODELS = ("mlp", "cnn", "tabular", "custom")


def try_one(number: int, chance: random.Random, place: Path) -> str:
    """Write a spec of the corpus or a random one, read it, and run it for a round or two."""
    texts = list(SPEC_TEXTS.values())
    overrides: list[str] = []
    if number < len(texts):
        text = texts[number]
    elif number < len(texts) + len(SPEC_SETTINGS):
        text, overrides = tomli_w.dumps(TINY).encode(), SPEC_SETTINGS[number - len(texts)]
    else:
        text, overrides = made_up(chance)
    (place / "spec.toml").write_bytes(text)
    (place / "overrides.txt").write_text("\n".join(overrides), encoding="utf-8", errors="backslashreplace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            spec = Experiment.from_toml(place / "spec.toml", overrides)
            train(spec, rounds=2 if number % 4 == 0 else 1)
        except FedstrataError as error:
            str(error).encode()  # the message can be printed
            return REFUSED
    return RAN


def train(spec: Experiment, rounds: int) -> None:
    """Train a spec for some rounds, with few samples and epochs."""
    spec = small(spec)
    whole = spec.data.name != TINY["data"]["name"] or spec.data.custom or spec.data.limit != TINY["data"]["limit"]
    data = None if whole else digits(spec.data.normalize, spec.seed)
    with Simulation(prepare(spec, data=data)) as simulation:
        for _ in range(min(rounds, spec.training.rounds)):
            simulation.step()


@lru_cache(64)
def digits(normalize: str, seed: int) -> Dataset:
    """Return the data of most cases, which are read once."""
    return Data(**{**TINY["data"], "normalize": normalize}).load(seed)


def small(spec: Experiment) -> Experiment:
    """Return the spec with fewer samples and epochs, which would only take time."""
    data, training = spec.data, spec.training
    if data.limit is None or data.limit > 200:
        data = data.model_copy(update={"limit": 60})
    if training.epochs > 2 and not training.local_steps:
        training = training.model_copy(update={"local_epochs": 1})
    return spec.model_copy(update={"data": data, "training": training})


def made_up(chance: random.Random) -> tuple[bytes, list[str]]:
    """Return the text of a random spec, and overrides for it."""
    table = start(chance)
    for _ in range(chance.choice([0, 0, 0, 1, 1, 2])):
        change(table, chance)
    overrides = [override(chance) for _ in range(chance.choice([0, 0, 0, 0, 1, 2]))]
    try:
        text = tomli_w.dumps(table)
    except (ValueError, TypeError):
        text = tomli_w.dumps(TINY)
    content = text.encode(errors="replace")
    if chance.random() < 0.1:
        content = misprinted(content, chance)
    return content, overrides


def start(chance: random.Random) -> dict[str, Any]:
    """Draw a spec that is mostly valid; one in eight has a codec."""
    table = plain_start(chance)
    if chance.random() < 0.125:
        table["communication"] = {way: codec(chance) for way in ("up", "down") if chance.random() < 0.7}
    return table


def codec(chance: random.Random) -> dict[str, Any]:
    """Draw a codec with at most one setting, which may have any value."""
    found = {"name": chance.choice([*CODECS])}
    keys = [*CODECS.find(found["name"]).model_fields]
    if keys and chance.random() < 0.5:
        key = chance.choice(keys)
        found[key] = value(key, chance)
    return found


def plain_start(chance: random.Random) -> dict[str, Any]:
    """Draw a spec without codecs."""
    if chance.random() < 0.8:
        row = combinations.allowed_by_chance(chance.choices(combinations.SPACES, weights=(4, 1, 1))[0], chance)
        if row.get("masking", "none") != "none" and chance.random() < (0.98 if "ckks" in row["masking"] else 0.9):
            row["masking"] = "none"  # making keys takes very long, and the family of choices tests masking often
        table = deepcopy(
            combinations.table_of(row, seed=chance.randrange(4))
        )  # other cases share the table, so it must not be changed
        table["partition"] = {"name": "dirichlet", "alpha": 0.5, "clients": 6}
        return {**table, "data": dict(TINY["data"])}
    table = deepcopy(TINY)
    for section, registry in SECTIONS.items():
        if chance.random() < 0.5:
            name = chance.choice([*registry] if section != "model" else LIGHT_MODELS)
            table[section] = {"name": name}
            if section == "partition":
                table[section]["clients"] = chance.randint(1, 6)
    return table


def fields_of(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a section and a key that are valid for a table."""
    yield from (("training", key) for key in Training.model_fields)
    yield from (("evaluation", key) for key in Evaluation.model_fields)
    yield from (("data", key) for key in ("name", "normalize", "limit", "custom"))
    for section, registry in SECTIONS.items():
        name = table.get(section, {})
        name = name.get("name") if isinstance(name, Mapping) else name
        try:
            yield from ((section, key) for key in registry.find(str(name)).model_fields)
        except FedstrataError:
            continue


def value(key: str, chance: random.Random) -> Any:
    """Draw a value for a key."""
    pool = chance.choice([SMALL, SMALL, SMALL, EXTREME, ODD])
    if pool is EXTREME and key in LONG_WORK:
        pool = SMALL
    chosen = deepcopy(chance.choice(pool))
    return [chosen] * chance.randint(1, 3) if chance.random() < 0.1 else chosen


def change(table: dict[str, Any], chance: random.Random) -> None:
    """Set, add or remove a key, or replace a section by another one."""
    kind = chance.randrange(10)
    if kind == 0 and table:
        table.pop(chance.choice(list(table)))
    elif kind == 1:
        table[chance.choice([*table, "seed", "compare", "Ü", ""])] = deepcopy(chance.choice(SMALL + EXTREME + ODD))
    elif kind == 2 and len(table) > 1:
        first, second = chance.sample(list(table), 2)
        table[first], table[second] = table[second], table[first]
    else:
        section, key = chance.choice(list(fields_of(table)))
        inner = table.get(section)
        if not isinstance(inner, dict):
            inner = table[section] = {"name": inner} if isinstance(inner, str) else {}
        inner[key] = value(key, chance)


def override(chance: random.Random) -> str:
    """Draw an override ``section.key=value``."""
    section, key = chance.choice(list(fields_of(TINY)))
    chosen = value(key, chance)
    word = str(chosen).lower() if isinstance(chosen, bool) else str(chosen)
    return chance.choice(
        [f"{section}.{key}={word}", f"{section}.{key}={word}", f"{section}={word}", f"{key}={word}", word]
    )


def misprinted(text: bytes, chance: random.Random) -> bytes:
    """Change a few characters of a text."""
    body = bytearray(text)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(body) + 1)
        body[place : place + chance.randint(0, 2)] = chance.choice(
            [b"", b"[", b"]", b'"', b"=", b"\n", b"\0", b"\xff", "ü".encode(), b".", b"1" * 400, b"#", b"[[", b"{"]
        )
    return bytes(body)


FAMILY = Family("specs", try_one)
