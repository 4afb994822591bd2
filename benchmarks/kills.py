"""Kill and stop processes of a deployment (a server and three sites) at random, and check that its runs survive.

Run it as ``python benchmarks/kills.py [--times 20] [--minutes M] [--seed 0] [--kinds site,...] [--codec NAME]``. The
processes communicate by mutual TLS. Two jobs run, one after the other:

- In the first job, a round needs two of the three sites. All processes of a site are killed, and the site is started
  again; a site is stopped for a minute and continues; or two sites are stopped, and the run must wait.
- In the second job, a round needs all three sites. The job's process is killed at a site or at the server; the whole
  server is killed and started again; or the server is stopped for a minute. The final model must be equal to the final
  model of an undisturbed run.

The order, the sites and the times of these events are drawn from the seed. A row for each event is written at once to
``benchmarks/results/kills.json``, where it replaces old rows of the same kind; ``--kinds none`` prints the table. The
sites import this module.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import fedstrata as fs
from fedstrata.base.jsonl import read_jsonl
from fedstrata.methods.scaffold import SCAFFOLD
from fedstrata.objectives.scaffold import Scaffold
from fedstrata.sites import ledger
from fedstrata.sites.federation import Sites
from fedstrata.sites.local_deployment import Processes
from fedstrata.sites.processes import send_signal
from fedstrata.sites.provision import ADMIN, SERVER, provision

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "kills.json"
SITES = ("a", "b", "c")
JOBS = {2: ("site", "stop", "stop two"), 3: ("worker", "server job", "server", "stop server")}
"""A mapping from the number of sites that a round needs to the kinds of events in this job."""
WORDS = {
    "site": "a site, all processes; started again",
    "stop": "a site, stopped for a minute",
    "stop two": "two of three sites, stopped for a minute",
    "worker": "the process of the job at a site",
    "server job": "the process of the job at the server",
    "server": "the server, all processes; started again",
    "stop server": "the server, stopped for a minute",
}
ROUNDS = {"site": 90, "stop": 120, "stop two": 40, "worker": 12, "server job": 12, "server": 12, "stop server": 12}
"""The largest number of rounds that pass during an event of each kind."""
CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    "qsgd": {"up": "qsgd", "down": "qsgd"},
    "top-k": {"up": {"name": "top-k", "fraction": 0.1}, "down": "qsgd"},
    "powersgd": {way: {"name": "powersgd", "factors": "int8"} for way in ("up", "down")},
}
"""A mapping from each value of ``--codec`` to the settings ``communication``."""
FEWER = {"stop": 4, "stop two": 20, "server job": 2, "server": 2, "stop server": 4}
"""The factors by which some kinds of events are rarer than others, such as pauses, which take at least a minute."""
HURRY = "KILLS_HURRY"
"""The environment variable with the path of a file; once the file exists, clients no longer wait before they train."""
PAUSE = 60.0
"""The seconds for which a site or the server is stopped."""
SIGNS = ("nothing was heard of it", "sites answer. The run waits for", "the job comes again", "waiting for the server")
"""Texts which show that the server noticed a missing party. The server writes them to the run's events or to its log;
``submit`` prints them if the job is interrupted or the server is away."""


class Leisurely(Scaffold):
    """SCAFFOLD's objective, with a pause of 0.8 seconds before each client trains."""

    def client_init(self, model: Any, context: Any) -> Any:
        """Wait, and then do the usual work."""
        if not Path(os.environ[HURRY]).exists():
            time.sleep(0.8)
        return super().client_init(model, context)


class Slow(SCAFFOLD):
    """SCAFFOLD with pauses. Its clients have a state, which must neither be lost nor be used twice."""

    def parts(self) -> fs.Parts:  # noqa: D102
        return {"objective": Leisurely()}


class Deployment:
    """A server, three sites and an administrator.

    Args:
        kits: The folder with the parties' kits.
        processes: The processes of the parties.
        seconds: The longest time to wait for anything.
    """

    def __init__(self, kits: Path, processes: Processes, seconds: float = 240.0) -> None:
        self.kits, self.processes, self.seconds = kits, processes, seconds
        for name in (SERVER, *SITES):
            processes.start(name)
        command = [sys.executable, "-m", "fedstrata", "submit", str(kits / ADMIN), "--out", str(kits / "result")]
        with (kits / "submit.txt").open("wb") as log:
            self.submitting = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    @property
    def folder(self) -> Path:
        """The run folder at the server."""
        return next((path.parent for path in (self.kits / SERVER / "fedstrata").glob("*/spec.toml")), self.kits)

    def history(self) -> list[bytes]:
        """Return the complete lines of ``metrics.jsonl``, one per round."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [line for line in lines if line.endswith(b"\n")]

    def last(self) -> dict[str, Any]:
        """Return the record of the last round."""
        lines = self.history()
        return dict(json.loads(lines[-1])) if lines else {"round": 0, "clients_returned": 0}

    def wait(self, what: str, ready: Callable[[], bool]) -> float:
        """Wait until ``ready`` returns True, and return the seconds that this took.

        Raises:
            RuntimeError: ``ready`` did not return True in time, or ``submit`` has ended.
        """
        began = time.monotonic()
        while not ready():
            if self.submitting.poll() is not None or time.monotonic() - began > self.seconds:
                told = (self.kits / "submit.txt").read_text()
                raise RuntimeError(f"waited {time.monotonic() - began:.0f} s for {what}:\n{told[-4000:]}")
            time.sleep(0.05)
        return time.monotonic() - began

    def told(self) -> str:
        """Return the last line that ``submit`` has printed."""
        return (self.kits / "submit.txt").read_text().rpartition("\n")[0].rpartition("\n")[2]

    def complete_after(self, round: int) -> bool:
        """Return True if the last round is after ``round`` and all three sites answered in it."""
        last = self.last()
        return bool(last["round"] > round and last["clients_returned"] == len(SITES))

    def signs(self) -> Counter[Path]:
        """Count how often each file contains one of ``SIGNS``."""
        # Folders of finished jobs are removed at any time, which would end a recursive search with an error.
        logs = [folder / "log.txt" for folder in (self.kits / SERVER, *(self.kits / SERVER).glob("*-*-*-*-*"))]
        files = [self.kits / "submit.txt", self.folder / "events.jsonl", *logs]
        found = Counter[Path]()
        for path in files:
            with suppress(OSError):  # the log of a finished job is removed
                text = path.read_text(errors="replace")
                found[path] = sum(text.count(sign) for sign in SIGNS)
        return found

    def process_of(self, party: str, module: str) -> psutil.Process | None:
        """Return the process of the job at a party, found by its Python module; None if there is none."""
        for process in psutil.Process(self.processes.running[party].pid).children(recursive=True):
            try:
                if f"{module} " in " ".join(process.cmdline()):
                    return process
            except psutil.Error:
                continue
        return None

    def kill_process(self, party: str, module: str) -> None:
        """Kill only the process of the job at a party, by SIGKILL."""
        self.wait(f"{module} of {party}", lambda: self.process_of(party, module) is not None)
        if process := self.process_of(party, module):
            process.kill()


def happen(kind: str, deployment: Deployment, draw: random.Random) -> dict[str, Any]:
    """Cause an event of one kind at a random time, and return its results as a row.

    Raises:
        RuntimeError: The deployment does not continue in time.
    """
    processes, victims = deployment.processes, draw.sample(SITES, 2)
    began = int(deployment.last()["round"])
    deployment.wait("all sites", lambda: deployment.complete_after(began))
    # If ``submit`` still waits for the server after an earlier event, it would not print this again.
    deployment.wait("submit to hear of the run", lambda: not deployment.told().startswith("waiting for the server"))
    time.sleep(draw.uniform(0.0, 3.0))
    before, signs, round = deployment.history(), deployment.signs(), int(deployment.last()["round"])
    row: dict[str, Any] = {"kind": kind, "round": round}
    since = time.monotonic()

    def notice() -> None:
        deployment.wait(f"{victims} to be missed", lambda: bool(deployment.signs() - signs))
        row["noticed"] = time.monotonic() - since

    if kind == "site":
        processes.kill(victims[0])
        notice()
        went = int(deployment.last()["round"])
        time.sleep(draw.uniform(0.0, 5.0))
        processes.start(victims[0])
        row["rounds_meanwhile"] = int(deployment.last()["round"]) - went
    elif kind == "worker":
        deployment.kill_process(victims[0], "worker_process")
        notice()
    elif kind == "server job":
        deployment.kill_process(SERVER, "runner_process")
        notice()
    elif kind == "server":
        processes.kill(SERVER)
        notice()
        time.sleep(draw.uniform(0.0, 5.0))
        processes.start(SERVER)
    else:
        stopped = {"stop": victims[:1], "stop two": victims, "stop server": [SERVER]}[kind]
        for party in stopped:
            send_signal(processes.running[party].pid, signal.SIGSTOP)
        notice()
        if kind == "stop two":
            time.sleep(5.0)  # the current round ends with the sites that are left
        went, least = int(deployment.last()["round"]), PAUSE - (time.monotonic() - since)
        time.sleep(max(0.0, least))
        row["rounds_meanwhile"] = int(deployment.last()["round"]) - went
        for party in stopped:
            send_signal(processes.running[party].pid, signal.SIGCONT)
    again, ended = time.monotonic(), int(deployment.last()["round"])
    deployment.wait("all sites to be back", lambda: deployment.complete_after(max(round, ended)))
    row["back"] = time.monotonic() - again
    after = deployment.history()
    first = next(line for line in after[ended:] if json.loads(line)["clients_returned"] == len(SITES))
    row["rounds_to_back"] = int(json.loads(first)["round"]) - ended
    # The last round may be repeated, because its checkpoint may not have been written yet.
    row["kept"] = after[: len(before) - 1] == before[:-1]
    return row


def spec_of(rounds: int, codec: str, checkpoint_every: int = 1) -> fs.Experiment:
    """Return the spec of a job."""
    return fs.Experiment.from_table(
        {
            "method": "kills:Slow",
            "partition": {"name": "dirichlet", "alpha": 1.0, "clients": len(SITES)},
            "model": {"name": "mlp", "hidden": [16]},
            "training": {"rounds": rounds, "local_steps": 5, "execution": "per-client"},
            "evaluation": {"every": 0, "checkpoint_every": checkpoint_every},
            "communication": CODECS[codec],
        }
    )


def run_job(
    least: int,
    counts: dict[str, int],
    codec: str,
    seed: int,
    place: Path,
    minutes: float,
    write: Callable[[dict[str, Any]], None],
) -> str:
    """Run one job and cause all its events; return a line with the result."""
    os.environ[HURRY] = str(place / "hurry")
    rounds = 20 + sum(count * ROUNDS[kind] for kind, count in counts.items())
    # The port is below the range that the system gives to clients, so it is still free when the server starts again.
    port = random.randint(20_000, 32_000)
    own = {"allow": ["kills"]}
    # By default, sites let a job start only twenty times.
    table = {"server": {"port": port, **own}, "least": least, "fewer": "wait", "policy": {"starts": 10_000}}
    sites = Sites.model_validate(table | {"site": dict.fromkeys(SITES, own)})
    spec, kits = spec_of(rounds, codec), place / "fed"
    provision(spec, sites, kits, base_dir=HERE)
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    random.Random(f"{seed} {least}").shuffle(kinds)
    with Processes(kits) as processes:
        deployment = Deployment(kits, processes)
        try:
            end = time.monotonic() + 60 * minutes
            for number, kind in enumerate(kinds):
                if time.monotonic() > end:
                    break
                write(happen(kind, deployment, random.Random(f"{seed} {least} {number}")))
            Path(os.environ[HURRY]).touch()
            if code := deployment.submitting.wait(60 + rounds):
                raise RuntimeError(f"submit ended with {code}:\n{(kits / 'submit.txt').read_text()[-4000:]}")
        finally:
            deployment.submitting.kill()
            deployment.submitting.wait()
        result = kits / "result"
        complete = [row["round"] for row in read_jsonl(result / "metrics.jsonl")] == list(range(1, rounds + 1))
        heads = {site: ledger.heads_of(deployment.folder / ledger.HEADS, site) for site in SITES}
        ledgers = {site: ledger.check(kits / site / ledger.PLACE, heads[site]) for site in SITES}
    lines = [f"{rounds} rounds, {'all there' if complete else 'NOT ALL THERE'}"]
    lines.append(
        "ledgers: " + "; ".join(f"{site} {'; '.join(each.problems) or 'whole'}" for site, each in ledgers.items())
    )
    if least == len(SITES):
        fs.run(spec_of(rounds, codec, checkpoint_every=0), out=place / "undisturbed")
        files = [folder / "model.safetensors" for folder in (result, place / "undisturbed")]
        same = files[0].read_bytes() == files[1].read_bytes()
        lines.append("the model is that of an undisturbed run" if same else "THE MODEL IS ANOTHER")
    return "; ".join(lines)


def table_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table with a row per kind: the number of events, and the median and the worst of each measurement."""
    lines = ["| what | times | missed after, s | rounds meanwhile | back after, s | rounds until then | kept |"]
    lines.append("|---|---|---|---|---|---|---|")
    for kind, codec in itertools.product(ROUNDS, CODECS):
        mine = [row for row in rows if row["kind"] == kind and row.get("codec", "none") == codec]
        if mine:
            cells = [_spread([row[key] for row in mine if key in row]) for key in
                     ("noticed", "rounds_meanwhile", "back", "rounds_to_back")]  # fmt: skip
            kept = sum(row["kept"] for row in mine)
            what = WORDS[kind] + (f"; {codec}" if CODECS[codec] else "")
            lines.append(f"| {what} | {len(mine)} | {' | '.join(cells)} | {kept} of {len(mine)} |")
    return lines


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.3g} (at most {max(values):.3g})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(ROUNDS))
    parser.add_argument("--codec", default="none", choices=CODECS)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="number of minutes per job during which processes are killed or stopped",
    )
    parser.add_argument("--place", type=Path, help="folder to keep kits and logs in (default: a temporary folder)")
    options = parser.parse_args()
    chosen = options.kinds.split(",")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(HERE))
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": [], "jobs": {}}
    name = "" if options.codec == "none" else f"{options.codec}: "
    about = {"codec": options.codec} if name else {}
    rows = [row for row in found["rows"] if row["kind"] not in chosen or row.get("codec") != about.get("codec")]
    for job in list(found["jobs"]):
        start, _, kinds = job.rpartition(": ")
        if start == name[:-2] and not set(chosen).isdisjoint(kinds.split(", ")):
            del found["jobs"][job]

    def write(row: dict[str, Any]) -> None:
        rows.append(about | {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
        print(rows[-1], flush=True)
        RESULTS.write_text(json.dumps({"rows": rows, "jobs": found["jobs"]}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as temporary:
        for least, kinds in JOBS.items():
            counts = {kind: max(1, options.times // FEWER.get(kind, 1)) for kind in kinds if kind in chosen}
            if counts:
                place = (options.place or Path(temporary)) / f"least-{least}"
                job = name + ", ".join(counts)
                found["jobs"][job] = run_job(least, counts, options.codec, options.seed, place, options.minutes, write)
                RESULTS.write_text(json.dumps({"rows": rows, "jobs": found["jobs"]}, indent=1) + "\n")
    print("\n".join([*table_of(rows), "", *(f"- {job}: {said}" for job, said in found["jobs"].items())]))


if __name__ == "__main__":
    main()
