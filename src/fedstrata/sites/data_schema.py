"""Check a site's own data against the spec's ``[data]``, compute statistics of the data, and create a data set."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base import records
from fedstrata.base.arrays import Ints
from fedstrata.base.config import MOST
from fedstrata.base.errors import DataError, SpecError
from fedstrata.base.jsonl import replace_file, write_json
from fedstrata.clients.client import ClientContext
from fedstrata.data.arrays import checked_inputs
from fedstrata.data.dataset import Dataset
from fedstrata.data.fitting import RawTargets, Statistics, Unfitted, fit
from fedstrata.data.partitions.base import Assignment
from fedstrata.data.schema import Schema, Table, held_out, ids, parsed
from fedstrata.data.sources import Data, read_arrays
from fedstrata.data.tables import SUFFIXES, read_table, targets_of
from fedstrata.data.tasks.base import Task
from fedstrata.data.tasks.classification import Classification
from fedstrata.evaluation.holdouts import hold_out
from fedstrata.evaluation.metrics import METRICS
from fedstrata.runs.preparation import Prepared, assemble, prepare, trained_on
from fedstrata.runs.simulation import make_context
from fedstrata.sites.engine import NVFlareEngine
from fedstrata.sites.manifest import FINGERPRINTS
from fedstrata.sites.policy import RuleError
from fedstrata.sites.wire import Begin, Survey
from fedstrata.spec.experiment import Experiment, parse_toml
from fedstrata.stratify.masking.key_store import KeyRing

LOG = logging.getLogger(__name__)

STATISTICS = "statistics"
"""A file in the server's run folder: the statistics of all sites' training samples at the start of the run."""

FEWEST = 2
"""The minimum number of training samples at a site. The mean over a single sample would reveal the sample."""

MOST_CLIENTS = 1_000_000
"""The maximum number of clients in a job. The memory use of a site grows with the number of clients."""

MORE = "Run 'fedstrata check' at the site, or read its log."
"""The last sentence of an error message about a site's data, if the server may see the message. The sentence says where
to read the full error."""

_PREPARING = Lock()
"""A lock for drawing the model's initial parameters. All sites in one process share PyTorch's random generator."""

_NO_LABELS = torch.empty(0, dtype=torch.int64)


class UnusableDataError(DataError):
    """An error that a site raises if its data do not fit the spec.

    The message contains only the reason why the data do not fit, so the site may send the message to the server.
    """


def context_of(begin: Begin, data: Path | None, keys: KeyRing, *, tells: bool = False) -> ClientContext:
    """Return the context (data, model and settings) that the clients of one site share.

    By default, the data come from the site's own file. If the spec names a data set, the spec's partition divides this
    data set among all clients.

    Args:
        begin: The server's first message, which describes the run.
        data: The site's own data file; None if the site's settings do not name a file.
        keys: The keys that clients use to mask their labels.
        tells: Whether the site also sends metrics measured on its own samples. In any case, the site sends sums, from
            which the server computes the metrics over all sites.

    Raises:
        SpecError: The spec is wrong, a data file is missing, or the spec and the site's settings both name data.
        UnusableDataError: The file is missing or damaged, or does not fit the spec.
    """
    spec = Experiment.from_table(parse_toml(begin.spec))
    if begin.statistics is None:
        if data is not None:
            raise SpecError(
                "data",
                "this site has its own data file, but the run uses the data set of the spec. Remove the file from the "
                "settings.",
            )
        with _PREPARING, _public_errors():
            prepared = prepare(spec)
    else:
        path = _file_of(spec, data, begin.clients)
        with _PREPARING, _public_errors():
            data_set, whole, brought = _own_data(spec, path, begin.clients[0], begin.total)
            prepared = assemble(spec, data_set, whole, sizes_known=False, brought=brought, fitting=begin.statistics)
    if len(prepared.assignment) != begin.total:
        raise SpecError(
            "partition.clients",
            f"differs from the number of clients of the job. Use {begin.total}.",
            len(prepared.assignment),
        )
    # A run without statistics uses data that the spec names. These data are not secret, so metrics on them may be sent.
    return dataclasses.replace(make_context(prepared, keys), tells_values=tells or begin.statistics is None)


def require_home(clients: list[int], total: int) -> None:
    """Raise an error if ids or the number of clients are invalid. Memory is allocated only after this check.

    Args:
        clients: The ids of the clients at this site.
        total: The number of clients of the job.

    Raises:
        RuleError: An id or the number of clients is out of bounds.
    """
    if type(total) is not int or not 1 <= total <= MOST_CLIENTS:
        raise RuleError("bounds", f"the job has {total!r:.40} clients, but must have 1 to {MOST_CLIENTS}")
    if not isinstance(clients, list) or len(clients) > total:
        raise RuleError("bounds", f"this site has more clients than the whole job ({total})")
    for client in clients:
        if type(client) is not int or not 0 <= client < total:
            raise RuleError("bounds", f"client {client!r:.40} is not between 0 and {total - 1}")


def survey_of(survey: Survey, data: Path | None, *, least: int = FEWEST) -> Statistics:
    """Return the summary statistics of a site's training samples, if the data fit the spec.

    Args:
        survey: The server's request for statistics.
        data: The site's own data file.
        least: The policy requires at least this many samples per value that leaves the site. The spec may require more.

    Raises:
        SpecError: The spec is wrong, or the data file is missing.
        UnusableDataError: The file is missing or damaged, or does not fit the spec.
    """
    spec = Experiment.from_table(parse_toml(survey.spec))
    least = max(least, FEWEST, spec.privacy.min_samples)
    path = _file_of(spec, data, survey.clients)
    with _public_errors():
        data_set, rows = _training_rows(spec, survey, path)
        assert data_set.unfitted is not None
        if data_set.unfitted.needed and (count := sum(map(len, rows))) < least:
            problem = f"training samples are left after test samples are held out. Provide at least {least}."
            raise _unfit(path, f"too few {problem}", f"only {count} {problem}")
        return data_set.unfitted.statistics(rows, least)


def training_samples(survey: Survey, data: Path | None) -> int:
    """Return the number of a site's training samples, without held-out samples. The number must not leave the site.

    Args:
        survey: A request for statistics, with the spec.
        data: The site's own data file.

    Raises:
        SpecError: The spec is wrong, or the data file is missing.
        DataError: The file is damaged, or does not fit the spec.
    """
    spec = Experiment.from_table(parse_toml(survey.spec))
    return sum(map(len, _training_rows(spec, survey, _file_of(spec, data, survey.clients))[1]))


def _training_rows(spec: Experiment, survey: Survey, path: Path) -> tuple[Dataset, list[Ints]]:
    """Return a site's data set, and the indices of each client's training samples, without held-out samples."""
    data_set, whole, brought = _own_data(spec, path, survey.clients[0], survey.total)
    if survey.tests and brought is None and spec.evaluation.client_test is None:
        accepted = "Add x_test and y_test, or set evaluation.client_test."
        raise _unfit(path, f"neither this file nor the server contains test samples. {accepted}")
    _, held = hold_out(spec.evaluation, data_set, whole, spec.seed, brought=brought, everybody=False)
    return data_set, list(trained_on(data_set, whole, held))


def description_of(spec: Experiment) -> str:
    """Return a hash of a spec's description of the data. A site's data must fit this description."""
    free = {"name", "normalize", "shift", "scale", "augment"}
    description = json.dumps([spec.data.model_dump(mode="json", exclude=free), spec.partition.min_size], sort_keys=True)
    return hashlib.sha256(description.encode()).hexdigest()


def _file_of(spec: Experiment, path: Path | None, clients: list[int]) -> Path:
    """Check that the spec describes the data completely, and return the site's file.

    For example, the list of classes must be in the spec, and is not taken from the site's rows.

    Raises:
        SpecError: The site has no file, or the description is incomplete.
    """
    if path is None:
        raise SpecError(
            "data",
            "the run uses the sites' own data, but this site's settings do not name a file. Set "
            "'data' in local/fedstrata.toml.",
        )
    if len(clients) != 1:
        problem = f"this site has {len(clients)} clients, but a site with its own data must have exactly one."
        raise SpecError("data", problem)
    _empty(spec.data, task_of(spec))
    return path


def _own_data(spec: Experiment, path: Path, client: int, total: int) -> tuple[Dataset, Assignment, Assignment | None]:
    """Return a site's data set, and the indices of each client's training samples and test samples.

    The indices of test samples are None if the file has no test samples, or if the spec holds out training samples for
    tests.
    """
    data_set = read_own(spec.data, path, task_of(spec), client=client, seed=spec.seed)
    least = max(spec.partition.min_size, FEWEST)
    if data_set.train_size < least:
        advice = f"Provide at least {least} (partition.min_size)."
        private = f"there are only {data_set.train_size} training samples. {advice}"
        raise _unfit(path, f"there are too few training samples. {advice}", private)
    whole, brought = _assigned_to(client, data_set.train_size, total), None
    if spec.evaluation.client_test is None and len(data_set.y_test):
        brought = _assigned_to(client, len(data_set.y_test), total)
    return data_set, whole, brought


def _unfit(path: Path, public: str, private: str = "") -> DataError:
    """Return an error about a site's file.

    The error's public text may leave the site, but the private text must not.
    """
    return DataError(f"{path}: {private or public}").publicly(public)


@contextmanager
def _public_errors() -> Iterator[None]:
    """Log any error of the ``with`` block, and raise an error with only the text that may leave the site."""
    try:
        yield
    except Exception as error:
        # An error without a public text may contain data, so only a general text leaves the site. The general text may
        # name the key of a setting, because the server knows the spec.
        known = isinstance(error, (DataError, SpecError))
        LOG.error("%s", error, exc_info=None if known else error)
        key = error.key if isinstance(error, SpecError) else ""
        general = f"{key}: the setting does not fit the data" if key else "the data cannot be used"
        public = getattr(error, "public", "") or general
        raise UnusableDataError(f"the site's data do not fit the spec: {public.rstrip('.')}. {MORE}") from error


def _assigned_to(client: int, size: int, clients: int) -> Assignment:
    """Return the indices of each client's samples. ``client`` has all ``size`` samples, and other clients have none."""
    ends = np.zeros(clients + 1, dtype=np.int64)
    ends[client + 1 :] = size
    return Assignment(np.arange(size, dtype=np.int64), ends)


def prepare_server(spec: Experiment, test: Path | None, clients: int) -> Prepared:
    """Prepare the server for an experiment on the sites' own data. The server does not have training samples.

    Args:
        spec: The experiment.
        test: The server's file of test samples; None if sites measure the model on their own samples.
        clients: The number of clients.

    Raises:
        SpecError: A setting does not fit the federation, or the description of the data is incomplete.
        DataError: The test file is missing or damaged, or does not fit the spec.
    """
    evaluation = spec.evaluation
    if test is None and spec.privacy.sums == "secure":
        problem = (
            "the server needs its own test samples, because sites may not send metrics with this setting. Set "
            "server.data in sites.toml to a file of test samples."
        )
        raise SpecError("privacy.sums", problem, spec.privacy.sums)
    empty, task = _empty(spec.data, task_of(spec)), task_of(spec)
    _refuse_disclosure(spec, empty, tests=test is not None)
    at_sites = test is None or evaluation.client_test is not None or evaluation.validation is not None
    if at_sites and (unsummed := [metric.label for metric in evaluation.metrics if not metric.adds_up(task)]):
        added, method = task.default_metrics, "of_tables"
        if task.has_classes:
            added, method = tuple(name for name in METRICS if METRICS.find(name).adds_up(task)), "of_sums"
        problem = "cannot be computed from sums, and sites send only sums. Use one of: "
        problem += f"{', '.join(added)}, or a metric with the method {method}."
        raise SpecError("evaluation.metrics", problem, unsummed[0])
    unassigned = Assignment(np.empty(0, dtype=np.int64), np.zeros(clients + 1, dtype=np.int64))
    data = empty if test is None else read_own(spec.data, test, task, client=None, seed=spec.seed)
    brought = unassigned if test is None and evaluation.client_test is None else None
    return assemble(spec, data, unassigned, sizes_known=False, brought=brought)


def surveyed(prepared: Prepared, engine: NVFlareEngine, folder: Path, *, resume: bool) -> Prepared:
    """Return the experiment, with data normalised by the statistics of all sites' training samples.

    If the run is new, the server requests these statistics from the sites.

    Args:
        prepared: The experiment, from ``prepare_server``.
        engine: The engine of the sites.
        folder: The server's run folder, where the statistics are stored.
        resume: Whether the run is resumed. A resumed run uses the statistics that were stored when the run began.

    Raises:
        SiteLostError: All sites are unreachable.
        FedstrataError: Too few sites have data that fit the spec.
    """
    unfitted, path = prepared.data.unfitted, folder / STATISTICS
    assert unfitted is not None
    if resume and path.exists():
        engine.statistics = records.decode(path.read_bytes())
        if (folder / FINGERPRINTS).exists():
            engine.fingerprints = json.loads((folder / FINGERPRINTS).read_text(encoding="utf-8"))
    else:
        engine.survey(unfitted, tests=prepared.held.own_test is not None)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, records.encode(engine.statistics))
        write_json(folder / FINGERPRINTS, engine.fingerprints)
    assert engine.statistics is not None
    # A resumed run knows only the total number of samples, and not the number of samples of each site. The total is
    # then the upper bound for each client.
    most = engine.statistics.samples or MOST
    samples = [engine.most_samples.get(client, most) for client in range(prepared.config.clients)]
    data = fit(prepared.data, engine.statistics)
    config = dataclasses.replace(
        prepared.config,
        most_samples=np.array(samples, dtype=np.int64),
        task=data.task,
        strata=len(data.stratum_names),
    )
    return dataclasses.replace(prepared, data=data, config=config)


def _refuse_disclosure(spec: Experiment, empty: Dataset, *, tests: bool) -> None:
    """Raise an error if the sites' replies would disclose facts that the method keeps private.

    Sums over test samples disclose the number of samples of each class, and statistics disclose the number of samples.
    ``tests`` says whether the server has test samples.
    """
    evaluation, conceals = spec.evaluation, spec.method.conceals
    sizes = "sizes" in conceals
    what = "numbers of samples" if sizes else "labels"
    for key in ("client_test", "validation"):
        measures = getattr(evaluation, key) is not None or (key == "client_test" and not tests)
        if measures and conceals:
            problem = (
                f"replies would disclose the sites' {what}, which the method keeps private. Remove this key, and give "
            )
            raise SpecError(f"evaluation.{key}", problem + "the server test samples.", getattr(evaluation, key))
    if conceals and empty.task.fits:
        problem = f"statistics of the targets would disclose the sites' {what}, which the method keeps private. "
        advice = "Set task.mean and task.deviation. Replace task.bins by task.edges."
        raise SpecError("task", problem + advice, empty.task.name)
    if sizes and empty.unfitted is not None and empty.unfitted.needed:
        problem = f"statistics of the samples would disclose the sites' {what}, which the method keeps private"
        accepted = "Use 'none', or data.shift and data.scale, and impute = 'constant' for missing values."
        raise SpecError("data.normalize", f"{problem}. {accepted}", spec.data.normalize)


def task_of(spec: Experiment) -> Task:
    """Return the spec's task. The default is classification: sites do not guess the task from labels."""
    return spec.task or Classification()


def _empty(data: Data, task: Task) -> Dataset:
    """Return a data set without samples, made from the spec's description of the data.

    Raises:
        SpecError: The description is incomplete, or the task cannot be used on the sites' own data.
    """
    for key in ("limit", "client"):
        if getattr(data, key) is not None:
            raise SpecError(
                f"data.{key}", ("has no effect, because sites use their own data. Remove the key."), getattr(data, key)
            )
    if data.schema is not None:
        schema = data.schema.closed(classes=task.has_classes)
        task.check_at_sites(schema.label, len(schema.classes or ()))
        table = Table("", {name: [] for name in (schema.label, *schema.inputs)})
        return _rows(data, task, schema, table, np.zeros(0, dtype=bool))
    if data.shape is None or data.classes is None:
        problem = (
            "the sites' own data must be described. Set [data.schema] for tables, or shape and classes for .npz files."
        )
        raise SpecError("data", problem)
    task.check_at_sites(None, data.classes)
    shape = data.shape
    x = torch.zeros(0, *((*shape[1:], shape[0]) if len(shape) == 3 else shape))
    return _arrays(data, task, (x, _NO_LABELS), (x, _NO_LABELS))


def read_own(data: Data, path: Path, task: Task, *, client: int | None, seed: int) -> Dataset:
    """Read the data file of a site or of the server. All samples of the server's file are test samples.

    Args:
        data: The spec's description of the data.
        path: The data file. A table has the columns of ``[data.schema]``. An ``.npz`` file has ``x_train`` and
            ``y_train``, and optionally ``x_test`` and ``y_test``. The server's ``.npz`` file has only the test arrays.
            Labels are 0 … C−1 for C classes.
        task: The task.
        client: The id of the site's client; None for the server.
        seed: The seed of the experiment.

    Raises:
        DataError: The file is missing or damaged, or does not fit the description.
        SpecError: A column is missing.
    """
    schema = data.schema
    if (path.suffix in SUFFIXES) != (schema is not None):
        wanted = "a .csv or .parquet file (data.schema)" if schema is not None else "an .npz file (data.shape)"
        raise _unfit(path, f"the type of the file does not fit the spec. Use {wanted}.")
    if schema is not None:
        table = read_table(path, schema)
        if schema.client is not None and client is not None and schema.client in table.columns:
            clients = np.unique(ids(table, schema.client, schema))
            if len(clients) > 1:
                column, named = f"column {schema.client!r}", f"such as {clients[0]!s} and {clients[1]!s}"
                public = f"{column}: the rows belong to several clients. Use the rows of one client."
                private = f"{column}: the rows belong to {len(clients)} clients, {named}. Use the rows of one client."
                raise _unfit(path, public, private)
        server = {"test": 0.5} if client is None else {}
        schema = schema.closed(classes=task.has_classes)
        schema = schema.model_copy(update={"client": None, **server}).completed(table)
        held = np.ones(len(table), dtype=bool)
        if client is not None:
            held = held_out(table, schema, seed, first=client, task=task)
        return _rows(data, task, schema, table, held)
    needed, other = ("train", "test") if client is not None else ("test", "")
    arrays = read_arrays(path, (f"x_{needed}", f"y_{needed}"), (f"x_{other}", f"y_{other}") if other else ())
    samples = _samples(path, arrays, needed)
    rest = samples[0][:0], _NO_LABELS
    if f"x_{other}" in arrays:
        if f"y_{other}" not in arrays:
            raise _unfit(path, f"x_{other} has no labels. Add the labels as y_{other}.")
        rest = _samples(path, arrays, other)
        if rest[0].shape[1:] != samples[0].shape[1:]:
            raise _unfit(
                path, f"samples of x_{other} have another shape than samples of x_{needed}. Use the same shape."
            )
    try:
        return _arrays(data, task, *((samples, rest) if needed == "train" else (rest, samples)))
    except DataError as error:
        raise _unfit(path, error.public, str(error)) from None


def _rows(data: Data, task: Task, schema: Schema, table: Table, held: NDArray[np.bool_]) -> Dataset:
    """Make a data set from the N rows of a table. ``held``, shape (N,), is True for each row that is a test sample.

    The features are computed later, with all sites' statistics.
    """
    classes = schema.classes or ()
    cells = torch.from_numpy(parsed(table, schema))
    labels = targets_of(table, schema, task).tolist()
    if task.has_classes:
        y = torch.tensor([classes.index(label) for label in labels], dtype=torch.int64)
    else:
        y = torch.tensor(labels, dtype=torch.float64)[:, None]
    width = (len(schema.names()),)
    x = torch.zeros(len(table), *width)
    targets = RawTargets(task, y[~held], schema.label) if task.fits else None
    unfitted = Unfitted(data.normalize, cells[~held], cells[held], schema, data.given(width), targets)
    outputs = len(classes) if task.has_classes else y.shape[1]
    return Dataset(
        "own", x[~held], y[~held], x[held], y[held], classes, unfitted=unfitted, task=task, n_outputs=outputs
    )


def _samples(path: Path, arrays: Mapping[str, Any], split: str) -> tuple[Tensor, Tensor]:
    """Return the checked inputs and labels of one split (``train`` or ``test``) of an ``.npz`` file."""
    x, y = checked_inputs(arrays[f"x_{split}"], f"x_{split}"), arrays[f"y_{split}"]
    if y.dtype.kind not in "iu" or y.shape != (len(x),):
        private = f"y_{split}: is of type {y.dtype} and shape {y.shape}. Give one integer for each of {len(x)} samples."
        raise _unfit(path, f"y_{split}: must have one integer for each sample", private)
    return x, torch.from_numpy(y.astype(np.int64))


def _arrays(data: Data, task: Task, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Dataset:
    """Make a data set from arrays, which are normalised later with all sites' statistics."""
    names = tuple(str(label) for label in range(data.classes or 0))
    return data.declared(Dataset("own", *train, *test, names, task=task))
