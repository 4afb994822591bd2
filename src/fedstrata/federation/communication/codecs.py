"""Codecs: they encode the change of a model in fewer bytes, and decode it.

A *change* is a table of named floating-point tensors, such as a model update or a gradient. A *payload* is its encoded
form: tensors by name and part. Their shapes and dtypes depend only on those of the change. Both ends know them, so that
only the numbers travel (``pack``), and the size of a message does not depend on its values.
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
"""An encoded change: parts by name, where a name is that of a tensor, or one of the codec for all tensors."""

Forms = dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]
"""Shape and dtype of every part of a payload while it travels.

int8 stands for float32 that is rounded by ``rounded``, plus one byte for the power of two. Codes of a codec are uint8.
"""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


class Codec(Setting):
    """A codec encodes and decodes changes.

    A codec is stateless: with error feedback, the sender keeps the error between two changes.
    """

    feedback: ClassVar[bool] = False
    """Whether the sender adds the error of a change to its next change (error feedback)."""

    linear: ClassVar[bool] = False
    """Whether a sum of payloads decodes to the sum of their changes."""

    @abstractmethod
    def forms(self, like: Params) -> Forms:
        """Return the forms of the payload of a change with the names and shapes of ``like``."""

    @abstractmethod
    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Return the payload of a change.

        Args:
            change: Finite tensors of float32.
            generator: For codecs that round at random.
        """

    @abstractmethod
    def decode(self, payload: Payload, like: Params) -> Params:
        """Return the change that a payload encodes, in the shapes and dtypes of ``like``.

        Raises:
            ReplyRefusedError: The payload contains a number that this codec never encodes.
        """


def pack(payload: Payload, forms: Forms) -> Tensor:
    """Return the numbers of all tensors of a payload as bytes, one tensor after another.

    Args:
        payload: The payload.
        forms: The forms that both ends expect.

    Returns:
        The bytes, uint8, (bytes,).

    Raises:
        FedstrataError: The payload has other forms, because the codec's ``forms`` and ``encode`` do not agree.
    """
    actual = {name: {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} for name, parts in payload.items()}
    for name in actual | forms:
        wanted = {part: (shape, _in_memory(dtype)) for part, (shape, dtype) in forms.get(name, {}).items()}
        if actual.get(name) != wanted:
            raise FedstrataError(f"the payload's {name!r} is {actual.get(name)}, its codec said {forms.get(name)}")
    flat = [_bytes(payload[name][part], dtype) for name, parts in forms.items() for part, (_, dtype) in parts.items()]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def unpack(packed: Tensor, forms: Forms) -> Payload:
    """Return the payload that ``pack`` packed.

    Raises:
        ReplyRefusedError: The number of bytes is wrong, or a number is NaN or infinite.
    """
    sizes = [_length(shape, dtype) for parts in forms.values() for shape, dtype in parts.values()]
    if packed.dtype != torch.uint8 or packed.shape != (sum(sizes),):
        raise ReplyRefusedError(f"{packed.dtype} of {tuple(packed.shape)} instead of {sum(sizes)} bytes")
    pieces = iter(torch.split(packed, sizes))
    payload = {
        name: {part: _numbers(next(pieces), dtype).reshape(shape) for part, (shape, dtype) in parts.items()}
        for name, parts in forms.items()
    }
    for name, parts in payload.items():
        if not all(map(finite, parts.values())):
            raise ReplyRefusedError(f"NaN or infinity in the payload's {name!r}")
    return payload


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that a receiver decodes if ``tensor`` travels as ``dtype``.

    For int8 these are float32 multiples k · 2ᵉ with |k| ≤ 127, with the smallest e that covers the largest value.

    >>> rounded(torch.tensor([1.0, 0.5, 0.004]), torch.int8).tolist()
    [1.0, 0.5, 0.0]
    """
    if dtype != torch.int8:
        return tensor.to(dtype)
    exponent = _exponent(tensor)
    return (tensor.double() * 2.0**-exponent).round().mul(2.0**exponent).float()


def _exponent(tensor: Tensor) -> int:
    """Return the smallest e of a signed byte for which all values are at most 127 · 2ᵉ; ``rounded`` keeps it."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    if not math.isfinite(largest):
        return 127  # with this exponent, infinity stays infinity
    mantissa, exponent = math.frexp(largest / 127)
    return max(exponent - (mantissa == 0.5), -128) if largest else -128


def _in_memory(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.int8 else dtype


def _length(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a part."""
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
    # A slice may begin at an address that its dtype does not allow; a copy does not.
    flat = piece.clone().view(dtype)
    if dtype != torch.int8:
        return flat
    return (flat[:-1].double() * 2.0 ** flat[-1].item()).float() if len(flat) else flat.float()


class Uncompressed(Codec):
    """No encoding: changes travel as they are."""

    linear = True

    def forms(self, like: Params) -> Forms:
        """Return one part per tensor, with its dtype."""
        return {name: {"": (tuple(t.shape), t.dtype)} for name, t in like.items()}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Return the tensors unchanged, without copies."""
        return {name: {"": tensor} for name, tensor in change.items()}

    def decode(self, payload: Payload, like: Params) -> Params:
        """Return the tensors unchanged, without copies."""
        return {name: payload[name][""] for name in like}


class BFloat16(Codec):
    """Rounding to bfloat16: half the bytes, and a relative error of at most 2⁻⁸."""

    def forms(self, like: Params) -> Forms:
        """Return one part of bfloat16 per tensor."""
        return {name: {"": (tuple(t.shape), torch.bfloat16)} for name, t in like.items()}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Return the tensors, rounded to bfloat16."""
        return {name: {"": tensor.to(torch.bfloat16)} for name, tensor in change.items()}

    def decode(self, payload: Payload, like: Params) -> Params:
        """Return the tensors in their own dtypes."""
        return {name: payload[name][""].to(t.dtype) for name, t in like.items()}


class QSGD(Codec):
    """Stochastic rounding to ``levels`` steps between 0 and the largest value of a bucket (Alistarh et al. 2017).

    The result is unbiased: E[decode(encode(x))] = x. The variance of a coordinate is at most (M / s)² / 4, for a
    bucket's largest absolute value M and s levels. A bucket's scale is M, as in the paper's experiments. A code takes
    ⌈log₂(2 s + 1)⌉ bits.

    Args:
        levels: Number of steps on each side of 0, s.
        bucket: Number of coordinates that share a scale.
    """

    levels: int = Field(default=7, ge=1, le=2**15 - 1)
    bucket: PositiveInt = 512

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return (2 * self.levels).bit_length()

    def forms(self, like: Params) -> Forms:
        """Return one name with two parts: the buckets' scales, and the packed codes of all coordinates."""
        d = _coordinates(like)
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]]
        parts = {"scales": ((-(-d // self.bucket),), torch.float32), "codes": ((_packed(d, self.bits),), torch.uint8)}
        return {"all": parts}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Return codes from 0 (for −M) to 2 s (for M), and the scales M."""
        flat = _flat(change)
        rows = np.pad(flat, (0, -len(flat) % self.bucket)).reshape(-(-len(flat) // self.bucket), self.bucket)
        scales = np.abs(rows).max(axis=1, initial=0.0)
        # In float64, because the product of a large value and ``levels`` could overflow in float32.
        steps = rows * (self.levels / np.where(scales > 0, scales, 1).astype(np.float64))[:, None]
        codes = np.floor(steps + generator.random(steps.shape)).astype(np.int64) + self.levels
        codes = np.clip(codes, 0, 2 * self.levels).ravel()[: len(flat)]
        return {"all": {"scales": torch.from_numpy(scales), "codes": _pack(codes, self.bits)}}

    def decode(self, payload: Payload, like: Params) -> Params:
        """Return the values of the codes, times the scale of their bucket."""
        d, parts = _coordinates(like), payload["all"]
        codes, scales = _unpack(parts["codes"], self.bits, d), parts["scales"].numpy().astype(np.float64)
        if d and codes.max() > 2 * self.levels:
            raise ReplyRefusedError(f"a code of {codes.max()}, where {2 * self.levels} is the largest")
        if not ((scales >= 0) & np.isfinite(scales)).all():
            raise ReplyRefusedError("the scale of a bucket is negative, NaN or infinite")
        values = (codes - self.levels) * (np.repeat(scales, self.bucket)[:d] / self.levels)
        return _shaped(values.astype(np.float32), like)


class WithMemory(Codec):
    """A codec with error feedback: the sender adds the error of a change to its next change.

    The decoded changes so far and the remaining error are together the sum of all changes (Seide et al. 2014;
    Karimireddy et al. 2019). If clients take part rarely, their errors refer to an old model and pull towards it.

    Args:
        damping: Factor that is applied to the error for each round of its age.
        forget_after: Rounds after which an error is dropped. Default: never.
        start: The first round with compression; changes of earlier rounds travel unencoded.
    """

    feedback = True

    damping: float = Field(default=1.0, gt=0, le=1)
    forget_after: PositiveInt | None = None
    start: PositiveInt = 1

    def kept(self, age: int) -> float:
        """Return the factor of an error that is ``age`` rounds old."""
        if self.forget_after is not None and age > self.forget_after:
            return 0.0
        return float(self.damping**age)


class TopK(WithMemory):
    """The coordinates with the largest absolute values over all tensors, with error feedback.

    The server learns which coordinates a client has changed most.

    Args:
        fraction: Fraction of the coordinates that are sent; at least one coordinate is sent.
    """

    fraction: float = Field(default=0.01, gt=0, le=1)

    def _sent(self, d: int) -> int:
        return min(max(1, round(self.fraction * d)), d)

    def forms(self, like: Params) -> Forms:
        """Return one name with two parts: the packed indices of the coordinates, and their values."""
        d = _coordinates(like)
        k = self._sent(d)
        indices = ((_packed(k, _bits(d)),), torch.uint8)
        return {"all": {"places": indices, "values": ((k,), torch.float32)}}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Return the largest coordinates; of equal values the first ones."""
        flat = _flat(change)
        k = self._sent(len(flat))
        indices = _largest(np.abs(flat), k)
        return {"all": {"places": _pack(indices, _bits(len(flat))), "values": torch.from_numpy(flat[indices])}}

    def decode(self, payload: Payload, like: Params) -> Params:
        """Return the values at their indices, and zero elsewhere."""
        d, parts = _coordinates(like), payload["all"]
        indices = _unpack(parts["places"], _bits(d), self._sent(d))
        if len(indices) and (indices[-1] >= d or (np.diff(indices) <= 0).any()):
            raise ReplyRefusedError(f"indices that do not ascend, or lie beyond {d} coordinates")
        flat = np.zeros(d, dtype=np.float32)
        flat[indices] = parts["values"].numpy()
        return _shaped(flat, like)


class PowerSGD(WithMemory):
    """A low-rank approximation of every matrix, with error feedback (Vogels et al. 2019).

    Each tensor is a matrix of its first dimension by all others. For the sum of the clients' matrices M = Σ M_k, two
    sums travel: P = Σ M_k Q, which is made orthonormal and sent back, then Q = Σ M_kᵀ P. The decoded matrix is P Qᵀ.
    The next exchange begins with this Q, so that each exchange is one power iteration. A client's error is
    M_k − P (M_kᵀ P)ᵀ. Tensors of one dimension, and tensors that would not become smaller, travel unencoded.

    The server needs only the sums, except if a method needs each client's change.

    Args:
        rank: Rank of the approximation.
        factors: Type in which P and Q travel. With ``int8``, each tensor has one more byte for the power of two of its
            numbers. Error feedback includes the error of this rounding.
    """

    linear = True

    rank: int = Field(default=1, ge=1, le=1024)
    factors: Literal["float32", "bfloat16", "int8"] = "float32"

    def split(self, like: Params) -> tuple[list[str], list[str]]:
        """Return the names of the tensors that are compressed, and of those that travel unencoded."""
        matrices = []
        for name, tensor in like.items():
            rows, columns = _sides(tensor)
            if tensor.ndim > 1 and self.rank * (rows + columns) < rows * columns:
                matrices.append(name)
        return matrices, [name for name in like if name not in matrices]

    def first_basis(self, like: Params, generator: np.random.Generator) -> Payload:
        """Return Q of the first exchange: normal random numbers."""
        drawn = {
            name: generator.standard_normal(parts["q"][0], np.float32)
            for name, parts in self.forms_of_basis(like).items()
        }
        return {name: {"q": self.rounded(torch.from_numpy(basis))} for name, basis in drawn.items()}

    def rounded(self, tensor: Tensor) -> Tensor:
        """Return a tensor, rounded as it is when it travels."""
        return rounded(tensor, DTYPES[self.factors])

    def project(self, change: Params, basis: Payload) -> Payload:
        """Return a client's part of the first sum: P_k = M_k Q."""
        return {name: {"p": self.rounded(_matrix(change[name]) @ parts["q"].float())} for name, parts in basis.items()}

    def orthonormal(self, summed: Payload) -> Payload:
        """Return P of the first sum with orthonormal columns."""
        frames = {name: torch.linalg.qr(parts["p"].double()).Q.float() for name, parts in summed.items()}
        return {name: {"p": self.rounded(p)} for name, p in frames.items()}

    def coefficients(self, change: Params, frame: Payload) -> Payload:
        """Return a client's part of the second sum, Q_k = M_kᵀ P, and the unencoded tensors."""
        _, rest = self.split(change)
        payload = {
            name: {"q": self.rounded(_matrix(change[name]).T @ parts["p"].float())} for name, parts in frame.items()
        }
        return payload | {name: {"": self.rounded(change[name])} for name in rest}

    def forms_of_basis(self, like: Params) -> Forms:
        """Return the forms of Q: (columns, rank) for every matrix."""
        return {name: {"q": parts["q"]} for name, parts in self.forms(like).items() if "q" in parts}

    def forms_of_frame(self, like: Params) -> Forms:
        """Return the forms of P and of ``project``: (rows, rank) for every matrix."""
        return {name: {"p": parts["p"]} for name, parts in self.forms(like).items() if "p" in parts}

    def forms_of_coefficients(self, like: Params) -> Forms:
        """Return the forms of ``coefficients``."""
        whole = self.forms(like)
        return {name: {part: form for part, form in parts.items() if part != "p"} for name, parts in whole.items()}

    def next_basis(self, payload: Payload, before: Payload) -> Payload:
        """Return Q of the next exchange: the sum of this exchange, normalised; the previous Q if the sum is zero."""
        basis = {}
        for name, parts in before.items():
            new = payload[name]["q"].double()
            norm = new.norm()
            basis[name] = {"q": self.rounded((new / norm).float()) if norm > 0 else parts["q"]}
        return basis

    def forms(self, like: Params) -> Forms:
        """Return the forms of both factors of every matrix, and of the unencoded tensors."""
        matrices, rest = self.split(like)
        dtype, forms = DTYPES[self.factors], Forms()
        for name in matrices:
            rows, columns = _sides(like[name])
            forms[name] = {"p": ((rows, self.rank), dtype), "q": ((columns, self.rank), dtype)}
        return forms | {name: {"": (tuple(like[name].shape), dtype)} for name in rest}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Return both factors of a single change, after two power iterations from a random basis."""
        basis = self.first_basis(change, generator)
        for _ in range(2):
            frame = self.orthonormal(self.project(change, basis))
            payload = self.coefficients(change, frame)
            basis = self.next_basis(payload, basis)
        return with_frame(payload, frame)

    def decode(self, payload: Payload, like: Params) -> Params:
        """Return P Qᵀ for every matrix, in the shapes of ``like``."""
        change = {}
        for name, tensor in like.items():
            parts = payload[name]
            whole = parts["p"].float() @ parts["q"].float().T if "p" in parts else parts[""].float()
            change[name] = whole.reshape(tensor.shape).to(tensor.dtype)
        return change


def with_frame(payload: Payload, frame: Payload) -> Payload:
    """Return the coefficients of a second sum, together with their frame P."""
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
    """Return the indices of the k largest values, ascending; of equal values those of the first.

    >>> _largest(np.array([2.0, 1.0, 2.0, 3.0, 2.0], dtype=np.float32), 3)
    array([0, 2, 3])
    """
    if k == 0:
        return np.zeros(0, dtype=np.int64)
    least = np.partition(sizes, len(sizes) - k)[-k]  # ten times as fast as sorting
    above, equal = np.flatnonzero(sizes > least), np.flatnonzero(sizes == least)
    return np.sort(np.concatenate([above, equal[: k - len(above)]]))


def _bits(d: int) -> int:
    """Return the number of bits of the largest index of ``d`` coordinates."""
    return max(1, (d - 1).bit_length())


def _packed(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def _pack(codes: NDArray[np.int64], bits: int) -> Tensor:
    """Return whole numbers as bytes, with ``bits`` bits per number.

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
    """The codecs of models and updates.

    Args:
        up: Codec of the changes that clients send.
        down: Codec of the model that clients receive. With ``none`` the whole model travels; otherwise the encoded
            changes that a client missed, if these are smaller.
    """

    up: AnyCodec = Uncompressed()
    down: AnyCodec = Uncompressed()

    @model_validator(mode="after")
    def _remembers_nothing(self) -> Self:
        """Refuse settings of a client's error feedback: the server keeps the error of the model itself."""
        if isinstance(self.down, WithMemory):
            for key, usual in (("damping", 1.0), ("forget_after", None)):
                if getattr(self.down, key) != usual:
                    problem = "is about what clients remember of their changes; going down nothing grows old"
                    raise SpecError(f"down.{key}", problem, getattr(self.down, key))
        return self

    @property
    def plain(self) -> bool:
        """Whether both directions are unencoded."""
        return isinstance(self.up, Uncompressed) and isinstance(self.down, Uncompressed)
