"""A family of damaged messages, which may only cause a ``WireError``, and of runs whose clients send wrong replies."""

from __future__ import annotations

import json
import random
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import combinations
import numpy as np
import torch
from tests.fuzz.cases import RAN, REFUSED, Family, SilentDifferenceError, damaged
from tests.fuzz.corpus import MESSAGE_BYTES, messages
from torch import Tensor

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, WireError
from fedstrata.base.records import RECORDS
from fedstrata.clients.client import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Failure
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import Simulation, make_context

LIARS = 25
"""One in this many cases is a run in which clients send wrong replies."""

CODED: list[dict[str, Any]] = [
    {"up": "qsgd", "down": "qsgd"},
    {"up": {"name": "powersgd", "rank": 2}, "down": "bf16"},
    {"up": {"name": "top-k", "fraction": 0.3}, "down": {"name": "powersgd"}},
]
NUMBERS: list[Any] = [0, -1, 1, 2**31, 2**63 - 1, -(2**63), 2**64, 10**40, True, None, "1", 0.5]
FLOATS = [float("nan"), float("inf"), -float("inf"), 1e308, -1.0, 0.0, 5e-324]


def try_one(number: int, chance: random.Random, place: Path) -> str:
    """Try a message of the corpus, a damaged message, or a run whose clients send wrong replies."""
    known = list(MESSAGE_BYTES.values())
    if number < len(known):
        content = known[number]
    elif number % LIARS == 0:
        return lied_to(chance, place)
    else:
        content = mutated(chance)
    (place / "message.bin").write_bytes(content)
    try:
        tree = records.decode(content)
    except WireError:
        return REFUSED
    again = records.decode(records.encode(tree))
    if records.encode(again) != records.encode(tree):
        raise SilentDifferenceError("a message that was read is another one when it is sent on")
    return RAN


def mutated(chance: random.Random) -> bytes:
    """Return a message with damaged bytes, a changed JSON skeleton, or other values."""
    content = records.encode(chance.choice(messages()))
    kind = chance.randrange(3)
    if kind == 0:
        return damaged(content, chance)
    (length,) = struct.unpack_from("<Q", content)
    skeleton, block = json.loads(content[8 : 8 + length]), content[8 + length :]
    for _ in range(chance.randint(1, 3)):
        skeleton = rewritten(skeleton, chance)
    text = json.dumps(skeleton).encode()
    if kind == 2:
        text = damaged(text, chance)
    return struct.pack("<Q", len(text)) + text + block


def rewritten(node: Any, chance: random.Random) -> Any:
    """Replace a node of a JSON skeleton by another node."""
    if isinstance(node, dict) and node and chance.random() < 0.8:
        key = chance.choice(list(node))
        changed = dict(node)
        kind = chance.randrange(6)
        if kind == 0:
            del changed[key]
        elif kind == 1:
            changed[chance.choice(["$t", "$a", "$b", "$i", "$f", "$r", "$m", "$u", "", "f", "x"])] = changed.pop(key)
        elif kind == 2 and key == "$r":
            changed[key] = chance.choice([*RECORDS, "os.system", ""])
        else:
            changed[key] = rewritten(changed[key], chance)
        return changed
    if isinstance(node, list) and node and chance.random() < 0.8:
        place = chance.randrange(len(node))
        return [*node[:place], rewritten(node[place], chance), *node[place + 1 :]][: chance.choice([None, None, place])]
    return chance.choice(
        [*NUMBERS, "", "ü", [], {}, {"$t": 0}, {"$i": 0}, {"$f": -1}, {"$t": "i"}, [[[]]], {"$m": [[1, 2]]}, {"$u": []}]
    )


class Lying(LocalEngine):
    """A local engine that changes some replies of clients."""

    chance: random.Random

    def ask(self, requests: Any, *, together: bool, group: Any = None) -> Any:
        outcomes = dict(super().ask(requests, together=together, group=group))
        return {client: self._changed(outcome) for client, outcome in outcomes.items()}

    def hop(self, client: int, task: Any, weights: Any) -> Any:
        outcome = super().hop(client, task, weights)
        return outcome if isinstance(outcome, Failure) else (outcome[0], self._changed(outcome[1]))

    def _changed(self, outcome: Any) -> Any:
        if isinstance(outcome, Failure) or self.chance.random() < 0.5:
            return outcome
        return altered(outcome, self.chance)


def altered(tree: Any, chance: random.Random) -> Any:
    """Return a tree with one leaf, or the whole tree, replaced."""
    if chance.random() < 0.05:
        return chance.choice([*NUMBERS, *FLOATS, [], {}, torch.ones(2)])
    if hasattr(type(tree), "__dataclass_fields__"):
        fields = {name: getattr(tree, name) for name in type(tree).__dataclass_fields__}
        which = chance.choice(list(fields)) if fields else None
        if which is None:
            return tree
        fields[which] = altered(fields[which], chance)
        return type(tree)(**fields)
    if isinstance(tree, Mapping) and tree:
        which = chance.choice(list(tree))
        kind = chance.randrange(5)
        if kind == 0:
            return {key: item for key, item in tree.items() if key != which}
        if kind == 1:
            return {**tree, chance.choice(["", "x", 3, None]): tree[which]}
        return {**tree, which: altered(tree[which], chance)}
    if isinstance(tree, (list, tuple)) and tree:
        place = chance.randrange(len(tree))
        return type(tree)([*tree[:place], altered(tree[place], chance), *tree[place + 1 :]])
    if isinstance(tree, Tensor):
        return altered_tensor(tree, chance)
    if isinstance(tree, np.ndarray):
        return altered_tensor(torch.from_numpy(tree.copy()), chance).detach().to(torch.float64).numpy()
    return chance.choice([*NUMBERS, *FLOATS])


def altered_tensor(tensor: Tensor, chance: random.Random) -> Any:
    """Return a tensor with another shape, type or value."""
    changed = tensor.clone()
    kind = chance.randrange(8)
    if kind == 0:
        return changed.reshape(-1)[:-1] if changed.numel() else changed.new_ones(3)
    if kind == 1:
        return changed.to(
            chance.choice([torch.float64, torch.int8, torch.int64, torch.bool, torch.float16, torch.complex64])
        )
    if kind == 2:
        return changed.unsqueeze(0)
    if kind == 3:
        return chance.choice(
            [None, 1, "tensor", changed.numpy(), [changed], torch.empty(0), changed.to_sparse() if changed.dim() else 1]
        )
    if changed.numel() == 0:
        return changed.new_ones(2)
    flat = changed.view(-1) if changed.is_contiguous() else changed.reshape(-1)
    if changed.is_floating_point():
        wild = torch.tensor(chance.choice(FLOATS), dtype=torch.float64).to(changed.dtype)
        flat[chance.randrange(len(flat))] = wild
    elif changed.dtype == torch.bool:
        flat[chance.randrange(len(flat))] ^= True
    else:
        numbers = [-1, 0, 1, 10**6, 2**62, -(2**63)] if changed.dtype == torch.int64 else [1]
        flat[chance.randrange(len(flat))] = chance.choice(numbers)
    return flat.view(changed.shape)


def lied_to(chance: random.Random, place: Path) -> str:
    """Run two rounds with wrong replies: they must end, and the model must be finite."""
    space = chance.choice(combinations.SPACES)
    for _ in range(50):
        row = {factor: chance.choice(levels) for factor, levels in space.items()}
        row["availability"] = "always"
        if row.get("masking", "none") in ("none", "prf") and combinations.refusal(row) is None:
            break
    else:
        return REFUSED
    table = combinations.table_of(row)
    if chance.random() < 0.5 and row.get("method") != "sfl" and row.get("mode", "batch") == "batch":
        table["communication"] = chance.choice(CODED)
    (place / "table.json").write_text(json.dumps(table, default=str))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            prepared = prepare(fs.Experiment.from_table(table), data=combinations.data())
            engine = Lying(make_context(prepared), StateStore())
            engine.chance = chance
            with Simulation(prepared, engine) as simulation:
                for _ in range(2):
                    simulation.step()
                final = simulation.evaluated()
        except FedstrataError:
            return REFUSED
    for name, tensor in {**final.params, **final.buffers}.items():
        if not torch.isfinite(tensor).all():
            raise SilentDifferenceError(f"{name} is not finite any more")
    return RAN


FAMILY = Family("messages", try_one)
