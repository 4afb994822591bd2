"""Check users' arrays, and convert them to the form in which a ``Dataset`` stores them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedstrata.base.arrays import Floats32
from fedstrata.base.errors import DataError
from fedstrata.data.mapped import MappedFile

Array = ArrayLike | Tensor
Pair = tuple[NDArray[np.generic], NDArray[np.generic]]

CHANNELS = (1, 3, 4)
"""The accepted numbers of image channels. An axis whose length is one of these numbers can be the channel axis."""


def _numpy(values: Array, key: str) -> NDArray[np.generic]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values  # NumPy has no bfloat16
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{key} cannot be converted to an array: {error}. Give numbers or strings.") from None
    if array.dtype.kind == "O" or (array.dtype.kind == "U" and not isinstance(values, np.ndarray)):
        texts = np.asarray(values, dtype=object).flat
        if any(isinstance(text, str) and text.endswith("\0") for text in texts):
            problem = f"{key}: a string ends with a NUL character, which NumPy cuts off. Remove the character."
            raise DataError(problem).publicly(problem)
    if array.dtype == object and all(isinstance(item, str) for item in array.flat):
        return array.astype(str)  # pandas stores text in arrays of objects
    if array.dtype == object:
        problem = f"{key}: the rows have different lengths or types. Give one array of numbers or strings."
        raise DataError(problem).publicly(problem)
    return array


def checked_ids(values: Array, key: str) -> Tensor:
    """Convert integer inputs, such as token ids, to int64. The shape (N, …) does not change.

    Raises:
        DataError: The inputs are not integers.
    """
    if (file := MappedFile.of(values)) is not None and file.dtype in ("int32", "int64") and len(file.shape) > 1:
        return file.checked(key)
    array = _numpy(values, key)
    if array.dtype.kind not in "iub" or array.ndim < 2 or array.size == 0:
        problem = f"is of type {array.dtype} and shape {array.shape}. With normalize = 'keep', inputs must be"
        raise DataError(f"{key} {problem} integers of shape (N, …).")
    return torch.from_numpy(np.ascontiguousarray(array.astype(np.int64)))


def checked_named(values: Mapping[str, Array], key: str) -> dict[str, Tensor]:
    """Convert a model's named inputs to tensors (N, …). Integers and booleans are not converted to floats.

    Args:
        values: A mapping from the names of the model's arguments to arrays (N, …).
        key: The name of the inputs in error messages.

    Raises:
        DataError: An input's name is not a valid argument name, a value is not a finite number, or the inputs have
            different numbers of samples.
    """
    tensors = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise DataError(f"{key}: {name!r} is not a valid argument name. Use a name such as 'input_ids'.")
        part = f"{key}.{name}"
        if (file := MappedFile.of(value)) is not None:
            tensors[name] = file.checked(part)
            continue
        array = _numpy(value, part)
        if array.dtype.kind not in "fiub":
            raise DataError(f"{part} is of type {array.dtype}. Inputs must be numbers or booleans.")
        if array.ndim < 1 or array.size == 0:
            raise DataError(f"{part} has shape {array.shape}. Use shape (N, …), with at least one sample.")
        tensors[name] = _tensor(array if array.dtype.kind == "b" else _storable(array, part, exact=False))
    if not tensors:
        raise DataError(f"{key} contains no arrays. Give at least one array of inputs.")
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{length} of {name}" for name, length in lengths.items())
        raise DataError(
            f"{key}: the inputs have different numbers of samples: {listed}. Give all inputs the same number."
        )
    return tensors


def checked_inputs(values: Array, key: str, *, exact: bool = False) -> Tensor:
    """Check inputs, and convert them to the form in which a ``Dataset`` stores them.

    The result may share memory with ``values``.

    Args:
        values: See ``from_arrays``.
        key: The name of the inputs in error messages.
        exact: Whether to keep float64 even if float32 suffices. By default, float64 is kept only if different samples
            would be equal in float32. For test inputs, set ``exact`` if the training inputs are float64.

    Returns:
        The inputs as a contiguous array of shape (N, H, W, C) or (N, F).

    Raises:
        DataError: The values are not finite, or their shape fits neither images nor a table.
    """
    if (file := MappedFile.of(values)) is not None:
        if len(file.shape) not in (2, 3, 4) or (len(file.shape) == 4 and file.shape[3] not in CHANNELS):
            problem = f"is memory-mapped with shape {file.shape}. Use shape (N, F), (N, H, W) or (N, H, W, C)."
            raise DataError(f"{key} {problem}")
        tensor = file.checked(key)
        return tensor[..., None] if tensor.dim() == 3 else tensor
    array = _numpy(values, key)
    if array.dtype.kind not in "fiub":
        raise DataError(f"{key} is of type {array.dtype}. Inputs must be numbers.").publicly(
            f"{key} has an unsupported type. Inputs must be numbers."
        )
    if array.ndim not in (2, 3, 4) or array.size == 0:
        forms = "(N, F), (N, H, W), (N, H, W, C) or (N, C, H, W). No axis may be empty."
        error = DataError(f"{key} has shape {array.shape}. Use {forms}")
        raise error.publicly(f"{key} has an unsupported shape. Use {forms}")
    if array.ndim == 4 and array.shape[3] not in CHANNELS and array.shape[1] in CHANNELS:
        array = array.transpose(0, 2, 3, 1)
    if array.ndim == 3:
        array = array[..., None]
    return _tensor(_storable(array, key, exact=exact))


def _tensor(array: NDArray[np.generic]) -> Tensor:
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _storable(array: NDArray[np.generic], key: str, *, exact: bool) -> NDArray[np.generic]:
    """Convert numbers to a type that PyTorch supports well; see ``checked_inputs``."""
    if array.dtype.kind == "f":
        if array.dtype.itemsize > 8:
            array = array.astype(np.float64)
        with np.errstate(over="ignore"):  # values too large for float32 become infinite and are reported below
            narrow = array.astype(np.float32)
        if array.dtype.itemsize <= 4 or not (exact or _crowded(array, narrow)):
            array = narrow
        bad = ~np.isfinite(array)
        if bad.any():
            first = tuple(int(axis[0]) for axis in np.nonzero(bad))
            error = DataError(
                f"{key}: {int(bad.sum())} values are NaN or infinite, the first at index {first}. Replace or remove "
                "them."
            )
            raise error.publicly(f"{key}: some values are NaN or infinite. Replace or remove them.")
    elif array.dtype.kind == "b":
        array = array.astype(np.int8)
    elif array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if (largest := int(array.max())) >= 2**63:
            accepted = "Use integers below 2**63, or floats."
            error = DataError(f"{key}: {largest} is too large. {accepted}")
            raise error.publicly(f"{key}: some numbers are too large. {accepted}")
        # PyTorch supports few operations on uint16, uint32 and uint64.
        array = array.astype(np.int32 if array.dtype.itemsize == 2 else np.int64)
    return array


def _crowded(values: NDArray[Any], narrow: Floats32) -> bool:
    """Return True if float32 would make different samples equal, for example if values are large and similar."""
    flat, rounded = (part.reshape(-1, part.shape[-1]) for part in (values, narrow))
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.abs(flat - rounded).max(axis=0)
        return bool((np.isfinite(error) & (error > 1e-3 * flat.std(axis=0)) & (flat.std(axis=0) > 0)).any())


SPLITS = ("train", "test")


def checked_labels(first: Array, second: Array, sizes: tuple[int, int], kind: str) -> Pair:
    """Check the labels (or domains, or clients) of both splits. Return one integer or string per sample.

    Args:
        first: The labels of the training samples.
        second: The labels of the test samples.
        sizes: The number of training samples and of test samples.
        kind: ``"y"``, ``"domain"`` or ``"client"``, for error messages.

    Raises:
        DataError: The labels have the wrong length, shape or type.
    """
    checked = []
    for values, samples, split in zip((first, second), sizes, SPLITS, strict=True):
        key = f"{kind}_{split}"
        array = _numpy(values, key)
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim != 1:
            raise DataError(
                f"{key} has shape {array.shape}. Give one number or string per sample, not one-hot vectors."
            )
        _require_length(array, key, samples)
        if array.dtype.kind == "f":
            if not (np.isfinite(array) & (array == np.floor(array))).all():
                raise DataError(f"{key} contains fractions, NaN or infinity. Use integers or strings.")
            if (largest := float(np.abs(array).max(initial=0))) > 2**53:
                problem = (
                    f"{largest:g} is too large, because floats are exact only up to 2**53. Use integers or strings."
                )
                raise DataError(f"{key}: {problem}")
            array = array.astype(np.int64)
        if array.dtype.kind not in "iubUS":
            raise DataError(f"{key} is of type {array.dtype}. Use integers or strings.")
        checked.append(decoded(array, key))
    if (checked[0].dtype.kind == "U") != (checked[1].dtype.kind == "U"):
        raise DataError(
            f"{kind}_train has the type {checked[0].dtype}, but {kind}_test has the type {checked[1].dtype}. "
            "Use the same type for both."
        )
    return checked[0], checked[1]


def _require_length(array: NDArray[np.generic], key: str, samples: int) -> None:
    if len(array) != samples:
        split = key.rpartition("_")[2]
        raise DataError(f"{key} has {len(array)} values for {samples} samples in x_{split}. Give one value per sample.")


def has_fractions(values: Array) -> bool:
    """Return True if the targets are floats and some of them are not integers."""
    array = _numpy(values, "y_train")
    return bool(array.dtype.kind == "f" and np.isfinite(array).all() and (array != np.floor(array)).any())


def too_many_values(values: Array) -> int | None:
    """Return the number of distinct targets if it is too large to be the number of classes; otherwise None.

    The number is too large if it exceeds both 100 and a third of the number of samples.
    """
    array = _numpy(values, "y_train")
    if array.dtype.kind not in "fiu" or array.ndim != 1:
        return None
    different = len(np.unique(array))
    return different if different > max(100, len(array) / 3) else None


def checked_values(values: Array, key: str, samples: int) -> NDArray[np.float64]:
    """Convert numeric targets (one or several per sample) to float64, shape (N, K).

    Args:
        values: The targets, shape (N,) or (N, K).
        key: The name of the targets in error messages.
        samples: The number N of samples.

    Raises:
        DataError: The targets are not finite numbers, or have the wrong shape.
    """
    array = _numpy(values, key)
    if array.dtype.kind not in "fiub":
        raise DataError(f"{key} is of type {array.dtype}. The task needs numbers as targets.")
    if array.ndim not in (1, 2) or 0 in array.shape[1:]:
        raise DataError(f"{key} has shape {array.shape}. Use (N,) for one number per sample, or (N, K) for K.")
    _require_length(array, key, samples)
    numbers = array.reshape(samples, -1).astype(np.float64)
    if (bad := ~np.isfinite(numbers)).any():
        place = tuple(int(axis[0]) for axis in np.nonzero(bad))[: array.ndim]
        raise DataError(
            f"{key}: {int(bad.sum())} values are not finite numbers, the first at index {place}. Remove them."
        )
    return numbers


def checked_places(values: Array, key: str, samples: int) -> NDArray[np.int64]:
    """Convert targets with one class per token or pixel to int64, shape (N, …).

    Args:
        values: The targets, shape (N, T) or (N, H, W).
        key: The name of the targets in error messages.
        samples: The number N of samples.

    Raises:
        DataError: The targets are not integers, or have the wrong shape.
    """
    array = _numpy(values, key)
    if array.dtype.kind not in "iub":
        raise DataError(f"{key} is of type {array.dtype}. The task needs integers as targets.")
    if array.ndim < 2:
        raise DataError(f"{key} has shape {array.shape}. Use shape (N, …), with one class for each token or pixel.")
    _require_length(array, key, samples)
    return array.astype(np.int64)


def decoded(array: NDArray[np.generic], key: str) -> NDArray[np.generic]:
    """Decode an array of byte strings as UTF-8. Return any other array unchanged.

    Raises:
        DataError: The bytes are not UTF-8.
    """
    if array.dtype.kind != "S":
        return array
    try:
        return np.char.decode(array, "utf-8")  # type: ignore[arg-type]  # the array contains bytes
    except UnicodeDecodeError as error:
        raise DataError(
            f"{key} contains the bytes {error.object!r}, which are not UTF-8. Store text as strings."
        ) from None


def encode(pair: Pair, names: Sequence[str] | None, kind: str) -> tuple[tuple[Tensor, Tensor], tuple[str, ...]]:
    """Convert labels to numbers 0…C−1. Return the labels of both splits as numbers, and the name of each class.

    Args:
        pair: The labels of both splits, from ``checked_labels``.
        names: The name of each class. If ``names`` is given, each label must be an index into ``names``, or an element
            of ``names``. By default, the distinct labels are sorted and numbered.
        kind: ``"y"``, ``"domain"`` or ``"client"``, for error messages.

    Raises:
        DataError: A label is not one of ``names``, or a name occurs twice.
    """
    if np.result_type(*pair).kind == "f":
        # NumPy concatenates int64 and uint64 to float64, which would round different large labels to the same number.
        pair = (pair[0].astype(object), pair[1].astype(object))
    both = np.concatenate(pair)
    if names is None:
        values, both = np.unique(both, return_inverse=True)
        names = [str(value) for value in values]
    elif both.dtype.kind == "U":
        known = {str(text): number for number, text in enumerate(names)}
        if len(known) < len(names):
            listed = ", ".join(map(str, names))
            raise DataError(f"{kind}: some names occur twice in {listed}. Make all names different.")
        missing = sorted(set(both.tolist()) - set(known))
        if missing:
            raise DataError(f"{kind}: {missing[0]!r} is not one of the given names. Use one of: {', '.join(known)}.")
        both = np.array([known[text] for text in both.tolist()])
    elif both.min() < 0 or both.max() >= len(names):
        span = f"{both.min()}…{both.max()}"
        raise DataError(
            f"{kind} contains the numbers {span}, but there are {len(names)} names. Use 0…{len(names) - 1}."
        )
    codes, train_size = torch.from_numpy(both.astype(np.int64)), len(pair[0])
    return (codes[:train_size].clone(), codes[train_size:].clone()), tuple(str(text) for text in names)


def encode_clients(
    first: Array | None, second: Array | None, sizes: tuple[int, int]
) -> tuple[tuple[Tensor | None, Tensor | None], tuple[str, ...]]:
    """Convert the client ids of both splits to numbers 0…M−1. Return the numbers, and the name of each client.

    Args:
        first: The client of each training sample; None if the data set does not define clients.
        second: The client of each test sample; None if unknown.
        sizes: The number of training samples and of test samples.

    Raises:
        DataError: The ids have the wrong length, shape or type, or only the test samples have ids.
    """
    if first is None:
        if second is not None:
            raise DataError("client_test is set, but client_train is not. Give both, or only client_train.")
        return (None, None), ()
    # If the clients of test samples are not known, encode an empty list that has the type of ``client_train``.
    ids, n_test = (second, sizes[1]) if second is not None else (_numpy(first, "client_train")[:0], 0)
    owners, names = encode(checked_labels(first, ids, (sizes[0], n_test), "client"), None, "client")
    return (owners[0], None if second is None else owners[1]), names


def check_seen(train: Tensor, test: Tensor, names: Sequence[str]) -> None:
    """Warn about classes that occur only in the test set.

    Models cannot learn these classes, so every prediction for their samples counts as an error.

    Raises:
        DataError: The splits have no class in common, for example because labels are spelt differently.
    """
    unseen = np.setdiff1d(test.numpy(), train.numpy())
    if len(unseen) == 0:
        return
    named = ", ".join(repr(names[code]) for code in unseen[:10]) + (", …" if len(unseen) > 10 else "")
    count = int(np.isin(test.numpy(), unseen).sum())
    if count == len(test):
        known = ", ".join(repr(names[code]) for code in np.unique(train.numpy())[:10])
        problem = f"y_test has the labels {named}, but y_train has only the labels {known}"
        raise DataError(f"{problem}. Use only labels that occur in y_train.")
    problem = (
        f"y_train lacks the labels {named}, which {count} of {len(test)} test samples have. "
        "Predictions for these samples count as errors."
    )
    warnings.warn(problem, stacklevel=2)
