"""Information squeeze: exact against brute force and scikit-learn, packed, and projected alike for everybody."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.base import records
from fedstrata.data.sources import Data
from fedstrata.models.zoo import MLP, make_model
from fedstrata.sampling.sketches import CompressReply, pack, project, quantize, restore


def inertia(values: np.ndarray, codes: np.ndarray) -> float:
    parts = [values[codes == code].astype(np.float64) for code in np.unique(codes)]
    return sum(float(((part - part.mean()) ** 2).sum()) for part in parts)


@pytest.mark.slow
@given(
    st.lists(st.floats(-100, 100, width=32).map(lambda v: round(v, 3)), min_size=1, max_size=6),
    st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_no_assignment_is_better(values, centres):
    x = np.array(values, dtype=np.float32)
    found, codes = quantize(x, centres)
    best = min(inertia(x, np.array(codes)) for codes in itertools.product(range(centres), repeat=len(x)))
    assert inertia(x, codes) == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert len(found) == min(centres, len(np.unique(x)))
    for code in range(len(found)):
        assert found[code] == pytest.approx(x[codes == code].mean(dtype=np.float64), rel=1e-5, abs=1e-5)
    assert (np.diff(found) > 0).all()


@pytest.fixture(scope="module")
def gradient() -> torch.Tensor:
    """Of a real model on real data."""
    data = Data("digits").load()
    model = make_model(MLP(), data.shape, data.outputs, seed=0)
    params = {name: w.requires_grad_(True) for name, w in model.params().items()}
    loss = F.cross_entropy(model(params, data.inputs(slice(0, 100))), data.targets(slice(0, 100)))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(params.values()))])


def test_it_beats_lloyds_iterations_on_a_real_gradient(gradient):
    from sklearn.cluster import KMeans

    values = project(gradient, 2048, seed=0).numpy()
    assert len(values) == 2048
    exact = inertia(values, quantize(values, 9)[1])
    lloyd = KMeans(9, n_init=10, random_state=0).fit(values[:, None].astype(np.float64))
    assert exact <= lloyd.inertia_ * (1 + 1e-9)
    assert exact < 0.1 * inertia(values, np.zeros(len(values)))


@pytest.mark.slow
@given(st.integers(0, 65), st.integers(1, 256), st.integers(0, 2**32 - 1))
@settings(max_examples=80, deadline=None)
def test_packing_loses_nothing(length, centres, seed):
    generator = np.random.default_rng(seed)
    X = np.sort(generator.normal(size=centres)).astype(np.float32)
    codes = generator.integers(centres, size=length).astype(np.uint8)
    packed = pack(codes, centres)
    assert len(packed) == (length if centres > 16 else -(-length // 2))
    assert restore(X, packed, length).tolist() == X[codes].tolist()


@pytest.mark.parametrize(
    ("packed", "centres", "length"),
    [([0x12], 2, 2), ([0x00], 2, 3), ([3], 17, 2), ([17], 17, 1)],
    ids=["no such centre", "too short", "too short, unpacked", "no such centre, unpacked"],
)
def test_codes_that_do_not_fit_are_refused(packed, centres, length):
    with pytest.raises(ValueError, match=f"do not match {length} coordinates and {centres} centres"):
        restore(np.arange(centres, dtype=np.float32), np.array(packed, dtype=np.uint8), length)


def test_a_reply_is_half_a_byte_a_coordinate_on_the_wire(gradient):
    values = project(gradient, 2048, seed=0).numpy()
    X, codes = quantize(values, 9)
    reply = CompressReply(torch.from_numpy(X), torch.from_numpy(pack(codes, len(X))), len(codes))
    data = records.encode(reply)
    assert 2048 // 2 + 9 * 4 < len(data) < 2048 // 2 + 9 * 4 + 500  # names and offsets
    back = records.decode(data)
    assert restore(back.centres.numpy(), back.codes.numpy(), back.length).tolist() == X[codes].tolist()


@pytest.mark.slow
def test_projection_keeps_inner_products_on_average():
    generator = np.random.default_rng(0)
    a, b = (torch.from_numpy(generator.normal(size=300)) for _ in range(2))
    b = b + a
    found = np.array([float(project(a, 40, seed) @ project(b, 40, seed)) for seed in range(400)])
    error = found.std(ddof=1) / np.sqrt(len(found))
    assert abs(found.mean() - float(a @ b)) < 4 * error
    assert error < 0.05 * abs(float(a @ b))


def test_projection_is_one_linear_map_for_everybody():
    generator = np.random.default_rng(1)
    a, b = (torch.from_numpy(generator.normal(size=500)) for _ in range(2))
    torch.testing.assert_close(project(a + 2 * b, 64, 7), project(a, 64, 7) + 2 * project(b, 64, 7))
    assert not torch.equal(project(a, 64, 7), project(a, 64, 8))


@pytest.mark.parametrize("coordinates", [0, 5, 6])
def test_a_short_gradient_stays_as_it_is(coordinates):
    gradient = torch.arange(5.0)
    assert project(gradient, coordinates, seed=0) is gradient
