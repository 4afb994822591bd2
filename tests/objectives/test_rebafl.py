"""ReBaFL's losses by hand, its prototypes, and what its second loss trains."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedstrata.models.model import Model
from fedstrata.objectives.base import Batch, Context
from fedstrata.objectives.calibrated import EXCLUDED, log_prior
from fedstrata.objectives.rebafl import Rebalanced

Z = (0.3, -1.2, 2.0)
ONE = Batch(torch.ones(1, 1), torch.tensor([0]))


def by_hand(z: list[float], p: list[float], y: int) -> float:
    """Eq. 9 as it is printed."""
    return -math.log(p[y] * math.exp(z[y]) / sum(pc * math.exp(zc) for pc, zc in zip(p, z, strict=True)))


@pytest.mark.parametrize(
    ("epsilon", "counts", "prior"),
    [
        (0.0, [30.0, 10.0, 0.0], [0.75, 0.25, 0.0]),
        (0.0, [30.0, 10.0, 20.0], [1 / 2, 1 / 6, 1 / 3]),
        (1.0, [30.0, 10.0, 0.0], [1 / 3, 1 / 3, 1 / 3]),
        (0.3, [30.0, 10.0, 0.0], [0.7 * 0.75 + 0.1, 0.7 * 0.25 + 0.1, 0.1]),
        (0.3, [4.0, 0.0, 0.0], [0.8, 0.1, 0.1]),
    ],
)
def test_relaxed_balanced_softmax_on_three_logits(epsilon, counts, prior, logits, begun):
    found = log_prior(torch.tensor(counts), epsilon)
    assert found.exp().tolist() == pytest.approx(prior)
    objective, model = Rebalanced(epsilon=epsilon, mu=0), logits(*Z)
    params = {"head.weight": model.params()["head.weight"].requires_grad_(True)}
    loss = objective.loss(model, params, ONE, begun(objective, model, counts))
    assert loss.item() == pytest.approx(by_hand(list(Z), prior, 0), abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, list(params.values()))
    total = sum(p * math.exp(z) for p, z in zip(prior, Z, strict=True))
    q = [p * math.exp(z) / total for p, z in zip(prior, Z, strict=True)]
    assert gradient.flatten().tolist() == pytest.approx([q[0] - 1, q[1], q[2]], abs=1e-6)
    if prior[2] == 0:
        assert gradient[2].item() == 0


def test_a_client_without_samples_has_a_prior_too():
    assert log_prior(torch.zeros(3)).tolist() == [EXCLUDED] * 3
    assert log_prior(torch.zeros(2), 0.5).isfinite().all()


# Feature augmentation, on two features and three classes of which the client holds 0 and 2.

P = torch.tensor([[1.0, 0.0], [0.0, 3.0], [-1.0, 2.0]])
H = torch.tensor([[1.5, 0.5], [-1.0, 1.0], [0.5, -0.5], [-2.0, 2.5]])
Y = torch.tensor([0, 2, 0, 2])


class Body(nn.Module):
    """A linear extractor of two features and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 3)
        with torch.no_grad():
            self.body.weight.copy_(torch.tensor([[0.9, -0.2], [0.1, 1.1]]))
            self.body.bias.copy_(torch.tensor([0.05, -0.1]))
            self.head.weight.copy_(torch.tensor([[0.4, -0.3], [-0.6, 0.2], [0.1, 0.8]]))
            self.head.bias.copy_(torch.tensor([0.1, 0.0, -0.2]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def table(means: Tensor, samples: list[float]) -> dict[str, Tensor]:
    return {"means": means, "samples": torch.tensor(samples)}


def context_of(objective: Rebalanced, known: list[float], begun, own: list[float] = (0, 0, 0)) -> Context:
    received = {"prototypes": table(P, known), "own": table(torch.zeros(3, 2), list(own))}
    return begun(objective, Model(Body()), [2.0, 0.0, 2.0], **received)


def test_augmented_features_by_hand(begun):
    objective = Rebalanced(transfer=0.5)
    features, labels = objective.augment(H, Y, context_of(objective, [1, 1, 1], begun))
    assert labels.tolist() == [0, 1, 2, 0]
    assert features.tolist() == [
        [1 + 0.5 * 0.5, 0 + 0.5 * 0.5],
        [0 + 0.5 * 0.0, 3 + 0.5 * -1.0],
        [-1 + 0.5 * -0.5, 2 + 0.5 * -0.5],
        [1 + 0.5 * -1.0, 0 + 0.5 * 0.5],
    ]


def test_classes_without_a_prototype_are_skipped_in_the_cycle(begun):
    objective = Rebalanced()
    _, labels = objective.augment(H, Y, context_of(objective, [5, 0, 1], begun))
    assert labels.tolist() == [0, 2, 0, 2]
    # In the first round the federation knows none: there are the client's own.
    _, labels = objective.augment(H, Y, context_of(objective, [0, 0, 0], begun, own=[2, 0, 2]))
    assert labels.tolist() == [0, 2, 0, 2]


@pytest.mark.parametrize(("epsilon", "relaxed"), [(0.0, True), (0.2, True), (1.0, True), (0.2, False)])
@pytest.mark.parametrize("known", [[1, 1, 1], [4, 0, 1]])
def test_the_whole_loss_by_hand(epsilon, relaxed, known, begun):
    objective = Rebalanced(epsilon=epsilon, mu=0.7, transfer=1.0, relaxed=relaxed)
    model, context = Model(Body()), context_of(objective, known, begun)
    params = model.params()
    x = torch.tensor([[1.0, 2.0], [0.3, -0.4], [-1.0, 0.6], [0.8, 0.8]])
    h, z = model.with_features(params, x)
    classes = [c for c in range(3) if known[c]]
    targets = [classes[j % len(classes)] for j in range(4)]
    augmented = torch.stack([P[c] + h[j] - P[Y[j]] for j, c in enumerate(targets)])
    z2 = model.head(params, augmented)

    def relax(counts: list[int]) -> list[float]:
        return [(1 - epsilon) * n / 4 + epsilon / 3 if relaxed else 1.0 for n in counts]

    first = [by_hand(z[j].tolist(), relax([2, 0, 2]), int(Y[j])) for j in range(4)]
    second = [by_hand(z2[j].tolist(), relax([targets.count(c) for c in range(3)]), targets[j]) for j in range(4)]
    expected = [a + 0.7 * b for a, b in zip(first, second, strict=True)]
    assert objective.loss(model, params, Batch(x, Y), context).item() == pytest.approx(sum(expected) / 4, abs=1e-5)


def test_the_second_loss_trains_the_head_alone(begun):
    model = Model(Body())
    batch = Batch(torch.tensor([[1.0, 2.0], [0.3, -0.4], [-1.0, 0.6], [0.8, 0.8]]), Y)
    with model.loaded(model.params(), train=True) as params:

        def gradient(objective: Rebalanced) -> dict[str, Tensor]:
            loss = objective.loss(model, params, batch, context_of(objective, [1, 1, 1], begun))
            return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))

        without, with_it = gradient(Rebalanced(mu=0)), gradient(Rebalanced(mu=3.0))
    assert {n for n in with_it if not torch.equal(with_it[n], without[n])} == set(model.head_names)
