"""Compute references for federated methods: local training of each client, and centralised training on all samples.

A reference shows how much federated training gains or loses, compared with training without federation. The runs of a
reference use the data, the model and the training settings of an experiment. Each run has only one client (the
partition ``SingleClient``). In ``centralised``, this client has the samples of all clients. In ``local``, each client
has a run with only its own samples. The function ``fold`` combines the runs of a reference into one run folder.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.base.errors import SpecError, not_among
from fedstrata.base.jsonl import MetricsLog, replace_file, write_json
from fedstrata.data.partitions.natural import SingleClient
from fedstrata.evaluation.evaluator import over_clients
from fedstrata.evaluation.history import History, Record, write_evaluations
from fedstrata.evaluation.metrics import nan_for_none
from fedstrata.federation.availability import Always
from fedstrata.methods.fedavg import FedAvg
from fedstrata.runs.preparation import Arrays, prepare
from fedstrata.runs.run_folder import METRICS, SPEC, SUMMARY
from fedstrata.spec.experiment import Experiment

REFERENCES = ("local", "centralised")
"""The names of references that ``compare(references=…)`` accepts."""

SHARED: dict[str, Callable[[Experiment], object]] = {
    "data": lambda spec: spec.data,
    "partition": lambda spec: spec.partition,
    "model": lambda spec: spec.model,
    "rounds, clients, local work and batches (training)": lambda spec: (
        spec.training.rounds,
        spec.training.clients_per_round,
        spec.training.local_epochs,
        spec.training.local_steps,
        spec.training.samples_per_step,
    ),
}
"""A mapping from the description of some settings to a function that returns the values of these settings.

The values must be the same in all compared experiments, because the experiments share one reference.
"""

SUMMED = ("samples", "seconds")
"""Columns that are summed over a reference's runs. Numbers of clients are also summed; other columns are averaged."""

MEASURED = ("test", "validation")
"""Two keys of a record. Their values are dicts of metrics."""

COMMUNICATION = ("exchanges", "hops", "bytes_up", "bytes_down")
"""The columns about communication. The runs of a reference do not communicate, so these columns are 0."""


def reference_runs(
    name: str, experiments: Mapping[str, Experiment], data: Arrays | None = None
) -> dict[str, Experiment]:
    """Return the experiments of a reference, as a mapping from the name of each run to its experiment.

    The name of a run is also the name of its folder. The only run of the reference ``centralised`` is named
    ``everything``. In each round, this run computes as many per-sample gradients as all invited clients together in an
    average federated round. The reference ``local`` has a run ``client-K`` for each client with samples. This client
    trains in every round. All other settings, such as the learning rate, come from the first experiment.

    Args:
        name: The name of the reference, such as ``local``.
        experiments: A mapping from labels to the experiments that are compared.
        data: Your own data; see ``prepare``.

    Raises:
        SpecError: The reference is unknown, or the experiments differ in one of the ``SHARED`` settings.
    """
    if name not in REFERENCES:
        raise SpecError("--references", not_among("is not a reference", name, REFERENCES), name)
    first = next(iter(experiments.values()))
    for description, setting in SHARED.items():
        if any(setting(spec) != setting(first) for spec in experiments.values()):
            raise SpecError(
                "--references",
                f"requires that all experiments have the same {description}. Make these settings equal, or remove the "
                "reference.",
                name,
            )
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
    """Return settings of ``training`` that give one client as much work per round as all invited clients together.

    Args:
        spec: The federated experiment.
        samples: The total number of training samples.
        clients: The number of clients.
    """
    training = spec.training
    invited = training.invited(clients)
    if training.local_steps is not None:
        return {"local_steps": training.local_steps * invited}
    if invited == clients:
        return {}
    gradients = training.epochs * samples * invited / clients
    return {"local_epochs": None, "local_steps": max(1, round(gradients / min(training.samples_per_step, samples)))}


def fold(name: str, folders: Sequence[Path], out: Path, lower: Collection[str] = ()) -> None:
    """Combine the runs of a reference into one run folder, as if the reference were a method.

    Samples, seconds and numbers of clients are summed over the runs, and communication is 0. Most other numbers are
    means over the runs. The columns ``accuracy_sd_clients`` and ``accuracy_min_clients`` are the standard deviation and
    the minimum of the accuracy over the clients.

    Args:
        name: The name of the reference.
        folders: The folders of the reference's runs.
        out: The run folder to write.
        lower: The metrics for which lower values are better.
    """
    histories = [History.load(folder) for folder in folders]
    records = [_combined(rounds, lower) for rounds in zip(*histories, strict=False)]
    first = histories[0]
    combined = History(
        records, method=name, seed=first.seed, targets=first.targets, lower=first.lower, primary=first.primary
    )
    kept = [saved for history in histories if (saved := history.saved) is not None]
    combined.kept = _combined(kept, lower) if kept else {}
    if untrained := [history for history in histories if history.warning]:
        combined.warning = f"{len(untrained)} of {len(histories)} runs of this reference: {untrained[0].warning}"
    # A client that trains alone has the number 0 in its run. Its number in the federation is in the folder's name.
    combined.clients = [
        {**row, "client": int(folder.name.removeprefix("client-"))}
        for folder, history in zip(folders, histories, strict=True)
        for row in history.clients
        if name == "local"
    ]
    write_evaluations(combined, out)
    new = out / "metrics.new"
    new.unlink(missing_ok=True)
    MetricsLog(new).append(*records)
    new.replace(out / METRICS)
    others = "; the specs of the other runs only differ in partition.only" if len(folders) > 1 else ""
    note = f"# The spec of {folders[0].name}{others}.\n"
    replace_file(out / SPEC, (note + (folders[0] / SPEC).read_text(encoding="utf-8")).encode())
    write_json(out / SUMMARY, combined.summary)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if all values are None."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _combined(records: Sequence[Record], lower: Collection[str]) -> Record:
    """Combine all runs' records of one round into one record; see ``fold``."""
    combined: Record = {"round": records[0]["round"]}
    for key in records[0]:
        values = [record.get(key) for record in records]
        if key in COMMUNICATION:
            combined[key] = 0
        elif all(value is None for value in values):
            combined[key] = None
        elif key not in combined and all(isinstance(value, (int, float)) for value in values):
            summed = key in SUMMED or key.startswith("clients_")
            combined[key] = sum(values) if summed else statistics.fmean(values)  # type: ignore[arg-type]
        elif key in MEASURED and all(values):
            labels = values[0] or {}
            combined[key] = {label: _mean([value[label] for value in values if value]) for label in labels}
    accuracies = [record["accuracy"] for record in records]
    if len(records) > 1 and combined["accuracy"] is not None:
        combined["accuracy_sd_clients"] = statistics.pstdev(accuracies)
        combined["accuracy_min_clients"] = min(accuracies)
    if len(records) > 1 and all("clients" in record for record in records):
        by_client = [record["clients"] for record in records]
        labels = [label for label in by_client[0] if label != "unheard"]
        means = np.array([[nan_for_none(metrics[label]["mean"]) for label in labels] for metrics in by_client])
        higher = np.array([label not in lower for label in labels])
        combined["clients"] = dict(zip(labels, over_clients(means, np.ones(len(means)), higher), strict=True))
        for statistic in combined["clients"].values():
            del statistic["weighted_mean"]  # The records do not contain the weights for this mean.
    return combined
