"""Kill runs at random moments, resume them, and compare their files with the files of undisturbed runs.

    python benchmarks/kill_runs.py [--chains 4] [--jobs 2] [--minutes M] [--only SPEC,...] [--signals KILL,...]

A chain starts ``python -m fedstrata run``, ``compare`` or ``sweep``, sends a signal, and runs the same command again
(``run --resume`` if the run has begun). After up to four signals, the command ends by itself. ``KILL``, ``TERM`` and
``INT`` are sent to the command's process. ``worker`` kills one of the processes that the command started: a worker
process of the local engine, which the run must survive, or the process of one run of ``compare`` or ``sweep``.

After a chain, all models, ``metrics.jsonl``, ``events.jsonl``, ``summary.json`` and other JSON files must be equal to
the files of an undisturbed run, except times and the checksums of lines with times. There must be no additional file in
the folder, in the folder for temporary files and in ``/dev/shm``, and no process of the command may still run.

A row for each chain is written to ``benchmarks/results/kill_runs.json`` as soon as it ends. A chain with a
row in this file is not repeated; ``--chains 0`` only prints the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import tomli_w

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from processes import Command, started

from fedstrata.cli import main as fedstrata

SHARED = Path("/dev/shm")
RESULTS = Path(__file__).parent / "results" / "kill_runs.json"
TIMES = {"seconds", "checksum"}
"""Keys of JSON objects whose values differ from run to run: seconds, and checksums, which cover the seconds."""
TABLE: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 12},
    "availability": {"name": "bernoulli", "p": 0.85},
    "model": {"name": "mlp", "hidden": [64]},
    "training": {"rounds": 7, "clients_per_round": 8, "local_epochs": 20, "batch_size": 8, "workers": 4},
    "evaluation": {"checkpoint_every": 1},
}
"""Settings with half a second of work per round, enough for the local engine to start worker processes."""
POWERSGD = {"name": "powersgd", "rank": 2, "factors": "int8"}
TOP_K = {"name": "top-k", "fraction": 0.05, "damping": 0.9}
EARLY = {"name": "early-stopping", "patience": 2}
VALIDATION = {"validation": 0.2}
STRATIFY = {"training": {"rounds": 6, "batch_size": 64}}
SPECS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "qsgd": (["run"], {"communication": {"up": "qsgd", "down": "qsgd"}}),
    "top-k": (["run"], {"method": "scaffold", "communication": {"up": TOP_K, "down": "qsgd"}}),
    "powersgd": (["run"], {"communication": {"up": POWERSGD, "down": POWERSGD}}),
    "ldp": (["run"], {"method": {"name": "fedstas", "epsilon": 3.0, "bound": 300, "samples": 900}}),
    "callbacks": (
        ["run"],
        {"method": "moon", "callbacks": [EARLY, "keep-best"], "evaluation": VALIDATION},
    ),
    "prf": (["run"], {"method": {"name": "stratify", "masking": "prf"}, **STRATIFY}),
    "ckks": (["run"], {"method": {"name": "stratify", "masking": "ckks"}, **STRATIFY}),
    "compare": (
        ["compare", "--jobs", "2"],
        {"compare": {"fedavg": {"communication": {"up": "qsgd"}}, "scaffold": {"communication": {"up": POWERSGD}}}},
    ),
    "sweep": (
        ["sweep", "--jobs", "2", "--set", "training.lr=0.02,0.1"],
        {"evaluation": VALIDATION, "communication": {"up": TOP_K}},
    ),
}
SIGNALS = ("KILL", "TERM", "INT", "worker")
WITHOUT_WORKERS = {"prf", "ckks"}
"""Specs whose rounds are too short for worker processes."""


class Reference(NamedTuple):
    """An undisturbed run: its folder, the seconds to its first round and to its end, and whether it had workers."""

    folder: Path
    first: float
    last: float
    workers: bool


def words(name: str, place: Path) -> tuple[str, ...]:
    """Return Python's arguments that run a spec, or resume the run if it has begun."""
    command, out, spec = SPECS[name][0], place / "out", place / "spec.toml"
    if command == ["run"] and (out / "spec.toml").exists():
        return "-m", "fedstrata", "run", "--resume", str(out), "--quiet"
    return "-m", "fedstrata", command[0], str(spec), *command[1:], "--out", str(out), "--quiet"


def begin(name: str, place: Path) -> None:
    """Make the folder of a chain, with its spec and a folder for temporary files of its processes."""
    table = json.loads(json.dumps(TABLE))
    for key, value in SPECS[name][1].items():
        table[key] = {**table[key], **value} if key in table else value
    (place / "tmp").mkdir(parents=True)
    (place / "spec.toml").write_text(tomli_w.dumps(table))
    os.environ["TMPDIR"] = str(place / "tmp")


def workers(command: Command) -> list[psutil.Process]:
    """Return the processes that a command has started: forks of it, and processes of runs with their own forks."""
    found = []
    with suppress(psutil.Error):
        main = psutil.Process(command.process.pid)
        line = main.cmdline()
        for child in main.children(recursive=True):
            with suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE and (child.cmdline() == line or is_run(child)):
                    found.append(child)
    return found


def is_run(process: psutil.Process) -> bool:
    """Return True if a process belongs to one run of ``compare`` or ``sweep``."""
    return "spawn_main" in " ".join(process.cmdline())


def written(place: Path) -> int:
    """Return the total size of the files ``metrics.jsonl`` in bytes."""
    return sum(path.stat().st_size for path in (place / "out").rglob("metrics.jsonl"))


def undisturbed(name: str, place: Path) -> Reference:
    """Run a spec without sending a signal."""
    begin(name, place)
    with started(*words(name, place), cwd=place) as command:
        since, first, had = time.monotonic(), 0.0, False
        while command.process.poll() is None:
            first = first or (time.monotonic() - since if written(place) else 0.0)
            had = had or any(SPECS[name][0] == ["run"] or is_fork(one) for one in workers(command))
            time.sleep(0.02)
        if command.ended():
            raise RuntimeError(f"{name}: {command.said}")
        if not had and name not in WITHOUT_WORKERS:
            raise RuntimeError(f"{name}: the local engine started no worker processes")
        return Reference(place / "out", first, time.monotonic() - since, had)


def is_fork(process: psutil.Process) -> bool:
    """Return True if a process has the same command line as its parent."""
    with suppress(psutil.Error):
        parent = process.parent()
        return parent is not None and parent.cmdline() == process.cmdline()
    return False


def send(command: Command, what: str, chance: random.Random, reference: Reference, place: Path, number: int) -> str:
    """Send a signal at a random moment; return the kind of process that got it, or "" if the command had ended.

    One in four signals is sent while the command starts, and the other signals are sent after its next round. A worker
    is killed at a random time after a worker has started.
    """
    size, left = written(place), reference.last - reference.first
    if what == "worker":
        while command.process.poll() is None and not workers(command):
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, left / 4))
    elif chance.random() < 0.25:
        time.sleep(chance.uniform(0.0, reference.first))
    else:
        while command.process.poll() is None and written(place) == size:
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, left / (1 + number)))
    if command.process.poll() is not None:
        return ""
    if what != "worker":
        os.kill(command.process.pid, getattr(signal, f"SIG{what}"))
        return "the command"
    if not (victims := workers(command)):
        return ""
    victim = chance.choice(victims)
    kind = "a worker" if is_fork(victim) else "a run"
    with suppress(psutil.NoSuchProcess):
        victim.kill()
        return kind
    return ""


def chain(name: str, what: str, number: int, reference: Reference, place: Path) -> dict[str, Any]:
    """Start, kill and resume one command; return the row."""
    begin(name, place)
    chance, shared = random.Random(f"{name} {what} {number}"), set(SHARED.iterdir())
    left, linger, tries, planned = 0, 0.0, 0, chance.randint(2, 4)
    codes, hit = [-1], Counter[str]()
    while codes[-1] and len(codes) <= planned + 2:
        with started(*words(name, place), cwd=place) as command:
            victim, sent = "", tries
            # If the command survives the end of a worker, another worker can be killed.
            while tries < planned and command.process.poll() is None and (what == "worker" or tries == sent):
                tries += 1
                victim = send(command, what, chance, reference, place, tries)
                hit[victim] += what == "worker"
            codes.append(command.ended())
            # If the command succeeds, it has ended before the signal was sent.
            hit[victim] += what != "worker" and codes[-1] != 0
            since = time.monotonic()
            left += not command.leaves_nothing()
            linger = max(linger, time.monotonic() - since)
            said = command.said
        if what == "worker" and codes[-1] and not hit["a run"]:
            break  # a run must survive the end of its workers
    del hit[""], codes[0]
    files = [*(set(SHARED.iterdir()) - shared), *place.glob("tmp/*")]
    row = {"spec": name, "signal": what, "number": number, "tries": tries, "hit": dict(+hit), "codes": codes}
    row |= {"differs": differences(reference.folder, place / "out"), "processes": left, "linger": round(linger, 1)}
    return row | {"files": sorted(map(str, files)), "said": said[-2000:] if codes[-1] else ""}


def differences(expected: Path, found: Path) -> list[str]:
    """Return the files that exist in only one of two folders, or whose contents differ in more than their times."""
    files = [{path.relative_to(place) for path in place.rglob("*") if path.is_file()} for place in (expected, found)]
    common = {path for path in files[0] & files[1] if content(expected / path) == content(found / path)}
    return sorted(str(path) for path in (files[0] | files[1]) - common)


def content(path: Path) -> Any:
    """Return the content of a file to compare; None for pictures, pages and checkpoints, which contain random masks."""
    if path.suffix == ".safetensors":
        return path.read_bytes()
    if path.suffix not in (".json", ".jsonl") or path.name == "manifest.json":
        return None
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    return [timeless(json.loads(line)) for line in lines]


def timeless(value: Any) -> Any:
    """Return a JSON value without times."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in TIMES}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def table_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table with a row for each spec and signal, and a row of sums."""
    lines = ["| spec | signal | chains | tries | kills | equal | processes left | files left | longest linger, s |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    cells: list[tuple[str, str]] = [(name, what) for name in SPECS for what in SIGNALS]
    for name, what in [*cells, *(("all", what) for what in SIGNALS), ("all", "all")]:
        if mine := [row for row in rows if name in (row["spec"], "all") and what in (row["signal"], "all")]:
            kills = sum(sum(row["hit"].values()) for row in mine)
            sums = [sum(row["tries"] for row in mine), kills, sum(not row["differs"] for row in mine)]
            sums += [sum(row["processes"] for row in mine), sum(len(row["files"]) for row in mine)]
            linger = max(row["linger"] for row in mine)
            lines.append(f"| {name} | {what} | {len(mine)} | {' | '.join(map(str, sums))} | {linger} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chains", type=int, default=4, help="number of chains for each spec and signal")
    parser.add_argument("--jobs", type=int, default=2, help="number of chains to run at the same time")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--only", default=",".join(SPECS))
    parser.add_argument("--signals", default=",".join(SIGNALS))
    options = parser.parse_args()
    # A shell lets background programs ignore SIGINT, and their child processes would inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    done = {(row["spec"], row["signal"], row["number"]) for row in rows}
    names = [name for name in options.only.split(",") if name != "ckks" or importlib.util.find_spec("tenseal")]
    signals, numbers = options.signals.split(","), range(options.chains)
    cells = [(name, what, number) for number in numbers for name in names for what in signals]
    cells = [cell for cell in cells if cell not in done and (cell[1] != "worker" or cell[0] not in WITHOUT_WORKERS)]
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="kill-runs-") as temporary, ProcessPoolExecutor(options.jobs) as pool:
        place = Path(temporary)
        fedstrata(["keys", "--out", str(place / "keys")])
        os.environ |= {"FEDSTRATA_KEYS": str(place / "keys"), "OMP_NUM_THREADS": "1"}
        wanted = list(dict.fromkeys(cell[0] for cell in cells))
        references = dict(zip(wanted, pool.map(undisturbed, wanted, [place / name for name in wanted]), strict=True))
        print({name: (round(each.first, 1), round(each.last, 1), each.workers) for name, each in references.items()})
        while cells and time.monotonic() < until:
            part, cells = cells[: 4 * options.jobs], cells[4 * options.jobs :]
            chains = [pool.submit(chain, *cell, references[cell[0]], place / "-".join(map(str, cell))) for cell in part]
            for each in as_completed(chains):
                rows.append(each.result())
                print({key: value for key, value in rows[-1].items() if value}, flush=True)
                RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print("\n".join(table_of(rows)))


if __name__ == "__main__":
    main()
