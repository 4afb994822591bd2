"""Prepare an experiment: load the data, split them among clients, build the model, and check all settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.config import under
from fedstrata.base.errors import SpecError
from fedstrata.base.inputs import described, each
from fedstrata.clients.training.steps import try_optimizer
from fedstrata.data.dataset import Dataset, Split, from_arrays
from fedstrata.data.fitting import Statistics, fit, fit_targets
from fedstrata.data.partitions.base import Assignment, Partition
from fedstrata.data.partitions.natural import SingleClient
from fedstrata.data.partitions.server_data import ServerData
from fedstrata.data.sources import Data
from fedstrata.evaluation.holdouts import NATURAL, HeldOut, cut_validation, hold_out, natural_tests, without
from fedstrata.evaluation.predictions import collect
from fedstrata.federation.attacks import Attack
from fedstrata.federation.availability import Population
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.messages import Weights
from fedstrata.methods.base import Method
from fedstrata.methods.recipe import Recipe
from fedstrata.models.batchnorm import federate_batchnorm
from fedstrata.models.memory_format import lay_out
from fedstrata.models.model import Model
from fedstrata.models.probe import draws_random_numbers
from fedstrata.models.zoo import CustomModel, OwnModel, Trial, make_model, own_module
from fedstrata.objectives.base import is_plain
from fedstrata.runs.client_checks import check_client_privacy
from fedstrata.runs.dp_checks import check_privacy
from fedstrata.runs.identity import about_data, about_model, identity_of
from fedstrata.runs.secure_checks import check_secure_sums, with_parties
from fedstrata.spec.experiment import Experiment

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
Arrays = Dataset | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class Prepared:
    """An experiment that has been checked and is ready to run.

    Args:
        spec: The experiment.
        data: The data set.
        assignment: The training samples of each client.
        config: The configuration that the server and the clients share.
        held: The samples that are not used in training, such as validation samples.
    """

    spec: Experiment
    data: Dataset
    assignment: Assignment
    config: FederationConfig
    held: HeldOut = field(default_factory=HeldOut)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The run's identity, which must be unchanged when the run is resumed; see ``fedstrata.runs.identity``."""
        return identity_of(self.spec, self.data, self.config.model, self.assignment)


def prepare(spec: Experiment, *, data: Arrays | None = None, model: OwnModel | None = None) -> Prepared:
    """Load the data, split them among the clients, build the model, and check all settings, without writing files.

    Args:
        spec: The experiment.
        data: Your own data, which replace the data in the spec: a ``Dataset``, a tuple ``(x_train, y_train, x_test,
            y_test)``, or a mapping with these keys.
        model: Your own model, which replaces the model in the spec. Pass the module's class, or a function that creates
            the module, so that the seed determines the initial parameters; see ``fedstrata.models.zoo.own_module``. If
            you pass a module object, training starts from the object's parameters, whatever the seed.

    Raises:
        SpecError: A setting does not fit the data, the federation or another setting.
        DataError: The data are missing or damaged.
    """
    if data is None:
        dataset = spec.data.load(spec.seed, spec.task)
    else:
        dataset = as_dataset(data, spec)
        custom = Data("custom", custom=about_data(dataset), augment=spec.data.augment)
        spec = spec.model_copy(update={"data": custom})
    spec = spec.with_task(dataset.task)
    share, validation = spec.evaluation.validation, None
    divided, numbers = dataset, None
    if share is not None and spec.partition.name not in NATURAL:
        validation = cut_validation(dataset, share, spec.seed)
        divided, numbers = without(dataset, validation)
    if dataset.task.fits:
        # The partition may need strata, such as ranges of the target. Compute them from all samples, because it is not
        # known yet which client trains on which samples.
        divided = fit_targets(divided, [np.arange(divided.train_size)])

    def split(partition: Partition) -> Assignment:
        parts = under("partition", lambda: partition.split(divided, spec.seed))
        return parts if numbers is None else replace(parts, indices=numbers[parts.indices])

    assignment, whole = split(spec.partition), spec.partition
    while isinstance(whole, SingleClient):
        whole = whole.of
    fitting = None if dataset.unfitted is None else assignment if whole is spec.partition else split(whole)
    brought = natural_tests(dataset, assignment) if spec.evaluation.client_test is None else None
    return assemble(spec, dataset, assignment, model, validation=validation, brought=brought, fitting=fitting)


def assemble(
    spec: Experiment,
    dataset: Dataset,
    assignment: Assignment,
    model: OwnModel | None = None,
    *,
    sizes_known: bool = True,
    validation: NDArray[np.int64] | None = None,
    brought: Assignment | None = None,
    fitting: Assignment | Statistics | None = None,
) -> Prepared:
    """Prepare an experiment on data that are already loaded and split among clients, and check its settings.

    Args:
        spec: The experiment.
        dataset: The data set.
        assignment: The indices of each client's samples in ``dataset``.
        model: See ``prepare``.
        sizes_known: Whether ``assignment`` contains the samples of all clients. False in a deployment, in which sites
            keep their data.
        validation: The indices of training samples that were held out before the partition.
        brought: Each client's own test samples, if the site's data or the data set contain such samples.
        fitting: The samples from which normalisation and imputed values are computed, or the statistics of these
            samples; None if both are unknown.

    Raises:
        SpecError: A setting does not fit the data, the federation or another setting.
    """
    if model is None:
        made = make_model(spec.model, dataset.shape, dataset.outputs, spec.seed, _trial_of(dataset))
    else:
        module = own_module(model, dataset.shape, dataset.outputs, spec.seed)
        made = (
            module
            if isinstance(module, Model)
            else Model(lay_out(module, dataset.shape) if not dataset.keep else module)
        )
        _check_outputs(made, dataset)
        spec = spec.model_copy(update={"model": CustomModel(custom=about_model(made))})
    federate_batchnorm(made.module)
    _check_start(made, spec)
    _check_metrics(made, dataset, spec)
    for callback in spec.callbacks:
        callback.check(spec.evaluation)
    everybody = assignment
    assignment, held = hold_out(
        spec.evaluation,
        dataset,
        assignment,
        spec.seed,
        validation=validation,
        brought=brought,
        everybody=sizes_known,
    )
    if dataset.unfitted is not None and fitting is not None:
        if isinstance(fitting, Assignment):
            rows = trained_on(dataset, fitting, held)
            fitting = dataset.unfitted.statistics(rows, spec.privacy.min_samples)
        dataset = fit(dataset, fitting)
    if dataset.task.fits and sizes_known:
        rows = trained_on(dataset, fitting if isinstance(fitting, Assignment) else assignment, held)
        dataset = fit_targets(dataset, rows)
    config = FederationConfig(
        seed=spec.seed,
        training=spec.training,
        model=made,
        outputs=dataset.outputs,
        clients=len(assignment),
        sizes=assignment.sizes if sizes_known else None,
        most_samples=assignment.sizes if sizes_known else None,
        server_data=ServerData(dataset, _all_but_the_servers(everybody, held)) if sizes_known else None,
        weight_diversity=spec.evaluation.weight_diversity,
        random=draws_random_numbers(made, dataset.inputs(slice(0, 2), "train" if dataset.train_size else "test")),
        privacy=spec.privacy,
        strata=len(dataset.stratum_names),
        places=dataset.y_train.shape[1:].numel() if dataset.task.weighted else 1,
        task=dataset.task,
        augment=spec.data.augment,
    )
    config = with_parties(spec.method, config)
    if config.augment is not None:
        config.augment.check(dataset)
    # ``availability.check`` stores values in the object. Copy the object, so that the user's spec does not change.
    spec = spec.model_copy(update={"availability": spec.availability.model_copy()})
    known = assignment if sizes_known else None
    population = Population(config.clients, config.strata, known, dataset.strata, spec.seed)
    under("availability", lambda: spec.availability.check(population))
    if spec.attack is not None:
        if not sizes_known:
            refuse_attack(spec)
        dataset = _attacked(spec.attack, dataset, assignment, spec.seed)
    check_method(spec, config, dataset, held)
    return Prepared(spec, dataset, assignment, config, held)


def check_method(spec: Experiment, config: FederationConfig, dataset: Dataset, held: HeldOut) -> None:
    """Raise ``SpecError`` if the spec's method does not fit the federation, the data or other settings.

    Args:
        spec: The experiment.
        config: The settings that server and clients share.
        dataset: The data set.
        held: The samples that are not used for training.
    """
    if spec.attack is not None and spec.attack.alters_replies and not isinstance(spec.method, Recipe):
        problem = f"needs updates from local training, but clients of {spec.method.name!r} do not send any. "
        raise SpecError("attack", f"{problem}Use attack 'label-flip', or a method such as fedavg.", spec.attack.name)
    if spec.privacy.sums == "secure":
        check_secure_sums(spec, config, held)
    _check_optimizer(spec.method, config)
    _check_task(spec.method, config)
    spec.method.check(config)
    if spec.privacy.dp is not None:
        check_privacy(spec.method, config, dataset)
    if spec.privacy.clients is not None:
        check_client_privacy(spec, config)
    for allowed in spec.method.declared(config) or ():
        if limit := allowed.limit_below(spec.privacy):
            problem = (
                f"all clients would refuse the request {allowed.label!r}, because a reply {limit.reason}, but must "
            )
            problem += f"use at least {spec.privacy.min_samples}. Set privacy.min_samples to at most {limit.samples}."
            raise SpecError("privacy.min_samples", problem, spec.privacy.min_samples)
    if not spec.communication.plain and not spec.method.asks_for_changes():
        problem = (
            f"has no effect, because {spec.method.name} does not send the same model to all clients. "
            "Remove the section."
        )
        raise SpecError("communication", problem)


def refuse_attack(spec: Experiment) -> None:
    """Raise an error if the spec of a deployment contains an attack. Attacks are possible only in simulations.

    Raises:
        SpecError: The spec has a section ``attack``.
    """
    if spec.attack is not None:
        problem = "attacks are possible only in simulations, not in deployments. Remove the section [attack]."
        raise SpecError("attack", problem, spec.attack.name)


def _attacked(attack: Attack, dataset: Dataset, assignment: Assignment, seed: int) -> Dataset:
    """Check an attack, and return the data set, with false labels if the attack changes the attackers' labels.

    The labels of samples that are held out of training do not change.
    """
    attackers = attack.attackers(len(assignment), seed)
    if attack.alters_replies:
        return dataset
    if dataset.task.name != "classification":
        problem = (
            f"needs classes, but the task is {dataset.task.name!r}. Use an attack on updates, such as 'sign-flip'."
        )
        raise SpecError("attack", problem, attack.name)
    rows = torch.from_numpy(np.concatenate([assignment[client] for client in attackers]))
    y = dataset.y_train.clone()
    y[rows] = attack.false_labels(y[rows], dataset.outputs)
    return replace(dataset, y_train=y)


def _check_optimizer(method: Method, config: FederationConfig) -> None:
    """Raise ``SpecError`` if the optimiser does not suit the method, or cannot update the model."""
    training, objective = config.training, method.objective_in_use()
    reason = method.needs_sgd or objective.needs_sgd
    if reason and not training.optimizer.is_sgd:
        raise SpecError("training.optimizer", f"{reason}. Use optimizer = 'sgd'.", training.optimizer.label)
    if method.needs_sgd and training.accumulate > 1:
        raise SpecError("training.accumulate", f"{reason}. Use accumulate = 1.", training.accumulate)
    if method.needs_sgd and training.optimizer_state == "keep":
        raise SpecError("training.optimizer_state", f"{reason}. Use optimizer_state = 'reset'.", "keep")
    if not training.optimizer.is_sgd:
        params = config.model.params()
        try_optimizer(training, {name: w for name, w in params.items() if objective.trains(name, config.model)})


def trained_on(data: Dataset, assignment: Assignment, held: HeldOut) -> Iterator[NDArray[np.int64]]:
    """Return an iterator that yields the indices of each client's training samples, without held-out samples."""
    trains = np.ones(data.train_size, dtype=bool)
    trains[held.samples] = False
    return (rows[trains[rows]] for rows in map(assignment.__getitem__, range(len(assignment))))


def _all_but_the_servers(assignment: Assignment, held: HeldOut) -> Assignment:
    """Return an assignment of all samples that the server may not use: the clients' samples and held-out samples."""
    if held.validation is None:
        return assignment
    used = np.union1d(assignment.indices, held.validation)
    return replace(assignment, indices=used, offsets=np.array([0, len(used)]))


def _check_start(model: Model, spec: Experiment) -> None:
    """Raise ``SpecError`` if the initial model cannot be evaluated, or has values that are not finite."""
    for name, tensor in {**model.params(), **model.buffers()}.items():
        if not torch.isfinite(tensor).all():
            problem = (
                f"{name} contains NaN or infinity, which the server refuses. Initialise it with finite numbers, or "
            )
            raise SpecError("model", problem + "register constants with persistent=False.")
    local = spec.training.batch_norm == "local" and model.has_batchnorm
    if local and spec.evaluation.batch_size == 1:
        problem = "with training.batch_norm = 'local', statistics are computed per batch. Use batch_size = 2 or more."
        raise SpecError("evaluation.batch_size", problem, 1)


def _check_task(method: Method, config: FederationConfig) -> None:
    """Raise ``SpecError`` if the method, or the loss of its objective, does not support the task."""
    task = config.task.name
    for objective in (method.objective_in_use(), method.personal_objective()):
        if is_plain(objective, "loss") or objective.tasks is None:
            continue
        if task not in objective.tasks:
            problem = f"has its own loss for the tasks {', '.join(sorted(objective.tasks))}, but the task is {task!r}."
            raise SpecError("method", f"{problem} Use another method, such as fedavg or fedprox.", method.name)
        if config.task.has_classes and not config.task.plain:
            changed = ", ".join(key for key in config.task.to_spec() if key != "name")
            problem = (
                f"has its own loss, which would ignore the task's settings ({changed}). Remove these settings, or use "
            )
            raise SpecError("method", f"{problem}another method, such as fedavg or fedprox.", method.name)
    if method.needs_strata and not config.strata:
        problem = f"needs classes, but the task {task!r} has no classes. {config.task.stratum_hint}".rstrip()
        raise SpecError("method", problem, method.name)


def _check_metrics(model: Model, dataset: Dataset, spec: Experiment) -> None:
    """Raise ``SpecError`` if a metric does not work for the task."""
    if dataset.task.has_classes:
        for metric in spec.evaluation.metrics:
            metric.check(dataset.outputs)
        return
    split: Split = "train" if dataset.train_size else "test"
    # The server of a deployment may have no samples. Test the metrics on one sample of zeros then.
    if not len(samples := dataset.targets(slice(0, 4), split)):
        x, samples = each(dataset.x_test, _one), _one(dataset.y_test)
        dataset = replace(dataset, x_test=x, y_test=samples)
    rows = collect(model, Weights(model.params(), model.buffers()), dataset, split, np.arange(len(samples)))
    for metric in spec.evaluation.metrics:
        metric.check_rows(rows, dataset.task)


def _one(samples: Tensor) -> Tensor:
    """Return one sample of zeros, with the type and shape of the samples in ``samples``."""
    return samples.new_zeros(1, *samples.shape[1:])


def _trial_of(dataset: Dataset) -> Trial:
    """Return a sample for testing a model, and a function that returns the expected shape of the model's outputs."""
    split: Split = "train" if dataset.train_size else "test"
    x, y = dataset.inputs(slice(0, 1), split), dataset.targets(slice(0, 1), split)
    if not len(y):  # the server of a deployment may have no samples
        return None
    return x, lambda outputs: dataset.task.check_outputs(outputs, y, dataset.outputs)


def _check_outputs(model: Model, dataset: Dataset) -> None:
    """Raise ``SpecError`` if the outputs of the user's own model do not have the shape that the task needs."""
    x, y = dataset.inputs(slice(0, 2)), dataset.targets(slice(0, 2))
    form = dataset.task.check_outputs(torch.empty(0), y, dataset.outputs)
    needed = f"must take batches of shape {described(dataset.shape)} and return outputs of shape {form}"
    try:
        with torch.no_grad(), model.loaded(model.params(), model.buffers()) as params:
            output = model(params, x)
    except Exception as error:
        raise SpecError("model", f"{needed}, but the model failed on a test batch: {error}") from error
    if not isinstance(output, torch.Tensor) or dataset.task.check_outputs(output, y, dataset.outputs):
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise SpecError("model", f"{needed}, but returned {shape} for {len(y)} samples. Change the output.")


def as_dataset(data: Arrays, spec: Experiment) -> Dataset:
    """Convert the user's own arrays to a data set."""
    if isinstance(data, Dataset):
        if spec.task not in (None, data.task):
            problem = f"differs from the data set's task {data.task.name!r}. Pass the same task to from_arrays."
            raise SpecError("task", problem, spec.task.name if spec.task is not None else "")
        return data
    if isinstance(data, Mapping):
        accepted = inspect.signature(from_arrays).parameters
        if wrong := [key for key in data if key not in accepted] + [key for key in ARRAYS if key not in data]:
            problem = (
                f"give a mapping with the keys {', '.join(ARRAYS)} and, optionally, other arguments of from_arrays"
            )
            raise SpecError("data", problem, sorted(map(str, wrong)))
        return from_arrays(**{"normalize": spec.data.normalize, "task": spec.task, **data})
    if not isinstance(data, Sequence) or len(data) != len(ARRAYS):
        problem = f"must be a Dataset, a mapping, or four arrays: {', '.join(ARRAYS)}"
        raise SpecError("data", problem, f"{len(data)} items" if isinstance(data, Sequence) else type(data).__name__)
    return from_arrays(*data, normalize=spec.data.normalize, task=spec.task)
