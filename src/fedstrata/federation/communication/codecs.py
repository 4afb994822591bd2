"""Codecs: how a change of a model becomes fewer bytes, and back.

A *change* is a table of named floating-point tensors: what local training made of a model, a gradient, a difference of
two models. A *payload* is what is sent of it, tensors by name and part. Their shapes and dtypes depend on those of the
change alone: both ends know them, so that nothing but the numbers travels (``pack``), and the size of a message tells
nothing of what is in it.
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
"""What is sent of a change: by tensor, or under a name of the codec's own for all of them, and by part."""

Forms = dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]
"""Shape and dtype, as they travel, of every part of a payload.

int8 stands for float32 that travels as ``rounded`` makes it, with one byte more for the power of two; codes of a
codec's own are uint8.
"""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


class Codec(Setting):
    """How a change travels.

    A codec is stateless: what has to be remembered between two changes (``feedback``) is kept by who encodes.
    """

    feedback: ClassVar[bool] = False
    """Whether what a change loses is remembered by its sender and added to its next change (error feedback)."""

    linear: ClassVar[bool] = False
    """Whether ``decode`` of a sum of payloads is the sum of what they decode to."""

    @abstractmethod
    def forms(self, like: Params) -> Forms:
        """What the payload of a change like ``like`` consists of."""

    @abstractmethod
    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """What travels.

        Args:
            change: Finite tensors of float32.
            generator: For codecs that round at random.
        """

    @abstractmethod
    def decode(self, payload: Payload, like: Params) -> Params:
        """What a payload stands for, in the shapes and dtypes of ``like``.

        Raises:
            ReplyRefusedError: A number in it can be no codec's.
        """


def pack(payload: Payload, forms: Forms) -> Tensor:
    """A payload as it travels: the numbers of all its tensors one after another, as bytes.

    Args:
        payload: Tensors of these forms.
        forms: What both ends expect.

    Returns:
        uint8, (bytes,).

    Raises:
        FedstrataError: The payload has another form: its codec's ``forms`` and ``encode`` do not agree.
    """
    found = {name: {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} for name, parts in payload.items()}
    for name in found | forms:
        wanted = {part: (shape, _in_memory(dtype)) for part, (shape, dtype) in forms.get(name, {}).items()}
        if found.get(name) != wanted:
            raise FedstrataError(f"the payload's {name!r} is {found.get(name)}, its codec said {forms.get(name)}")
    flat = [_bytes(payload[name][part], dtype) for name, parts in forms.items() for part, (_, dtype) in parts.items()]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def unpack(packed: Tensor, forms: Forms) -> Payload:
    """What ``pack`` packed.

    Raises:
        ReplyRefusedError: These are not as many bytes, or a number is NaN or infinite.
    """
    sizes = [_length(shape, dtype) for parts in forms.values() for shape, dtype in parts.values()]
    if packed.dtype != torch.uint8 or packed.shape != (sum(sizes),):
        raise ReplyRefusedError(f"{packed.dtype} of {tuple(packed.shape)} instead of {sum(sizes)} bytes")
    pieces = iter(torch.split(packed, sizes))
    found = {
        name: {part: _numbers(next(pieces), dtype).reshape(shape) for part, (shape, dtype) in parts.items()}
        for name, parts in forms.items()
    }
    for name, parts in found.items():
        if not all(map(finite, parts.values())):
            raise ReplyRefusedError(f"NaN or infinity in the payload's {name!r}")
    return found


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as a receiver has them whom they reach as ``dtype``.

    Of int8: float32, whole multiples of the smallest power of two of which 127 reach the largest absolute value.

    >>> rounded(torch.tensor([1.0, 0.5, 0.004]), torch.int8).tolist()
    [1.0, 0.5, 0.0]
    """
    if dtype != torch.int8:
        return tensor.to(dtype)
    exponent = _exponent(tensor)
    return (tensor.double() * 2.0**-exponent).round().mul(2.0**exponent).float()


def _exponent(tensor: Tensor) -> int:
    """The smallest e that a signed byte holds for which no value is above 127 · 2ᵉ; the same after ``rounded``."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    if not math.isfinite(largest):
        return 127  # with which infinity arrives as what it is
    mantissa, exponent = math.frexp(largest / 127)
    return max(exponent - (mantissa == 0.5), -128) if largest else -128


def _in_memory(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.int8 else dtype


def _length(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a part."""
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
    # A copy begins where its dtype may.
    flat = piece.clone().view(dtype)
    if dtype != torch.int8:
        return flat
    return (flat[:-1].double() * 2.0 ** flat[-1].item()).float() if len(flat) else flat.float()


class Uncompressed(Codec):
    """As it is."""

    linear = True

    def forms(self, like: Params) -> Forms:
        """Every tensor."""
        return {name: {"": (tuple(t.shape), t.dtype)} for name, t in like.items()}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """The tensors themselves."""
        return {name: {"": tensor} for name, tensor in change.items()}

    def decode(self, payload: Payload, like: Params) -> Params:
        """The tensors themselves."""
        return {name: payload[name][""] for name in like}


class BFloat16(Codec):
    """Half the bytes: float32 rounded to the nearest bfloat16, whose relative error is at most 2⁻⁸."""

    def forms(self, like: Params) -> Forms:
        """Every tensor."""
        return {name: {"": (tuple(t.shape), torch.bfloat16)} for name, t in like.items()}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Rounded."""
        return {name: {"": tensor.to(torch.bfloat16)} for name, tensor in change.items()}

    def decode(self, payload: Payload, like: Params) -> Params:
        """Exact."""
        return {name: payload[name][""].to(t.dtype) for name, t in like.items()}


class QSGD(Codec):
    """Stochastic rounding to ``levels`` steps between 0 and the largest value of a bucket (Alistarh et al. 2017).

    Unbiased: E[decode(encode(x))] = x, with a variance of at most (M / s)² / 4 a coordinate for a bucket's largest
    value M and s levels. Of the two scales in the paper this is the largest value, as in its experiments. A code takes
    ⌈log₂(2 s + 1)⌉ bits.

    Args:
        levels: s, the steps on each side of 0.
        bucket: Coordinates that share a scale.
    """

    levels: int = Field(default=7, ge=1, le=2**15 - 1)
    bucket: PositiveInt = 512

    @property
    def bits(self) -> int:
        """Of a code."""
        return (2 * self.levels).bit_length()

    def forms(self, like: Params) -> Forms:
        """All coordinates' codes, packed, and the buckets' scales."""
        d = _coordinates(like)
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]]
        parts = {"scales": ((-(-d // self.bucket),), torch.float32), "codes": ((_packed(d, self.bits),), torch.uint8)}
        return {"all": parts}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Codes from 0 for −M to 2 s for M."""
        flat = _flat(change)
        rows = np.pad(flat, (0, -len(flat) % self.bucket)).reshape(-(-len(flat) // self.bucket), self.bucket)
        scales = np.abs(rows).max(axis=1, initial=0.0)
        # float64: the product of a scale near the end of float32 must not overflow before it is divided.
        steps = rows * (self.levels / np.where(scales > 0, scales, 1).astype(np.float64))[:, None]
        codes = np.floor(steps + generator.random(steps.shape)).astype(np.int64) + self.levels
        codes = np.clip(codes, 0, 2 * self.levels).ravel()[: len(flat)]
        return {"all": {"scales": torch.from_numpy(scales), "codes": _pack(codes, self.bits)}}

    def decode(self, payload: Payload, like: Params) -> Params:
        """Code and scale to value."""
        d, parts = _coordinates(like), payload["all"]
        codes, scales = _unpack(parts["codes"], self.bits, d), parts["scales"].numpy().astype(np.float64)
        if d and codes.max() > 2 * self.levels:
            raise ReplyRefusedError(f"a code of {codes.max()}, where {2 * self.levels} is the largest")
        if not ((scales >= 0) & np.isfinite(scales)).all():
            raise ReplyRefusedError("a bucket whose largest absolute value can be none")
        values = (codes - self.levels) * (np.repeat(scales, self.bucket)[:d] / self.levels)
        return _shaped(values.astype(np.float32), like)


class WithMemory(Codec):
    """A codec that loses much of a change, and makes up for it later: the sender remembers what was lost.

    What is remembered goes into the sender's next change, so that what was decoded so far and the memory are together
    the sum of all changes (Seide et al. 2014; Karimireddy et al. 2019). Where clients take part rarely their memories
    grow old, and pull towards a model of long ago.

    Args:
        damping: What is left of a memory with every round of its age.
        forget_after: Rounds after which a memory is dropped; never unless given.
        start: The first round that is compressed; before it changes travel as they are.
    """

    feedback = True

    damping: float = Field(default=1.0, gt=0, le=1)
    forget_after: PositiveInt | None = None
    start: PositiveInt = 1

    def kept(self, age: int) -> float:
        """The factor of a memory that is ``age`` rounds old."""
        if self.forget_after is not None and age > self.forget_after:
            return 0.0
        return float(self.damping**age)


class TopK(WithMemory):
    """The coordinates of the largest absolute values over all tensors, with error feedback.

    It tells who decodes which coordinates a client has changed most.

    Args:
        fraction: Of all coordinates; at least one is sent.
    """

    fraction: float = Field(default=0.01, gt=0, le=1)

    def _sent(self, d: int) -> int:
        return min(max(1, round(self.fraction * d)), d)

    def forms(self, like: Params) -> Forms:
        """Their places, packed, and their values."""
        d = _coordinates(like)
        k = self._sent(d)
        places = ((_packed(k, _bits(d)),), torch.uint8)
        return {"all": {"places": places, "values": ((k,), torch.float32)}}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """Ties go to the coordinate that comes first."""
        flat = _flat(change)
        k = self._sent(len(flat))
        places = _largest(np.abs(flat), k)
        return {"all": {"places": _pack(places, _bits(len(flat))), "values": torch.from_numpy(flat[places])}}

    def decode(self, payload: Payload, like: Params) -> Params:
        """Zero elsewhere."""
        d, parts = _coordinates(like), payload["all"]
        places = _unpack(parts["places"], _bits(d), self._sent(d))
        if len(places) and (places[-1] >= d or (np.diff(places) <= 0).any()):
            raise ReplyRefusedError(f"places that do not ascend, or lie beyond {d} coordinates")
        flat = np.zeros(d, dtype=np.float32)
        flat[places] = parts["values"].numpy()
        return _shaped(flat, like)


class PowerSGD(WithMemory):
    """The best that ``rank`` outer products say of every matrix, with error feedback (Vogels et al. 2019).

    Tensors are taken as matrices of their first dimension by all others. Of the sum of all matrices M = Σ M_k two sums
    travel: P = Σ M_k Q, which is made orthonormal and sent back, then Q = Σ M_kᵀ P. What is decoded is P Qᵀ, and the
    next exchange begins with this Q (one power iteration an exchange). A client's memory is M_k − P (M_kᵀ P)ᵀ: its own
    part minus its own projection. Tensors of one dimension, and those that would not get smaller, travel as they are.

    Both sums are sums: the server needs nobody's own part, unless a method wants each client's change.

    Args:
        rank: Outer products for a matrix.
        factors: The type of what travels; of ``int8`` a byte more for each tensor: the power of two that its numbers
            are multiples of. What rounding loses is remembered with the rest.
    """

    linear = True

    rank: int = Field(default=1, ge=1, le=1024)
    factors: Literal["float32", "bfloat16", "int8"] = "float32"

    def split(self, like: Params) -> tuple[list[str], list[str]]:
        """The names of what is compressed, and of what travels as it is."""
        matrices = []
        for name, tensor in like.items():
            rows, columns = _sides(tensor)
            if tensor.ndim > 1 and self.rank * (rows + columns) < rows * columns:
                matrices.append(name)
        return matrices, [name for name in like if name not in matrices]

    def first_basis(self, like: Params, generator: np.random.Generator) -> Payload:
        """Q of the first exchange: normal numbers."""
        drawn = {
            name: generator.standard_normal(parts["q"][0], np.float32)
            for name, parts in self.forms_of_basis(like).items()
        }
        return {name: {"q": self.rounded(torch.from_numpy(basis))} for name, basis in drawn.items()}

    def rounded(self, tensor: Tensor) -> Tensor:
        """As it travels."""
        return rounded(tensor, DTYPES[self.factors])

    def project(self, change: Params, basis: Payload) -> Payload:
        """The first sum's part: P_k = M_k Q."""
        return {name: {"p": self.rounded(_matrix(change[name]) @ parts["q"].float())} for name, parts in basis.items()}

    def orthonormal(self, summed: Payload) -> Payload:
        """P of the first sum, its columns orthonormal."""
        found = {name: torch.linalg.qr(parts["p"].double()).Q.float() for name, parts in summed.items()}
        return {name: {"p": self.rounded(p)} for name, p in found.items()}

    def coefficients(self, change: Params, frame: Payload) -> Payload:
        """The second sum's part, Q_k = M_kᵀ P, and what travels as it is."""
        _, rest = self.split(change)
        payload = {
            name: {"q": self.rounded(_matrix(change[name]).T @ parts["p"].float())} for name, parts in frame.items()
        }
        return payload | {name: {"": self.rounded(change[name])} for name in rest}

    def forms_of_basis(self, like: Params) -> Forms:
        """Q: (columns, rank) for every matrix."""
        return {name: {"q": parts["q"]} for name, parts in self.forms(like).items() if "q" in parts}

    def forms_of_frame(self, like: Params) -> Forms:
        """P, and what ``project`` gives: (rows, rank) for every matrix."""
        return {name: {"p": parts["p"]} for name, parts in self.forms(like).items() if "p" in parts}

    def forms_of_coefficients(self, like: Params) -> Forms:
        """What ``coefficients`` gives."""
        whole = self.forms(like)
        return {name: {part: form for part, form in parts.items() if part != "p"} for name, parts in whole.items()}

    def next_basis(self, payload: Payload, before: Payload) -> Payload:
        """Q of the next exchange: that of this one's sum, of length 1; that before where nothing came."""
        found = {}
        for name, parts in before.items():
            new = payload[name]["q"].double()
            norm = new.norm()
            found[name] = {"q": self.rounded((new / norm).float()) if norm > 0 else parts["q"]}
        return found

    def forms(self, like: Params) -> Forms:
        """Both factors of every matrix, and what travels as it is."""
        matrices, rest = self.split(like)
        dtype, forms = DTYPES[self.factors], Forms()
        for name in matrices:
            rows, columns = _sides(like[name])
            forms[name] = {"p": ((rows, self.rank), dtype), "q": ((columns, self.rank), dtype)}
        return forms | {name: {"": (tuple(like[name].shape), dtype)} for name in rest}

    def encode(self, change: Params, generator: np.random.Generator) -> Payload:
        """A change of one party alone, by two power iterations from a basis of its own; both factors travel."""
        basis = self.first_basis(change, generator)
        for _ in range(2):
            frame = self.orthonormal(self.project(change, basis))
            payload = self.coefficients(change, frame)
            basis = self.next_basis(payload, basis)
        return with_frame(payload, frame)

    def decode(self, payload: Payload, like: Params) -> Params:
        """P Qᵀ, in the shapes of ``like``."""
        found = {}
        for name, tensor in like.items():
            parts = payload[name]
            whole = parts["p"].float() @ parts["q"].float().T if "p" in parts else parts[""].float()
            found[name] = whole.reshape(tensor.shape).to(tensor.dtype)
        return found


def with_frame(payload: Payload, frame: Payload) -> Payload:
    """The coefficients of a second sum with the P that all of them belong to."""
    return payload | {name: {**parts, **payload[name]} for name, parts in frame.items()}


def _sides(tensor: Tensor) -> tuple[int, int]:
    return (tensor.shape[0], math.prod(tensor.shape[1:])) if tensor.ndim else (1, 1)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(_sides(tensor)).float()


def _coordinates(like: Params) -> int:
    return sum(tensor.numel() for tensor in like.values())


def _flat(change: Params) -> NDArray[np.float32]:
    flat = [tensor.detach().reshape(-1).float() for tensor in change.values()]
    found: NDArray[np.float32] = torch.cat(flat).numpy() if flat else np.zeros(0, dtype=np.float32)
    return found


def _shaped(flat: NDArray[np.float32], like: Params) -> Params:
    parts = torch.split(torch.from_numpy(flat), [tensor.numel() for tensor in like.values()])
    return {name: part.reshape(t.shape).to(t.dtype) for (name, t), part in zip(like.items(), parts, strict=True)}


def _largest(sizes: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The places of the k largest, in ascending order; of equal ones the first.

    >>> _largest(np.array([2.0, 1.0, 2.0, 3.0, 2.0], dtype=np.float32), 3)
    array([0, 2, 3])
    """
    if k == 0:
        return np.zeros(0, dtype=np.int64)
    least = np.partition(sizes, len(sizes) - k)[-k]  # sorting all of them takes ten times as long
    above, equal = np.flatnonzero(sizes > least), np.flatnonzero(sizes == least)
    return np.sort(np.concatenate([above, equal[: k - len(above)]]))


def _bits(d: int) -> int:
    """Of the largest place among ``d`` coordinates."""
    return max(1, (d - 1).bit_length())


def _packed(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def _pack(codes: NDArray[np.int64], bits: int) -> Tensor:
    """Whole numbers of so many bits, one after another.

    >>> _pack(np.array([1, 2, 3]), 4).tolist()
    [18, 48]
    """
    spread = (codes[:, None] >> np.arange(bits - 1, -1, -1)) & 1
    return torch.from_numpy(np.packbits(spread.astype(np.uint8)))


def _unpack(packed: Tensor, bits: int, count: int) -> NDArray[np.int64]:
    """What ``_pack`` packed.

    >>> _unpack(torch.tensor([18, 48], dtype=torch.uint8), 4, 3).tolist()
    [1, 2, 3]
    """
    spread = np.unpackbits(packed.numpy(), count=count * bits).reshape(count, bits)
    found: NDArray[np.int64] = spread @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int64))
    return found


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
    """How models and updates travel.

    Args:
        up: What clients send: their changes, encoded.
        down: What clients get: the model whole (``none``), or, where that is smaller, the encoded changes of it that a
            client missed.
    """

    up: AnyCodec = Uncompressed()
    down: AnyCodec = Uncompressed()

    @model_validator(mode="after")
    def _remembers_nothing(self) -> Self:
        """The server sees what clients have: what a codec loses going down is never forgotten."""
        if isinstance(self.down, WithMemory):
            for key, usual in (("damping", 1.0), ("forget_after", None)):
                if getattr(self.down, key) != usual:
                    problem = "is about what clients remember of their changes; going down nothing grows old"
                    raise SpecError(f"down.{key}", problem, getattr(self.down, key))
        return self

    @property
    def plain(self) -> bool:
        """Whether everything travels as it is."""
        return isinstance(self.up, Uncompressed) and isinstance(self.down, Uncompressed)
