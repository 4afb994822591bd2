"""Compress models and gradients, so that the server can compare and store them for many clients.

A sketch is a random projection of the model's parameters to K numbers; see ``project``. The projection is linear, so
the sketch of an update is the sketch after training minus the sketch before training. On average, the squared distance
between two sketches equals the squared distance between the models. The relative standard deviation of the squared
distance is √(2/K), for models of any size: 3 % for K = 2,048. A model of at most K parameters is stored unchanged.

FedSTaS also quantizes the projected gradient, so that a client sends only a few values, and one small code for each
coordinate ("information squeeze").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import ClassVar

import ckmeans
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstrata.base.arrays import Floats, Floats32, Ints
from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.base.rng import rng
from fedstrata.federation.messages import FitReply, ModelRequest, Params, Reply, RequestRule, Weights
from fedstrata.federation.reply_checks import require_shape

NO_POINTS: Floats32 = np.empty((0, 0), dtype=np.float32)
"""A matrix without rows."""


def project(gradients: Tensor, coordinates: int, seed: int) -> Tensor:
    """Project gradients to fewer coordinates, with the same random projection for every client.

    The projection is a count sketch (Charikar et al. 2002). Each coordinate gets a random sign, and is added to a
    bucket. Inner products stay the same in expectation, and the cost for d coordinates is O(d). Coordinate i is added
    to bucket i mod p, where p is the largest prime up to K. The width of a layer is normally not a multiple of this
    prime, so the weights of each input or output are spread evenly over the buckets. Buckets p … K − 1 stay 0.

    Args:
        gradients: One gradient, shape (d,), or n gradients, shape (n, d).
        coordinates: The number K of coordinates after projection. Gradients with at most K coordinates are not
            projected. With 0, gradients are not projected.
        seed: The experiment's seed.

    Returns:
        The projected gradients, shape (min(d, K),) or (n, min(d, K)).
    """
    d = gradients.shape[-1]
    if coordinates == 0 or d <= coordinates:
        return gradients
    signed = (gradients * _signs(d, seed).to(gradients.dtype)).numpy()
    before, p = signed.shape[:-1], _prime(coordinates)
    full = d // p * p
    buckets = np.zeros((*before, coordinates), dtype=signed.dtype)
    signed[..., :full].reshape(*before, d // p, p).sum(axis=-2, out=buckets[..., :p])
    buckets[..., : d - full] += signed[..., full:]
    return torch.from_numpy(buckets)


@lru_cache(maxsize=4)
def _signs(d: int, seed: int) -> Tensor:
    """Return a random sign (±1) for every coordinate, float32, shape (d,)."""
    return torch.from_numpy(rng(seed, "projection").integers(2, size=d, dtype=np.int8)).float().mul_(2).sub_(1)


@lru_cache
def _prime(most: int) -> int:
    """Return the largest prime up to ``most``; 1 if ``most`` is 1."""
    return next((n for n in range(most, 1, -1) if all(n % k for k in range(2, int(n**0.5) + 1))), 1)


def quantize(values: Floats32, centres: int) -> tuple[Floats32, NDArray[np.uint8]]:
    """Quantize a vector by exact one-dimensional k-means, which replaces each value by the mean of its cluster.

    Args:
        values: The vector, shape (d,).
        centres: The maximum number d' of clusters, at most 255.

    Returns:
        Two arrays. The first array contains the means, ascending, shape (d',). If the vector has fewer than d'
        different values, the array is shorter. The second array contains, for every coordinate, the index (in the first
        array) of the mean that replaces the coordinate, shape (d,).

    >>> X, codes = quantize(np.array([0.0, 9.0, 0.2, 8.8], dtype=np.float32), 2)
    >>> X.round(2).tolist(), codes.tolist()
    ([0.10000000149011612, 8.899999618530273], [0, 1, 0, 1])
    """
    ordered = np.sort(values)
    groups = ckmeans.ckmeans(ordered, min(centres, len(np.unique(ordered))))
    # The smallest value of each group except the first: these values separate the groups. ``np.unique`` merges groups
    # that begin with equal values.
    lowest = np.unique(ordered[np.cumsum([len(group) for group in groups[:-1]], dtype=np.int64)])
    edges = np.concatenate([[0], np.searchsorted(ordered, lowest), [len(ordered)]])
    sums = np.add.reduceat(ordered, edges[:-1], dtype=np.float64)
    means = (sums / np.diff(edges)).astype(np.float32)
    return means, np.searchsorted(lowest, values, side="right").astype(np.uint8)


def pack(codes: NDArray[np.uint8], centres: int) -> NDArray[np.uint8]:
    """Pack two codes into each byte if there are at most 16 centres. Otherwise, return the codes unchanged.

    >>> pack(np.array([1, 2, 3], dtype=np.uint8), 9).tolist()
    [18, 48]
    """
    if centres > 16:
        return codes
    even = np.append(codes, np.uint8(0)) if len(codes) % 2 else codes
    packed: NDArray[np.uint8] = (even[0::2] * np.uint8(16)) | even[1::2]
    return packed


def restore(centres: Floats32, packed: NDArray[np.uint8], length: int) -> Floats32:
    """Replace each code (the index of a centre) by the centre, and return the quantized gradient, shape (length,).

    The argument ``packed`` contains the codes (indices of centres) in the form that ``pack`` returns.

    Raises:
        ValueError: The codes do not match the length or the centres.
    """
    codes = np.stack([packed >> 4, packed & 15], axis=1).ravel()[:length] if len(centres) <= 16 else packed
    if len(codes) != length or (length and codes.max() >= len(centres)):
        raise ValueError(
            f"the codes ({len(packed)} bytes) do not match {length} coordinates and {len(centres)} centres"
        )
    restored: Floats32 = centres[codes]
    return restored


def sketch_length(params: Params, coordinates: int) -> int:
    """Return the length of a sketch (random projection) of a model.

    The length is the smaller of ``coordinates`` and the number of parameters. If ``coordinates`` is 0, the length is
    the number of parameters.
    """
    d = sum(map(torch.numel, params.values()))
    return min(d, coordinates or d)


@record("CompressReply")
class CompressReply(Reply):
    """The gradient of a client's loss, quantized if the request asks for quantization.

    Args:
        centres: The values X that occur in the quantized gradient, shape (d',), float32. Without quantization, X
            contains all coordinates of the gradient.
        codes: The index λ into X for every coordinate, uint8. If d' ≤ 16, each byte contains two indices, with the
            first index in the high four bits. Without quantization, the array is empty.
        length: The number of coordinates.
    """

    centres: Tensor
    codes: Tensor
    length: int

    @cached_property
    def restored(self) -> Floats32:
        """The gradient as floats, shape (length,).

        Raises:
            ValueError: The codes do not match the length or the centres.
        """
        centres: Floats32 = self.centres.numpy()
        whole = len(centres) == self.length and not len(self.codes)
        return centres if whole else restore(centres, self.codes.numpy(), self.length)


@record("Compress")
class Compress(ModelRequest):
    """A request for the quantized gradient of a client's loss at the global model (FedSTaS, "information squeeze").

    Args:
        round: The round, counted from 1.
        weights: The global model.
        centres: The maximum number d' of different values in the quantized gradient. With 0, the gradient is not
            quantized.
        coordinates: The length to which a random projection reduces the gradient before quantization (K_desired in the
            paper). With 0, the gradient is not projected.
    """

    reply_type: ClassVar[type[Reply]] = CompressReply
    rule = RequestRule("the gradient of the loss over its samples")

    round: int
    weights: Weights
    centres: int
    coordinates: int

    def check(self, reply: CompressReply) -> None:
        """Raise ``ReplyRefusedError`` if the centres and codes do not represent a gradient of the requested length."""
        require_shape(reply.centres, (-1,), torch.float32, "centres")
        require_shape(reply.codes, (-1,), torch.uint8, "codes")
        length = sketch_length(self.weights.params, self.coordinates)
        most = self.centres or length
        if reply.length != length or len(reply.centres) > most:
            raise ReplyRefusedError(
                f"the reply has {reply.length} coordinates and {len(reply.centres)} centres, but must have {length} "
                f"coordinates and at most {most} centres"
            )
        try:
            _ = reply.restored
        except (ValueError, IndexError, TypeError) as error:
            raise ReplyRefusedError(str(error)) from error


@record("SketchReply")
class SketchReply(Reply):
    """A sketch (random projection) of a locally trained model.

    Args:
        values: The sketch, shape (K,), float32; see ``sketch``.
    """

    values: Tensor


@record("Sketch")
class Sketch(ModelRequest):
    """A request to train once from the global model, and to send a sketch of the trained parameters (FedSSAR).

    The client trains with plain cross-entropy on all its samples. The method's objective is not used, because its
    state must not change in rounds in which the client does not take part.

    Args:
        round: The round, counted from 1.
        weights: The global model.
        coordinates: The length K of the sketch. With 0, the client sends the parameters themselves.
    """

    reply_type: ClassVar[type[Reply]] = SketchReply
    rule = RequestRule("the parameters of a model that it trained on its samples")

    round: int
    weights: Weights
    coordinates: int

    def check(self, reply: SketchReply) -> None:
        """Raise ``ReplyRefusedError`` if the sketch does not have the requested shape."""
        length = sketch_length(self.weights.params, self.coordinates)
        require_shape(reply.values, (length,), torch.float32, "the sketch")


@record("Sketches")
class Sketches:
    """The latest sketch of each client that has sent a model.

    Args:
        known: The clients with a sketch, ascending, int64.
        points: The sketches of the clients in ``known``, shape (len(known), K).
        sent: The sketch, shape (K,), float32, of the global model that the server sent most recently; empty before the
            first round.
    """

    known: Ints
    points: Floats32
    sent: Floats32

    def with_rows(self, clients: Ints, points: Floats32) -> Sketches:
        """Return a copy in which the given clients have new sketches.

        Args:
            clients: Clients with a new sketch, ascending, shape (n,).
            points: The new sketches, shape (n, K).
        """
        known, points = with_rows(self.known, self.points, clients, points)
        return replace(self, known=known, points=points)


def no_sketches() -> Sketches:
    """Return an empty collection of sketches: the state before the first client sends a model."""
    return Sketches(np.empty(0, dtype=np.int64), NO_POINTS, np.empty(0, dtype=np.float32))


def with_rows(known: Ints, points: Floats32, clients: Ints, rows: Floats32) -> tuple[Ints, Floats32]:
    """Replace the rows of some clients in a copy of a matrix, and add rows for clients without a row.

    Args:
        known: The client of each row of the matrix, ascending, shape (n,).
        points: The matrix, shape (n, d).
        clients: The clients with new rows, ascending, shape (c,).
        rows: The new rows, shape (c, d).

    Returns:
        Two arrays: the client of each row of the new matrix, and the new matrix.
    """
    union = np.union1d(known, clients)
    result = np.empty((len(union), rows.shape[1]), dtype=np.float32)
    if len(known):
        result[np.searchsorted(union, known)] = points
    result[np.searchsorted(union, clients)] = rows
    return union, result


def lengths(points: Floats32) -> Floats:
    """Return the Euclidean norm of every row, shape (n,).

    The type is float64, because squares of very small values are zero in float32.
    """
    norms: Floats = np.sqrt(np.einsum("kd,kd->k", points, points, dtype=np.float64))
    return norms


def sketch(params: Params, coordinates: int, seed: int) -> Floats32:
    """Return the sketch of a model.

    Args:
        params: A mapping from the names of the model's parameters to their values.
        coordinates: The length K of the sketch. With 0, the sketch contains all parameters.
        seed: The experiment's seed.

    Returns:
        The sketch, shape (min(d, K),), for a model with d parameters.
    """
    flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in params.values()])
    sketch: Floats32 = project(flat, coordinates, seed).numpy()
    return sketch


def update_sketches(
    state: Sketches, replies: Mapping[int, FitReply], coordinates: int, seed: int, updates: bool
) -> Sketches:
    """Store sketches of the models that the participants of a round sent.

    Args:
        state: The sketches before the round.
        replies: A mapping from each participant to its reply, which contains the trained model.
        coordinates: The length K of a sketch. With 0, a sketch contains all parameters.
        seed: The experiment's seed.
        updates: Whether to store sketches of updates (trained minus received model) instead of sketches of models.

    Returns:
        The updated sketches, with new sketches for the participants that trained.
    """
    # A client that took no step sent back the model that it received, which says nothing about the client's data.
    models = {client: reply.weights.params for client, reply in replies.items() if reply.trained}
    if not models:
        return state
    points = np.stack([sketch(params, coordinates, seed) for params in models.values()])
    return state.with_rows(np.fromiter(models, dtype=np.int64), points - state.sent if updates else points)
