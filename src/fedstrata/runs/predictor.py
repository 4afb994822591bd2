"""Predict with the final model of a run. The file ``model.json`` describes the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedstrata.base.config import build, under
from fedstrata.base.errors import DataError, SpecError
from fedstrata.base.inputs import Inputs, Shape, described, each
from fedstrata.base.jsonl import jsonable, replace_file, write_json
from fedstrata.data.arrays import checked_ids, checked_inputs, checked_named
from fedstrata.data.dataset import Dataset
from fedstrata.data.fitting import Features
from fedstrata.data.schema import Schema, Table, parsed
from fedstrata.data.tables import read_table, table_of
from fedstrata.data.tasks.base import TASKS, Task
from fedstrata.data.tasks.classification import Classification
from fedstrata.evaluation.history import MODEL, WEIGHTS, read_weights
from fedstrata.models.memory_format import lay_out
from fedstrata.models.model import Model, forward
from fedstrata.models.untrained import twin_of
from fedstrata.models.zoo import MODELS, OwnModel, Trial, make_model, own_module
from fedstrata.runs.identity import fingerprints_of_frozen, require_same_frozen
from fedstrata.runs.preparation import Prepared

FORMAT = 1
"""The format version of ``model.json``, which increases if older versions of fedstrata cannot read new files."""

CUSTOM = "custom"
"""The value of ``model.name`` in a spec if the model is the user's own module."""

OF_ROWS = ("label", "columns", "missing", "delimiter")
"""The keys of a table's schema that inference needs. The other keys determine only how a run splits the rows."""


def describe_model(prepared: Prepared) -> dict[str, Any]:
    """Return the content of ``model.json``: all information that inference needs, except the parameters.

    Each float is written with only as many digits as are needed to read the same float64 again.

    Args:
        prepared: The experiment.
    """
    data, model, spec, shape = prepared.data, prepared.config.model, prepared.spec, prepared.data.shape
    architecture = spec.model.to_spec()
    if architecture.get("name") == CUSTOM:
        cls, tensors = type(model.module), {**model.params(), **model.buffers()}
        architecture["class"] = f"{cls.__module__}.{cls.__qualname__}"
        architecture["shapes"] = {name: list(tensor.shape) for name, tensor in tensors.items()}
    table = None
    if (features := data.features) is not None:
        schema = {key: value for key, value in features.schema.to_spec().items() if key in OF_ROWS}
        table = {"schema": schema, "imputed": features.imputed, "features": features.schema.names()}
    local = spec.training.batch_norm == "local" and model.has_batchnorm
    about = {
        "format": FORMAT,
        "fedstrata": version("fedstrata"),
        "model": architecture,
        "input_shape": None if isinstance(shape, Mapping) else list(shape),
        "classes": data.outputs,
        "class_names": list(data.class_names),
        "table": table,
        "normalisation": _normalisation(data.shift, data.scale),
        "batch_size": spec.evaluation.batch_size,
        "batch_statistics": local,
    }
    if data.task != Classification():
        about |= {"task": data.task.to_spec(), "keep": data.keep}
    if isinstance(x := data.inputs(slice(0, 0)), Mapping):
        about["inputs"] = _several(x, data)
    # Frozen parameters are not stored. When the model is loaded, they are computed again from the seed.
    frozen = prepared.identity.get("frozen")
    return about | {"frozen": {"seed": spec.seed, "fingerprints": frozen}} if frozen else about


def _normalisation(shift: Inputs | None, scale: Inputs | None) -> dict[str, Any] | None:
    if not isinstance(shift, Tensor) or not isinstance(scale, Tensor):
        return None
    return {"dtype": _name(shift.dtype), "shift": shift.tolist(), "scale": scale.tolist()}


def _several(x: Mapping[str, Tensor], data: Dataset) -> dict[str, Any]:
    """Return the shape, type and normalisation of each input of a model with several inputs."""
    shift, scale = data.shift or {}, data.scale or {}
    assert isinstance(shift, Mapping)
    assert isinstance(scale, Mapping)
    return {
        name: {
            "shape": list(tensor.shape[1:]),
            "dtype": _name(tensor.dtype),
            "normalisation": _normalisation(shift.get(name), scale.get(name)),
        }
        for name, tensor in x.items()
    }


def _read_normalisation(about: Mapping[str, Any] | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the shift and the scale of a normalisation in ``model.json``."""
    if about is None:
        return None, None
    dtype = {"float32": torch.float32, "float64": torch.float64}[about["dtype"]]
    return torch.tensor(about["shift"], dtype=dtype), torch.tensor(about["scale"], dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_model(folder: Path, prepared: Prepared, content: bytes) -> None:
    """Write ``model.safetensors`` and ``model.json``, and store the checksums of both in ``model.json``.

    Args:
        folder: The run folder.
        prepared: The experiment.
        content: The parameters and buffers in the format of safetensors.
    """
    about = describe_model(prepared) | {"parameters": hashlib.sha256(content).hexdigest()}
    write_json(folder / MODEL, about | {"checksum": _checksum(about)})
    replace_file(folder / WEIGHTS, content)  # last, because this file shows that the run has ended


def _checksum(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(jsonable(about), sort_keys=True).encode()).hexdigest()


def load(run_dir: str | Path, model: OwnModel | None = None) -> Predictor:
    """Load the final model of a run for inference.

    This function reads only ``model.json`` and ``model.safetensors``, and does not use pickle. If the spec names your
    own model function, the function's Python module is imported, unless you pass ``model``.

    Args:
        run_dir: The run folder, or any folder with ``model.json`` and ``model.safetensors``.
        model: A PyTorch module with the same architecture, if the run trained your own module. As in ``fedstrata.run``,
            you may also pass the module's Python class, or a function that creates the module. ``load`` does not change
            the module, and uses the run's trained parameters instead of the module's. The folder does not contain
            frozen parameters, so the module's frozen parameters must equal the frozen parameters of the run.

    Raises:
        SpecError: The folder does not contain a finished run, or ``model`` is missing or does not fit the run.
        DataError: A file is damaged.

    >>> import tempfile, fedstrata as fs
    >>> spec = fs.Experiment(training={"rounds": 1}, partition=fs.IID(clients=4))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     history = fs.run(spec, out=f"{place}/run")
    ...     predictor = fs.load(f"{place}/run")
    >>> digits = spec.data.load()
    >>> found = predictor.predict(digits.x_test)
    >>> (found == digits.y_test.numpy()).mean() == history.final_accuracy
    np.True_
    """
    folder = Path(run_dir)
    _require_model(folder)
    about = _read(folder / MODEL)
    tensors = read_weights(folder / WEIGHTS)
    built = _build(about, model, folder)
    frozen = about.get("frozen", {}).get("fingerprints", {})
    built.keep_constant(built.untrained.sent.keys() & frozen)
    _require_fit(built, tensors, folder)
    require_same_frozen(frozen, fingerprints_of_frozen(built) if "frozen" in about else {}, f"the run in {folder}")
    if model is not None:
        built = _try_out(built, about)
    built.load_for_good()
    built.share({name: tensors[name] for name in built.params()}, {name: tensors[name] for name in built.buffers()})
    return Predictor(built.module, about)


class Predictor:
    """A trained model for inference. New samples are prepared in the same way as the training samples.

    A model that was trained on a table takes rows with the columns of ``schema``, for example from a file or a data
    frame. As in training, the predictor imputes missing values and encodes categories. If a cell is invalid, the error
    names the row and the column.

    On the run's test set, the accuracy of the predictions is exactly ``final_accuracy``. To predict on a GPU, move
    ``module`` to the GPU.

    With ``training.batch_norm = "local"``, ``predict`` normalises each batch with the batch's own statistics, as
    evaluations during the run do. A prediction then depends on the other samples in the batch, so pass many samples of
    all classes at once.

    Args:
        module: The module with its final parameters.
        about: The content of ``model.json``.
    """

    def __init__(self, module: nn.Module, about: Mapping[str, Any]) -> None:
        self.module = module
        """The PyTorch module in evaluation mode. The module takes normalised samples, as the method ``inputs`` returns
        them."""
        self.classes: tuple[int | str, ...] = _labels(about["class_names"])
        """The labels that ``predict`` may return, in the order of the columns in ``predict_proba``."""
        self.shape: Shape = _shape_of(about)
        """The shape of one sample for ``module``, without the batch axis.

        The shape is (channels, height, width) or (features,). For several inputs, it is a mapping from names to shapes.
        """
        self.task: Task = _task_of(about)
        """The task, such as classification, which determines what ``predict`` returns."""
        self._keep = bool(about.get("keep", False))
        self._features = _features_of(about)
        self.schema: Schema | None = None if self._features is None else self._features.schema
        """The columns of a table and the values that each column accepts; None if the run trained on arrays.

        ``schema.names()`` returns the names of the features, in the order of the inputs of ``module``.
        """
        self._batch_size, self._batch_statistics = int(about["batch_size"]), bool(about["batch_statistics"])
        self._shift, self._scale = _all_normalisation(about)

    def predict(self, x: Any) -> NDArray[Any]:
        """Return the most likely class of each sample, or other predictions for other tasks.

        Args:
            x: The samples before normalisation. A model that was trained on a table takes rows: a pandas or polars data
                frame, a mapping from column names to lists, or the path of a CSV or Parquet file. Other columns, such
                as the label, are ignored. The model also takes an array (N, F) of the features in ``schema.names()``,
                with imputed values. A model that was trained on arrays takes an array of shape (N, F), (N, H, W), (N,
                H, W, C) or (N, C, H, W), as ``from_arrays`` does. For a single sample, N is 1.

        Returns:
            The labels, shape (N,). Labels are integers if all class names are integers, and otherwise strings. For
            example, the labels "0" and "1" are returned as integers, and the labels True and False as strings.

            The predictions of other tasks have other meanings. Regression returns numbers in the unit of the targets,
            shape (N,), or (N, K) for K targets. With several labels per sample, the result has shape (N, K), with 1 for
            each predicted label. Next-token prediction and segmentation return a class for each token or pixel.

        Raises:
            DataError: A cell does not match the schema, or a value is missing in a column without a rule for missing
                values. Also raised if samples are not finite, or differ in shape from the training samples.
            SpecError: The rows lack a column.
        """
        if not self.task.has_classes:
            predictions = [self.task.predictions(outputs) for outputs in self._logits(x)]
            key = "values" if "values" in predictions[0] else "labels"
            whole: NDArray[Any] = torch.cat([each[key] for each in predictions]).cpu().numpy()
            return whole[:, 0] if key == "values" and whole.shape[1] == 1 else whole
        numbers = np.concatenate([logits.argmax(dim=1).cpu().numpy() for logits in self._logits(x)])
        labels: NDArray[Any] = np.array(self.classes)
        if labels.dtype.kind == "f":  # NumPy converts integers to floats if some are < 0 and some ≥ 2**63
            labels = np.array(self.classes, dtype=object)
        predicted: NDArray[Any] = labels[numbers]
        return predicted

    def predict_proba(self, x: Any) -> NDArray[np.float32]:
        """Return the probability of each class for each sample: the softmax of the logits.

        Args:
            x: See ``predict``.

        Returns:
            The probabilities, shape (N, C), float32. Column c contains the probabilities of ``classes[c]``.

        Raises:
            SpecError: The task does not predict probabilities.
            FedstrataError: See ``predict``.
        """
        parts = [self.task.predictions(outputs) for outputs in self._logits(x)]
        if not all("probabilities" in part for part in parts):
            raise SpecError(
                "task", "does not predict probabilities. Call predict instead of predict_proba.", self.task.name
            )
        return np.concatenate([part["probabilities"].cpu().numpy() for part in parts])

    def inputs(self, x: Any) -> Inputs:
        """Return the normalised samples as input for ``module``: float32, shape (N, F) or (N, C, H, W).

        For a model with several inputs, return a mapping from the inputs' names to tensors (N, …).

        Args:
            x: See ``predict``.

        Raises:
            FedstrataError: See ``predict``.
        """
        return self._samples(x).inputs(slice(None), "test")

    @torch.no_grad()
    def _logits(self, x: Any) -> Iterator[Tensor]:
        data = self._samples(x)
        n, device = len(data.y_test), next(self.module.parameters()).device
        if self._batch_statistics and n == 1:
            problem = (
                "x has only one sample. This model was trained with batch_norm = 'local', and computes its BatchNorm"
            )
            raise DataError(f"{problem} statistics from x. Give several samples at once.")
        # Make batches of nearly equal size, as evaluation in a run does, so that the last batch is never a single
        # sample.
        bounds = np.linspace(0, n, -(-n // self._batch_size) + 1).astype(int).tolist()
        with _batch_statistics(self.module) if self._batch_statistics else nullcontext():
            for begin, end in pairwise(bounds):
                part = each(data.inputs(slice(begin, end), "test"), lambda tensor: tensor.to(device))
                yield forward(self.module, part)

    def _samples(self, x: Any) -> Dataset:
        """Return a data set that contains the samples, with the same normalisation as the run's data set."""
        if self._features is not None and isinstance(x, (str, Path)):
            x = read_table(Path(x), self._features.schema)
        if self._features is not None and (isinstance(x, (Table, Mapping)) or hasattr(x, "columns")):
            table = x if isinstance(x, Table) else table_of(x, "x")
            x = self._features.of(torch.from_numpy(parsed(table, self._features.schema)))
        if isinstance(self.shape, Mapping):
            return self._named_samples(x, self.shape)
        if self._keep:
            ids = checked_ids(x, "x")
            if ids.shape[1:] != self.shape:
                problem = f"has the shape {tuple(ids.shape)}, but this model takes {described(self.shape)}"
                raise DataError(f"x {problem}. Pad or cut the samples.")
            nothing = torch.zeros(len(ids), dtype=torch.int64)
            return Dataset("x", ids, nothing, ids, nothing, (), keep=True)
        stored = checked_inputs(x, "x", exact=isinstance(self._shift, Tensor) and self._shift.dtype == torch.float64)
        form = (*self.shape[1:], self.shape[0]) if len(self.shape) == 3 else self.shape
        if stored.shape[1:] != form:
            sample = "(N, F)" if len(form) == 1 else "(N, C, H, W), (N, H, W, C) or, with one channel, (N, H, W)"
            problem = (
                f"has the shape {tuple(np.shape(x))}, but this model takes samples of shape {self.shape}. Give {sample}"
            )
            rows = "" if self.schema is None else f", or rows of a table with {', '.join(self.schema.inputs)}"
            raise DataError(f"x {problem}, with N = 1 for a single sample{rows}.")
        labels = torch.zeros(len(stored), dtype=torch.int64)
        names = tuple(str(label) for label in self.classes)
        return Dataset("x", stored, labels, stored, labels, names, shift=self._shift, scale=self._scale)

    def _named_samples(self, x: Any, shape: Mapping[str, tuple[int, ...]]) -> Dataset:
        """Return a data set in which each sample has several inputs."""
        needed = f"this model takes the inputs {described(shape)}"
        if not isinstance(x, Mapping) or x.keys() != shape.keys():
            given = (
                f"has the inputs {', '.join(map(str, x))}" if isinstance(x, Mapping) else "is not a mapping of inputs"
            )
            raise DataError(f"x {given}, but {needed}. Give exactly these inputs, by name.")
        stored = checked_named(x, "x")
        for name, tensor in stored.items():
            if tuple(tensor.shape[1:]) != shape[name]:
                raise DataError(f"x.{name} has the shape {tuple(tensor.shape)}, but {needed}. Pad or cut the samples.")
        nothing = torch.zeros(len(next(iter(stored.values()))), dtype=torch.int64)
        names = tuple(str(label) for label in self.classes)
        return Dataset("x", stored, nothing, stored, nothing, names, shift=self._shift, scale=self._scale)

    def __repr__(self) -> str:
        what = f"classes={len(self.classes)}" if self.task.has_classes else f"task={self.task.name!r}"
        return f"Predictor({type(self.module).__name__}, shape={self.shape}, {what})"


@contextmanager
def _batch_statistics(module: nn.Module) -> Iterator[None]:
    """Let BatchNorm normalise with each batch's statistics, and leave the running statistics unchanged."""
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    tracked = [layer.track_running_stats for layer in norms]
    try:
        for layer in norms:
            layer.train()
            layer.track_running_stats = False
        yield
    finally:
        for layer, track in zip(norms, tracked, strict=True):
            layer.eval()
            layer.track_running_stats = track


def _labels(names: list[str]) -> tuple[int | str, ...]:
    """Convert class names to labels: to integers if all names are integers, and otherwise to strings.

    >>> _labels(["-1", "7"]), _labels(["1", "1.5"]), _labels(["07", "7"])
    ((-1, 7), ('1', '1.5'), ('07', '7'))
    """
    try:
        whole = [int(name) for name in names]
    except ValueError:
        return tuple(names)
    return tuple(whole) if [str(label) for label in whole] == names else tuple(names)


def _require_model(folder: Path) -> None:
    """Raise ``SpecError`` if a file of the final model is missing."""
    if not (folder / WEIGHTS).is_file():
        if not (folder / "spec.toml").is_file():
            below = [*folder.glob(f"*/{WEIGHTS}"), *folder.glob(f"*/*/{WEIGHTS}")]
            runs = sorted(path.parent.relative_to(folder).as_posix() for path in below)
            hint = (
                f"Use one of its runs: {', '.join(runs[:6])}{' …' * (len(runs) > 6)}" if runs else "Give a run folder."
            )
            problem = f"is not a run folder, because it contains neither {WEIGHTS} nor spec.toml. {hint}"
            raise SpecError("run_dir", problem, str(folder))
        problem = (
            f"the run has not ended, so the final model ({WEIGHTS}) does not exist yet. Resume the run with 'fedstrata "
            f"run --resume {folder}', or fedstrata.run(…, resume=True)."
        )
        raise SpecError("run_dir", problem, str(folder))
    if not (folder / MODEL).is_file():
        problem = (
            f"the folder does not contain {MODEL}, which describes how to use {WEIGHTS}. If the run has a checkpoint, "
            f"'fedstrata run --resume {folder}' writes the file."
        )
        raise SpecError("run_dir", problem, str(folder))


def _read(path: Path) -> dict[str, Any]:
    """Read ``model.json``.

    Raises:
        DataError: The file is damaged, or was written in a new format by a later version of fedstrata.
    """
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        later = about["format"] > FORMAT
        if not later:
            if about.pop("checksum", None) not in (None, _checksum(about)):
                raise ValueError("the file was changed after the run")
            _check(about)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SpecError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}. Restore the file.") from None
    if later:
        problem = (
            f"was written by fedstrata {about.get('fedstrata')}, which is newer than the installed version "
            f"{version('fedstrata')}"
        )
        raise DataError(f"{path} {problem}. Install the newer version.")
    return about


def _task_of(about: Mapping[str, Any]) -> Task:
    return Classification() if about.get("task") is None else TASKS.parse(about["task"])


def _trial_of(about: Mapping[str, Any], samples: int = 1) -> Trial:
    """Return samples of zeros for testing a model, and a function that returns the expected shape of the outputs."""
    shape = _shape_of(about)
    if isinstance(shape, Mapping):
        types = {name: getattr(torch, one["dtype"]) for name, one in about["inputs"].items()}
        x: Inputs = {name: torch.zeros(samples, *size, dtype=types[name]) for name, size in shape.items()}
    else:
        x = torch.zeros(samples, *shape, dtype=torch.int64 if about.get("keep") else torch.float32)
    needed = "" if about.get("task") else f"(B, {about['classes']})"
    return x, lambda outputs: "" if not needed or outputs.shape == (samples, about["classes"]) else needed


def _shape_of(about: Mapping[str, Any]) -> Shape:
    if "inputs" in about:
        return {name: tuple(one["shape"]) for name, one in about["inputs"].items()}
    return tuple(about["input_shape"])


def _all_normalisation(about: Mapping[str, Any]) -> tuple[Inputs | None, Inputs | None]:
    """Return the shift and the scale of the inputs.

    For several inputs, return the shifts and the scales by the inputs' names. Inputs without normalisation are left
    out.
    """
    if "inputs" not in about:
        return _read_normalisation(about["normalisation"])
    read = {name: _read_normalisation(one["normalisation"]) for name, one in about["inputs"].items()}
    shift = {name: pair[0] for name, pair in read.items() if pair[0] is not None}
    scale = {name: pair[1] for name, pair in read.items() if pair[1] is not None}
    return (shift, scale) if shift else (None, None)


def _features_of(about: Mapping[str, Any]) -> Features | None:
    """Return the object that computes the features of a table's rows; None if the run trained on arrays.

    Raises:
        ValueError: The schema, the imputed values and the features do not match.
        SpecError: The schema is invalid.
    """
    if (table := about.get("table")) is None:
        return None
    schema = build(Schema, table["schema"])
    columns, imputed = schema.inputs, {name: float(value) for name, value in table["imputed"].items()}
    if any(column.type == "category" and column.categories is None for column in columns.values()):
        raise ValueError("table.schema does not list the categories of a column")
    if schema.names() != table["features"] or about["input_shape"] != [len(table["features"])]:
        raise ValueError("table.features differs from the features of table.schema, or does not fit input_shape")
    if [name for name, column in columns.items() if column.impute is not None] != list(imputed):
        raise ValueError("table.imputed must name exactly the columns of table.schema that have the key 'impute'")
    return Features(schema, imputed)


def _check(about: Mapping[str, Any]) -> None:
    names = about["class_names"]
    if "inputs" not in about:
        _check_input("input_shape", about["input_shape"], about["normalisation"], image=not about.get("keep"))
    for name, one in about.get("inputs", {}).items():
        _check_input(f"inputs.{name}.shape", one["shape"], one["normalisation"], image=False)
        if not isinstance(getattr(torch, one["dtype"], None), torch.dtype):
            raise ValueError(f"inputs.{name}.dtype has the invalid value {one['dtype']!r}")
    task = about.get("task") or ""
    if ":" not in (task if isinstance(task, str) else task["name"]):  # the user's own task is imported later
        _task_of(about)
    unnamed = about.get("task") is not None and not names
    if not unnamed and (not names or not all(isinstance(n, str) for n in names) or len(names) != about["classes"]):
        raise ValueError("class_names is not a list with one name per class")
    if type(about["batch_size"]) is not int or about["batch_size"] < 1 or type(about["batch_statistics"]) is not bool:
        raise ValueError("batch_size or batch_statistics has the wrong type")
    if not isinstance(about["model"]["name"], str):
        raise ValueError("model.name is not a string")
    _features_of(about)
    if (frozen := about.get("frozen")) is not None and not (
        type(frozen["seed"]) is int and frozen["fingerprints"].keys()
    ):
        raise ValueError("frozen.seed must be an integer, and frozen.fingerprints must not be empty")


def _check_input(key: str, shape: Any, normalisation: Any, *, image: bool) -> None:
    """Check the shape and the normalisation of an input.

    Args:
        key: The key of the shape in ``model.json``.
        shape: The shape of one sample.
        normalisation: The normalisation of the input.
        image: Whether the input is an image or a vector. Images and vectors are normalised along their first axis
            (channels), and other inputs along their last axis.
    """
    if (image and len(shape) not in (1, 3)) or not all(type(side) is int and side > 0 for side in shape):
        raise ValueError(f"{key} has the invalid value {shape}")
    if normalisation is not None:
        width = shape[0] if image else [1, *shape][-1]
        if normalisation["dtype"] not in ("float32", "float64"):
            raise ValueError(f"normalisation.dtype has the invalid value {normalisation['dtype']!r}")
        for which in ("shift", "scale"):
            values = normalisation[which]
            if len(values) != width or not all(isinstance(value, (int, float)) for value in values):
                raise ValueError(f"normalisation.{which} is not a list of {width} numbers")


def _build(about: Mapping[str, Any], model: OwnModel | None, folder: Path) -> Model:
    """Build a model with the run's architecture and with arbitrary parameters."""
    shape, classes, seed = _shape_of(about), about["classes"], about.get("frozen", {}).get("seed", 0)
    if model is not None:
        module = own_module(model, shape, classes, seed)
        return Model(twin_of(module.module if isinstance(module, Model) else module))
    name = about["model"]["name"]
    if name == CUSTOM:
        own = about["model"].get("class")
        problem = f"the run in {folder} trained your own module {own}, whose code the folder does not contain"
        raise SpecError("model", f"{problem}. Pass the module: fedstrata.load(…, model=…).")
    try:
        table = under("model", lambda: MODELS.parse(about["model"]))
        return make_model(table, shape, classes, seed, _trial_of(about))
    except SpecError as error:
        if ":" not in name:
            raise
        advice = ". Alternatively, pass the module itself: fedstrata.load(…, model=…)."
        raise SpecError(error.key, error.problem.rstrip(".") + advice, error.value) from None


def _try_out(model: Model, about: Mapping[str, Any]) -> Model:
    """Test the user's own module on two samples. Return the module in the memory format that training uses.

    Raises:
        SpecError: The module raises an error on the samples, or does not return one logit per class.
    """
    shape, name = _shape_of(about), type(model.module).__name__
    needed = f"must take batches of shape {described(shape)} and return logits (B, {about['classes']})"
    try:
        laid_out = Model(model.module if about.get("keep") else lay_out(model.module, shape))
        laid_out.keep_constant(model.untrained.constant)
        with torch.no_grad():
            trial = _trial_of(about, 2)
            assert trial is not None
            output = forward(laid_out.module, trial[0])
    except Exception as error:  # the user's own module may raise any exception
        raise SpecError("model", f"{needed}, but the model failed on a test batch: {error}", name) from error
    if trial[1](output):
        raise SpecError(
            "model", f"{needed}, but returned {tuple(output.shape)} for two samples. Change the output.", name
        )
    return laid_out


def _require_fit(model: Model, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raise ``SpecError`` if a tensor's name, dtype or shape differs between the module and the file.

    If a file of an earlier version contains frozen parameters, the model uses these parameters.
    """
    stored_frozen = {name: tensor for name, tensor in model.untrained.frozen.items() if name in tensors}
    expected = {**model.params(), **model.buffers(), **stored_frozen}
    for name in expected | dict(tensors):
        here, stored = _size(expected.get(name)), _size(tensors.get(name))
        if here != stored:
            problem = f"does not fit the run in {folder}: {name} is {here} in the module, but {stored} in {WEIGHTS}"
            raise SpecError("model", f"{problem}. Pass the module of the run.", type(model.module).__name__)
    for name, tensor in stored_frozen.items():
        # ``tensor`` shares its memory with the user's module, so give it new memory with the stored values.
        tensor.data = torch.empty_like(tensor).copy_(tensors[name])


def _size(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
