"""Which replies cannot be used, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstrata.base import records
from fedstrata.base.errors import ReplyRefusedError, WireError

DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
"""Types of tensors that every operation here knows."""


Check = Callable[[Any], None]
"""Raises ``ReplyRefusedError`` for a reply that is well-formed and still wrong."""


def defect_of(reply: Any, check: Check, further: Check | None = None) -> str | None:
    """Why a reply cannot be used, or None.

    Args:
        reply: What came.
        check: What the request expects.
        further: What the method expects beside that.
    """
    if not isinstance(reply, records.Message):
        return f"a {type(reply).__name__} is no message"
    try:
        # Over a wire it would not have arrived; here clients may live in the same process.
        records.require_types(reply)
        for leaf in records.leaves_of(reply):
            if isinstance(leaf, Tensor):
                # Every operation of the server can be done with such tensors.
                if leaf.layout != torch.strided or leaf.device.type == "meta":
                    return f"a tensor that is {leaf.layout} on {leaf.device.type}"
                if leaf.dtype not in DTYPES:
                    return f"a tensor of {leaf.dtype}"
            elif isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
                return "a whole number of more than 64 bits"
            if isinstance(leaf, (Tensor, np.ndarray, float)) and not finite(leaf):
                return "NaN or infinity"
        check(reply)
        if further is not None:
            further(reply)
    except (ReplyRefusedError, WireError) as error:
        return str(error)
    return None


def finite(leaf: Any) -> bool:
    """Whether a tensor, an array or a number holds neither NaN nor infinity."""
    if isinstance(leaf, Tensor):
        if not leaf.is_floating_point():
            return not leaf.is_complex() or finite(torch.view_as_real(leaf))
        # NaN and infinity survive a sum, which is several times faster; a finite tensor's sum may still overflow.
        return math.isfinite(leaf.sum().item()) or bool(torch.isfinite(leaf).all())
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "fc" or bool(np.isfinite(leaf).all())
    return not isinstance(leaf, float) or math.isfinite(leaf)


def require_like(got: Mapping[str, Tensor], like: Mapping[str, Tensor], what: str) -> None:
    """Refuse tensors whose names, shapes or dtypes differ from those of ``like``.

    Raises:
        ReplyRefusedError: With the first difference.
    """
    if got.keys() != like.keys():
        if missing := [name for name in like if name not in got]:
            raise ReplyRefusedError(f"{what} lacks {missing[0]!r}")
        raise ReplyRefusedError(f"{what} has an unknown {next(name for name in got if name not in like)!r}")
    for name, tensor in like.items():
        found = got[name]
        if found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise ReplyRefusedError(
                f"{what}[{name!r}] is {tuple(found.shape)} {found.dtype}, expected {tuple(tensor.shape)} {tensor.dtype}"
            )


def require_shape(got: Tensor, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> None:
    """Refuse a tensor of another shape or dtype.

    Args:
        got: What came.
        shape: Its shape; −1 for any length.
        dtype: Its dtype.
        what: What it is, for the message.

    Raises:
        ReplyRefusedError: With what it is and what was expected.
    """
    fits = got.ndim == len(shape) and all(wanted in (-1, side) for wanted, side in zip(shape, got.shape, strict=True))
    if not fits or got.dtype != dtype:
        raise ReplyRefusedError(f"{what} is {tuple(got.shape)} {got.dtype}, expected {shape} {dtype}")
