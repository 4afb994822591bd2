"""The model that a run leaves behind, described in ``model.json`` and ready for samples as they come."""

from __future__ import annotations

import copy
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

from fedstrata.base.config import under
from fedstrata.base.errors import DataError, SpecError
from fedstrata.base.jsonl import jsonable, replace_file, write_json
from fedstrata.data.arrays import Array, checked_inputs
from fedstrata.data.dataset import Dataset
from fedstrata.evaluation.history import MODEL, WEIGHTS, read_weights
from fedstrata.models.batchnorm import has_batchnorm
from fedstrata.models.memory_format import lay_out
from fedstrata.models.model import Model
from fedstrata.models.zoo import MODELS, make_model
from fedstrata.runs.preparation import Prepared

FORMAT = 1
"""Raised when an older fedstrata could not read the file, or would read it wrongly."""

CUSTOM = "custom"
"""What a spec's model is called that was a module of the user's own."""


def describe_model(prepared: Prepared) -> dict[str, Any]:
    """What inference needs beside the parameters, as plain values; ``model.json`` holds it.

    Every number comes back to the bit: JSON has the shortest text that reads as the same float64.

    Args:
        prepared: The experiment.
    """
    data, model, spec = prepared.data, prepared.config.model, prepared.spec
    architecture = spec.model.to_spec()
    if architecture.get("name") == CUSTOM:
        cls, tensors = type(model.module), {**model.params(), **model.buffers()}
        architecture["class"] = f"{cls.__module__}.{cls.__qualname__}"
        architecture["shapes"] = {name: list(tensor.shape) for name, tensor in tensors.items()}
    normalisation = None
    if data.shift is not None and data.scale is not None:
        dtype = str(data.shift.dtype).removeprefix("torch.")
        normalisation = {"dtype": dtype, "shift": data.shift.tolist(), "scale": data.scale.tolist()}
    local = spec.training.batch_norm == "local" and has_batchnorm(model.module)
    return {
        "format": FORMAT,
        "fedstrata": version("fedstrata"),
        "model": architecture,
        "input_shape": list(data.shape),
        "classes": data.classes,
        "class_names": list(data.class_names),
        "normalisation": normalisation,
        "batch_size": spec.evaluation.batch_size,
        "batch_statistics": local,
    }


def write_model(folder: Path, prepared: Prepared, content: bytes) -> None:
    """``model.json`` and ``model.safetensors``, with checksums of both in the first.

    Args:
        folder: The run's.
        prepared: The experiment.
        content: The parameters and buffers, as safetensors has them.
    """
    about = describe_model(prepared) | {"parameters": hashlib.sha256(content).hexdigest()}
    write_json(folder / MODEL, about | {"checksum": _checksum(about)})  # before what says that the run is over
    replace_file(folder / WEIGHTS, content)


def _checksum(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(jsonable(about), sort_keys=True).encode()).hexdigest()


def load(run_dir: str | Path, model: nn.Module | Model | None = None) -> Predictor:
    """The model of a run that has ended, for samples as they come.

    ``model.json`` and ``model.safetensors`` are all that is read, and nothing is unpickled. Where the spec named a
    factory of your own, ``"module:factory"``, that module is imported as the run did, unless you give ``model``.

    Args:
        run_dir: The run's folder, or any that holds these two files.
        model: A module like the one that the run trained, where that was your own; its values do not matter, and it
            stays as it is.

    Raises:
        SpecError: There is no run, it has not ended, or its model needs a ``model`` that was not given or does not fit.
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
    _require_fit(built, tensors, folder)
    if model is not None:
        built = _try_out(built, about)
    built.load_for_good()
    built.share({name: tensors[name] for name in built.params()}, {name: tensors[name] for name in built.buffers()})
    return Predictor(built.module, about)


class Predictor:
    """A trained model that takes samples as they come: it normalises them as the training samples were.

    On a run's test set it finds the run's ``final_accuracy``: the samples are cut into the same batches. To compute on
    a GPU, move ``module`` there.

    With ``training.batch_norm = "local"`` no running statistics are shared, and the run's accuracy is measured with
    those of each test batch. ``predict`` does the same: what a sample is taken for then depends on its companions, so
    give many at once, of all kinds. ``module`` in evaluation mode has initial statistics in that case.

    Args:
        module: The module with its final parameters.
        about: What ``model.json`` says.
    """

    def __init__(self, module: nn.Module, about: Mapping[str, Any]) -> None:
        self.module = module
        """The ``nn.Module`` in evaluation mode; it takes normalised inputs, such as ``inputs`` gives."""
        self.classes: tuple[int | str, ...] = _labels(about["class_names"])
        """The label of each column of ``predict_proba``, as ``predict`` gives them."""
        self.shape: tuple[int, ...] = tuple(about["input_shape"])
        """Shape of one sample as ``module`` sees it, (channels, height, width) or (features,)."""
        self._batch_size, self._batch_statistics = int(about["batch_size"]), bool(about["batch_statistics"])
        normalisation = about["normalisation"]
        self._shift = self._scale = None
        if normalisation is not None:
            dtype = {"float32": torch.float32, "float64": torch.float64}[normalisation["dtype"]]
            self._shift, self._scale = (torch.tensor(normalisation[key], dtype=dtype) for key in ("shift", "scale"))

    def predict(self, x: Array) -> NDArray[Any]:
        """The likeliest class of each sample.

        Args:
            x: Samples as they are before any normalisation: (N, F), (N, H, W), (N, H, W, C) or (N, C, H, W), as
                ``from_arrays`` takes them; also a single one has the first axis.

        Returns:
            (N,): whole numbers where all class names are such, else the names as strings. Labels are names once data
            were read, so that the strings "0" and "1" come back as numbers too, and True and False as strings.

        Raises:
            DataError: They are no numbers, not finite, or not of the shape that the model was trained on.
        """
        numbers = np.concatenate([logits.argmax(dim=1).cpu().numpy() for logits in self._logits(x)])
        labels: NDArray[Any] = np.array(self.classes)
        if labels.dtype.kind == "f":  # NumPy has no type for whole numbers on both sides of 2**63
            labels = np.array(self.classes, dtype=object)
        found: NDArray[Any] = labels[numbers]
        return found

    def predict_proba(self, x: Array) -> NDArray[np.float32]:
        """How likely each class is for each sample, by the softmax of the logits.

        Args:
            x: See ``predict``.

        Returns:
            (N, C), float32; the columns are those of ``classes``.

        Raises:
            DataError: See ``predict``.
        """
        return np.concatenate([logits.softmax(dim=1).cpu().numpy() for logits in self._logits(x)])

    def inputs(self, x: Array) -> Tensor:
        """Samples as ``module`` takes them: normalised, float32, (N, F) or (N, C, H, W).

        Args:
            x: See ``predict``.

        Raises:
            DataError: See ``predict``.
        """
        return self._samples(x).inputs(slice(None), "test")

    @torch.no_grad()
    def _logits(self, x: Array) -> Iterator[Tensor]:
        data = self._samples(x)
        n, device = len(data.x_test), next(self.module.parameters()).device
        if self._batch_statistics and n == 1:
            problem = "a single sample; this model was trained with batch_norm = 'local' and normalises each batch"
            raise DataError(f"x: {problem} with its own statistics: give many samples at once")
        # As the run's test set was: of nearly equal size, for a last batch of one would have no statistics.
        bounds = np.linspace(0, n, -(-n // self._batch_size) + 1).astype(int).tolist()
        with _batch_statistics(self.module) if self._batch_statistics else nullcontext():
            for begin, end in pairwise(bounds):
                yield self.module(data.inputs(slice(begin, end), "test").to(device))

    def _samples(self, x: Array) -> Dataset:
        """Samples as a data set that normalises them as the run's own did."""
        stored = checked_inputs(x, "x", exact=self._shift is not None and self._shift.dtype == torch.float64)
        form = (*self.shape[1:], self.shape[0]) if len(self.shape) == 3 else self.shape
        if stored.shape[1:] != form:
            sample = "(N, F)" if len(form) == 1 else "(N, C, H, W), (N, H, W, C) or, with one channel, (N, H, W)"
            problem = f"of shape {tuple(np.shape(x))}; this model takes samples of shape {self.shape}, as {sample}"
            raise DataError(f"x: {problem}, N = 1 for a single one")
        labels = torch.zeros(len(stored), dtype=torch.int64)
        names = tuple(str(label) for label in self.classes)
        return Dataset("x", stored, labels, stored, labels, names, shift=self._shift, scale=self._scale)

    def __repr__(self) -> str:
        return f"Predictor({type(self.module).__name__}, shape={self.shape}, classes={len(self.classes)})"


@contextmanager
def _batch_statistics(module: nn.Module) -> Iterator[None]:
    """Let BatchNorm normalise with each batch's statistics in the block, and keep none of them."""
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
    """Class names as labels: numbers were turned into text when the data were read.

    >>> _labels(["-1", "7"]), _labels(["1", "1.5"]), _labels(["07", "7"])
    ((-1, 7), ('1', '1.5'), ('07', '7'))
    """
    try:
        whole = [int(name) for name in names]
    except ValueError:
        return tuple(names)
    return tuple(whole) if [str(label) for label in whole] == names else tuple(names)


def _require_model(folder: Path) -> None:
    """Both files are there.

    Raises:
        SpecError: They are not; with what to do.
    """
    if not (folder / WEIGHTS).is_file():
        if not (folder / "spec.toml").is_file():
            raise SpecError("run_dir", f"no run folder: it has neither {WEIGHTS} nor spec.toml", str(folder))
        problem = (
            f"this run has not ended, and a run leaves its model ({WEIGHTS}) at its end; 'fedstrata run --resume "
            f"{folder}', or fedstrata.run(…, resume=True), goes on from its last checkpoint"
        )
        raise SpecError("run_dir", problem, str(folder))
    if not (folder / MODEL).is_file():
        problem = (
            f"it has no {MODEL}, which says how to use {WEIGHTS}; 'fedstrata run --resume {folder}' writes it, where "
            "the run kept a checkpoint"
        )
        raise SpecError("run_dir", problem, str(folder))


def _read(path: Path) -> dict[str, Any]:
    """What ``describe_model`` said.

    Raises:
        DataError: The file is damaged, or of a later version.
    """
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        later = about["format"] > FORMAT
        if not later:
            if about.pop("checksum", None) not in (None, _checksum(about)):
                raise ValueError("it is not what the run wrote; without its 'checksum' it is taken as it is")
            _check(about)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    if later:
        raise DataError(f"{path} was written by fedstrata {about.get('fedstrata')}; this is {version('fedstrata')}")
    return about


def _check(about: Mapping[str, Any]) -> None:
    shape, names, normalisation = about["input_shape"], about["class_names"], about["normalisation"]
    if len(shape) not in (1, 3) or not all(type(side) is int and side > 0 for side in shape):
        raise ValueError(f"input_shape is {shape}")
    if not names or not all(isinstance(name, str) for name in names) or len(names) != about["classes"]:
        raise ValueError("class_names are not as many texts as there are classes")
    if type(about["batch_size"]) is not int or about["batch_size"] < 1 or type(about["batch_statistics"]) is not bool:
        raise ValueError("batch_size or batch_statistics is of a wrong kind")
    if not isinstance(about["model"]["name"], str):
        raise ValueError("model.name is no text")
    if normalisation is not None:
        if normalisation["dtype"] not in ("float32", "float64"):
            raise ValueError(f"normalisation.dtype is {normalisation['dtype']!r}")
        for key in ("shift", "scale"):
            values = normalisation[key]
            if len(values) != shape[0] or not all(isinstance(value, (int, float)) for value in values):
                raise ValueError(f"normalisation.{key} is not a number for each of {shape[0]}")


def _build(about: Mapping[str, Any], model: object, folder: Path) -> Model:
    """The architecture; its values are still of no meaning."""
    if isinstance(model, (Model, nn.Module)):
        module = model.module if isinstance(model, Model) else model
        return Model(copy.deepcopy(module), head="")  # nobody asks for features here: any part may be called the head
    if model is not None:
        raise SpecError("model", "expected an nn.Module or a fedstrata Model, or nothing", type(model).__name__)
    name = about["model"]["name"]
    if name == CUSTOM:
        own = about["model"].get("class")
        problem = f"the run in {folder} trained a module of your own, {own}, which no file holds"
        raise SpecError("model", f"{problem}; give one like it: fedstrata.load(…, model=…)")
    try:
        table = under("model", lambda: MODELS.parse(about["model"]))
        return make_model(table, tuple(about["input_shape"]), about["classes"], seed=0)
    except SpecError as error:
        if ":" not in name:
            raise
        advice = "; give the module itself: fedstrata.load(…, model=…)"
        raise SpecError(error.key, error.problem + advice, error.value) from None


def _try_out(model: Model, about: Mapping[str, Any]) -> Model:
    """A module of the user's own, in the memory format that it was trained in.

    Raises:
        SpecError: It does not take the samples, or gives no logit for each class.
    """
    shape, name = tuple(about["input_shape"]), type(model.module).__name__
    needed = (
        f"a model takes a batch of shape (B, {', '.join(map(str, shape))}) and gives logits (B, {about['classes']})"
    )
    try:
        laid_out = Model(lay_out(model.module, shape), head="")
        with torch.no_grad():
            found = tuple(laid_out.module(torch.zeros(2, *shape)).shape)
    except Exception as error:  # it is the user's own module, which raises what it likes
        raise SpecError("model", f"{needed}; this one failed: {error}", name) from error
    if found != (2, about["classes"]):
        raise SpecError("model", f"{needed}; this one gave {found} for two samples", name)
    return laid_out


def _require_fit(model: Model, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """The module has the tensors of the file, no more and no less.

    Raises:
        SpecError: With the first that differs.
    """
    own, path = {**model.params(), **model.buffers()}, folder / WEIGHTS
    for name in [*own, *(name for name in tensors if name not in own)]:
        ours, found = (_size(table.get(name)) for table in (own, tensors))
        if ours != found:
            problem = f"does not fit the run in {folder}: {name} is {ours} in the module, and {found} in {path.name}"
            raise SpecError("model", problem, type(model.module).__name__)


def _size(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
