"""Power-of-choice: the candidates for whom the model is worst."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedstrata.base.errors import SpecError
from fedstrata.federation.messages import Weights
from fedstrata.sampling.power_of_choice import LossReport, PowerOfChoice


def losses(federation) -> dict[int, float]:
    context = federation.engine.context
    result = {}
    with torch.no_grad(), context.config.model.loaded(federation.weights.params, federation.weights.buffers) as params:
        for client in range(context.config.clients):
            where = torch.from_numpy(context.assignment[client].copy())
            logits = context.config.model(params, context.data.inputs(where))
            result[client] = float(F.cross_entropy(logits, context.data.y_train[where]))
    return result


def test_clients_know_how_bad_the_model_is(tiny):
    federation = tiny(4)
    replies = federation.ask(range(4), LossReport(1, federation.weights))
    assert {c: reply.loss for c, reply in replies.items()} == pytest.approx(losses(federation))
    assert len(federation.store.clients) == 0


def test_the_worst_of_all_are_taken(tiny):
    federation = tiny(6, clients_per_round=2)
    sampler = PowerOfChoice(candidates=6)
    selection, _ = sampler.select(federation, sampler.init(federation), federation.weights)
    truth = losses(federation)
    assert selection.clients.tolist() == sorted(sorted(truth, key=truth.__getitem__)[-2:])
    assert selection.draws.tolist() == [1, 1]


@pytest.mark.slow
def test_only_candidates_are_asked_and_large_clients_are_candidates_more_often(tiny):
    federation = tiny(6, sizes=[8, 8, 8, 8, 8, 80], clients_per_round=1)
    sampler = PowerOfChoice(candidates=2)
    state = sampler.init(federation)
    asked = np.zeros(6)
    for round in range(1, 60):
        federation.begin(round)
        sampler.select(federation, state, federation.weights)
        assert len(federation.log.invited) == 2
        asked[list(federation.log.invited)] += 1
    assert asked[5] > 40 > asked[:5].max()


def test_twice_as_many_candidates_as_clients_unless_there_are_fewer(tiny):
    for clients, invited, expected in ((8, 3, 6), (4, 3, 4)):
        federation = tiny(clients, clients_per_round=invited)
        sampler = PowerOfChoice()
        state = sampler.init(federation)
        federation.begin(2)
        selection, _ = sampler.select(federation, state, federation.weights)
        assert len(federation.log.invited) == expected
        assert len(selection.clients) == invited


@pytest.mark.slow
def test_of_clients_for_whom_the_model_is_as_bad_each_is_taken_sometimes(tiny):
    """With a model of zeros every loss is log 3."""
    federation = tiny(5, clients_per_round=1)
    sampler = PowerOfChoice(candidates=5)
    state = sampler.init(federation)
    nothing = Weights({name: torch.zeros_like(w) for name, w in federation.weights.params.items()}, {})
    taken = set()
    for round in range(1, 40):
        federation.begin(round)
        taken |= set(sampler.select(federation, state, nothing)[0].clients.tolist())
    assert taken == set(range(5))


@pytest.mark.parametrize(("candidates", "words"), [(7, "the partition has 6 clients"), (1, "Use at least")])
def test_bad_numbers_of_candidates(tiny, candidates, words):
    with pytest.raises(SpecError, match=words) as caught:
        PowerOfChoice(candidates=candidates).check(tiny(6, clients_per_round=2).config)
    assert caught.value.key == "method.client_sampler.candidates"
