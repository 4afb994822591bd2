"""Codecs, which encode changes of a model in fewer bytes and decode them.

A *change* is a mapping from names to floating-point tensors, such as a model update or a gradient. A *payload* is an
encoded change: a mapping from names to parts, and each part is a tensor. The shapes and dtypes of the parts are called
*forms*. The forms depend only on the shapes and dtypes of the change, so sender and receiver both know them. Therefore,
only the values of the parts are sent (``pack``), and a message's size does not depend on the values.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from fedstrata.base.config import FromRegistry, Registry, Setting
from fedstrata.base.errors import FedstrataError, ReplyRefusedError, SpecError
from fedstrata.federation.messages import Params
from fedstrata.federation.reply_checks import finite

Payload = dict[str, dict[str, Tensor]]
"""An encoded change: a mapping from each tensor's name to its parts.

The name is ``all`` if a codec joins all tensors.
"""

Forms = dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]
"""The shape and dtype in which each tensor of an encoded change is sent. The names are the same as in ``Payload``.

The dtype int8 stands for float32 values that ``rounded`` returns. Each value is sent as one byte. The common exponent
of the values takes one more byte.
"""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


class Codec(Setting):
    """Base class of codecs, which encode changes (such as model updates) in fewer bytes and decode them.

    A codec has no state. With error feedback, the sender of the changes stores the encoding error.
    """

    linear: ClassVar[bool] = False
    """Whether the codec is linear: decoding the sum of several payloads gives the sum of the decoded changes."""

    @abstractmethod
    def forms(self, like: Params) -> Forms:
        """Return the payload's shapes and dtypes for a change whose tensors have those in ``like``."""

    @abstractmethod
    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Encode a change and return its payload.

        Args:
            change: The change; all values are finite.
            generator: The random generator for codecs that round at random.
        """

    @abstractmethod
    def decode(self, payload: Payload, like: Params) -> Params:
        """Decode a payload, and return the change with the shapes and dtypes of ``like``.

        Raises:
            ReplyRefusedError: The payload contains a number that ``encode`` can never return.
        """


def pack(payload: Payload, forms: Forms) -> Tensor:
    """Convert the values of all tensors of a payload to bytes, one tensor after the other.

    Args:
        payload: The payload.
        forms: The shapes and dtypes that sender and receiver expect.

    Returns:
        The bytes as a tensor of shape (bytes,) and dtype uint8.

    Raises:
        FedstrataError: The payload has unexpected shapes or dtypes, because the codec's methods ``forms`` and
            ``encode`` contradict each other.
    """
    actual = {name: {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} for name, parts in payload.items()}
    for name in actual | forms:
        wanted = {part: (shape, _in_memory(dtype)) for part, (shape, dtype) in forms.get(name, {}).items()}
        if actual.get(name) != wanted:
            raise FedstrataError(
                f"the payload for {name!r} has the layout {actual.get(name)}, but must have {forms.get(name)}"
            )
    flat = [_bytes(payload[name][part], dtype) for name, parts in forms.items() for part, (_, dtype) in parts.items()]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def unpack(packed: Tensor, forms: Forms) -> Payload:
    """Restore an encoded change (payload) from the bytes that ``pack`` returned.

    Raises:
        ReplyRefusedError: The number of bytes is wrong, or a value is NaN or infinite.
    """
    sizes = [_length(shape, dtype) for parts in forms.values() for shape, dtype in parts.values()]
    if packed.dtype != torch.uint8 or packed.shape != (sum(sizes),):
        raise ReplyRefusedError(
            f"the payload has shape {tuple(packed.shape)} and type {packed.dtype}, but must have shape "
            f"{(sum(sizes),)} and type torch.uint8"
        )
    pieces = iter(torch.split(packed, sizes))
    payload = {
        name: {part: _numbers(next(pieces), dtype).reshape(shape) for part, (shape, dtype) in parts.items()}
        for name, parts in forms.items()
    }
    for name, parts in payload.items():
        if not all(map(finite, parts.values())):
            raise ReplyRefusedError(f"the payload for {name!r} contains NaN or infinity")
    return payload


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values that a receiver decodes if ``tensor`` is sent as ``dtype``.

    For int8, these are float32 values k · 2ᵉ with integers k from −127 to 127. All values have the same exponent e: the
    smallest exponent with which the largest absolute value can be represented.

    >>> rounded(torch.tensor([1.0, 0.5, 0.004]), torch.int8).tolist()
    [1.0, 0.5, 0.0]
    """
    if dtype != torch.int8:
        return tensor.to(dtype)
    exponent = _exponent(tensor)
    return (tensor.double() * 2.0**-exponent).round().mul(2.0**exponent).float()


def _exponent(tensor: Tensor) -> int:
    """Return the smallest e, from −128 to 127, with which all absolute values are at most 127 · 2ᵉ.

    The argument and the result of ``rounded`` have the same e.
    """
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    if not math.isfinite(largest):
        return 127  # the decoded value 127 · 2¹²⁷ overflows float32 to infinity
    mantissa, exponent = math.frexp(largest / 127)
    return max(exponent - (mantissa == 0.5), -128) if largest else -128


def _in_memory(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.int8 else dtype


def _length(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the number of bytes in which a tensor of this shape and dtype is sent."""
    numbers = math.prod(shape)
    return numbers * dtype.itemsize + (dtype == torch.int8 and numbers > 0)


def _bytes(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if dtype == torch.int8 and len(flat):
        exponent = _exponent(flat)
        codes = (flat.double() * 2.0**-exponent).nan_to_num(127, 127, -127)
        flat = torch.cat([codes.to(dtype), torch.tensor([exponent], dtype=dtype)])
    return flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)


def _numbers(piece: Tensor, dtype: torch.dtype) -> Tensor:
    # The address of a slice may not be aligned, and a view as another dtype needs an aligned address. A clone has one.
    flat = piece.clone().view(dtype)
    if dtype != torch.int8:
        return flat
    return (flat[:-1].double() * 2.0 ** flat[-1].item()).float() if len(flat) else flat.float()


class Uncompressed(Codec):
    """No compression: tensors are sent unchanged."""

    linear = True

    def forms(self, like: Params) -> Forms:
        """Return the shape and dtype of each tensor in ``like``."""
        return {name: {"": (tuple(t.shape), t.dtype)} for name, t in like.items()}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Return the tensors unchanged, without copies."""
        return {name: {"": tensor} for name, tensor in change.items()}

    def decode(self, payload: Payload, like: Params) -> Params:
        """Return the tensors unchanged, without copies."""
        return {name: payload[name][""] for name in like}


class BFloat16(Codec):
    """Rounding to bfloat16, with half the bytes of float32 and a relative error of at most 2⁻⁸."""

    def forms(self, like: Params) -> Forms:
        """Return the shape of each tensor, and the dtype bfloat16."""
        return {name: {"": (tuple(t.shape), torch.bfloat16)} for name, t in like.items()}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Return the change with all tensors rounded to bfloat16."""
        return {name: {"": tensor.to(torch.bfloat16)} for name, tensor in change.items()}

    def decode(self, payload: Payload, like: Params) -> Params:
        """Return the tensors of the payload, converted to the dtypes of ``like``."""
        return {name: payload[name][""].to(t.dtype) for name, t in like.items()}


class QSGD(Codec):
    """Random rounding to ``levels`` steps on each side of 0, with one scale per bucket (Alistarh et al. 2017).

    A bucket is a group of consecutive coordinates. The scale M of a bucket is its largest absolute value, as in the
    paper's experiments. The result is unbiased: E[decode(encode(x))] = x. Let s be ``levels``. Each coordinate takes
    ⌈log₂(2 s + 1)⌉ bits. The variance of a coordinate's rounding error is at most (M / s)² / 4.

    Args:
        levels: Number of quantisation steps on each side of 0.
        bucket: Number of consecutive coordinates per bucket. A bucket's scale is its largest absolute value.
    """

    levels: int = Field(default=7, ge=1, le=2**15 - 1)
    bucket: PositiveInt = 512

    @property
    def bits(self) -> int:
        """The number of bits per coordinate."""
        return (2 * self.levels).bit_length()

    def forms(self, like: Params) -> Forms:
        """Return the shapes and dtypes of the tensors under the key ``all``: the buckets' scales and packed codes."""
        d = _coordinates(like)
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]]
        parts = {"scales": ((-(-d // self.bucket),), torch.float32), "codes": ((_packed(d, self.bits),), torch.uint8)}
        return {"all": parts}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Return each bucket's scale M, and each coordinate's code: from 0 (for −M) to 2 · ``levels`` (for M)."""
        flat = _flat(change)
        bucket = self._size(len(flat))
        rows = np.pad(flat, (0, -len(flat) % bucket)).reshape(-1, bucket)
        scales = np.abs(rows).max(axis=1, initial=0.0)
        # Compute in float64, because the product of a large value and ``levels`` could overflow in float32.
        steps = rows * (self.levels / np.where(scales > 0, scales, 1).astype(np.float64))[:, None]
        codes = np.floor(steps + generator.random(steps.shape)).astype(np.int64) + self.levels
        codes = np.clip(codes, 0, 2 * self.levels).ravel()[: len(flat)]
        return {"all": {"scales": torch.from_numpy(scales), "codes": _pack(codes, self.bits)}}

    def decode(self, payload: Payload, like: Params) -> Params:
        """Return each coordinate as (code − s) × M / s, where s is ``levels`` and M is the scale of the bucket."""
        d, parts = _coordinates(like), payload["all"]
        codes, scales = _unpack(parts["codes"], self.bits, d), parts["scales"].numpy().astype(np.float64)
        if d and codes.max() > 2 * self.levels:
            raise ReplyRefusedError(
                f"the payload contains the code {codes.max()}, but the largest allowed code is {2 * self.levels}"
            )
        if not ((scales >= 0) & np.isfinite(scales)).all():
            raise ReplyRefusedError("the scale of a bucket is negative, NaN or infinite")
        values = (codes - self.levels) * (np.repeat(scales, self._size(d))[:d] / self.levels)
        return _shaped(values.astype(np.float32), like)

    def _size(self, coordinates: int) -> int:
        """Return the number of coordinates in a bucket: ``bucket``, or all coordinates if the change has fewer."""
        return min(self.bucket, max(coordinates, 1))


class WithMemory(Codec):
    """A codec with error feedback: the sender adds the encoding error of a change to its next change.

    The decoded changes and the remaining error always add up to the sum of all changes (Seide et al. 2014; Karimireddy
    et al. 2019). If a client takes part rarely, its stored error is old and pulls the model towards an old version. The
    settings ``damping`` and ``forget_after`` limit this effect.

    Args:
        damping: Factor by which a client's stored encoding error is multiplied, once for each round since the client's
            latest update.
        forget_after: Number of rounds after which a client's stored encoding error is deleted. Default: never.
        start: First round (counted from 1) in which updates are compressed.
    """

    damping: float = Field(default=1.0, gt=0, le=1)
    forget_after: PositiveInt | None = None
    start: PositiveInt = 1

    def kept(self, age: int) -> float:
        """Return the factor for an encoding error that was stored ``age`` rounds ago."""
        if self.forget_after is not None and age > self.forget_after:
            return 0.0
        return float(self.damping**age)


class TopK(WithMemory):
    """Top-k sparsification with error feedback: only the largest coordinates are sent.

    The largest coordinates are chosen among the coordinates of all tensors. The server learns which coordinates of a
    client's change are largest.

    Args:
        fraction: Fraction of an update's coordinates to send.
    """

    fraction: float = Field(default=0.01, gt=0, le=1)

    def _sent(self, d: int) -> int:
        return min(max(1, round(self.fraction * d)), d)

    def forms(self, like: Params) -> Forms:
        """Return the shapes and dtypes of the two tensors under the key ``all``: the packed indices, and the values."""
        d = _coordinates(like)
        k = self._sent(d)
        indices = ((_packed(k, _bits(d)),), torch.uint8)
        return {"all": {"places": indices, "values": ((k,), torch.float32)}}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Return the indices and values of the coordinates with the largest absolute values."""
        flat = _flat(change)
        k = self._sent(len(flat))
        indices = _largest(np.abs(flat), k)
        return {"all": {"places": _pack(indices, _bits(len(flat))), "values": torch.from_numpy(flat[indices])}}

    def decode(self, payload: Payload, like: Params) -> Params:
        """Return tensors with the received values at the received indices, and zeros at all other indices."""
        d, parts = _coordinates(like), payload["all"]
        indices = _unpack(parts["places"], _bits(d), self._sent(d))
        if len(indices) and (indices[-1] >= d or (np.diff(indices) <= 0).any()):
            raise ReplyRefusedError(f"the payload's indices are not in ascending order, or not all are below {d}")
        flat = np.zeros(d, dtype=np.float32)
        flat[indices] = parts["values"].numpy()
        return _shaped(flat, like)


class PowerSGD(WithMemory):
    """A low-rank approximation of each parameter matrix, with error feedback (Vogels et al. 2019).

    Each tensor is treated as a matrix with one row per index of the first dimension. Let M_k be client k's matrix. The
    sum Σ M_k is approximated in two steps. First, clients send M_k Q, and the server sends back P: the sum Σ M_k Q with
    orthonormalised columns. Then, clients send M_kᵀ P. The next exchange begins with Σ M_kᵀ P as Q.
    The decoded matrix is P Qᵀ. A client's error is M_k − P (M_kᵀ P)ᵀ. A tensor is approximated only if it has several
    dimensions and the approximation is smaller.

    The server decodes only the sums, unless a method needs each client's change.

    Args:
        rank: Rank of the matrices that approximate an update.
        factors: Number format of the two factors of each low-rank matrix.
    """

    linear = True

    rank: int = Field(default=1, ge=1, le=1024)
    factors: Literal["float32", "bfloat16", "int8"] = "float32"

    def split(self, like: Params) -> tuple[list[str], list[str]]:
        """Return two lists of names: the tensors that are approximated, and all other tensors."""
        matrices = []
        for name, tensor in like.items():
            rows, columns = _sides(tensor)
            if tensor.ndim > 1 and self.rank * (rows + columns) < rows * columns:
                matrices.append(name)
        return matrices, [name for name in like if name not in matrices]

    def first_basis(self, like: Params, generator: np.random.Generator) -> Payload:
        """Return random matrices Q for the first exchange, drawn from the standard normal distribution."""
        drawn = {
            name: generator.standard_normal(parts["q"][0], np.float32)
            for name, parts in self.forms_of_basis(like).items()
        }
        return {name: {"q": self.rounded(torch.from_numpy(basis))} for name, basis in drawn.items()}

    def rounded(self, tensor: Tensor) -> Tensor:
        """Round a tensor to the number format ``factors``."""
        return rounded(tensor, DTYPES[self.factors])

    def project(self, change: Params, basis: Payload) -> Payload:
        """Return a client's term of the first sum: P_k = M_k Q for each matrix M_k of the client's change."""
        return {name: {"p": self.rounded(_matrix(change[name]) @ parts["q"].float())} for name, parts in basis.items()}

    def orthonormal(self, summed: Payload) -> Payload:
        """Orthonormalise the columns of each matrix P = Σ M_k Q in the first sum, and return the matrices."""
        frames = {name: torch.linalg.qr(parts["p"].double()).Q.float() for name, parts in summed.items()}
        return {name: {"p": self.rounded(p)} for name, p in frames.items()}

    def coefficients(self, change: Params, frame: Payload) -> Payload:
        """Return client k's term of the second sum, rounded: its change, with each matrix M_k replaced by M_kᵀ P."""
        _, rest = self.split(change)
        payload = {
            name: {"q": self.rounded(_matrix(change[name]).T @ parts["p"].float())} for name, parts in frame.items()
        }
        return payload | {name: {"": self.rounded(change[name])} for name in rest}

    def forms_of_basis(self, like: Params) -> Forms:
        """Return the shape (columns, rank) and the dtype of Q, the second factor of P Qᵀ, for each matrix."""
        return {name: {"q": parts["q"]} for name, parts in self.forms(like).items() if "q" in parts}

    def forms_of_frame(self, like: Params) -> Forms:
        """Return the shape (rows, rank) and the dtype of P, the first factor of P Qᵀ, for each matrix."""
        return {name: {"p": parts["p"]} for name, parts in self.forms(like).items() if "p" in parts}

    def forms_of_coefficients(self, like: Params) -> Forms:
        """Return the shapes and dtypes of the tensors that ``coefficients`` returns."""
        whole = self.forms(like)
        return {name: {part: form for part, form in parts.items() if part != "p"} for name, parts in whole.items()}

    def next_basis(self, payload: Payload, before: Payload) -> Payload:
        """Return the matrices Q for the next exchange: the sums Σ M_kᵀ P over the clients k, each divided by its norm.

        Args:
            payload: The second sum of this exchange, Σ M_kᵀ P for each matrix.
            before: The matrices Q of this exchange. Q does not change for a matrix whose second sum is zero.
        """
        basis = {}
        for name, parts in before.items():
            new = payload[name]["q"].double()
            norm = new.norm()
            basis[name] = {"q": self.rounded((new / norm).float()) if norm > 0 else parts["q"]}
        return basis

    def forms(self, like: Params) -> Forms:
        """Return the shapes and dtypes of both factors P and Q of each matrix, and of all other tensors."""
        matrices, rest = self.split(like)
        dtype, forms = DTYPES[self.factors], Forms()
        for name in matrices:
            rows, columns = _sides(like[name])
            forms[name] = {"p": ((rows, self.rank), dtype), "q": ((columns, self.rank), dtype)}
        return forms | {name: {"": (tuple(like[name].shape), dtype)} for name in rest}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Return both factors P and Q of one change, after two power iterations that start at random matrices Q."""
        basis = self.first_basis(change, generator)
        for _ in range(2):
            frame = self.orthonormal(self.project(change, basis))
            payload = self.coefficients(change, frame)
            basis = self.next_basis(payload, basis)
        return with_frame(payload, frame)

    def decode(self, payload: Payload, like: Params) -> Params:
        """Return P Qᵀ for each matrix, and all other tensors, in the shapes of ``like``."""
        change = {}
        for name, tensor in like.items():
            parts = payload[name]
            whole = parts["p"].float() @ parts["q"].float().T if "p" in parts else parts[""].float()
            change[name] = whole.reshape(tensor.shape).to(tensor.dtype)
        return change


def with_frame(payload: Payload, frame: Payload) -> Payload:
    """Add the factors P to an encoded change that contains only the factors Q of PowerSGD's product P Qᵀ.

    Args:
        payload: A client's term of PowerSGD's second sum, or the second sum itself.
        frame: The factors P; empty if the codec is not PowerSGD.
    """
    return payload | {name: {**parts, **payload[name]} for name, parts in frame.items()}


def _sides(tensor: Tensor) -> tuple[int, int]:
    return (tensor.shape[0], math.prod(tensor.shape[1:])) if tensor.ndim else (1, 1)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(_sides(tensor)).float()


def _coordinates(like: Params) -> int:
    return sum(tensor.numel() for tensor in like.values())


def _flat(change: Params) -> NDArray[np.float32]:
    parts = [tensor.detach().reshape(-1).float() for tensor in change.values()]
    flat: NDArray[np.float32] = torch.cat(parts).numpy() if parts else np.zeros(0, dtype=np.float32)
    return flat


def _shaped(flat: NDArray[np.float32], like: Params) -> Params:
    parts = torch.split(torch.from_numpy(flat), [tensor.numel() for tensor in like.values()])
    return {name: part.reshape(t.shape).to(t.dtype) for (name, t), part in zip(like.items(), parts, strict=True)}


def _largest(sizes: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Return the indices of the k largest values, in ascending order. Among equal values, the first are chosen.

    >>> _largest(np.array([2.0, 1.0, 2.0, 3.0, 2.0], dtype=np.float32), 3)
    array([0, 2, 3])
    """
    if k == 0:
        return np.zeros(0, dtype=np.int64)
    least = np.partition(sizes, len(sizes) - k)[-k]  # ten times as fast as sorting all values
    above, equal = np.flatnonzero(sizes > least), np.flatnonzero(sizes == least)
    return np.sort(np.concatenate([above, equal[: k - len(above)]]))


def _bits(d: int) -> int:
    """Return the number of bits that an index into ``d`` coordinates needs."""
    return max(1, (d - 1).bit_length())


def _packed(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def _pack(codes: NDArray[np.int64], bits: int) -> Tensor:
    """Convert integers to bytes, with ``bits`` bits per integer.

    >>> _pack(np.array([1, 2, 3]), 4).tolist()
    [18, 48]
    """
    spread = (codes[:, None] >> np.arange(bits - 1, -1, -1)) & 1
    return torch.from_numpy(np.packbits(spread.astype(np.uint8)))


def _unpack(packed: Tensor, bits: int, count: int) -> NDArray[np.int64]:
    """Return the numbers that ``_pack`` packed.

    >>> _unpack(torch.tensor([18, 48], dtype=torch.uint8), 4, 3).tolist()
    [1, 2, 3]
    """
    spread = np.unpackbits(packed.numpy(), count=count * bits).reshape(count, bits)
    codes: NDArray[np.int64] = spread @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int64))
    return codes


CODECS: Registry[Codec] = Registry(
    "codec",
    Codec,  # type: ignore[type-abstract]
    {
        "none": "fedstrata.federation.communication.codecs:Uncompressed",
        "bf16": "fedstrata.federation.communication.codecs:BFloat16",
        "qsgd": "fedstrata.federation.communication.codecs:QSGD",
        "top-k": "fedstrata.federation.communication.codecs:TopK",
        "powersgd": "fedstrata.federation.communication.codecs:PowerSGD",
    },
)

AnyCodec = Annotated[Codec, FromRegistry(CODECS)]


class Communication(Setting):
    """The compression of models and updates.

    Args:
        up: Codec (compression scheme) for the updates that clients send.
        down: Codec for the model that clients receive. Each client receives the compressed difference between its
            version of the model and the new version.
    """

    up: AnyCodec = Uncompressed()
    down: AnyCodec = Uncompressed()

    @model_validator(mode="after")
    def _remembers_nothing(self) -> Self:
        """Reject ``damping`` and ``forget_after`` in ``down``, because the server's encoding error is never old."""
        if isinstance(self.down, WithMemory):
            for key, usual in (("damping", 1.0), ("forget_after", None)):
                if getattr(self.down, key) != usual:
                    problem = "has no effect on models that the server sends. Remove this key."
                    raise SpecError(f"down.{key}", problem, getattr(self.down, key))
        return self

    @property
    def plain(self) -> bool:
        """Whether all messages to and from clients are sent without encoding."""
        return isinstance(self.up, Uncompressed) and isinstance(self.down, Uncompressed)
