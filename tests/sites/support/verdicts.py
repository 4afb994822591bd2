"""Compute the verdicts of a site's guard on requests that differ a little ("mutants") from those of a real run.

    python tests/sites/support/verdicts.py     # writes tests/hostile/verdicts.json.gz again

The requests of a short run of each job are recorded as they are sent. They are changed in this form, by the names of
records and fields, so that the same changes are possible after classes have moved or lost fields. A seed, and the
fields that existed when the file was written, determine each change. A request that cannot be built counts as refused.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import random
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from site_engine import make_site_engine
from torch import Tensor

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import WireError
from fedstrata.federation.messages import Request
from fedstrata.runs.identity import environment
from fedstrata.runs.preparation import Prepared
from fedstrata.sites.disclosure import declaration_of
from fedstrata.sites.guard import Guard, Quota
from fedstrata.sites.policy import RuleError
from fedstrata.sites.settings import SiteSettings
from fedstrata.sites.site_server import SERVER, SiteServer
from fedstrata.sites.sums import Sums

FILE = Path(__file__).parents[2] / "hostile" / "verdicts.json.gz"
CLIENTS, ROUNDS = 4, 2
MUTANTS = 1500
"""The number of mutants for each job and phase."""
PHASES = ("enrolment", "round", "evaluation")
RULES = {"kind": "k", "rounds": "r", "phase": "p", "bounds": "b", "repeat": "t", "order": "o"}
ACCEPTED, UNREADABLE = "A", "w"

STRATIFY = {"name": "stratify", "cap": 15}
JOBS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in ("fedavg", "fedprox", "scaffold", "fedsampling", "fedssar", "clustered")},
    **{name: {"method": name} for name in ("power-of-choice", "sfl", "rebafl", "feddyn", "moon", "fedrs", "fedlc")},
    **{name: {"method": name} for name in ("fedbabu", "bsm-fedavg")},
    "fedavg-ft": {
        "method": {"name": "fedavg-ft", "per_class": 2},
        "data": {"name": "digits", "limit": 400},
        "partition": {"name": "classes", "per_client": 3, "clients": CLIENTS, "size": 16},
    },
    "fedsts": {"method": {"name": "fedsts", "strata": 2}},
    "fedstas": {"method": {"name": "fedstas", "strata": 2, "epsilon": 3.0, "bound": 200}},
    "fedtan": {"method": "fedtan", "model": "resnet20", "training": {"local_steps": 1, "batch_size": 8}},
    "stratify": {"method": STRATIFY},
    "stratify, local steps": {"method": STRATIFY | {"local_steps": 2}},
    "stratify, single": {"method": STRATIFY | {"mode": "single"}},
    "stratify, hybrid": {"method": STRATIFY | {"mode": "hybrid"}},
    "stratify, prf": {"method": STRATIFY | {"masking": "prf"}},
    "stratify, ckks": {"method": STRATIFY | {"masking": "ckks"}},
    "top-k": {"method": "fedavg", "communication": {"up": {"name": "top-k", "fraction": 0.05}}},
    "powersgd": {"method": "fedavg", "communication": {"up": {"name": "powersgd", "rank": 2}}},
    "powersgd, stratify": {"method": STRATIFY, "communication": {"up": {"name": "powersgd", "rank": 2}}},
}


def spec_of(job: str) -> fs.Experiment:
    table = JOBS[job]
    training = {"rounds": ROUNDS, "clients_per_round": 3, "batch_size": 16, "execution": "per-client"}
    training |= table.get("training", {})
    return fs.Experiment.from_table(
        {
            "seed": 5,
            "data": {"name": "digits", "limit": 160},
            "partition": {"name": "dirichlet", "alpha": 1.0, "clients": CLIENTS},
            "model": {"name": "mlp", "hidden": [8]},
            "evaluation": {"every": 1, "client_test": 0.3, "fine_tune": 1},
            **table,
            "training": training | ({} if "local_steps" in training else {"local_epochs": 1}),
        }
    )


# The wire form of a record: its JSON skeleton, with the numbers and tensors put back into it.


@dataclass(frozen=True)
class Block:
    """A tensor ($t), an array ($a) or bytes ($b)."""

    kind: str
    tensor: Tensor


def parse(data: bytes, *, whole: bool = False) -> Any:
    """Return the wire form of a record; unless ``whole``, only the first elements of bytes and large tensors."""
    (length,) = struct.unpack_from("<Q", data)
    skeleton, block = json.loads(data[8 : 8 + length]), data[8 + length :]
    tensors = safetensors.torch.load(block) if block else {}
    numbers = {f"${key}": tensors[key].tolist() if key in tensors else [] for key in ("i", "f")}

    def filled(node: Any) -> Any:
        if isinstance(node, list):
            return [filled(item) for item in node]
        if not isinstance(node, dict):
            return node
        if len(node) == 1:
            ((key, value),) = node.items()
            if key in numbers:
                return numbers[key][value]
            if key in ("$t", "$a", "$b"):
                tensor = tensors[str(value)]
                large = not whole and (key == "$b" or tensor.numel() > 1000)
                return Block(
                    key, tensor.flatten()[:16] if large else tensor
                )  # guards do not read models or ciphertexts
        return {key: filled(item) for key, item in node.items()}

    return filled(skeleton)


def unparse(tree: Any) -> bytes:
    ints: list[int] = []
    floats: list[float] = []
    tensors: dict[str, Tensor] = {}

    def taken(node: Any) -> Any:
        if isinstance(node, Block):
            tensors[str(len(tensors))] = node.tensor.clone().contiguous()
            return {node.kind: len(tensors) - 1}
        if isinstance(node, list):
            return [taken(item) for item in node]
        if isinstance(node, dict):
            return {key: taken(item) for key, item in node.items()}
        if isinstance(node, float):
            floats.append(node)
            return {"$f": len(floats) - 1}
        if isinstance(node, int) and not isinstance(node, bool) and -(2**63) <= node < 2**63:
            ints.append(node)
            return {"$i": len(ints) - 1}
        return node

    text = json.dumps(taken(tree), separators=(",", ":")).encode()
    named = tensors | ({"i": torch.tensor(ints)} if ints else {})
    named |= {"f": torch.tensor(floats, dtype=torch.float64)} if floats else {}
    return struct.pack("<Q", len(text)) + text + (safetensors.torch.save(named) if named else b"")


# The recording of a run.


@dataclass(frozen=True)
class Asked:
    """A request of the run and its answer, in the wire form."""

    client: int
    request: Any
    reply: Any
    relay: bool
    together: bool


def recorded(job: str, folder: Path) -> tuple[Prepared, list[Asked]]:
    """Run a job, and return the requests to a site that has all clients."""
    spec = spec_of(job)
    prepared, sums, tape = fs.prepare(spec), Sums(60.0), list[Asked]()
    site_server = SiteServer("a", folder, lambda target, data: sums.add_up("a", data), SiteSettings())

    class Transport:
        def is_reachable(self, site: str) -> bool:
            return True

        def send(self, site: str, data: bytes, patience: float, number: int) -> object:
            body, answer = parse(data)["f"]["body"], site_server.call(SERVER, data)
            asked, said = body["f"], parse(answer)["f"]
            if body["$r"] == "Ask":
                for client, which, reply in zip(asked["clients"], asked["which"], said["outcomes"], strict=True):
                    tape.append(Asked(client, asked["requests"][which], reply, False, bool(asked["group"])))
            elif body["$r"] == "Hop":
                tape.append(Asked(asked["client"], asked["task"], said.get("reply"), True, False))
            return answer

    engine = make_site_engine(prepared.config, Transport(), ["a"] * CLIENTS, sums, spec=spec.to_toml(), run="run")
    with fs.Simulation(prepared, engine) as simulation:
        for _ in simulation:
            pass
    return prepared, tape


# The mutations. A mutation depends only on the seed, ``fields`` and the recorded values.


def field_names(tape: list[Asked]) -> dict[str, list[str]]:
    """Return a mapping from the wire name of every record in the requests to its fields."""
    found: dict[str, list[str]] = {}

    def look(node: Any) -> None:
        if isinstance(node, dict):
            if "$r" in node:
                found.setdefault(node["$r"], list(node["f"]))
            node = list(node.values())
        if isinstance(node, list):
            for item in node:
                look(item)

    look([each.request for each in tape])
    return found


def changed(node: Any, chance: random.Random, fields: Mapping[str, list[str]]) -> Any:
    """Return a wire form with one change.

    Raises:
        KeyError: The field to change does not exist any more.
    """
    if isinstance(node, dict) and "$r" in node:
        names, way = fields[node["$r"]], chance.random()
        if way < 0.04:
            return {**node, "$r": chance.choice(list(fields))}
        if way < 0.08 or not names:
            return {**node, "f": {**node["f"], "extra": 1}}
        name = chance.choice(names)
        if name not in node["f"]:
            raise KeyError(name)
        if way < 0.1:
            return {**node, "f": {key: item for key, item in node["f"].items() if key != name}}
        return {**node, "f": {**node["f"], name: changed(node["f"][name], chance, fields)}}
    if isinstance(node, dict) and "$u" in node and node["$u"]:
        return {"$u": changed(node["$u"], chance, fields)}
    if isinstance(node, dict):
        key = chance.choice([*node, "x"])
        others = {k: item for k, item in node.items() if k != key}
        if key in node and chance.random() < 0.5:
            return {**node, key: changed(node[key], chance, fields)}
        return chance.choice([others, {}, {**others, key: 0}, None])
    if isinstance(node, list):
        place = chance.randrange(len(node) + 1)
        if place < len(node) and chance.random() < 0.7:
            return [*node[:place], changed(node[place], chance, fields), *node[place + 1 :]]
        return chance.choice([node[:-1], [], [*node, *node[:1]], [*node, 0], None])
    if isinstance(node, Block):
        return changed_tensor(node, chance)
    if isinstance(node, bool):
        return chance.choice([not node, not node, not node, int(not node), None])
    if isinstance(node, int):
        near = [node + 1, node - 1, node + 2, 0, 1, 2, -1, -node - 1, 2 * node, 2**31, 2**62, -(2**63), 2**70]
        return chance.choice([*near, float(node), math.nan, True, str(node), None])
    if isinstance(node, float):
        near = [math.nextafter(node, math.inf), math.nextafter(node, -math.inf), node / 2, 2 * node, 1 - node]
        return chance.choice([*near, 0.0, 0.5, 1.0, 1e-9, 2.0, -node - 1, -0.0, math.inf, math.nan, 1, None])
    if isinstance(node, str):
        return chance.choice(["", node + "x", node.upper(), "test", "validation", "train", 0, None])
    return chance.choice([0, 1, 0.5, "", [], {}, True])


def changed_tensor(block: Block, chance: random.Random) -> Any:
    tensor, way = block.tensor, chance.randrange(13)
    flat = tensor.reshape(-1)
    if way == 0:
        return Block(block.kind, flat[:0])
    if way == 1:
        return Block(block.kind, flat[:-1])
    if way == 2:
        return Block(block.kind, torch.cat([flat, flat[:1]]))
    if way == 3:
        return Block(block.kind, torch.cat([flat, flat]))
    if way == 4:
        return Block(block.kind, tensor.unsqueeze(0))
    if way == 5:
        return Block(block.kind, flat[:1].reshape(-1)[0] if len(flat) else tensor)
    if way == 6:
        return Block(block.kind, tensor.to(chance.choice([torch.float32, torch.int32, torch.int64, torch.float64])))
    if way == 7:
        return Block(block.kind, torch.zeros_like(tensor))
    if way == 8:
        return Block(block.kind, tensor + 1 if tensor.dtype != torch.bool else ~tensor)
    if way == 9:
        return Block(block.kind, tensor - 1 if tensor.dtype not in (torch.bool, torch.uint8) else tensor.flip(0))
    if way == 10:
        return Block(block.kind, flat.flip(0))
    if way == 11:
        return Block(chance.choice(["$t", "$a", "$b"]), flat)
    return chance.choice([None, 0, [], ""])


def mutant(seed: str, place: int, tape: list[Asked], fields: Mapping[str, list[str]]) -> Asked:
    """Return a mutant to send instead of the request with index ``place`` in the run.

    Raises:
        KeyError: The mutant cannot be built any more.
    """
    chance = random.Random(seed)
    other = chance.choice([place] * 6 + [max(0, place - 1), chance.randrange(place + 1), chance.randrange(len(tape))])
    found, way = tape[other], chance.random()
    client, request, relay, together = found.client, found.request, found.relay, found.together
    if other == place or way < 0.3:
        for _ in range(chance.choice([1, 1, 1, 2])):
            request = changed(request, chance, fields)
    if chance.random() < 0.15:
        client = chance.choice([*range(CLIENTS), -1, CLIENTS])
    if chance.random() < 0.04:
        relay = not relay
    if chance.random() < 0.04:
        together = not together
    return Asked(client, request, None, relay, together)


# The verdicts.


def verdict(guard: Guard, asked: Asked) -> str:
    """Return the verdict of a guard on a request as a letter; see ``RULES``, ``ACCEPTED`` and ``UNREADABLE``."""
    try:
        request = records.decode(unparse(asked.request))
    except WireError:
        return UNREADABLE
    if not 0 <= asked.client < CLIENTS or not isinstance(request, Request):
        return UNREADABLE
    try:
        guard.check(asked.client, request, relay=asked.relay, together=asked.together)
    except RuleError as error:
        return RULES[error.rule]
    return ACCEPTED


def places_of(phases: list[str]) -> Iterator[tuple[int, str, int]]:
    """Yield for each request of the run its index, its phase and its number of mutants."""
    for place, phase in enumerate(phases):
        many, nth = phases.count(phase), phases[:place].count(phase)
        yield place, phase, MUTANTS * (nth + 1) // many - MUTANTS * nth // many


@dataclass
class Found:
    """The results of one job.

    Args:
        tape: A text that identifies the sequence of requests in the run, without their contents.
        fields: The fields that could be changed.
        verdicts: A mapping from each phase to the letters of its mutants.
    """

    tape: str
    fields: dict[str, list[str]]
    verdicts: dict[str, str]


def judged(job: str, fields: dict[str, list[str]] | None = None) -> Found:
    """Return the verdicts on all mutants of a job.

    Args:
        job: The name of the job.
        fields: The fields that existed when the file was written. Default: the current fields.
    """
    with tempfile.TemporaryDirectory() as folder:
        prepared, tape = recorded(job, Path(folder))
        fields = field_names(tape) if fields is None else fields
        declared = declaration_of(prepared.spec, agreed=prepared.config, own_data=False)
        phases = replayed(Guard(declared, None, Quota(Path(folder), "phases")), tape)
        guard, found = Guard(declared, None, Quota(Path(folder), "job")), dict[str, list[str]]()
        for place, phase, many in places_of(phases):
            letters = found.setdefault(phase, [])
            for number in range(many):
                try:
                    asked = mutant(f"{job} {place} {number}", place, tape, fields)
                except KeyError:
                    letters.append(UNREADABLE)
                else:
                    letters.append(verdict(guard, asked))
            replayed(guard, tape[place : place + 1])
    names = [[each.client, each.request["$r"], each.relay, each.together] for each in tape]
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    return Found(digest, fields, {phase: "".join(letters) for phase, letters in found.items()})


def replayed(guard: Guard, tape: list[Asked]) -> list[str]:
    """Let a guard check requests of the run, all of which it accepts; return their phases."""
    phases = []
    for asked in tape:
        match = guard.check(
            asked.client, records.decode(unparse(asked.request)), relay=asked.relay, together=asked.together
        )
        assert match is not None
        guard.take(match)
        if asked.reply is not None and asked.reply["$r"] != "Failed":
            guard.answered(match, records.decode(unparse(asked.reply)))
        phases.append(str(match.allowed.rule.phase))
    return phases


def made_on() -> dict[str, str]:
    """Return the parts of the environment on which the choice of clients may depend."""
    return {key: environment()[key] for key in ("torch", "processor")}


def known() -> dict[str, Any]:
    """Return the content of the file with verdicts."""
    content: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return content


def main() -> None:
    found = {}
    for job in sys.argv[1:] or JOBS:
        found[job] = vars(judged(job))
        counts = {p: {c: v.count(c) for c in sorted(set(v))} for p, v in found[job]["verdicts"].items()}
        print(job, counts, flush=True)
    if not sys.argv[1:]:
        text = json.dumps({"made_on": made_on(), "jobs": found}).encode()
        FILE.write_bytes(gzip.compress(text, mtime=0))


if __name__ == "__main__":
    main()
