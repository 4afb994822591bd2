"""Calculations with the papers' formulas and algorithms: biases, errors, variances and numbers of operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedstrata.aggregation.base import Aggregator, StratumMean
from fedstrata.base.arrays import Ints
from fedstrata.clients.store import StateStore
from fedstrata.engines import make_engine
from fedstrata.experiments.run import run
from fedstrata.federation.federation import Federation
from fedstrata.runs.preparation import Prepared, prepare
from fedstrata.runs.simulation import make_context
from fedstrata.sampling.allocation import neyman, spread
from fedstrata.sampling.client_sizes import truth_probability
from fedstrata.sampling.fedssar import shares
from fedstrata.sampling.stratified import Start, draw, stratify
from fedstrata.spec.experiment import Experiment
from fedstrata.stratify.messages import StepsReply
from fedstrata.stratify.roster import Roster
from fedstrata.stratify.schedule import Holders, frequencies, schedule
from fedstrata.stratify.selection import select_batch
from fedstrata.stratify.single import Route

DRAWS = 200_000


def fedssar_bias(sizes: list[int], places: int = 10) -> float:
    """Return the bias of FedSSAR's mean update, relative to the length of the mean update over all N clients.

    We assume that the clients of a cluster have equal updates, and that updates of different clusters are orthogonal.
    All updates have the same length. A cluster with N_h of N clients gets m_h of m draws. The cluster's weight in the
    mean is m_h / m, but should be N_h / N.

    Args:
        sizes: The number N_h of clients in each of at most m clusters.
        places: The number m of draws.

    >>> round(fedssar_bias([50, 30, 20]), 3), round(fedssar_bias([90, 5, 5]), 3)
    (0.0, 0.136)
    """
    counts = np.array(sizes, dtype=np.int64)
    weights = shares(places, counts, counts, np.random.default_rng(0)) / places
    return _relative_error(weights, counts)


def _relative_error(weights: NDArray[Any], counts: Ints) -> float:
    """Return ‖w − s‖ / ‖s‖, where w are the weights of groups of clients, and s are their shares of all clients."""
    wanted = counts / counts.sum()
    return float(np.linalg.norm(weights - wanted) / np.linalg.norm(wanted))


def neyman_bias(sizes: list[int], deviations: list[float], places: int) -> tuple[list[int], float]:
    """Return Neyman's allocation of draws to strata, and the relative bias of FedSTS's mean update.

    Some strata may get no draws. FedSTS's mean is then biased, because these strata are left out and the weights of the
    other strata increase. As in ``fedssar_bias``, updates of different strata are orthogonal and of equal length.

    Args:
        sizes: The number N_h of clients in each stratum.
        deviations: The spread S_h of the clients in each stratum; see ``fedstrata.sampling.allocation.spread``.
        places: The number m of draws.

    >>> neyman_bias([10, 10], [1.0, 1.0], 4)
    ([2, 2], 0.0)
    """
    counts = np.array(sizes, dtype=np.int64)
    allocation = neyman(places, counts, np.array(deviations), least=0)
    clients = np.arange(counts.sum())
    strata = np.repeat(np.arange(len(counts)), counts)
    alike = np.ones(len(clients))
    chosen = draw(clients, strata, counts, allocation, alike, False, np.random.default_rng(0))
    everybody = np.arange(len(chosen.clients))
    weights = StratumMean().coefficients(chosen, everybody, np.ones_like(everybody))
    of_strata = np.bincount(chosen.stratum, weights=weights, minlength=len(counts))
    return allocation.tolist(), _relative_error(of_strata, counts)


def sampled_variance(
    noise: float, scale: float, places: int = 10, draws: int = 1000, start: Start = "random"
) -> dict[str, float]:
    """Compare the mean updates of FedSTS's sampling and of uniform sampling, for 100 clients in ten groups.

    The gradient of a client, shape (50,), is the mean of its group plus normal noise. We assume that updates equal
    gradients.

    Args:
        noise: The standard deviation of the noise.
        scale: The standard deviation of the means of the groups.
        places: The number m of draws.
        draws: The number of simulated rounds.
        start: The first centres of k-means, which makes the strata. In the paper, they are random.

    Returns:
        A dict. The key ``ratio`` is the variance of the mean update (the sum over the coordinates), divided by the
        variance with uniform sampling without replacement. The key ``bias`` is the length of the bias of the mean
        update, divided by the length of the mean gradient.
    """
    generator = np.random.default_rng(1)
    means = scale * generator.standard_normal((10, 50)) + 0.3
    points = np.repeat(means, 10, axis=0) + noise * generator.standard_normal((100, 50))
    clients, single = np.arange(100), points.astype(np.float32)
    strata = stratify(single, places, 0, 1, start)
    sizes = np.bincount(strata)
    allocation = neyman(places, sizes, spread(single, strata, len(sizes)), least=0)
    ours, uniform = np.empty((draws, 50)), np.empty((draws, 50))
    for i in range(draws):
        chosen = draw(clients, strata, sizes, allocation, np.linalg.norm(points, axis=1), False, generator)
        returned = np.arange(len(chosen.clients))
        ours[i] = StratumMean().coefficients(chosen, returned, np.ones_like(returned)) @ points[chosen.clients]
        uniform[i] = points[generator.choice(100, places, replace=False)].mean(axis=0)
    mean = points.mean(axis=0)
    return {
        "ratio": float(ours.var(axis=0).sum() / uniform.var(axis=0).sum()),
        "bias": float(np.linalg.norm(ours.mean(axis=0) - mean) / np.linalg.norm(mean)),
    }


def mean_of_one_draw(lengths: NDArray[np.float64], aggregator: Aggregator) -> float:
    """Return the expected length of the aggregated update if one client is drawn from one stratum.

    All updates have the same direction. As in FedSTS, the probability of drawing a client is proportional to the length
    of its gradient. This function assumes that the length of the gradient equals the length of the client's update.

    Args:
        lengths: The length of every client's update, shape (N,).
        aggregator: The aggregator that is applied to the drawn update.
    """
    n = len(lengths)
    clients, strata = np.arange(n), np.zeros(n, dtype=np.int64)
    # All clients are drawn only to obtain the probability with which a single draw chooses each client.
    all_drawn = draw(clients, strata, np.array([n]), np.array([n]), lengths, False, np.random.default_rng(0))
    total = 0.0
    for k in range(n):
        one = {key: getattr(all_drawn, key)[[k]] for key in ("clients", "draws", "probability", "stratum")}
        weight = aggregator.coefficients(replace(all_drawn, **one), np.array([0]), np.array([1]))
        total += float(all_drawn.probability[k] * weight[0] * lengths[k])
    return total


def size_estimates(sizes: Ints, bound: int, epsilon: float, draws: int = DRAWS) -> NDArray[np.float64]:
    """Simulate a server's estimates ñ of the total number of samples, which are computed from randomised reports.

    The estimates, shape (draws,), are not yet clipped to at least 1.

    Args:
        sizes: The number n_k of samples of each of m participants, shape (m,).
        bound: The bound M. Participants report numbers from 1 to M − 1.
        epsilon: The privacy budget ε of a report.
        draws: The number of estimates.
    """
    alpha = truth_probability(epsilon, bound)
    generator = np.random.default_rng(0)
    shape = (draws, len(sizes))
    clipped = np.clip(sizes, 1, bound - 1)
    answers = np.where(generator.random(shape) < alpha, clipped, generator.integers(1, bound, size=shape))
    estimates: NDArray[np.float64] = (answers.sum(axis=1) - (1 - alpha) * bound * len(sizes) / 2) / alpha
    return estimates


def keep_errors(size: int, participants: int, bound: int, epsilon: float, fraction: float = 0.1) -> float:
    """Return the root mean square of the error p̃ − p in the probability of keeping a sample (FedSTaS, Lemma 2.2).

    The server wants n* = q n of all n samples, so the exact probability is p = q. With private sizes, the server knows
    only an estimate ñ of n, and clients use p̃ = min(1, n*/ñ).

    Args:
        size: The number n_k of samples of every participant.
        participants: The number m of participants.
        bound: The bound M. Participants report numbers from 1 to M − 1.
        epsilon: The privacy budget ε of a report.
        fraction: The fraction q of samples to keep.

    >>> keep_errors(50, 10, 100, 50.0) < 1e-9  # with this ε, nearly all reports are the true sizes
    True
    """
    estimates = size_estimates(np.full(participants, size), bound, epsilon, max(DRAWS // participants, 200))
    keep = np.minimum(1.0, fraction * participants * size / np.maximum(estimates, 1.0))
    return float(np.sqrt(((keep - fraction) ** 2).mean()))


def label_variance(labels: Ints, batch: int) -> float:
    """Return the part of the variance of a batch's mean gradient that the labels in the batch cause.

    We assume that gradients of different labels are orthogonal and have length 1. The variance is then the mean of ‖b −
    s‖² over the batches. The vector b contains the label fractions in the batch, and s contains the label fractions in
    all samples.

    Args:
        labels: The labels of the samples, in the order of training, shape (L,).
        batch: The number of samples in a batch. A smaller last batch is ignored.

    >>> label_variance(np.array([0, 1, 0, 1]), 2), label_variance(np.array([0, 0, 1, 1]), 2)
    (0.0, 0.5)
    """
    classes = int(labels.max()) + 1
    whole = labels[: len(labels) // batch * batch].reshape(-1, batch)
    parts = np.stack([(whole == label).mean(axis=1) for label in range(classes)], axis=1)
    off = parts - np.bincount(labels, minlength=classes) / len(labels)
    return float((off**2).sum(axis=1).mean())


def uses_a_sample(counts: list[int], cap: int, batch: int = 10, seed: int = 0) -> list[float]:
    """Return how often each client's samples are used per epoch on average, with Stratify's uniform selection.

    All samples have one label. A client can be drawn until all its samples have been used in the epoch.

    Args:
        counts: The number of samples at each client.
        cap: The largest number of samples with this label that an epoch uses, which is the limit of the frequency f_l.
        batch: The number of positions in a batch.
        seed: The seed of the draws.

    >>> uses_a_sample([500, 500], 1000)
    [1.0, 1.0]
    """
    generator = np.random.default_rng(seed)
    held = np.array(counts, dtype=np.int64)
    unused = held.copy()
    wanted = int(frequencies(np.array([held.sum()]), "capped", cap)[0])
    while wanted > 0 and unused.any():
        positions = np.zeros(min(batch, wanted, int(unused.sum())), dtype=np.int64)
        chosen = select_batch(positions, {0: np.flatnonzero(unused)}, None, generator)
        # The draw of a client without unused samples does not count, and is repeated in a later batch.
        used = np.minimum(np.bincount(chosen, minlength=len(held)), unused)
        unused -= used
        wanted -= int(used.sum())
    return [round(float(use), 2) for use in (held - unused) / held]


def transfers(
    spec: Experiment, chunk_sizes: Sequence[int], *, weighted: bool = False, retain: float = 0.5
) -> list[float]:
    """Return the transfers of the model per sample in an epoch of Stratify's single-sample mode, without training.

    Args:
        spec: An experiment with Stratify.
        chunk_sizes: The chunk sizes to compare.
        weighted: Whether clients are drawn in proportion to their numbers of samples of a label.
        retain: The fraction of the clients with a label that are considered for the label.

    Returns:
        The number of transfers per sample for each chunk size.
    """
    prepared = prepare(spec)
    counts = prepared.assignment.counts(prepared.data.y_train.numpy(), prepared.data.outputs)
    engine = make_engine("local", make_context(prepared), StateStore())
    federation = Federation(engine, prepared.config, spec.availability, "transfers")
    federation.begin(1)
    labels, clients = np.nonzero(counts.T)
    offsets = np.searchsorted(labels, np.arange(counts.shape[1] + 1))
    holders = Holders(np.arange(counts.shape[1]), offsets, clients, counts.T[labels, clients])
    result = []
    for chunk_size in chunk_sizes:
        wanted = schedule(counts.sum(axis=0), federation.rng("schedule"))
        roster = Roster(federation, holders, weighted=weighted)
        route = Route(roster, wanted, chunk_size=chunk_size, retain=retain)
        result.append(_walk(route, counts.copy()) / len(wanted))
    return result


def _walk(route: Route, unused: Ints) -> int:
    """Return the number of transfers until the label schedule is done.

    Args:
        route: The route of the model from client to client.
        unused: The number of unused samples of each client and label, which is changed.
    """
    count = 0
    for count, (client, task) in enumerate(route.tasks(), start=1):
        missing = []
        for label in task.labels.tolist():
            missing.append(unused[client, label] == 0)
            unused[client, label] -= not missing[-1]
        gone = sorted({label for label in task.labels.tolist() if unused[client, label] == 0})
        reply = StepsReply(torch.tensor(missing), torch.tensor(gone, dtype=torch.int64), torch.zeros(()))
        route.on_reply(count - 1, reply)
    return count


def largest_curvature(prepared: Prepared, params: Mapping[str, Tensor], steps: int = 50) -> float:
    """Return the largest eigenvalue (by magnitude) of the Hessian of the mean loss over all training samples.

    A smoothness constant L of the loss cannot be smaller. The eigenvalue is computed by power iteration.

    Args:
        prepared: The experiment with the model and the samples.
        params: The model's parameters.
        steps: The number of iterations.
    """
    x, y = prepared.data.inputs(torch.arange(prepared.data.train_size)), prepared.data.y_train
    params = {name: weights.clone().requires_grad_() for name, weights in params.items()}
    leaves = list(params.values())
    loss = F.cross_entropy(torch.func.functional_call(prepared.config.model.module, params, (x,)), y)
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, leaves, create_graph=True)])
    vector = torch.randn(len(gradient), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        products = torch.autograd.grad(gradient @ (vector / vector.norm()), leaves, retain_graph=True)
        vector = torch.cat([part.flatten() for part in products])
    return float(vector.norm())


def training_operations(method: str, epochs: int, samples: int = 100) -> int:
    """Return the number of floating-point operations in a run with one client and one round.

    Nearly all operations belong to training. Only matrix products and convolutions count, in forward and backward
    passes. A multiplication and an addition count as two operations. The model is ReBaFL's model for images of 28×28
    pixels.

    Args:
        method: The name of the method.
        epochs: The number E of local epochs.
        samples: The client's number n_k of samples.
    """
    images = np.zeros((samples, 28, 28, 1), dtype=np.uint8)
    labels = np.arange(samples) % 10
    spec = {
        "partition": {"name": "iid", "clients": 1},
        "method": {"name": method},
        "model": {"name": "cnn"},
        "training": {"rounds": 1, "clients_per_round": 1, "local_epochs": epochs, "batch_size": 50, "workers": 1},
    }
    with FlopCounterMode(display=False) as counter:
        run(spec, data=(images, labels, images[:1], labels[:1]))
    return int(counter.get_total_flops())


def weight_variances(clients: int = 100, places: int = 10, draws: int = 4000) -> dict[str, float]:
    """Return the variance of a client's weight in the mean update, averaged over all clients.

    Args:
        clients: The number N of clients.
        places: The number m of clients to draw. N must be a multiple of m.
        draws: The number of simulated draws for each way of drawing.

    Returns:
        The variance for each way of drawing. With ``strata``, one client is drawn from each of m equal clusters. With
        ``plain``, m of all clients are drawn without replacement, as in FedAvg. With ``returning``, m of all clients
        are drawn with replacement.
    """
    generator = np.random.default_rng(0)
    groups = np.arange(clients).reshape(places, -1)
    kinds: dict[str, Callable[[], Ints]] = {
        "strata": lambda: np.array([generator.choice(group) for group in groups]),
        "plain": lambda: generator.choice(clients, places, replace=False),
        "returning": lambda: generator.choice(clients, places),
    }
    variances = {}
    for kind, draw_once in kinds.items():
        weights = np.stack([np.bincount(draw_once(), minlength=clients) for _ in range(draws)]) / places
        variances[kind] = float(weights.var(axis=0).mean())
    return variances


def cluster_variances(sizes: Sequence[int], draws: int = 4000) -> NDArray[np.float64]:
    """Return the variance of a client's weight in the mean update, for each cluster, shape (m,).

    One client is drawn from each of the m clusters. Each of these clients has the weight 1/m.

    Args:
        sizes: The number of clients in each cluster.
        draws: The number of simulated draws.
    """
    generator = np.random.default_rng(0)
    variances = []
    for size in sizes:
        chosen = generator.integers(size, size=draws)[:, None] == np.arange(size)
        variances.append((chosen / len(sizes)).var(axis=0).mean())
    return np.array(variances)
