"""Data that each site brings: checked against the spec's ``[data]``, counted, and made the world of one site."""

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
from fedstrata.base.errors import DataError, SpecError
from fedstrata.base.jsonl import replace_file, write_json
from fedstrata.clients.context import ClientContext
from fedstrata.data.arrays import checked_inputs
from fedstrata.data.dataset import Dataset
from fedstrata.data.fitting import Statistics, Unfitted, fit
from fedstrata.data.partitions import Assignment
from fedstrata.data.schema import Schema, Table, held_out, ids, parsed
from fedstrata.data.sources import Data, read_arrays
from fedstrata.data.tables import SUFFIXES, read_table
from fedstrata.evaluation.holdouts import hold_out
from fedstrata.evaluation.metrics import METRICS, Metric
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
"""In the server's run folder: what all sites' training samples came to when the run began."""

FEWEST = 2
"""Training samples of a site: the mean of a single one would be that sample."""

MOST_CLIENTS = 1_000_000
"""Of a job: a site's memory grows with their number."""

MORE = "'fedstrata check' at the site, and its log, say more"
"""Where the private part of an error about a site's data is told."""

_PREPARING = Lock()
"""Initial parameters are drawn from PyTorch's generator, which all threads share: sites of one process take turns."""

_NO_LABELS = torch.empty(0, dtype=torch.int64)


class UnusableDataError(DataError):
    """A site's data are not what the spec says. Its text leaves the site: the public part of what was found, alone."""


def context_of(begin: Begin, data: Path | None, keys: KeyRing, *, tells: bool = False) -> ClientContext:
    """What the clients of one site share: the spec's data by its partition, or the site's own file.

    Args:
        begin: The run.
        data: The site's own file.
        keys: For masked labels.
        tells: Whether the server may learn how good a model is on the site's own samples, beside sums that add up.

    Raises:
        SpecError: The spec is wrong, or a site lacks a data file, or has one that nobody asked for.
        UnusableDataError: The file is missing, damaged or not what the spec says.
    """
    spec = Experiment.from_table(parse_toml(begin.spec))
    if begin.statistics is None:
        if data is not None:
            raise SpecError("data", "this site has a data file of its own, but the run is about the spec's")
        with _PREPARING, _told():
            prepared = prepare(spec)
    else:
        path = _file_of(spec, data, begin.clients)
        with _PREPARING, _told():
            own, whole, brought = _own(spec, path, begin.clients[0], begin.total)
            prepared = assemble(spec, own, whole, sizes_known=False, brought=brought, fitting=begin.statistics)
    if len(prepared.assignment) != begin.total:
        raise SpecError("partition.clients", f"there are {begin.total} clients", len(prepared.assignment))
    # What can be known of the spec's own data is no secret of a site's.
    return dataclasses.replace(make_context(prepared, keys), tells_values=tells or begin.statistics is None)


def require_home(clients: list[int], total: int) -> None:
    """Refuse numbers of clients that there cannot be, before anything is as large as they say.

    Raises:
        RuleError: They are such.
    """
    if type(total) is not int or not 1 <= total <= MOST_CLIENTS:
        raise RuleError("bounds", f"{total!r:.40} clients; accepted: 1 to {MOST_CLIENTS}")
    if not isinstance(clients, list) or len(clients) > total:
        raise RuleError("bounds", f"more clients at this site than there are; accepted: {total} at most")
    for client in clients:
        if type(client) is not int or not 0 <= client < total:
            raise RuleError("bounds", f"client {client!r:.40}; accepted: 0 to {total - 1}")


def survey_of(survey: Survey, data: Path | None, *, least: int = FEWEST) -> Statistics:
    """What the samples that a site trains on come to, if they are what the spec says.

    Args:
        survey: The question.
        data: The site's own file.
        least: Fewest samples behind a number, by the site's own rules; the spec may want more.

    Raises:
        SpecError: The spec is wrong, or a site lacks a data file.
        UnusableDataError: The file is missing, damaged or not what the spec says.
    """
    spec = Experiment.from_table(parse_toml(survey.spec))
    least = max(least, FEWEST, spec.privacy.min_samples)
    path = _file_of(spec, data, survey.clients)
    with _told():
        own, whole, brought = _own(spec, path, survey.clients[0], survey.total)
        if survey.tests and brought is None and spec.evaluation.client_test is None:
            problem = "there are no test samples, and the server has none; accepted: x_test and y_test, or a test part "
            problem += "by evaluation.client_test"
            raise DataError(f"{path}: {problem}").publicly(problem)
        _, held = hold_out(spec.evaluation, own, whole, spec.seed, brought=brought, everybody=False)
        assert own.unfitted is not None
        rows = list(trained_on(own, whole, held))
        if own.unfitted.needed and (left := sum(map(len, rows))) < least:
            accepted = f"accepted: {least} or more, for the mean of one is its value"
            error = DataError(f"{path}: {left} training samples are left beside what is held out; {accepted}")
            raise error.publicly(f"too few training samples are left beside what is held out; {accepted}")
        return own.unfitted.statistics(rows, least)


def description_of(spec: Experiment) -> str:
    """Names what a spec says that a site's data must be: whether they are is the same answer to all such specs."""
    free = {"name", "normalize", "shift", "scale"}
    said = json.dumps([spec.data.model_dump(mode="json", exclude=free), spec.partition.min_size], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def _file_of(spec: Experiment, path: Path | None, clients: list[int]) -> Path:
    """The site's file, where the spec says all that its data must be: a site's rows complete no spec.

    Raises:
        SpecError: There is no file, or the spec does not say it.
    """
    if path is None:
        raise SpecError("data", "the run is about the sites' own data, and this site's settings name no file")
    if len(clients) != 1:
        raise SpecError("data", "a site's own data are those of one client", clients)
    _nothing(spec.data)
    return path


def _own(spec: Experiment, path: Path, client: int, total: int) -> tuple[Dataset, Assignment, Assignment | None]:
    """A site's own data, whose they are, and the test samples that it measures models on."""
    own = read_own(spec.data, path, client=client, seed=spec.seed)
    least = max(spec.partition.min_size, FEWEST)
    if own.train_size < least:
        accepted = f"accepted: {least} or more, as by min_size"
        error = DataError(f"{path}: {own.train_size} training samples; {accepted}")
        raise error.publicly(f"too few training samples; {accepted}")
    whole, brought = _all_of(client, own.train_size, total), None
    if spec.evaluation.client_test is None and len(own.y_test):
        brought = _all_of(client, len(own.y_test), total)
    return own, whole, brought


@contextmanager
def _told() -> Iterator[None]:
    """What is wrong with data goes to the site's log as it is, and to others in the words of the spec alone."""
    try:
        yield
    except Exception as error:
        # An error without a public part may hold anything of the data; the key of a setting is the spec's.
        known = isinstance(error, (DataError, SpecError))
        LOG.error("%s", error, exc_info=None if known else error)
        key = error.key if isinstance(error, SpecError) else ""
        public = getattr(error, "public", "") or (
            f"{key}: the setting does not suit them" if key else "they cannot be used"
        )
        raise UnusableDataError(f"the site's data are not what the spec says: {public}; {MORE}") from error


def _all_of(client: int, size: int, clients: int) -> Assignment:
    """All samples are one client's."""
    ends = np.zeros(clients + 1, dtype=np.int64)
    ends[client + 1 :] = size
    return Assignment(np.arange(size, dtype=np.int64), ends)


def prepare_server(spec: Experiment, test: Path | None, clients: int) -> Prepared:
    """The experiment as its server sees it where the sites' data are their own: it holds test samples, or none.

    Args:
        spec: The experiment.
        test: The server's file of test samples; None where sites measure the model on samples of their own.
        clients: N.

    Raises:
        SpecError: A setting does not fit, or the spec does not say what the sites' data are.
        DataError: The test file is missing, damaged or not what the spec says.
    """
    evaluation = spec.evaluation
    nothing = _nothing(spec.data)
    _refuse_telling(spec, nothing, tests=test is not None)
    elsewhere = test is None or evaluation.client_test is not None or evaluation.validation is not None
    if elsewhere and (alone := [metric.label for metric in evaluation.metrics if not metric.adds_up]):
        added = ", ".join(name for name in METRICS if METRICS.find(name).of_sums is not Metric.of_sums)
        problem = f"cannot be computed from sums, which is what sites send; accepted: {added}, or of_sums of its own"
        raise SpecError("evaluation.metrics", problem, alone[0])
    nobody = Assignment(np.empty(0, dtype=np.int64), np.zeros(clients + 1, dtype=np.int64))
    data = nothing if test is None else read_own(spec.data, test, client=None, seed=spec.seed)
    brought = nobody if test is None and evaluation.client_test is None else None
    return assemble(spec, data, nobody, sizes_known=False, brought=brought)


def surveyed(prepared: Prepared, engine: NVFlareEngine, folder: Path, *, resume: bool) -> Prepared:
    """The same experiment, for which the sites were asked what their data come to; or with what was known before.

    Args:
        prepared: From ``prepare_server``.
        engine: Reaches the sites.
        folder: The server's run folder, where the answer is kept.
        resume: Whether the run goes on: as it began, whoever of the sites is there now.

    Raises:
        SiteLostError: No site can be reached.
        FedstrataError: No site has data that the spec describes.
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
    return dataclasses.replace(prepared, data=fit(prepared.data, engine.statistics))


def _refuse_telling(spec: Experiment, nothing: Dataset, *, tests: bool) -> None:
    """What sites tell of their samples may not tell what a method keeps private.

    Sums over test samples tell how many there are of each class, statistics how many samples there are.

    Args:
        spec: The experiment.
        nothing: No samples, as the spec describes them.
        tests: Whether the server has test samples.

    Raises:
        SpecError: It does.
    """
    evaluation, conceals = spec.evaluation, spec.method.conceals
    sizes = "sizes" in conceals
    what = "sizes" if sizes else "labels"
    for key in ("client_test", "validation"):
        measures = getattr(evaluation, key) is not None or (key == "client_test" and not tests)
        if measures and conceals:
            problem = f"what sites answer tells their {what}, which the method keeps private: leave it out, and give "
            raise SpecError(f"evaluation.{key}", problem + "the server test samples", getattr(evaluation, key))
    if sizes and nothing.unfitted is not None and nothing.unfitted.needed:
        problem = f"what the sites' samples come to tells their {what}, which the method keeps private; accepted: "
        problem += "'none', or data.shift and data.scale; and impute = 'constant' where values are missing"
        raise SpecError("data.normalize", problem, spec.data.normalize)


def _nothing(data: Data) -> Dataset:
    """A data set without samples, as the spec describes the sites'.

    Raises:
        SpecError: It does not.
    """
    for key in ("limit", "client"):
        if getattr(data, key) is not None:
            raise SpecError(f"data.{key}", "belongs to the spec's own data, not to the sites'", getattr(data, key))
    if data.schema is not None:
        data.schema.refuse_open()
        empty = Table("", {name: [] for name in (data.schema.columns or {})})
        return _rows(data, data.schema, empty, np.zeros(0, dtype=bool))
    if data.shape is None or data.classes is None:
        problem = "the sites' own data need a description: [data.schema] for tables, shape and classes for .npz"
        raise SpecError("data", problem)
    shape = data.shape
    x = torch.zeros(0, *((*shape[1:], shape[0]) if len(shape) == 3 else shape))
    return _arrays(data, (x, _NO_LABELS), (x, _NO_LABELS))


def read_own(data: Data, path: Path, *, client: int | None, seed: int) -> Dataset:
    """The file of a site, or the server's, of which all samples are test samples.

    Args:
        data: What it must be.
        path: The file: a table by ``[data.schema]``; otherwise ``.npz`` with ``x_train`` and ``y_train``, and perhaps
            ``x_test`` and ``y_test``; labels are 0 … C−1.
        client: The site's; None for the server.
        seed: The experiment's.

    Raises:
        DataError: It is missing, damaged, or not what the spec says.
        SpecError: A column is missing.
    """
    schema = data.schema
    if (path.suffix in SUFFIXES) != (schema is not None):
        wanted = ".csv or .parquet, by data.schema" if schema is not None else ".npz, by data.shape and data.classes"
        error = DataError(f"{path} is of another kind; accepted: {wanted}")
        raise error.publicly(f"the file is of another kind; accepted: {wanted}")
    if schema is not None:
        table = read_table(path, schema)
        if schema.client is not None and client is not None and schema.client in table.columns:
            clients = np.unique(ids(table, schema.client, schema))
            if len(clients) > 1:
                problem = f"rows of {len(clients)} clients, {clients[0]!s} and {clients[1]!s} among them; accepted: one"
                error = DataError(f"{path}, column {schema.client!r}: {problem}")
                raise error.publicly(f"column {schema.client!r}: rows of more clients than one; accepted: one")
        server = {"test": 0.5} if client is None else {}
        schema = schema.model_copy(update={"client": None, **server}).completed(table)
        held = np.ones(len(table), dtype=bool) if client is None else held_out(table, schema, seed, first=client)
        return _rows(data, schema, table, held)
    needed, other = ("train", "test") if client is not None else ("test", "")
    arrays = read_arrays(path, (f"x_{needed}", f"y_{needed}"), (f"x_{other}", f"y_{other}") if other else ())
    there = _samples(path, arrays, needed)
    rest = there[0][:0], _NO_LABELS
    if f"x_{other}" in arrays:
        if f"y_{other}" not in arrays:
            raise DataError(f"{path} has x_{other} and no y_{other}").publicly(f"x_{other} without y_{other}")
        rest = _samples(path, arrays, other)
        if rest[0].shape[1:] != there[0].shape[1:]:
            problem = f"samples of x_{other} have another shape than those of x_{needed}"
            raise DataError(f"{path}: {problem}").publicly(problem)
    try:
        return _arrays(data, *((there, rest) if needed == "train" else (rest, there)))
    except DataError as error:
        raise DataError(f"{path}: {error}").publicly(error.public) from None


def _rows(data: Data, schema: Schema, table: Table, held: NDArray[np.bool_]) -> Dataset:
    """Rows as a data set, of which features are yet to be made."""
    classes = schema.classes or ()
    cells = torch.from_numpy(parsed(table, schema))
    labels = ids(table, schema.label, schema).tolist() if len(table) else []
    y = torch.tensor([classes.index(label) for label in labels], dtype=torch.int64)
    width = (len(schema.names()),)
    x = torch.zeros(len(table), *width)
    unfitted = Unfitted(data.normalize, cells[~held], cells[held], schema, data.given(width))
    return Dataset("own", x[~held], y[~held], x[held], y[held], classes, unfitted=unfitted)


def _samples(path: Path, arrays: Mapping[str, Any], split: str) -> tuple[Tensor, Tensor]:
    """Inputs and labels of one split."""
    x, y = checked_inputs(arrays[f"x_{split}"], f"x_{split}"), arrays[f"y_{split}"]
    if y.dtype.kind not in "iu" or y.shape != (len(x),):
        error = DataError(f"{path}: y_{split} is {y.dtype} {y.shape}; expected one whole number for each of {len(x)}")
        raise error.publicly(f"y_{split}: expected one whole number for each sample")
    return x, torch.from_numpy(y.astype(np.int64))


def _arrays(data: Data, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Dataset:
    """Arrays as a data set that is not normalised yet."""
    names = tuple(str(label) for label in range(data.classes or 0))
    return data.declared(Dataset("own", *train, *test, names))
