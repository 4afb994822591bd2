"""Compute biases, errors, variances and operation counts from the papers' formulas and algorithms."""

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
from fedstrata.clients.client import StateStore
from fedstrata.engines import make_engine
from fedstrata.experiments.run import run
from fedstrata.federation.federation import Federation
from fedstrata.runs.preparation import Prepared, prepare
from fedstrata.runs.simulation import make_context
from fedstrata.sampling.allocation import allocated, spread
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
    """Return the bias of FedSSAR's mean update, divided by the norm of the mean update of all N clients.

    We assume that all updates have the same norm, that clients of one cluster have equal updates, and that updates of
    different clusters are orthogonal. A cluster with N_h of the N clients gets m_h of the m draws. The cluster's weight
    in the mean update is m_h / m, but an unbiased mean update requires the weight N_h / N.

    Args:
        sizes: Number of clients N_h in each cluster. The number of clusters is at most m.
        places: Number of draws m per round.

    >>> round(fedssar_bias([50, 30, 20]), 3), round(fedssar_bias([90, 5, 5]), 3)
    (0.0, 0.136)
    """
    counts = np.array(sizes, dtype=np.int64)
    weights = shares(places, counts, counts, np.random.default_rng(0)) / places
    return _relative_error(weights, counts)


def _relative_error(weights: NDArray[Any], counts: Ints) -> float:
    """Return ‖w − s‖ / ‖s‖, where w are the weights of groups, and s are the groups' fractions of all clients."""
    wanted = counts / counts.sum()
    return float(np.linalg.norm(weights - wanted) / np.linalg.norm(wanted))


def neyman_bias(sizes: list[int], deviations: list[float], places: int) -> tuple[list[int], float]:
    """Return Neyman's allocation of draws to strata, and the relative bias of FedSTS's mean update.

    If no client is drawn from a stratum, the other strata have larger weights in the mean update, so this update is
    biased. As in ``fedssar_bias``, we assume that updates of different strata are orthogonal and have equal norms.

    Args:
        sizes: Number of clients N_h in each stratum.
        deviations: Spread S_h of the gradients in each stratum; see ``fedstrata.sampling.allocation.spread``.
        places: Number of draws m per round.

    >>> neyman_bias([10, 10], [1.0, 1.0], 4)
    ([2, 2], 0.0)
    """
    counts = np.array(sizes, dtype=np.int64)
    allocation = allocated("neyman", places, counts, np.array(deviations))[0]
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
    """Simulate FedSTS's sampling and uniform sampling, and compare the mean updates.

    The 100 clients form ten groups. A client's gradient, shape (50,), is the mean gradient of the client's group plus
    Gaussian noise. We assume that a client's update equals its gradient.

    Args:
        noise: Standard deviation of the noise in the clients' gradients.
        scale: Standard deviation of the groups' mean gradients.
        places: Number of draws m per round.
        draws: Number of simulated rounds.
        start: Initial centres of the k-means algorithm that forms the strata. In the paper, these centres are random.

    Returns:
        A dict with two numbers. ``ratio`` is the variance of FedSTS's mean update, divided by the variance for uniform
        sampling (without replacement). These variances are sums over coordinates. ``bias`` is the norm of the bias of
        FedSTS's mean update, divided by the norm of the mean gradient of all clients.
    """
    generator = np.random.default_rng(1)
    means = scale * generator.standard_normal((10, 50)) + 0.3
    points = np.repeat(means, 10, axis=0) + noise * generator.standard_normal((100, 50))
    clients, single = np.arange(100), points.astype(np.float32)
    strata = stratify(single, places, 0, 1, start)
    sizes = np.bincount(strata)
    allocation = allocated("neyman", places, sizes, spread(single, strata, len(sizes)))[0]
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
    """Return the expected norm of the aggregated update if the server draws a single client from a single stratum.

    As in FedSTS, the probability of drawing a client is proportional to the norm of the client's gradient. We assume
    that a client's update and gradient have equal norms, and that all updates have the same direction.

    Args:
        lengths: Norm of each client's update, shape (N,).
        aggregator: Aggregator that determines the weight of the drawn update.
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
    """Simulate how the server estimates the total number of samples from the clients' randomised reports.

    The function returns the estimates ñ, shape (draws,). The estimates can be below 1, because they are not clipped.

    Args:
        sizes: Number of samples n_k of each of the m participants, shape (m,).
        bound: Upper bound M: participants report numbers from 1 to M − 1.
        epsilon: Privacy budget ε of a single report.
        draws: Number of simulated estimates.
    """
    alpha = truth_probability(epsilon, bound)
    generator = np.random.default_rng(0)
    shape = (draws, len(sizes))
    clipped = np.clip(sizes, 1, bound - 1)
    answers = np.where(generator.random(shape) < alpha, clipped, generator.integers(1, bound, size=shape))
    estimates: NDArray[np.float64] = (answers.sum(axis=1) - (1 - alpha) * bound * len(sizes) / 2) / alpha
    return estimates


def keep_errors(size: int, participants: int, bound: int, epsilon: float, fraction: float = 0.1) -> float:
    """Return the root mean square error of p̃, the probability of keeping a sample (FedSTaS, Lemma 2.2).

    The server wants to keep n* = q n of all n samples, so the correct probability is p = q. If clients keep their
    numbers of samples private, the server knows only an estimate ñ of n. Clients then use p̃ = min(1, n*/ñ) instead of
    p.

    Args:
        size: Number of samples n_k, which is equal for all participants.
        participants: Number of participants m.
        bound: Upper bound M: participants report numbers from 1 to M − 1.
        epsilon: Privacy budget ε of a single report.
        fraction: Fraction q of the samples that the server wants to keep.

    >>> keep_errors(50, 10, 100, 50.0) < 1e-9  # with this ε, nearly all reports are the true sizes
    True
    """
    estimates = size_estimates(np.full(participants, size), bound, epsilon, max(DRAWS // participants, 200))
    keep = np.minimum(1.0, fraction * participants * size / np.maximum(estimates, 1.0))
    return float(np.sqrt(((keep - fraction) ** 2).mean()))


def label_variance(labels: Ints, batch: int) -> float:
    """Return how much of the variance of a batch's mean gradient is due to the batch's labels.

    We assume that gradients of different labels are orthogonal and have norm 1. The variance is then the mean of
    ‖b − s‖² over the batches. The vector b contains the label fractions of a batch, and s contains the label fractions
    of all samples.

    Args:
        labels: Labels of the samples, in the order of training, shape (L,).
        batch: Number of samples per batch. A smaller last batch is ignored.

    >>> label_variance(np.array([0, 1, 0, 1]), 2), label_variance(np.array([0, 0, 1, 1]), 2)
    (0.0, 0.5)
    """
    classes = int(labels.max()) + 1
    whole = labels[: len(labels) // batch * batch].reshape(-1, batch)
    parts = np.stack([(whole == label).mean(axis=1) for label in range(classes)], axis=1)
    off = parts - np.bincount(labels, minlength=classes) / len(labels)
    return float((off**2).sum(axis=1).mean())


def uses_a_sample(counts: list[int], cap: int, batch: int = 10, seed: int = 0) -> list[float]:
    """Simulate Stratify's uniform selection of clients, and return which fraction of its samples each client uses.

    The simulation covers one epoch in which all samples have the same label. A client can be drawn until each of its
    samples has been used once.

    Args:
        counts: Number of samples at each client.
        cap: Maximum number of samples of the label per epoch (the cap of the frequency f_l).
        batch: Number of samples per batch.
        seed: Seed of the random draws.

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
    """Count the model transfers of one epoch in Stratify's single-sample mode, without training the model.

    Args:
        spec: Experiment whose method is Stratify.
        chunk_sizes: Chunk sizes to compare. A chunk consists of consecutive labels of the label schedule.
        weighted: Whether the probability of drawing a client is proportional to its number of samples with the label.
        retain: For each label, Stratify considers this fraction of the clients with samples of the label.

    Returns:
        Number of model transfers per sample, for each chunk size.
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
    """Return the number of model transfers until the label schedule is finished.

    Args:
        route: Route of the model from client to client.
        unused: Number of unused samples of each client and label. The function changes this array.
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
    """Return the largest absolute eigenvalue of the Hessian of the mean loss over all training samples.

    This eigenvalue is a lower bound on the smoothness constant L of the loss. The function uses power iteration.

    Args:
        prepared: Prepared experiment with the model and the training samples.
        params: Model parameters at which the Hessian is evaluated.
        steps: Number of power iterations.
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
    """Count the floating-point operations of a run with one client and one round.

    The model is ReBaFL's CNN for images of 28×28 pixels. Only matrix products and convolutions are counted, in forward
    and backward passes. One multiplication and one addition are two operations. Nearly all counted operations belong to
    training.

    Args:
        method: Name of the federated learning method.
        epochs: Number of local epochs E.
        samples: Number of samples n_k of the client.
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
    """Simulate three ways of drawing clients, and return the variance of a client's weight in the mean update.

    Args:
        clients: Number of clients N.
        places: Number of clients m that are drawn per round. N must be a multiple of m.
        draws: Number of simulated rounds for each way of drawing.

    Returns:
        The variance for each way of drawing, averaged over all clients. With ``strata``, one client is drawn from each
        of m clusters of equal size. With ``plain``, m of the N clients are drawn without replacement, as in FedAvg.
        With ``returning``, m clients are drawn from the N clients with replacement.
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
    """Return, for each of m clusters, the variance of a client's weight in the mean update, shape (m,).

    In each simulated round, one client is drawn from each cluster. A drawn client has the weight 1/m, and all other
    clients have the weight 0.

    Args:
        sizes: Number of clients in each cluster.
        draws: Number of simulated rounds.
    """
    generator = np.random.default_rng(0)
    variances = []
    for size in sizes:
        chosen = generator.integers(size, size=draws)[:, None] == np.arange(size)
        variances.append((chosen / len(sizes)).var(axis=0).mean())
    return np.array(variances)
