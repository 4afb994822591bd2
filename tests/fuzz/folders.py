"""Families of damaged run folders and checkpoints: a resumed run must have the usual result, or be refused."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tests.fuzz.cases import RAN, REFUSED, Family, SilentDifferenceError, damaged

import fedstrata as fs
from fedstrata.base.errors import FedstrataError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.evaluation.history import History
from fedstrata.evaluation.summary import summary_lines
from fedstrata.reporting.summary import failures

ROUNDS, STOPPED = 4, 2

TINY: dict[str, Any] = {
    "data": {"name": "digits", "limit": 80},
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 4},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": ROUNDS, "clients_per_round": 3, "local_epochs": 1, "batch_size": 8, "workers": 1},
    "evaluation": {"every": 1, "checkpoint_every": 1},
}
METHODS: dict[str, Any] = {
    "fedavg": {"name": "fedavg", "aggregator": {"name": "size", "server": "adam"}},
    "scaffold": "scaffold",
    "moon": "moon",
    "fedstas": {"name": "fedstas", "strata": 2, "fraction": 0.5},
    "stratify": {"name": "stratify", "cap": 4},
    "sfl": "sfl",
    "feddyn": "feddyn",
    "rebafl": "rebafl",
    "power-of-choice": {"name": "power-of-choice", "candidates": 4},
    "fedyogi": "fedyogi",
    "fednova": "fednova",
    "fedexp": "fedexp",
    "ccvr": {"name": "ccvr", "every": 2, "steps": 3},
    "fedau": "fedau",
    "mifa": "mifa",
    "fedvarp": "fedvarp",
    "fedawe": "fedawe",
    "fedsts": {"name": "fedsts", "strata": 2, "refresh": "participants"},
}
"""Methods with all kinds of state: of the server, of clients and of samplers, a schedule, and a relay."""

_MADE: list[tempfile.TemporaryDirectory[str]] = []


class StoppedError(Exception):
    """Raised by a callback to interrupt a run."""


def spec_of(method: str) -> dict[str, Any]:
    availability = {"name": "bernoulli", "p": 0.7}
    return {**TINY, "method": METHODS[method], "availability": availability}


@cache
def undisturbed(method: str) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the final model, as bytes, and the records without times of a run that was not interrupted."""
    return ending(fs.run(spec_of(method)))


@cache
def finished(method: str) -> Path:
    """Return the folder of a finished run."""
    folder = empty_folder() / "run"
    fs.run(spec_of(method), out=folder)
    return folder


@cache
def stopped(method: str) -> Path:
    """Return the folder of a run that was interrupted in the middle."""
    folder = empty_folder() / "run"

    def stop(record: Any) -> None:
        if record["round"] == STOPPED:
            raise StoppedError

    try:
        fs.run(spec_of(method), out=folder, callbacks=[stop])
    except StoppedError:
        return folder
    raise AssertionError("it was not stopped")


def empty_folder() -> Path:
    """Return an empty folder, which is removed when the process ends."""
    _MADE.append(tempfile.TemporaryDirectory())
    return Path(_MADE[-1].name)


def ending(history: History) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the final model, as bytes, and the records without times."""
    records = [{key: value for key, value in record.items() if key != "seconds"} for record in history]
    params = history.params
    assert params is not None
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in params.items()}), records


def copied(source: Path, place: Path) -> Path:
    return Path(shutil.copytree(source, place / "run"))


def damage_checkpoint(folder: Path, chance: random.Random) -> None:
    """Damage files of the checkpoints."""
    root = folder / "checkpoint"
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else []
    if not files:
        return
    path = chance.choice(files)
    kind = chance.randrange(8)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        other = chance.choice(files)
        path.write_bytes(other.read_bytes())
    elif kind == 2:
        shutil.rmtree(chance.choice(sorted(part for part in root.iterdir() if part.is_dir())))
    elif kind == 3:
        first, *_, last = [*sorted(root.glob("round-0*")), root / "round-00000007"]
        shutil.copytree(first, last, dirs_exist_ok=True)  # an old checkpoint with the name of a newer one
    elif kind == 4:
        for name in ("round-00000009.part", "round-xyz", "clients"):
            (root / name).mkdir(exist_ok=True)
        (root / "clients" / "stale.bin").write_bytes(b"stale")
    elif kind == 5:
        path.write_bytes(b"\0" * path.stat().st_size)
    else:
        path.write_bytes(damaged(path.read_bytes(), chance))


LOGS = ("metrics.jsonl", "events.jsonl")


def damage_folder(folder: Path, chance: random.Random) -> None:
    """Damage files of a run folder outside its checkpoints."""
    path = chance.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    kind = chance.randrange(10)
    if kind == 0:
        path.unlink()
    elif kind in (1, 2, 3):
        damage_log(folder / chance.choice(LOGS), chance)
    elif kind == 4:
        edit_spec(folder, chance)
    elif kind == 5:
        edit_json(folder, chance)
    elif kind == 6:
        for name in chance.sample([".spec.toml.77.tmp", "summary.json", "model.safetensors", "model.json", "x"], 2):
            (folder / name).write_bytes(chance.randbytes(chance.randrange(80)))
    elif kind == 7:
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    elif kind == 8:
        other = stopped(chance.choice(list(METHODS)))
        names = ["metrics.jsonl", "events.jsonl", "run.json", "spec.toml"]
        name = chance.choice([name for name in names if (other / name).exists()])
        shutil.copy(other / name, folder / name)
    else:
        path.write_bytes(damaged(path.read_bytes(), chance))


def damage_log(path: Path, chance: random.Random) -> None:
    """Remove, repeat, move, change or cut lines of a log."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines:
        path.write_bytes(b"\0" * 100)
        return
    place = chance.randrange(len(lines))
    kind = chance.randrange(7)
    if kind == 0:
        del lines[place]
    elif kind == 1:
        lines.insert(place, lines[place])
    elif kind == 2:
        chance.shuffle(lines)
    elif kind == 3:
        lines[place] = re.sub(rb"\d", lambda found: str((int(found[0]) + 1) % 10).encode(), lines[place], count=1)
    elif kind == 4:
        lines[-1] = lines[-1][: chance.randrange(len(lines[-1]))]
    elif kind == 5:
        lines = [b"\0" * sum(map(len, lines))]
    else:
        lines[place] = damaged(lines[place], chance)
    path.write_bytes(b"".join(lines))


EDITS = (
    ("lr = 0.1", "lr = 0.2"),
    ("seed = 0", "seed = 1"),
    ("p = 0.7", "p = 0.9"),
    ("clients = 4", "clients = 5"),
    ("hidden = [\n    8,\n]", "hidden = [9]"),
    ("limit = 80", "limit = 81"),
    ("rounds = 4", "rounds = 5"),
    ("rounds = 4", "rounds = 3"),
    ("batch_size = 8", "batch_size = 9"),
    ('schedule = "constant"', 'schedule = "cosine"'),
    ('precision = "float32"', 'precision = "bf16"'),
    ("checkpoint_every = 1", "checkpoint_every = 2"),
    ("every = 1\n", "every = 2\n"),
    ('name = "scaffold"', 'name = "fedavg"'),
    ('name = "digits"', 'name = "custom"'),
    ("\n", "\n# a remark\n"),
)


def edit_spec(folder: Path, chance: random.Random) -> None:
    """Change a setting in the spec of a run folder, or empty the file."""
    path = folder / "spec.toml"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):  # damaged before
        return
    old, new = chance.choice([(old, new) for old, new in EDITS if old in text] or [("", "#")])
    path.write_text("" if chance.random() < 0.1 else text.replace(old, new, 1))


def edit_json(folder: Path, chance: random.Random) -> None:
    """Replace a value in ``run.json`` by another one of the file."""
    path = folder / "run.json"
    try:
        whole = json.loads(path.read_text())
    except (OSError, ValueError):  # damaged before
        return
    node, parents = whole, []
    while isinstance(node, dict) and node and (not parents or chance.random() < 0.8):
        key = chance.choice(list(node))
        parents.append((node, key))
        node = node[key]
    if not parents:
        return
    parent, key = parents[-1]
    if chance.random() < 0.3:
        del parent[key]
    else:
        parent[key] = chance.choice([None, 0, -1, "", "x", [], {}, True, 10**30, 1e300, {"a": 1}])
    path.write_text(json.dumps(whole))


def resumed(folder: Path, method: str) -> str:
    """Resume a run from its folder, and return the outcome.

    Raises:
        SilentDifferenceError: The model or the records are not those of an undisturbed run with the folder's spec.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            spec = fs.Experiment.from_toml(folder / "spec.toml")
            history = fs.run(spec, out=folder, resume=True)
        except FedstrataError:
            return REFUSED
        usual = spec.to_spec() == fs.Experiment.from_table(spec_of(method)).to_spec()
        (model, records), (got, found) = undisturbed(method) if usual else ending(fs.run(spec)), ending(history)
    if got != model:
        raise SilentDifferenceError(f"{method}: another model than the undisturbed run's")
    # If settings of the evaluation were edited, the records of earlier rounds differ.
    if usual and found != records:
        raise SilentDifferenceError(f"{method}: other records than the undisturbed run's: {found}")
    return RAN


def try_checkpoint(number: int, chance: random.Random, place: Path) -> str:
    """Resume an interrupted run whose checkpoints are damaged."""
    method = chance.choice(list(METHODS))
    folder = copied(stopped(method), place)
    for _ in range(chance.choice([1, 1, 2, 4])):
        damage_checkpoint(folder, chance)
    return resumed(folder, method)


def try_folder(number: int, chance: random.Random, place: Path) -> str:
    """Resume an interrupted run, or read a finished one, after its files were damaged."""
    method = chance.choice(list(METHODS))
    if chance.random() < 0.3:
        return read_again(copied(finished(method), place), method, chance)
    folder = copied(stopped(method), place)
    events = _events(folder)
    for _ in range(chance.choice([1, 1, 1, 2])):
        damage_folder(folder, chance)
    outcome = resumed(folder, method)
    if outcome == RAN:
        events_survive(folder, events)
        shown(History.load(folder))
    return outcome


def shown(history: History) -> None:
    """Check that the summary of a run can be made."""
    summary_lines(history), failures(history)


def _events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    return read_jsonl(path) if path.exists() else []


def events_survive(folder: Path, before: list[dict[str, Any]]) -> None:
    """Check that a folder still contains its earlier events, or an event that says that they were lost.

    Raises:
        SilentDifferenceError: Events are missing, and no event says so.
    """
    after = _events(folder)
    lost = [event for event in before if event not in after]
    told = any(event.get("kind") == "resumed" and "events.jsonl" in event["reason"] for event in after)
    if lost and not told:
        raise SilentDifferenceError(f"{lost} are lost, and nothing says so")


def read_again(folder: Path, method: str, chance: random.Random) -> str:
    """Damage a file of a finished run, and read the run: the content must be the same, or be refused.

    Raises:
        SilentDifferenceError: The content differs.
    """
    whole = History.load(folder)
    files = ["metrics.jsonl", "model.safetensors", "model.json", "summary.json", "run.json"]
    name = chance.choice([name for name in files if (folder / name).exists()])
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(damaged(content, chance))
    x = torch.zeros(3, 8, 8).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = RAN
        try:
            again = History.load(folder)
            params = again.params
            shown(again)
        except FedstrataError:
            outcome = REFUSED
        else:
            if name == "metrics.jsonl" and [*again] != [*whole][: len(again)]:
                raise SilentDifferenceError("metrics.jsonl: other records than those that were written")
            if params is not None and _digest(params) != _digest(undisturbed_params(method)):
                raise SilentDifferenceError(f"{name}: History.load has other parameters than those that were written")
        try:
            found = fs.load(folder).predict_proba(x)
        except FedstrataError:
            return REFUSED
        shutil.rmtree(folder)
        if not (found == fs.load(finished(method)).predict_proba(x)).all():
            raise SilentDifferenceError(f"{name}: the model that was loaded is another one")
    return outcome


def undisturbed_params(method: str) -> Any:
    return safetensors.torch.load(undisturbed(method)[0])


def _digest(params: Any) -> str:
    return hashlib.sha256(safetensors.torch.save({n: w.contiguous() for n, w in params.items()})).hexdigest()


CHECKPOINTS = Family("checkpoints", try_checkpoint)
FOLDERS = Family("folders", try_folder)
