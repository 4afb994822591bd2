"""Store a data set in arrays that all clients share.

Each client has a list of sample indices. Batches are normalised when they are read.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import DataError, SpecError
from fedstrata.base.inputs import Inputs, Shape, each, tensors_of
from fedstrata.data import arrays
from fedstrata.data.arrays import Array
from fedstrata.data.mapped import MappedFile, mapped_files
from fedstrata.data.normalisation import Normalize, shift_and_scale
from fedstrata.data.tasks.base import TASKS, Task
from fedstrata.data.tasks.classification import Classification

if TYPE_CHECKING:
    from fedstrata.data.fitting import Features, Unfitted

LOG = logging.getLogger(__name__)

Split = Literal["train", "test"]
Indices = Tensor | Ints | slice


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples of one task.

    Images are stored with the axes N, H, W and C, and tables with the axes N and F. Images and tables keep their data
    type, so 8-bit images stay 8-bit. The method ``inputs`` converts a batch to float32 for the model. If a model has
    several inputs, each input is a separate tensor with its own type and shape. ``from_arrays`` and ``Data(…).load()``
    build data sets.

    Args:
        name: The name of the data set in reports.
        x_train: Training inputs, as a contiguous tensor of shape (N, H, W, C) or (N, F). If samples have several
            inputs: a mapping from the name of each input to a tensor (N, …).
        y_train: Training targets. For classification, the targets are labels in 0…C−1, int64, shape (N,).
        x_test: Test inputs, in the same form as ``x_train``.
        y_test: Test targets, in the same form as ``y_train``.
        class_names: The name of each output of a model, such as the name of a class; empty if outputs have no names.
        domain_train: The domain of each training sample, shape (N,), int64; None if there are no domains.
        domain_test: The domain of each test sample.
        domain_names: The name of each domain.
        shift: The number to subtract from each channel or feature, float32 or float64, shape (C,) or (F,). If samples
            have several inputs: a mapping from the name of each normalised input to its shift.
        scale: The factor that multiplies each channel or feature after ``shift`` is subtracted.
        client_train: The client from which each training sample comes, shape (N,), int64; None if unknown.
        client_test: The client from which each test sample comes, if known.
        client_names: The name of each client, including clients that have only test samples.
        unfitted: The raw samples; None if features do not depend on statistics of the samples. As soon as the clients'
            training samples are known, features are computed again from the raw samples.
        features: The object that computes features from table rows; None for arrays.
        task: The task, which determines what the targets mean.
        n_outputs: The number of model outputs per sample, token or pixel. Default: the number of ``class_names``.
        keep: Whether inputs are integers, such as token ids, that are passed to the model unchanged.
        mapped: A mapping from each memory-mapped input, such as ``x_train`` or ``x_train.ids``, to its file.
    """

    name: str
    x_train: Inputs
    y_train: Tensor
    x_test: Inputs
    y_test: Tensor
    class_names: tuple[str, ...]
    domain_train: Tensor | None = None
    domain_test: Tensor | None = None
    domain_names: tuple[str, ...] = ()
    shift: Inputs | None = None
    scale: Inputs | None = None
    client_train: Tensor | None = None
    client_test: Tensor | None = None
    client_names: tuple[str, ...] = ()
    unfitted: Unfitted | None = None
    features: Features | None = None
    task: Task = field(default_factory=Classification)
    n_outputs: int | None = None
    keep: bool = False
    mapped: Mapping[str, MappedFile] = field(default_factory=dict)

    @property
    def outputs(self) -> int:
        """The number of model outputs per sample, token or pixel, such as the number of classes C."""
        return len(self.class_names) if self.n_outputs is None else self.n_outputs

    @cached_property
    def strata(self) -> Ints | None:
        """The stratum (class, range of targets or domain) of each training sample.

        The value is an array of shape (N,), or None if samples have no strata.
        """
        strata = self.task.strata(self.y_train, self.class_names)
        if strata is None and self.domain_train is not None:
            return self.domain_train.cpu().numpy()
        return strata

    @property
    def stratum_names(self) -> tuple[str, ...]:
        """The name of each stratum; empty if samples have no strata."""
        return self.task.stratum_names(self.class_names) or self.domain_names

    @property
    def strata_or_one(self) -> tuple[Ints, int]:
        """The stratum of each training sample, and the number of strata.

        Without strata, all samples are in stratum 0.
        """
        if self.strata is None:
            return np.zeros(self.train_size, dtype=np.int64), 1
        return self.strata, len(self.stratum_names)

    def require_strata(self, key: str, value: object) -> Ints:
        """Return the stratum of each training sample, shape (N,), or raise an error if samples have no strata.

        Args:
            key: The key of the setting that needs strata.
            value: The value of the setting.

        Raises:
            SpecError: The samples have no strata; the message says how to define strata.
        """
        if self.strata is None:
            problem = f"needs classes, but the task {self.task.name!r} has no classes. {self.task.stratum_hint}"
            raise SpecError(key, problem.rstrip(), value)
        return self.strata

    @property
    def shape(self) -> Shape:
        """The shape of a sample for the model: (C, H, W) or (F,), or a mapping with one shape per input."""
        if isinstance(self.x_train, Mapping):
            return {name: tuple(tensor.shape[1:]) for name, tensor in self.x_train.items()}
        size = tuple(self.x_train.shape[1:])
        if self.keep:
            return size
        return (size[2], size[0], size[1]) if len(size) == 3 else size

    @cached_property
    def sample_bytes(self) -> int:
        """The size in bytes of a sample as the model receives it."""
        if not isinstance(self.x_train, Tensor):
            return sum(tensor.shape[1:].numel() * tensor.element_size() for tensor in self.x_train.values())
        return 4 * self.x_train.shape[1:].numel()

    @property
    def train_size(self) -> int:
        """The number of training samples."""
        return len(self.y_train)

    def inputs(self, indices: Indices, split: Split = "train") -> Inputs:
        """Return the normalised inputs of some samples, in the order of ``indices``.

        Args:
            indices: The indices of the samples, shape (B,), or a slice.
            split: ``"train"`` or ``"test"``.

        Returns:
            A copy of the inputs in float32, shape (B, F) or (B, C, H, W) in channels-last memory format. If ``keep`` is
            true, the inputs are int64 and are not normalised. If the model has several inputs, the result maps each
            input's name to a tensor (B, …).

        Raises:
            IndexError: An index is negative or too large.
        """
        inputs = self.x_train if split == "train" else self.x_test
        if isinstance(inputs, Mapping):
            return {name: self._named(name, _take(tensor, indices)) for name, tensor in inputs.items()}
        stored = _take(inputs, indices)
        if self.keep:
            return stored
        # Shift and scale are float64 if inputs would lose too many digits in float32. Normalise such inputs first, and
        # round them afterwards.
        if self._rows is not None and self._rows[0].dtype == torch.float64:
            batch = (stored.double().flatten(1) - self._rows[0]).mul_(self._rows[1]).float().view(stored.shape)
        else:
            batch = stored.to(torch.float32, copy=isinstance(indices, slice))
            if self._rows is not None:
                batch.flatten(1).sub_(self._rows[0]).mul_(self._rows[1])
        return batch.permute(0, 3, 1, 2) if batch.dim() == 4 else batch

    def _named(self, name: str, stored: Tensor) -> Tensor:
        """Return one of several inputs, normalised along its last axis."""
        if not isinstance(self.shift, Mapping) or not isinstance(self.scale, Mapping) or name not in self.shift:
            return stored
        return stored.to(self.shift[name].dtype).sub(self.shift[name]).mul_(self.scale[name]).float()

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor] | None:
        """The shift and scale of each value of a flattened sample; None if inputs are not normalised.

        Images are normalised four times as fast with these tensors as by broadcasting shift and scale over the channel
        axis.
        """
        if not isinstance(self.x_train, Tensor) or not isinstance(self.shift, Tensor):
            return None
        assert isinstance(self.scale, Tensor)
        repeats = self.x_train.shape[1:].numel() // len(self.shift)
        return self.shift.repeat(repeats), self.scale.repeat(repeats)

    def targets(self, indices: Indices, split: Split = "train") -> Tensor:
        """Return the targets of B samples, shape (B, …). For classification, these are labels, int64, shape (B,)."""
        return _take(self.y_train if split == "train" else self.y_test, indices)

    def to(self, device: torch.device | str) -> Dataset:
        """Return the data set with its tensors on ``device``."""
        moved: dict[str, Any] = {name: each(x, lambda tensor: tensor.to(device)) for name, x in self.tensors().items()}
        return dataclasses.replace(self, **moved)

    def tensors(self) -> dict[str, Inputs]:
        """Return the fields that are tensors or mappings of tensors."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: x for name, x in named.items() if isinstance(x, (Tensor, Mapping)) and name != "mapped"}

    def __repr__(self) -> str:
        domains = f", domains={len(self.domain_names)}" if self.domain_names else ""
        domains += f", clients={len(self.client_names)}" if self.client_names else ""
        sizes = f"train={self.train_size}, test={len(self.y_test)}"
        outputs = f"{'classes' if self.task.has_classes else 'outputs'}={self.outputs}"
        return f"Dataset({self.name!r}, {sizes}, shape={self.shape}, {outputs}{domains})"


def from_arrays(
    x_train: Array | Mapping[str, Array],
    y_train: Array,
    x_test: Array | Mapping[str, Array],
    y_test: Array,
    *,
    name: str = "arrays",
    domain_train: Array | None = None,
    domain_test: Array | None = None,
    class_names: Sequence[str] | None = None,
    domain_names: Sequence[str] | None = None,
    clients: Array | None = None,
    clients_test: Array | None = None,
    normalize: Normalize = "standard",
    task: Task | str | None = None,
) -> Dataset:
    """Build a data set from arrays or tensors.

    Do not change the arrays afterwards, because the data set may share their memory.

    Inputs from ``numpy.load(…, mmap_mode="r")`` stay on disk, and may be larger than the RAM.

    Args:
        x_train: Training inputs of any numeric type: images (N, H, W), (N, H, W, C) or (N, C, H, W), or a table (N, F).
            An array with four axes is read as (N, C, H, W) if the second axis has the length 1, 3 or 4, and the last
            axis has another length. For a model with several inputs, give a mapping from the names of its arguments to
            arrays (N, …) of any shape. Integers and booleans, such as token ids and masks, stay unchanged. Floats are
            normalised along their last axis.
        y_train: Training targets. For classification, give one label per sample, as an integer or a string. For
            regression, give one or several numbers per sample, shape (N,) or (N, K). For several labels per sample,
            give an array (N, K) with 0 or 1 per label. For next-token prediction, give token ids, shape (N, T). For
            segmentation, give classes, shape (N, H, W).
        x_test: Test inputs, of the same kind as ``x_train``.
        y_test: Test targets, of the same kind as ``y_train``.
        name: The name of the data set in reports.
        domain_train: The domain of each training sample, as an integer or a string.
        domain_test: The domain of each test sample.
        class_names: The name of each class. If set, each label must be an index into ``class_names``, or an element of
            ``class_names``. Default: the sorted distinct labels.
        domain_names: The name of each domain; see ``class_names``.
        clients: The client of each training sample, as an integer or a string, for the partition ``natural``.
        clients_test: The client of each test sample. A client without training samples never trains.
        normalize: The normalisation of inputs. ``"standard"``: each channel or feature is shifted and scaled to mean 0
            and standard deviation 1 on the training set. Constant channels and features are only shifted. ``"unit"``:
            each channel or feature is scaled to [0, 1] on the training set. Values of type uint8 are divided by 255.
            ``"none"``: values do not change. ``"keep"``: inputs are integers of any shape, such as token ids (N, T),
            and are passed to the model unchanged.
        task: The task, or its name. Default: regression if some targets are not integers, otherwise classification.

    Raises:
        DataError: The arrays' lengths, shapes or types do not match, a value is not finite, or no label of the test set
            is in the training set. Labels that occur only in the test set cause a warning.

    >>> data = from_arrays([[0.0], [2.0]], ["cat", "ant"], [[4.0]], ["cat"])
    >>> data.class_names, data.y_train.tolist(), data.inputs(slice(None)).tolist()
    (('ant', 'cat'), [1, 0], [[-1.0], [1.0]])
    """
    train, test = _checked_pair(x_train, x_test, normalize)
    sizes = (len(tensors_of(train)[0]), len(tensors_of(test)[0]))
    task = task_of(task, y_train)
    y = task.targets(y_train, y_test, class_names, sizes)
    domains: tuple[tuple[Tensor | None, Tensor | None], tuple[str, ...]] = ((None, None), ())
    if (domain_train is None) != (domain_test is None):
        raise DataError("only one of domain_train and domain_test is given. Give both or neither.")
    if domain_train is not None and domain_test is not None:
        pair = arrays.checked_labels(domain_train, domain_test, sizes, "domain")
        domains = arrays.encode(pair, domain_names, "domain")
    owners, client_names = arrays.encode_clients(clients, clients_test, sizes)
    shift, scale = normalisation(train, normalize)
    return Dataset(
        name,
        train,
        y.train,
        test,
        y.test,
        y.names,
        *domains[0],
        domains[1],
        shift,
        scale,
        *owners,
        client_names,
        task=task,
        n_outputs=y.outputs,
        keep=normalize == "keep" and isinstance(train, Tensor),
        mapped=mapped_files({"x_train": x_train, "x_test": x_test}),
    )


def _checked_pair(x_train: Any, x_test: Any, normalize: Normalize) -> tuple[Inputs, Inputs]:
    """Return the inputs of both splits in the form in which a ``Dataset`` stores them.

    Raises:
        DataError: The inputs cannot be used, or the splits differ in names, shapes or types.
    """
    if isinstance(x_train, Mapping) != isinstance(x_test, Mapping):
        one, other = ("x_train", "x_test") if isinstance(x_train, Mapping) else ("x_test", "x_train")
        raise DataError(f"{one} is a mapping of several inputs, but {other} is not. Give both arrays in the same form.")
    if isinstance(x_train, Mapping):
        train, test = arrays.checked_named(x_train, "x_train"), arrays.checked_named(x_test, "x_test")
        if train.keys() != test.keys():
            names, others = ", ".join(train), ", ".join(test)
            raise DataError(f"x_train has the inputs {names}, but x_test has {others}. Use the same inputs in both.")
        pairs = [(f"x_train.{name}", train[name], f"x_test.{name}", test[name]) for name in train]
        both: tuple[Inputs, Inputs] = (train, {name: test[name] for name in train})
    else:
        if normalize == "keep":
            first, second = arrays.checked_ids(x_train, "x_train"), arrays.checked_ids(x_test, "x_test")
        else:
            first = arrays.checked_inputs(x_train, "x_train")
            second = arrays.checked_inputs(x_test, "x_test", exact=first.dtype == torch.float64)
        pairs, both = [("x_train", first, "x_test", second)], (first, second)
    for key, first, other_key, second in pairs:
        if first.shape[1:] != second.shape[1:]:
            sizes = f"a sample of {key} has size {_size(first)}, but a sample of {other_key} has size {_size(second)}"
            raise DataError(f"{sizes}. Give all samples the same shape.")
    return both


def normalisation(train: Inputs, normalize: Normalize) -> tuple[Inputs | None, Inputs | None]:
    """Compute shift and scale of the normalisation from the training inputs; see ``shift_and_scale``.

    Returns:
        The shift and the scale, or None and None if inputs are not normalised. For several inputs, shift and scale are
        mappings with one entry per float input.
    """
    if normalize in ("keep", "none"):
        return None, None
    if isinstance(train, Tensor):
        return shift_and_scale(train, normalize)
    floats = {name: tensor for name, tensor in train.items() if tensor.is_floating_point()}
    both = {name: shift_and_scale(t if t.dim() > 1 else t[:, None], normalize) for name, t in floats.items()}
    shift = {name: pair[0] for name, pair in both.items() if pair[0] is not None}
    scale = {name: pair[1] for name, pair in both.items() if pair[1] is not None}
    return (shift, scale) if shift else (None, None)


def task_of(task: Task | str | None, y_train: Array) -> Task:
    """Return the task with a given name, or the given task itself.

    For None, infer the task from the targets: regression if some targets are not integers, otherwise classification.
    Integer targets with very many distinct values cause an error, because the targets could be classes or quantities.

    Args:
        task: The task, its name, or None.
        y_train: The targets of the training samples.

    Raises:
        SpecError: No task has this name, or the targets could be either classes or quantities.
    """
    if isinstance(task, str):
        return TASKS.make(task, {})
    if task is not None:
        return task
    if arrays.has_fractions(y_train):
        LOG.warning(
            "the task is set to regression, because the targets have fractions. To use another task, set 'task'."
        )
        return TASKS.make("regression", {})
    if (many := arrays.too_many_values(y_train)) is not None:
        problem = f"is not set, and y_train has {many} different integers. Set task = 'regression' if the numbers are "
        raise SpecError("task", problem + "quantities, and task = 'classification' if the numbers are classes.")
    return Classification()


def _take(tensor: Tensor, indices: Indices) -> Tensor:
    if isinstance(indices, slice):
        return tensor[indices]
    if isinstance(indices, np.ndarray) and not indices.flags.writeable:
        indices = indices.copy()  # PyTorch warns about read-only memory
    index = torch.as_tensor(indices, device=tensor.device)
    if index.numel() and (index.dtype == torch.bool or index.is_floating_point()):
        raise IndexError(f"indices must be integers, not {index.dtype}")
    return tensor.index_select(0, index.long())


def _size(samples: Tensor) -> str:
    return "x".join(str(side) for side in samples.shape[1:]) or "one number"
