"""Check replies at the server. The server refuses a reply that fails a check, and records the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.base import records
from fedstrata.base.errors import ReplyRefusedError, WireError

DIVERGED = "Reduce training.lr, or set training.clip."
"""The advice in errors about NaN or infinity in a reply. Such a reply is a sign that training diverged."""

DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
"""The dtypes that all operations of the server support."""


Check = Callable[[Any], None]
"""A function that gets a reply of the right type, and raises ``ReplyRefusedError`` if its values are wrong."""


def defect_of(reply: Any, check: Check, further: Check | None = None) -> str | None:
    """Return the reason why a reply cannot be used; None if the reply can be used.

    Args:
        reply: The reply.
        check: The check that the request defines.
        further: An additional check, such as a check by the method.
    """
    if not isinstance(reply, records.Message):
        return f"the reply is a {type(reply).__name__}, which is not a message"
    try:
        # Decoding has checked the types of replies that came as bytes, but clients in this process reply with objects.
        records.require_types(reply)
        for leaf in records.leaves_of(reply):
            if isinstance(leaf, Tensor):
                if leaf.layout != torch.strided or leaf.device.type == "meta":
                    place = f"the layout {leaf.layout} on the device {leaf.device.type!r}"
                    return f"the reply contains a tensor with {place}"
                if leaf.dtype not in DTYPES:
                    return f"the reply contains a tensor of the unsupported type {leaf.dtype}"
            elif isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
                return "the reply contains an integer of more than 64 bits"
            if isinstance(leaf, (Tensor, np.ndarray, float)) and not finite(leaf):
                return f"the reply contains NaN or infinity. {DIVERGED}"
        check(reply)
        if further is not None:
            further(reply)
    except (ReplyRefusedError, WireError) as error:
        return str(error)
    return None


def finite(leaf: Any) -> bool:
    """Return True if a tensor, an array or a number contains neither NaN nor infinity."""
    if isinstance(leaf, Tensor):
        if not leaf.is_floating_point():
            return not leaf.is_complex() or finite(torch.view_as_real(leaf))
        # Check the sum first, which is faster: if it is finite, all values are finite. Finite values can have an
        # infinite sum, so check the values if the sum is not finite.
        return math.isfinite(leaf.sum().item()) or bool(torch.isfinite(leaf).all())
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "fc" or bool(np.isfinite(leaf).all())
    return not isinstance(leaf, float) or math.isfinite(leaf)


def require_shape(got: Tensor, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> None:
    """Raise an error if a tensor does not have the expected shape and dtype.

    Args:
        got: The tensor.
        shape: The expected shape. A dimension of −1 may have any size.
        dtype: The expected dtype.
        what: The tensor's name, for the error message.

    Raises:
        ReplyRefusedError: The shape or the dtype differs.
    """
    fits = got.ndim == len(shape) and all(wanted in (-1, side) for wanted, side in zip(shape, got.shape, strict=True))
    if not fits or got.dtype != dtype:
        actual = f"has shape {tuple(got.shape)} and type {got.dtype}"
        raise ReplyRefusedError(f"{what} {actual}, but must have shape {shape} and type {dtype}")
