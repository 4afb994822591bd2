"""Recover the prototypes that clients sent in a run, and the models with which the prototypes were computed.

A prototype is the mean feature vector of a client's samples of one class. A server sees the prototypes and the models,
but a checkpoint contains only each client's last prototypes, without the client's model. The rounds between the last
two checkpoints are therefore run again (a "replay"). The replayed prototypes are then compared with the prototypes in
the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.base import records
from fedstrata.base.errors import CheckpointError, SpecError
from fedstrata.base.records import Tree
from fedstrata.base.rng import rng
from fedstrata.clients.handlers.fit import BUFFERS
from fedstrata.clients.training.local import OBJECTIVE
from fedstrata.federation.messages import FitReply, Weights
from fedstrata.objectives.rebafl import Table
from fedstrata.runs import checkpoint
from fedstrata.runs.checkpoint import Checkpoint
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.simulation import Simulation

PROTOTYPES = "prototypes"
"""The key of the prototypes in a client's message."""


@dataclass(frozen=True)
class Sent:
    """The last prototypes of one client.

    Args:
        client: The id of the client.
        round: The round in which the client sent the prototypes.
        weights: The client's model, which the client sent together with the prototypes. The prototypes are class means
            of this model's features. With ``training.batch_norm = "local"``, the client did not send the statistics of
            BatchNorm. The audit's attacker then knows more than the server, because the attacker has these statistics.
        table: The prototypes ``means`` of all C classes, shape (C, d), and the number of ``samples`` of each class,
            shape (C,).
        difference: The largest difference between corresponding entries of ``table`` and of the checkpoint's
            prototypes, divided by the checkpoint's largest entry. The value is 0 if the replay gave the same
            prototypes.
    """

    client: int
    round: int
    weights: Weights
    table: Table
    difference: float


Watch = Callable[[int, int, str], None]
"""A function that shows progress.

The arguments are the number of finished steps, the total number of steps, and a description of the next step.
"""


def replay(prepared: Prepared, folder: Path, clients: int, seed: int, watch: Watch) -> list[Sent]:
    """Return, for each of several clients of a run, the last prototypes that the client sent.

    Args:
        prepared: The run's experiment.
        folder: The run folder.
        clients: The maximum number of clients. The clients are drawn from all clients that sent prototypes since the
            second-to-last checkpoint.
        seed: The seed of the draw.
        watch: A function that is called before every round, to show progress.

    Raises:
        SpecError: The clients of the run do not send or keep prototypes.
        CheckpointError: The run does not have a checkpoint, or the replay gives different messages.
    """
    _require_prototypes(prepared)
    before, last = last_checkpoints(folder)
    stored = _stored_tables(last, before, clients, seed)
    if not stored:
        since = f"after round {before.round}" if before else f"up to round {last.round}"
        problem = (
            f"no client stored the prototypes that it sent {since}. Set keep_prototypes = true, and audit a run in "
            "which clients take part more than once."
        )
        raise SpecError("keep_prototypes", problem).under("method")
    sent = _send_again(prepared, before, last.round, stored, watch)
    if not sent:
        first = before.round + 1 if before else 1
        problem = "cannot be replayed, because the run and the replay have prototypes of different clients. Use the "
        problem += "same data and the same version of fedstrata as in the run."
        raise CheckpointError(f"rounds {first} to {last.round} of {folder} {problem}")
    return sent


def last_checkpoints(folder: Path) -> tuple[Checkpoint | None, Checkpoint]:
    """Return the second-to-last checkpoint (None if there is only one checkpoint) and the last checkpoint of a run.

    Raises:
        CheckpointError: The run does not have a checkpoint, or is a deployment, in which sites keep clients' states.
    """
    last = checkpoint.load(folder / "checkpoint")
    if last is None:
        raise CheckpointError(f"{folder} does not have a checkpoint. Audit a run with evaluation.checkpoint_every > 0.")
    if last.remote:
        raise CheckpointError(
            f"{folder} is the run of a deployment, and does not contain the clients' messages. Audit a simulation."
        )
    return checkpoint.load(folder / "checkpoint", last=last.round - 1), last


def step_until(simulation: Simulation, until: int, watch: Watch) -> dict[str, Any]:
    """Run the rounds of a simulation up to and including round ``until``, and return the record of the last round."""
    begin, record = simulation.round, dict[str, Any]()
    while simulation.round < until:
        watch(simulation.round - begin, until - begin, f"replaying round {simulation.round + 1}")
        record = simulation.step()
    return record


def _require_prototypes(prepared: Prepared) -> None:
    spec, config = prepared.spec, prepared.config
    weights = Weights(config.model.params(), config.model.buffers())
    if PROTOTYPES not in spec.method.objective_in_use().expected(weights, config):
        problem = "does not send prototypes. Audit a run with the method or the objective 'rebafl', and with mu > 0."
        raise SpecError("method", problem, spec.method.name)


def _stored_tables(last: Checkpoint, before: Checkpoint | None, clients: int, seed: int) -> dict[int, Table]:
    """Read prototypes from the last checkpoint, for clients whose state changed since the second-to-last checkpoint.

    Args:
        last: The last checkpoint.
        before: The second-to-last checkpoint; None if it does not exist.
        clients: The maximum number of clients.
        seed: The seed with which the clients are drawn.

    Returns:
        A mapping from the id of each client to its prototypes.
    """
    old = before.clients if before else {}
    changed = sorted(client for client, path in last.clients.items() if path != old.get(client))
    tables: dict[int, Table] = {}
    for client in rng(seed, "audit-clients").permutation(changed).tolist():
        if len(tables) == clients:
            break
        table = records.decode(last.clients[client].read_bytes()).get(OBJECTIVE)
        if isinstance(table, Mapping) and table.keys() == {"means", "samples"} and (table["samples"] > 0).any():
            tables[client] = dict(table)
    return tables


def _send_again(
    prepared: Prepared, before: Checkpoint | None, until: int, stored: Mapping[int, Table], watch: Watch
) -> list[Sent]:
    """Repeat the rounds after a checkpoint, and return the last prototypes of the clients in ``stored``."""
    last: dict[int, tuple[int, Weights, Table]] = {}

    def listen(round: int, replies: Mapping[int, Any]) -> None:
        for client in replies.keys() & stored.keys():
            reply = replies[client]
            if isinstance(reply, FitReply) and PROTOTYPES in reply.message:
                last[client] = (round, reply.weights, reply.message[PROTOTYPES])

    with Simulation(prepared, "local", before, listener=listen) as simulation:
        step_until(simulation, until, watch)
        store = simulation.store
        return [
            Sent(client, round, _as_computed(store.get(client), weights), table, _difference(table, stored[client]))
            for client, (round, weights, table) in sorted(last.items())
        ]


def _as_computed(state: Mapping[str, Tree], weights: Weights) -> Weights:
    """Return the client's model, with the client's own BatchNorm statistics if the client stores such statistics."""
    return Weights(weights.params, {**weights.buffers, **state[BUFFERS]}) if BUFFERS in state else weights


def _difference(table: Table, stored: Table) -> float:
    largest = float(stored["means"].abs().max())
    return float((table["means"] - stored["means"]).abs().max()) / (largest or 1.0)
