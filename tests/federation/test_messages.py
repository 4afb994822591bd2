from __future__ import annotations

import pytest
import torch

import fedstrata as fs
from fedstrata.base.errors import ReplyRefusedError
from fedstrata.federation.messages import Fit, FitReply, Request, Weights, check_message
from fedstrata.sampling.client_sizes import SizeReply, SizeReport


def test_work_in_steps_is_the_same_for_large_and_small_clients():
    training = fs.Training(local_steps=3, batch_size=32)
    assert training.sample_gradients(32) == training.sample_gradients(3200) == 96
    assert training.sample_gradients(20) == 60
    assert fs.Training(local_epochs=5).sample_gradients(50.0) == 250


WEIGHTS = Weights({"w": torch.zeros(2)}, {"n": torch.zeros((), dtype=torch.int64)})
GOOD = {"weights": WEIGHTS, "samples": 3, "steps": 1, "seen": 3, "loss": 0.5, "message": {}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"weights": Weights({"w": torch.zeros(3)}, WEIGHTS.buffers)},
            r"params\['w'\] has shape \(3,\) and type torch.float32",
        ),
        ({"weights": Weights(WEIGHTS.params, {})}, "buffers lacks the tensor 'n'"),
        ({"samples": -1}, "a negative count"),
        ({"steps": -1}, "a negative count"),
        ({"seen": -1}, "a negative count"),
    ],
    ids=str,
)
def test_a_trained_model_is_checked_by_what_asked_for_it(change, problem):
    request = Fit(1, WEIGHTS, {}, 1.0)
    request.check_reply(FitReply(**GOOD))
    with pytest.raises(ReplyRefusedError, match=problem):
        request.check_reply(FitReply(**{**GOOD, **change}))


def test_an_objectives_message_is_like_what_the_server_expects():
    expected = {"c": {"w": torch.zeros(2)}}
    check_message(FitReply(**{**GOOD, "message": {"c": {"w": torch.ones(2)}}}), expected)
    for message, problem in (
        ({}, r"message has the entries \[\], but must have the entries \['c'\]"),
        ({"c": {"w": torch.ones(1)}}, r"c\['w'\] has shape"),
    ):
        with pytest.raises(ReplyRefusedError, match=problem):
            check_message(FitReply(**{**GOOD, "message": message}), expected)
    with pytest.raises(ReplyRefusedError, match=r"message has the entries \['c'\], but must have the entries \[\]"):
        check_message(FitReply(**{**GOOD, "message": {"c": {}}}), {})


def test_an_answer_to_another_question_is_refused():
    for wrong in (SizeReply(3), WEIGHTS, None):
        with pytest.raises(ReplyRefusedError, match="the reply to Fit must be a FitReply, not a "):
            Fit(1, WEIGHTS, {}, 1.0).check_reply(wrong)
    # A request that does not say what it wants takes any reply.
    Request().check_reply(SizeReply(3))
    with pytest.raises(ReplyRefusedError, match="must be a Reply"):
        Request().check_reply(Request())


@pytest.mark.parametrize("size", [-1, 2**31 + 1, 2**62])
def test_a_size_that_nobody_can_hold_is_refused(size):
    """Sums of such sizes ran over, and the server failed for a client's lie."""
    with pytest.raises(ReplyRefusedError, match=f"an impossible number of samples: {size}"):
        SizeReport(1, 0, 1.0).check_reply(SizeReply(size))
    SizeReport(1, 0, 1.0).check_reply(SizeReply(2**31))
