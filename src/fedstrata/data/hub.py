"""Data sets of the Hugging Face hub, through the optional package ``datasets``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrata.base.errors import DataError, ExtraMissingError, SpecError, nearest
from fedstrata.base.rng import rng
from fedstrata.data.subsets import stratified

Arrays = dict[str, NDArray[Any]]

INPUT_NAMES = ("image", "img", "images", "pixel_values", "x", "features")
LABEL_NAMES = ("label", "labels", "fine_label", "target", "class", "y")
TEST_SPLITS = ("test", "validation", "valid", "dev")


def load_hub(name: str, seed: int, client: str | None = None) -> Arrays:
    """Download (or find in the cache) a data set of the hub.

    Args:
        name: ``"owner/name"`` or ``"owner/name:configuration"``.
        seed: Decides the split of a data set that has only one.
        client: The column that says whose a sample is, such as ``writer_id``.

    Raises:
        ExtraMissingError: ``datasets`` is not installed.
        DataError: It cannot be had, or has no usable columns.
    """
    try:
        import datasets
    except ImportError:
        raise ExtraMissingError(f"data 'hub:{name}'", "hub") from None
    path, _, configuration = name.partition(":")
    try:
        splits = datasets.load_dataset(path, configuration or None)
    except Exception as error:  # whatever goes wrong on the way: network, name, permission, format
        first = str(error).strip().splitlines() or [""]
        raise DataError(f"the hub gives no {name!r}: {type(error).__name__}: {first[0]}") from None
    return from_hub(splits, seed, client)


def from_hub(splits: Any, seed: int = 0, client: str | None = None) -> Arrays:
    """The arrays of a ``datasets.DatasetDict``.

    Training samples are those of ``train``; test samples those of ``test``, else ``validation``, else a fifth
    of ``train`` with the classes in proportion.

    Args:
        splits: The splits by name; each with the same columns.
        seed: Decides that last split.
        client: The column that says whose a sample is.

    Returns:
        ``x_train y_train x_test y_test`` and ``classes``, as in a ``.npz`` file, and ``client_train client_test``.

    Raises:
        DataError: There is no split ``train``, or the columns are not clear.
    """
    if "train" not in splits:
        raise DataError(f"no split 'train'; there are: {', '.join(splits)}")
    train = splits["train"]
    if client is not None:
        _check_client(client, train.features)
    features = {name: feature for name, feature in train.features.items() if name != client}
    inputs, label = input_columns(features), label_column(features)
    x, y = read_inputs(train, inputs), read_labels(train, label)
    classes = getattr(train.features[label], "names", None)
    named = {} if classes is None else {"classes": np.array(classes)}
    other = next((name for name in TEST_SPLITS if name in splits), None)
    if other is not None:
        test = splits[other]
        parts = {"client_train": train, "client_test": test} if client else {}
        owners = {key: read_labels(split, str(client)) for key, split in parts.items()}
        arrays = {
            "x_train": x,
            "y_train": y,
            "x_test": read_inputs(test, inputs),
            "y_test": read_labels(test, label),
        }
        return arrays | owners | named
    codes = np.unique(y, return_inverse=True)[1]
    held = stratified(codes, max(1, len(y) // 5), rng(seed, "hub split"))
    rest = np.setdiff1d(np.arange(len(y)), held)
    owner = read_labels(train, client) if client else None
    owners = {} if owner is None else {"client_train": owner[rest], "client_test": owner[held]}
    return {"x_train": x[rest], "y_train": y[rest], "x_test": x[held], "y_test": y[held]} | owners | named


def _check_client(client: str, features: Any) -> None:
    if client not in features:
        accepted = ", ".join(features)
        raise SpecError("data.client", f"no such column; there are: {accepted}{nearest(client, features)}", client)


def input_columns(features: Any) -> list[str]:
    """The column that holds the inputs: images, else arrays, else lists, else all numbers as a table.

    Args:
        features: ``datasets.Features`` of a split.

    Raises:
        DataError: None is found, or several and none of them with a usual name.
    """
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    label = label_column(features)
    for accepted in (("Image",), ("Array2D", "Array3D"), ("Sequence", "List", "LargeList")):
        found = [name for name, kind in kinds.items() if kind in accepted and name != label]
        usual = [name for name in INPUT_NAMES if name in found]
        if len(found) == 1 or usual:
            return [(usual or found)[0]]
        if found:
            raise DataError(f"several columns could be the input: {', '.join(found)}; none is called 'image' or 'x'")
    numbers = [name for name, feature in features.items() if name != label and _is_number(feature)]
    if not numbers:
        columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise DataError(f"no column of images, arrays or numbers to learn from; there are: {columns}")
    return numbers


def label_column(features: Any) -> str:
    """The column that holds the label: of type ``ClassLabel``, else one with a usual name.

    Args:
        features: ``datasets.Features`` of a split.

    Raises:
        DataError: None is found, or several and none of them with a usual name.
    """
    found = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    usual = [name for name in LABEL_NAMES if name in (found or features)]
    if len(found) == 1 or usual:
        return str(found[0] if len(found) == 1 else usual[0])
    several = f"several columns could be the label: {', '.join(found)}"
    raise DataError(several if found else f"no label column among: {', '.join(features)}")


def read_inputs(split: Any, columns: Sequence[str]) -> NDArray[Any]:
    """Inputs of one split: bytes (N, H, W) or (N, H, W, 3) for images, numbers otherwise.

    Args:
        split: A ``datasets.Dataset``.
        columns: From ``input_columns``.

    Images of sixteen bits or of floats keep their numbers.

    Raises:
        DataError: Images or lists are of different sizes.
    """
    if len(columns) > 1 or _is_number(split.features[columns[0]]):
        return np.stack([np.asarray(split.with_format("numpy")[name][:]) for name in columns], axis=1)
    name = columns[0]
    if type(split.features[name]).__name__ != "Image":
        rows = np.asarray(split.with_format("numpy")[name][:])
        if rows.dtype == object:
            raise DataError(f"rows of column {name!r} are of different lengths")
        return rows
    pictures = (row[name] for row in split.select_columns([name]))
    images = None
    for number, picture in enumerate(pictures):
        if picture is None:
            raise DataError(f"column {name!r} has no image in row {number}")
        pixels = _pixels(picture)
        if images is None:
            images = np.empty((len(split), *pixels.shape), dtype=pixels.dtype)
        if pixels.shape[:2] != images.shape[1:3]:
            sizes = f"{images.shape[2]}x{images.shape[1]} and {pixels.shape[1]}x{pixels.shape[0]}"
            raise DataError(f"images of different sizes in column {name!r}, {sizes}; resize them to one first")
        if pixels.dtype != images.dtype:
            images = images.astype(np.promote_types(pixels.dtype, images.dtype))
        if pixels.ndim + 1 != images.ndim:
            # Grey ones among colours: all become colours, whichever came first.
            if images.ndim == 3:
                images = np.repeat(images[..., None], 3, axis=3)
            else:
                pixels = np.repeat(pixels[..., None], 3, axis=2)
        images[number] = pixels
    if images is None:
        raise DataError(f"column {name!r} is empty")
    return images


def _pixels(picture: Any) -> NDArray[Any]:
    """One image, (H, W) or (H, W, 3): bytes, or the numbers themselves where they have more than eight bits."""
    if picture.mode.startswith(("I", "F")):
        return np.asarray(picture)
    return np.asarray(picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB"))


def read_labels(split: Any, column: str) -> NDArray[Any]:
    """Labels of one split as whole numbers or strings, (N,)."""
    return np.asarray(split.with_format(None)[column][:])


def _is_number(feature: Any) -> bool:
    # Arrays have a dtype too; a single number is a Value.
    return type(feature).__name__ == "Value" and feature.dtype.startswith(("int", "uint", "float", "bool"))
