from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.objectives.fedbabu import BodyOnly
from fedstrata.sampling.sketches import Compress, CompressReply, Sketch, restore


def test_an_introduction_trains_what_the_objective_trains(tiny):
    """It trained the head that FedBABU freezes, so that clusters told who had taken part."""
    federation = tiny(2, objective=BodyOnly())
    (reply,) = federation.ask([0], Sketch(1, federation.weights, 0)).values()
    names = list(federation.weights.params)
    ends = np.cumsum([w.numel() for w in federation.weights.params.values()])
    parts = dict(zip(names, np.split(reply.values.numpy(), ends[:-1]), strict=True))
    head = federation.config.model.head_names
    for name, start in federation.weights.params.items():
        moved = (parts[name] != start.flatten().numpy()).any()
        assert moved == (name not in head)


@pytest.mark.slow
def test_a_gradient_is_of_the_mean_over_all_samples_though_they_come_in_batches(tiny):
    """700 samples are a batch of 512 and one of 188."""
    federation = tiny(sizes=[700])
    context, weights = federation.engine.context, federation.weights
    reply = federation.ask([0], Compress(1, weights, 255, 0))[0]
    assert reply.length == 57, "as few parameters as that have a centre each"
    values = restore(reply.centres.numpy(), reply.codes.numpy(), 57)
    params = {name: w.clone().requires_grad_() for name, w in weights.params.items()}
    where = torch.arange(700)
    logits = torch.func.functional_call(context.config.model.module, params, (context.data.inputs(where),))
    F.cross_entropy(logits, context.data.y_train[where]).backward()
    expected = torch.cat([w.grad.flatten() for w in params.values()])
    torch.testing.assert_close(torch.from_numpy(values), expected, atol=1e-6, rtol=1e-4)
    exact = federation.ask([0], Compress(1, weights, 0, 0))[0]
    torch.testing.assert_close(torch.from_numpy(exact.restored), expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("count", [9, 58])
def test_a_gradient_that_is_not_rounded_has_all_its_coordinates(tiny, count):
    federation = tiny(sizes=[10])
    request = Compress(1, federation.weights, 0 if count > 9 else 9, 0)
    empty = torch.empty(0, dtype=torch.uint8)
    with pytest.raises(ReplyRefusedError):
        request.check(CompressReply(torch.zeros(count), empty, 57))
    Compress(1, federation.weights, 0, 0).check(CompressReply(torch.zeros(57), empty, 57))
