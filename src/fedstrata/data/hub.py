"""Load data sets from the Hugging Face hub with the optional package ``datasets``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstrata.base.errors import DataError, ExtraMissingError, SpecError, not_among
from fedstrata.base.rng import rng
from fedstrata.data.subsets import stratified

Arrays = dict[str, NDArray[Any]]

INPUT_NAMES = ("image", "img", "images", "pixel_values", "x", "features")
LABEL_NAMES = ("label", "labels", "fine_label", "target", "class", "y")
TEST_SPLITS = ("test", "validation", "valid", "dev")


def load_hub(name: str, seed: int, client: str | None = None) -> Arrays:
    """Load a data set from the Hugging Face hub, or from the local cache if it was downloaded before.

    Args:
        name: ``"owner/name"`` or ``"owner/name:configuration"``.
        seed: The seed for drawing test samples, if the data set has only a training split.
        client: The name of the column that contains each sample's client, such as ``writer_id``.

    Raises:
        ExtraMissingError: The package ``datasets`` is not installed.
        DataError: The data set cannot be loaded, or has no usable columns.
    """
    try:
        import datasets
    except ImportError:
        raise ExtraMissingError(f"data 'hub:{name}'", "hub") from None
    path, _, configuration = name.partition(":")
    try:
        splits = datasets.load_dataset(path, configuration or None)
    except Exception as error:  # a wrong name, a wrong format and a network failure raise different exceptions
        first = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{name!r} could not be loaded from Hugging Face. Check the name and the network connection. "
            f"{type(error).__name__}: {first}"
        ) from None
    return from_hub(splits, seed, client)


def from_hub(splits: Any, seed: int = 0, client: str | None = None) -> Arrays:
    """Convert a ``datasets.DatasetDict`` to arrays.

    The training samples are the split ``train``. The test samples are the split ``test`` or, if it is missing, a
    validation split. If both are missing, the test samples are a random fifth of each class in ``train``.

    Args:
        splits: A mapping from the name of each split to its ``datasets.Dataset``. All splits have the same columns.
        seed: The seed for drawing test samples from ``train``.
        client: The column that contains each sample's client; None if the data set has no such column.

    Returns:
        The arrays ``x_train``, ``y_train``, ``x_test`` and ``y_test``. If labels have names, the result contains
        ``classes``. If ``client`` is set, the result contains ``client_train`` and ``client_test``. The arrays have the
        same meaning as in a ``.npz`` file.

    Raises:
        DataError: The split ``train`` is missing, or the columns with the inputs and the labels cannot be identified.
    """
    if "train" not in splits:
        names = ", ".join(splits)
        raise DataError(f"the data set has the splits {names}, but not 'train'. Use a data set with the split 'train'.")
    train = splits["train"]
    if client is not None:
        _check_client(client, train.features)
    features = {name: feature for name, feature in train.features.items() if name != client}
    inputs, label = input_columns(features), label_column(features)

    def read(split: Any) -> Arrays:
        owners = {"client": read_labels(split, client)} if client else {}
        return {"x": read_inputs(split, inputs), "y": read_labels(split, label)} | owners

    arrays = read(train)
    other = next((name for name in TEST_SPLITS if name in splits), None)
    if other is not None:
        test = read(splits[other])
    else:
        codes = np.unique(arrays["y"], return_inverse=True)[1]
        held = stratified(codes, max(1, len(codes) // 5), rng(seed, "hub split"))
        test = {key: array[held] for key, array in arrays.items()}
        arrays = {key: np.delete(array, held, axis=0) for key, array in arrays.items()}
    classes = getattr(train.features[label], "names", None)
    named = {} if classes is None else {"classes": np.array(classes)}
    both = (("train", arrays), ("test", test))
    return {f"{key}_{part}": array for part, split in both for key, array in split.items()} | named


def _check_client(client: str, features: Any) -> None:
    if client not in features:
        raise SpecError("data.client", not_among("is not a column of the data set", client, features), client)


def input_columns(features: Any) -> list[str]:
    """Return the names of the columns that contain the inputs.

    If a column contains images, the inputs are this column. Without images, the inputs are a single column of arrays,
    or a single column of lists. Otherwise, the inputs are a table of all numeric columns.

    Args:
        features: The ``datasets.Features`` of a split.

    Raises:
        DataError: No column can be the input, or several columns could be the input and none of them has a usual name.
    """
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    label = label_column(features)
    for accepted in (("Image",), ("Array2D", "Array3D"), ("Sequence", "List", "LargeList")):
        columns = [name for name, kind in kinds.items() if kind in accepted and name != label]
        usual = [name for name in INPUT_NAMES if name in columns]
        if len(columns) == 1 or usual:
            return [(usual or columns)[0]]
        if columns:
            raise DataError(
                f"several columns could be the input: {', '.join(columns)}. Rename one of them to 'image' or 'x'."
            )
    numbers = [name for name, feature in features.items() if name != label and _is_number(feature)]
    if not numbers:
        kinds_of = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise DataError(f"the data set has no column of images, arrays or numbers. Its columns are: {kinds_of}.")
    return numbers


def label_column(features: Any) -> str:
    """Return the name of the label column: the column of type ``ClassLabel``, or a column with a usual name for labels.

    Args:
        features: The ``datasets.Features`` of a split.

    Raises:
        DataError: The data set has no label column, or several possible label columns of which none has a usual name.
    """
    labels = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    usual = [name for name in LABEL_NAMES if name in (labels or features)]
    if len(labels) == 1 or usual:
        return str(labels[0] if len(labels) == 1 else usual[0])
    several = f"several columns could be the label: {', '.join(labels)}. Rename one of them to 'label'."
    none = f"the data set has no column with labels. Rename one of these columns to 'label': {', '.join(features)}"
    raise DataError(several if labels else none)


def read_inputs(split: Any, columns: Sequence[str]) -> NDArray[Any]:
    """Read the inputs of one split: images as (N, H, W) or (N, H, W, 3), numbers as a table.

    Args:
        split: A ``datasets.Dataset``.
        columns: The columns that contain the inputs; see ``input_columns``.

    Returns:
        The inputs. Images with at most 8 bits per channel are uint8. All other images, and columns that are not images,
        keep their type.

    Raises:
        DataError: Images or lists have different sizes.
    """
    if len(columns) > 1 or _is_number(split.features[columns[0]]):
        return np.stack([np.asarray(split.with_format("numpy")[name][:]) for name in columns], axis=1)
    name = columns[0]
    if type(split.features[name]).__name__ != "Image":
        rows = np.asarray(split.with_format("numpy")[name][:])
        if rows.dtype == object:
            raise DataError(f"the rows of the column {name!r} have different lengths. Make them equally long.")
        return rows
    pictures = (row[name] for row in split.select_columns([name]))
    images = None
    for number, picture in enumerate(pictures):
        if picture is None:
            raise DataError(f"the column {name!r} has no image in row {number}. Remove the row.")
        pixels = _pixels(picture)
        if images is None:
            images = np.empty((len(split), *pixels.shape), dtype=pixels.dtype)
        if pixels.shape[:2] != images.shape[1:3]:
            sizes = f"{images.shape[2]}x{images.shape[1]} and {pixels.shape[1]}x{pixels.shape[0]}"
            raise DataError(
                f"the images in the column {name!r} have different sizes, {sizes}. Resize them to one size first."
            )
        if pixels.dtype != images.dtype:
            images = images.astype(np.promote_types(pixels.dtype, images.dtype))
        if pixels.ndim + 1 != images.ndim:
            # Some images are grey and others in colour, so convert all of them to colour.
            if images.ndim == 3:
                images = np.repeat(images[..., None], 3, axis=3)
            else:
                pixels = np.repeat(pixels[..., None], 3, axis=2)
        images[number] = pixels
    if images is None:
        raise DataError(f"the column {name!r} is empty.")
    return images


def _pixels(picture: Any) -> NDArray[Any]:
    """Return the pixels of an image, (H, W) or (H, W, 3), as uint8; pixels with more than 8 bits keep their type."""
    if picture.mode.startswith(("I", "F")):
        return np.asarray(picture)
    return np.asarray(picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB"))


def read_labels(split: Any, column: str) -> NDArray[Any]:
    """Read the labels of one split as integers or strings, shape (N,)."""
    return np.asarray(split.with_format(None)[column][:])


def _is_number(feature: Any) -> bool:
    # Columns of arrays have a dtype, too, but only columns of single numbers have the type ``Value``.
    return type(feature).__name__ == "Value" and feature.dtype.startswith(("int", "uint", "float", "bool"))
