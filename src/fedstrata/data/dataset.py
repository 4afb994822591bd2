"""A data set in memory: stored once as it came, shared by all clients as indices, normalised when read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.errors import DataError
from fedstrata.data.arrays import (
    Array,
    Normalize,
    check_seen,
    checked_inputs,
    checked_labels,
    encode,
    encode_clients,
    normalisation,
)

if TYPE_CHECKING:
    from fedstrata.data.fitting import Unfitted

Split = Literal["train", "test"]
Indices = Tensor | NDArray[np.int64] | slice


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples of one classification task.

    Images are stored as N,H,W,C and tables as N,F, in their own type: 60,000 images of bytes stay bytes.
    ``inputs`` makes the float32 batch that a model sees. Build one with ``from_arrays`` or
    ``Data(…).load()``.

    Args:
        name: What it is called in reports.
        x_train: Training inputs, (N, H, W, C) or (N, F), contiguous.
        y_train: Training labels, (N,) int64 in 0…C−1.
        x_test: Test inputs.
        y_test: Test labels.
        class_names: The name of each label.
        domain_train: The domain each training sample comes from, (N,) int64, where there are domains.
        domain_test: The same for the test samples.
        domain_names: The name of each domain.
        shift: Subtracted from every channel (C,) or feature (F,); float32.
        scale: Multiplied after that.
        client_train: The client that each training sample comes from, (N,) int64, where clients are natural ones.
        client_test: The same for the test samples, where it is known.
        client_names: The name of each of those clients, of the test samples' too.
        unfitted: Where features can be made anew, when it is known who trains on what: the samples as they came.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    class_names: tuple[str, ...]
    domain_train: Tensor | None = None
    domain_test: Tensor | None = None
    domain_names: tuple[str, ...] = ()
    shift: Tensor | None = None
    scale: Tensor | None = None
    client_train: Tensor | None = None
    client_test: Tensor | None = None
    client_names: tuple[str, ...] = ()
    unfitted: Unfitted | None = None

    @property
    def classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample as a model sees it: (C, H, W) or (F,)."""
        size = tuple(self.x_train.shape[1:])
        return (size[2], size[0], size[1]) if len(size) == 3 else size

    @property
    def train_size(self) -> int:
        """Number of training samples."""
        return len(self.y_train)

    def inputs(self, indices: Indices, split: Split = "train") -> Tensor:
        """Normalised inputs of some samples, in the order asked for.

        Args:
            indices: Sample numbers, (B,), or a slice.
            split: ``"train"`` or ``"test"``.

        Returns:
            float32, (B, F) or (B, C, H, W) in channels-last memory format; always memory of its own.

        Raises:
            IndexError: A number is negative or too large.
        """
        taken = _take(self.x_train if split == "train" else self.x_test, indices)
        if self._rows is None:
            batch = taken.to(torch.float32, copy=isinstance(indices, slice))
        else:
            shift, scale = self._rows
            if shift.dtype == torch.float64:  # numbers whose differences float32 would lose before they are shifted
                batch = (taken.double().flatten(1) - shift).mul_(scale).float().view(taken.shape)
            else:
                batch = taken.to(torch.float32, copy=isinstance(indices, slice))
                batch.flatten(1).sub_(shift).mul_(scale)
        return batch.permute(0, 3, 1, 2) if batch.dim() == 4 else batch

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor] | None:
        """Shift and scale of every number of a sample: one long row.

        Broadcasting over an innermost axis of 3 channels takes four times as long.
        """
        if self.shift is None or self.scale is None:
            return None
        repeats = self.x_train.shape[1:].numel() // len(self.shift)
        return self.shift.repeat(repeats), self.scale.repeat(repeats)

    def labels(self, indices: Indices, split: Split = "train") -> Tensor:
        """Labels of some samples, (B,) int64."""
        return _take(self.y_train if split == "train" else self.y_test, indices)

    def to(self, device: torch.device | str) -> Dataset:
        """The same data set with its tensors on ``device``; indices are moved there when it is read."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **moved)

    def __repr__(self) -> str:
        domains = f", domains={len(self.domain_names)}" if self.domain_names else ""
        domains += f", clients={len(self.client_names)}" if self.client_names else ""
        sizes = f"train={self.train_size}, test={len(self.y_test)}"
        return f"Dataset({self.name!r}, {sizes}, shape={self.shape}, classes={self.classes}{domains})"


def from_arrays(
    x_train: Array,
    y_train: Array,
    x_test: Array,
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
) -> Dataset:
    """A data set from arrays or tensors.

    Args:
        x_train: Images (N, H, W), (N, H, W, C) or (N, C, H, W), or a table (N, F); any numeric type,
            whose memory may be shared. Four axes are
            taken as N,C,H,W when the last is not 1, 3 or 4 long and the second is.
        y_train: One label a sample: any whole numbers or strings.
        x_test: Test inputs of the same kind.
        y_test: Test labels.
        name: What to call it.
        domain_train: The domain of each training sample: any whole numbers or strings.
        domain_test: The same for the test samples.
        class_names: When given, labels are numbers into it; otherwise the sorted labels are numbered and
            named.
        domain_names: The same for domains.
        clients: Whose each training sample is, for the partition ``natural``: any whole numbers or strings.
        clients_test: The same for the test samples; of clients without training samples too, which never train.
        normalize: ``"standard"``: each channel or feature gets mean 0 and deviation 1 on the training set
            (one that never changes is only shifted); ``"unit"``: it lies in [0, 1] there (bytes are divided
            by 255); ``"none"``: values stay as they are.

    Raises:
        DataError: Lengths, shapes or types do not fit together, a value is not finite, or no label of the test set is
            in the training set. A warning names the labels that only the test set has.

    >>> data = from_arrays([[0.0], [2.0]], ["cat", "ant"], [[4.0]], ["cat"])
    >>> data.class_names, data.y_train.tolist(), data.inputs(slice(None)).tolist()
    (('ant', 'cat'), [1, 0], [[-1.0], [1.0]])
    """
    train = checked_inputs(x_train, "x_train")
    test = checked_inputs(x_test, "x_test", exact=train.dtype == torch.float64)
    if train.shape[1:] != test.shape[1:]:
        raise DataError(f"one sample of x_train is {_size(train)}, one of x_test {_size(test)}; they must be the same")
    y, names = encode(checked_labels(y_train, y_test, train, test, "y"), class_names, "y")
    check_seen(*y, names)
    domains: tuple[Tensor | None, Tensor | None] = (None, None)
    named: tuple[str, ...] = ()
    if (domain_train is None) != (domain_test is None):
        raise DataError("give domain_train and domain_test both, or neither")
    if domain_train is not None and domain_test is not None:
        pair = checked_labels(domain_train, domain_test, train, test, "domain")
        domains, named = encode(pair, domain_names, "domain")
    owners, known = encode_clients(clients, clients_test, train, test)
    shift, scale = normalisation(train, normalize)
    return Dataset(name, train, y[0], test, y[1], names, *domains, named, shift, scale, *owners, known)


def _take(tensor: Tensor, indices: Indices) -> Tensor:
    if isinstance(indices, slice):
        return tensor[indices]
    if isinstance(indices, np.ndarray) and not indices.flags.writeable:
        indices = indices.copy()  # PyTorch warns about read-only memory
    index = torch.as_tensor(indices, device=tensor.device)
    if index.numel() and (index.dtype == torch.bool or index.is_floating_point()):
        raise IndexError(f"indices are whole numbers, not {index.dtype}")
    return tensor.index_select(0, index.long())


def _size(samples: Tensor) -> str:
    return "x".join(str(side) for side in samples.shape[1:])
