"""What federated methods are to be measured against: training without the others, and training without borders.

Both are ordinary runs of an experiment's own data, model and training, with a partition ``SingleClient``: of all
clients' samples (``centralised``), or of one client's alone (``local``, a run for each). ``fold`` makes a row of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.base.errors import SpecError, nearest
from fedstrata.base.jsonl import MetricsLog, replace_file, write_json
from fedstrata.data.partitions import SingleClient
from fedstrata.evaluation.evaluator import over_clients
from fedstrata.evaluation.history import History, Record
from fedstrata.evaluation.metrics import nan_for_none
from fedstrata.federation.availability import Always
from fedstrata.methods.fedavg import FedAvg
from fedstrata.runs.preparation import Arrays, prepare
from fedstrata.runs.run_folder import METRICS, SPEC, SUMMARY
from fedstrata.spec.experiment import Experiment

REFERENCES = ("local", "centralised")
"""What ``compare(references=…)`` takes."""

WHAT_COUNTS: dict[str, Callable[[Experiment], object]] = {
    "data": lambda spec: spec.data,
    "partition": lambda spec: spec.partition,
    "model": lambda spec: spec.model,
    "rounds, clients, local work and batches (training)": lambda spec: (
        spec.training.rounds,
        spec.training.clients_per_round,
        spec.training.local_epochs,
        spec.training.local_steps,
        spec.training.batch_size,
    ),
}
"""What experiments must share that are measured against one reference."""

SUMMED = ("samples", "seconds")
"""What clients that train alone do together, beside counts of clients; other numbers are averaged over them."""

MEASURED = ("test", "validation")
"""Tables of metrics."""

UNSENT = ("exchanges", "hops", "bytes_up", "bytes_down")
"""What nobody does who trains alone."""


def reference_runs(
    name: str, experiments: Mapping[str, Experiment], data: Arrays | None = None
) -> dict[str, Experiment]:
    """The runs of a reference, by the names of their folders.

    ``centralised``: ``everything``, with as many sample-gradients a round as the clients that a round invites compute
    together, on average. ``local``: ``client-K`` for every client, which trains in every round as if it were invited.
    What else decides training, such as the learning rate, is the first experiment's.

    Args:
        name: Which of ``REFERENCES``.
        experiments: What is compared.
        data: Data of your own; see ``prepare``.

    Raises:
        SpecError: There is no such reference, or the experiments differ in data, partition, model or work.
    """
    if name not in REFERENCES:
        raise SpecError("--references", f"there are: {', '.join(REFERENCES)}{nearest(name, REFERENCES)}", name)
    first = next(iter(experiments.values()))
    for key, what in WHAT_COUNTS.items():
        if any(what(spec) != what(first) for spec in experiments.values()):
            raise SpecError("--references", f"measures experiments of the same {key}; these differ in it", name)
    sizes = prepare(first, data=data).assignment.sizes
    budget = _budget(first, int(sizes.sum()), len(sizes)) if name == "centralised" else {}

    def alone(partition: SingleClient) -> Experiment:
        training = first.training.model_copy(update={"clients_per_round": 1, **budget})
        changed = {"method": FedAvg(), "availability": Always(), "partition": partition, "training": training}
        return first.model_copy(update=changed)

    if name == "centralised":
        return {"everything": alone(SingleClient(of=first.partition))}
    holders = [client for client, size in enumerate(sizes.tolist()) if size]
    return {f"client-{client}": alone(SingleClient(of=first.partition, only=client)) for client in holders}


def _budget(spec: Experiment, samples: int, clients: int) -> dict[str, Any]:
    """A round's local work of the one client that holds everything."""
    training = spec.training
    invited = training.invited(clients)
    if training.local_steps is not None:
        return {"local_steps": training.local_steps * invited}
    if invited == clients:
        return {}
    gradients = training.epochs * samples * invited / clients
    return {"local_epochs": None, "local_steps": max(1, round(gradients / min(training.batch_size, samples)))}


def fold(name: str, folders: Sequence[Path], out: Path, lower: Collection[str] = ()) -> None:
    """Write the run folder of a reference, as if it were a method.

    A number that all its runs record is their mean; samples, seconds and counts of clients are their sum, and nothing
    is sent. ``accuracy_sd_clients`` and ``accuracy_min_clients`` are the standard deviation over clients and the least.

    Args:
        name: The reference.
        folders: Its runs' folders.
        out: Where to.
        lower: The metrics of which the lower value is the better one.
    """
    histories = [History.load(folder) for folder in folders]
    records = [_together(rounds, lower) for rounds in zip(*histories, strict=False)]
    whole = History(records, method=name, seed=histories[0].seed, targets=histories[0].targets)
    if untrained := [history for history in histories if history.warning]:
        whole.warning = f"{len(untrained)} of its {len(histories)} runs: {untrained[0].warning}"
    new = out / "metrics.new"
    new.unlink(missing_ok=True)
    MetricsLog(new).append(*records)
    new.replace(out / METRICS)
    others = "; the others differ in partition.only alone" if len(folders) > 1 else ""
    note = f"# The spec of {folders[0].name}{others}.\n"
    replace_file(out / SPEC, (note + (folders[0] / SPEC).read_text(encoding="utf-8")).encode())
    write_json(out / SUMMARY, whole.summary)


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of what there is, as of a metric that has no value for some."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _together(records: Sequence[Record], lower: Collection[str]) -> Record:
    """One round of all clients."""
    found: Record = {"round": records[0]["round"]}
    for key in records[0]:
        values = [record.get(key) for record in records]
        if key in UNSENT:
            found[key] = 0
        elif all(value is None for value in values):
            found[key] = None
        elif key not in found and all(isinstance(value, (int, float)) for value in values):
            summed = key in SUMMED or key.startswith("clients_")
            found[key] = sum(values) if summed else statistics.fmean(values)  # type: ignore[arg-type]
        elif key in MEASURED and all(values):
            labels = values[0] or {}
            found[key] = {label: _mean([value[label] for value in values if value]) for label in labels}
    accuracies = [record["accuracy"] for record in records]
    if len(records) > 1 and found["accuracy"] is not None:
        found["accuracy_sd_clients"] = statistics.pstdev(accuracies)
        found["accuracy_min_clients"] = min(accuracies)
    if len(records) > 1 and all("clients" in record for record in records):  # each on its own test part
        own = [record["clients"] for record in records]
        labels = [label for label in own[0] if label != "unheard"]
        each_own = np.array([[nan_for_none(each[label]["mean"]) for label in labels] for each in own])
        higher = np.array([label not in lower for label in labels])
        found["clients"] = dict(zip(labels, over_clients(each_own, np.ones(len(own)), higher), strict=True))
        for each in found["clients"].values():
            del each["weighted_mean"]  # for a record does not tell the weights
    return found
