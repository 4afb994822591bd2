"""What clients sent in a run: prototypes, and the models under which they were computed.

A server sees both. A checkpoint holds the prototypes that a client sent last, not its model: so the rounds between
the last two checkpoints are played again, exactly as they were, and what comes out is compared with what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.base import records
from fedstrata.base.errors import CheckpointError, SpecError
from fedstrata.base.records import Tree
from fedstrata.base.rng import rng
from fedstrata.clients.handlers.fit import BUFFERS, OBJECTIVE
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.objectives.prototypes import Table
from fedstrata.runs import checkpoint
from fedstrata.runs.checkpoint import Checkpoint
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.simulation import Simulation

PROTOTYPES = "prototypes"
"""What an objective calls its table in a message."""


@dataclass(frozen=True)
class Sent:
    """The last prototypes of one client.

    Args:
        client: Whose.
        round: When they were sent.
        weights: The client's model, of whose features the prototypes are class means. It was sent with them, but for
            BatchNorm's statistics where clients keep these (``training.batch_norm = "local"``): an attacker who has
            them too knows more than the server does.
        table: ``means`` (C, d) and ``samples`` (C,).
        difference: Largest difference from what the run's checkpoint holds, relative to its largest entry: 0 where
            the rounds played again were the same to the bit.
    """

    client: int
    round: int
    weights: Weights
    table: Table
    difference: float


Watch = Callable[[int, int, str], None]
"""Told how much is done, of how much, and what comes now."""


def replay(prepared: Prepared, folder: Path, clients: int, seed: int, watch: Watch) -> list[Sent]:
    """What some clients sent last.

    Args:
        prepared: The run's experiment.
        folder: The run's folder.
        clients: How many clients at most; drawn from those that sent prototypes since the checkpoint before the last.
        seed: Of that draw.
        watch: Told of every round.

    Raises:
        SpecError: The run sends or keeps no prototypes.
        CheckpointError: It has no checkpoint.
    """
    _require_prototypes(prepared)
    last = checkpoint.load(folder / "checkpoint")
    if last is None:
        raise CheckpointError(f"{folder} has no checkpoint; the audit needs a run with evaluation.checkpoint_every > 0")
    if last.remote:
        raise CheckpointError(f"{folder} is a run over sites, which keep what they sent; the audit needs a local run")
    before = checkpoint.load(folder / "checkpoint", last=last.round - 1)
    stored = _chosen(last, before, clients, seed)
    if not stored:
        since = f"after round {before.round}" if before else f"up to round {last.round}"
        problem = f"no client kept prototypes that it sent {since}; the audit needs true, and clients that returned"
        raise SpecError("keep_prototypes", problem).under("method")
    heard = _play(prepared, before, last.round, stored, watch)
    if not heard:
        first = before.round + 1 if before else 1
        problem = "other clients sent prototypes now than then; was it run with data of its own, or by another version?"
        raise CheckpointError(f"rounds {first} to {last.round} of {folder} cannot be played again: {problem}")
    return [
        Sent(client, round, weights, table, _difference(table, stored[client]))
        for client, (round, weights, table) in sorted(heard.items())
    ]


def _require_prototypes(prepared: Prepared) -> None:
    spec, config = prepared.spec, prepared.config
    weights = Weights(config.model.params(), config.model.buffers())
    if PROTOTYPES not in spec.method.objective_in_use().expected(weights, config):
        problem = "sends no prototypes; rebafl and the objective 'rebafl' do, with mu > 0"
        raise SpecError("method", problem, spec.method.name)


def _chosen(last: Checkpoint, before: Checkpoint | None, clients: int, seed: int) -> dict[int, Table]:
    """The stored tables of clients whose state changed after ``before``."""
    old = before.clients if before else {}
    fresh = sorted(client for client, path in last.clients.items() if path != old.get(client))
    found: dict[int, Table] = {}
    for client in rng(seed, "audit-clients").permutation(fresh).tolist():
        if len(found) == clients:
            break
        table = records.decode(last.clients[client].read_bytes()).get(OBJECTIVE)
        if isinstance(table, Mapping) and table.keys() == {"means", "samples"} and (table["samples"] > 0).any():
            found[client] = dict(table)
    return found


def _play(
    prepared: Prepared, before: Checkpoint | None, until: int, clients: Collection[int], watch: Watch
) -> dict[int, tuple[int, Weights, Table]]:
    heard: dict[int, tuple[int, Weights, Table]] = {}

    def listen(round: int, replies: Mapping[int, Any]) -> None:
        for client in replies.keys() & clients:
            reply = replies[client]
            if isinstance(reply, FitReply) and PROTOTYPES in reply.message:
                heard[client] = (round, reply.weights, reply.message[PROTOTYPES])

    begin = before.round if before else 0
    with Simulation(prepared, found=before, listener=listen) as simulation:
        while simulation.round < until:
            done = simulation.round - begin
            watch(done, until - begin, f"round {simulation.round + 1} again")
            simulation.step()
        return {
            client: (round, _as_computed(simulation.store.get(client), weights), table)
            for client, (round, weights, table) in heard.items()
        }


def _as_computed(state: Mapping[str, Tree], weights: Weights) -> Weights:
    """The model under which a client computed its prototypes: with its own statistics, where it keeps them."""
    return Weights(weights.params, {**weights.buffers, **state[BUFFERS]}) if BUFFERS in state else weights


def _difference(table: Table, stored: Table) -> float:
    largest = float(stored["means"].abs().max())
    return float((table["means"] - stored["means"]).abs().max()) / (largest or 1.0)
