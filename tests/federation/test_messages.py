from __future__ import annotations

from fedstrata.federation.messages import Fit, Weights
from fedstrata.sampling.messages import SizeReport


def test_work_in_steps_is_the_same_for_large_and_small_clients():
    request = Fit(1, Weights({}, {}), {}, 1.0, passes=5.0, steps=3, batch_size=32)
    assert request.work(32) == request.work(3200) == 96
    assert Fit(1, Weights({}, {}), {}, 0.5, passes=5.0).work(100) == 250


def test_the_work_of_a_fit_is_what_it_trains():
    fit = Fit(1, Weights({}, {}), {}, keep=0.5, passes=3.0)
    assert fit.work(40) == 60
    assert SizeReport(1, 0, 1.0).work(40) == 0
