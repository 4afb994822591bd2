"""What server and clients say to each other: frozen records of tensors and plain values.

All tensors are on the CPU. ``Params`` maps a parameter's name to its value. A method that needs to ask something else
declares a ``Request`` and a ``Reply`` of its own, and how a client answers (``fedstrata.clients.answers``).
"""

from __future__ import annotations

from torch import Tensor

from fedstrata.records import Message, record, same

ClientId = int
Params = dict[str, Tensor]
Extra = dict[str, dict[str, Tensor]]
"""What an objective sends along: a name for each group of tensors."""


class Request(Message):
    """A question to a client."""

    def work(self, samples: int) -> float:
        """How many sample-gradients answering takes a client that holds ``samples``, for simulated time."""
        return 0.0


class Reply(Message):
    """A client's answer."""


@record
class Weights(Message):
    """A model's parameters and buffers.

    Args:
        params: What is trained.
        buffers: What is not, such as BatchNorm's running statistics.
    """

    params: Params
    buffers: Params


def sample_gradients(samples: float, passes: float, steps: int, batch_size: int) -> float:
    """How many sample-gradients a client computes: in passes over its data, or in steps where there are any."""
    return steps * min(batch_size, samples) if steps else samples * passes


@record
class Fit(Request):
    """Train locally, starting at ``weights``.

    Args:
        round: The round, counted from 1.
        weights: The global model.
        message: What the objective's server side sends.
        keep: Probability with which each sample is used this round (data-level sampling).
        passes: How often the whole data are gone through, for simulated time only.
        steps: Mini-batch steps taken instead, of ``batch_size`` each; 0 for passes. Again for simulated time only.
        batch_size: Of these steps.
        counts: Whether the reply may tell how many samples were used. Under local differential privacy of the
            clients' sizes it must not: with the public ``keep`` it would give them away.
    """

    round: int
    weights: Weights
    message: Extra
    keep: float
    passes: float
    steps: int = 0
    batch_size: int = 0
    counts: bool = True

    def work(self, samples: int) -> float:
        """Samples seen: all kept ones, in every pass."""
        return sample_gradients(samples * self.keep, self.passes, self.steps, self.batch_size)


@record
class FitReply(Reply):
    """A locally trained model.

    Args:
        weights: After local training.
        samples: Samples that were used (n_k, or those kept); 0, as ``steps`` and ``seen``, where ``Fit`` wanted no
            counts.
        steps: Mini-batch steps really taken, K.
        seen: Sample-gradients computed.
        loss: Mean training loss over the steps.
        message: What the objective's client side sends.
    """

    weights: Weights
    samples: int
    steps: int
    seen: int
    loss: float
    message: Extra


@record
class SizeReport(Request):
    """How many samples do you hold? With ``bound``, answered under local differential privacy.

    Args:
        round: The round, counted from 1.
        bound: M, the public bound on the number of samples; 0 asks for the plain number.
        alpha: The probability of the true (clipped) answer; see ``fedstrata.sampling.privacy``.
    """

    round: int
    bound: int
    alpha: float


@record
class SizeReply(Reply):
    """The size, or its randomised response.

    Args:
        samples: The answer.
    """

    samples: int


@record
class Compress(Request):
    """Send the gradient of the local loss at ``weights``, squeezed into ``centres`` values (FedSTaS, IS).

    Args:
        round: The round, counted from 1.
        weights: The global model.
        centres: d', how many different values are left.
        coordinates: K_desired, what a seeded random projection reduces the gradient to first; 0 for none.
    """

    round: int
    weights: Weights
    centres: int
    coordinates: int

    def work(self, samples: int) -> float:
        """One gradient over all samples."""
        return float(samples)


@record
class CompressReply(Reply):
    """A squeezed gradient.

    Args:
        centres: X, shape (d',), float32.
        codes: λ, the centre of every coordinate, uint8; two coordinates a byte (high half first) where d' ≤ 16.
        length: The number of coordinates.
    """

    centres: Tensor
    codes: Tensor
    length: int


@record
class Sketch(Request):
    """Train once, starting at ``weights``, and send a sketch of the parameters that this leads to (FedSSAR).

    Plain cross-entropy, on all samples: an objective's own state belongs to the rounds that a client takes part in.

    Args:
        round: The round, counted from 1.
        weights: The global model.
        coordinates: K, the length of the sketch; 0 for the parameters themselves.
    """

    round: int
    weights: Weights
    coordinates: int

    def work(self, samples: int) -> float:
        """One pass over all samples."""
        return float(samples)


@record
class SketchReply(Reply):
    """A sketch of a locally trained model.

    Args:
        values: Shape (K,), float32; see ``fedstrata.sampling.sketches``.
    """

    values: Tensor


@record
class LossReport(Request):
    """How bad is the global model for you?

    Args:
        round: The round, counted from 1.
        weights: The global model.
    """

    round: int
    weights: Weights

    def work(self, samples: int) -> float:
        """A forward pass over all samples: a third of a gradient."""
        return samples / 3


@record
class LossReply(Reply):
    """The answer.

    Args:
        loss: Mean cross-entropy over a client's samples.
    """

    loss: float


@record
class LabelReport(Request):
    """Which labels do you hold, and how many samples of each?"""


@record
class LabelReply(Reply):
    """A client's labels.

    Args:
        labels: The labels it holds, int64, in an order of the client's own.
        counts: How many samples of each, int64.
    """

    labels: Tensor
    counts: Tensor


@record
class Reserve(Request):
    """Set samples aside for the batches to come (Stratify, Algorithm 4: training request).

    Args:
        round: The epoch, counted from 1.
        batches: The batch of every position asked of this client, int64, ascending.
        labels: The placeholder wanted at every position, int64.
        refill: Placeholders whose pools start anew, int64.
        fresh: Whether an earlier reservation of this epoch is forgotten first.
        window: The part of each label's samples, in the order in which they arrive, that is there: from and to, in
            [0, 1].
    """

    round: int
    batches: Tensor
    labels: Tensor
    refill: Tensor
    fresh: bool
    window: tuple[float, float] = (0.0, 1.0)


@record
class ReserveReply(Reply):
    """What could not be set aside.

    Args:
        missing: One bool a position: True where the pool was empty (``not_trained``).
        exhausted: Placeholders whose pool is empty now, int64.
    """

    missing: Tensor
    exhausted: Tensor


@record
class Gradient(Request):
    """The gradient of the summed loss over what was set aside for one batch (Stratify, Algorithm 4).

    Args:
        round: The epoch, counted from 1.
        batch: Which batch of the epoch.
        weights: The global model.
    """

    round: int
    batch: int
    weights: Weights


@record
class GradientReply(Reply):
    """Sums over a client's part of a batch.

    Args:
        gradient: Of the summed loss, by parameter.
        samples: How many samples.
        loss: The summed loss.
        buffers: Buffers after the union batch, alike at every client of it.
    """

    gradient: Params
    samples: int
    loss: float
    buffers: Params = same()


@record
class Steps(Request):
    """One SGD step on one sample for each placeholder, on the travelling model (Stratify, Algorithm 3).

    Args:
        round: The epoch, counted from 1.
        labels: The placeholders to train, in order, int64.
        refill: Placeholders whose pools start anew, int64.
        fresh: Whether what was drawn earlier in this epoch is forgotten first.
        window: See ``Reserve``.
    """

    round: int
    labels: Tensor
    refill: Tensor
    fresh: bool
    window: tuple[float, float] = (0.0, 1.0)

    def work(self, samples: int) -> float:
        """A sample for each placeholder."""
        return float(len(self.labels))


@record
class StepsReply(Reply):
    """What could not be trained.

    Args:
        missing: One bool a placeholder: True where the pool was empty (``not_trained``).
        exhausted: Placeholders whose pool is empty now, int64.
        loss: The summed loss of the samples, each before its step; a scalar, float32.
    """

    missing: Tensor
    exhausted: Tensor
    loss: Tensor


@record
class Visit(Request):
    """Train the travelling model on all your data, as in ``Fit`` (sequential federated learning).

    Args:
        round: The round, counted from 1.
        passes: How often the data are gone through, for simulated time only.
        steps: Mini-batch steps taken instead, of ``batch_size`` each; 0 for passes.
        batch_size: Of these steps.
    """

    round: int
    passes: float
    steps: int = 0
    batch_size: int = 0

    def work(self, samples: int) -> float:
        """Samples seen."""
        return sample_gradients(samples, self.passes, self.steps, self.batch_size)


@record
class VisitReply(Reply):
    """What local training saw.

    Args:
        samples: n_k.
        seen: Sample-gradients computed.
        loss: Mean training loss over the steps.
    """

    samples: int
    seen: int
    loss: float


@record
class FitTogether(Request):
    """Train locally as in ``Fit``, the first step in tandem with the round's other clients (FedTAN); ``FitReply``.

    Args:
        round: The round, counted from 1.
        weights: The global model.
        passes: How often the data are gone through, for simulated time only.
        steps: Mini-batch steps taken instead, of ``batch_size`` each; 0 for passes.
        batch_size: Of these steps.
    """

    round: int
    weights: Weights
    passes: float
    steps: int = 0
    batch_size: int = 0

    def work(self, samples: int) -> float:
        """Samples seen."""
        return sample_gradients(samples, self.passes, self.steps, self.batch_size)
