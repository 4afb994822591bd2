from __future__ import annotations

from bisect import bisect_left
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.base.errors import ReplyRefusedError, SpecError, WithheldError
from fedstrata.federation.secure import ring as module
from fedstrata.federation.secure.ring import LARGEST, Part, Ring, add, rounding

SITES = st.integers(1, 64)
RANGES = st.floats(1e-30, 1e30)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def of_one(ring: Ring, value: float, weight: float = 1.0, client: int = 0) -> np.ndarray:
    return ring.encode({"x": np.array([value])}, {}, rounding(0, 1, client, 0), weights={"x": weight})


@pytest.mark.slow
@given(SITES, RANGES, st.sampled_from([-1.0, 1.0]))
def test_the_sum_of_all_sites_at_the_end_of_the_range_does_not_wrap(sites: int, bound: float, sign: float) -> None:
    ring = Ring(sites, {"x": Part(1, bound)})
    total = ring.decode(add([of_one(ring, sign * bound, client=k) for k in range(sites)]), sites)
    assert total.parts["x"][0] == pytest.approx(sign * sites * bound, rel=1e-12)
    assert total.scaled == 0


@pytest.mark.slow
@given(SITES, RANGES, FLOATS, st.floats(0, 1))
def test_no_value_exceeds_the_range_and_the_error_is_below_one_step(
    sites: int, bound: float, value: float, weight: float
) -> None:
    ring = Ring(sites, {"x": Part(1, bound)})
    words = of_one(ring, value, weight)
    whole = int(words[:1].view(np.int32)[0])
    assert abs(whole) <= ring.scale
    assert words[1] == (abs(value) > bound)
    wanted = weight * max(-1.0, min(1.0, value / bound)) * ring.scale
    assert abs(whole - wanted) <= 1 + 1e-6


@pytest.mark.slow
@given(st.integers(1, 64), st.integers(0, 2**31 - 1))
def test_sums_of_counts_are_exact_up_to_the_largest(sites: int, most: int) -> None:
    if sites * most > LARGEST:
        with pytest.raises(SpecError, match=r"counts.n = \d+: the sum over \d+ sites may exceed"):
            Ring(sites, {}, {"n": most})
        return
    ring = Ring(sites, {}, {"n": most})
    total = add([ring.encode({}, {"n": most}, rounding(0, 1, k, 0)) for k in range(sites)])
    assert ring.decode(total, sites).counts == {"n": sites * most}


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_order_of_the_sites_does_not_matter(rows: list[list[int]]) -> None:
    vectors = [np.array(row, dtype=np.uint32) for row in rows]
    sums = {add(order).tobytes() for order in permutations(vectors)}
    assert sums == {np.array([sum(column) % 2**32 for column in zip(*rows, strict=True)], dtype=np.uint32).tobytes()}


def test_adding_leaves_the_vectors_as_they_are() -> None:
    vectors = [np.array([3], dtype=np.uint32), np.array([2**32 - 1], dtype=np.uint32)]
    assert add(vectors).tolist() == [2]
    assert [vector.tolist() for vector in vectors] == [[3], [2**32 - 1]]


@pytest.mark.slow
@given(st.floats(-1, 1), st.floats(0, 1))
def test_the_expected_value_of_a_rounded_number_is_the_number(value: float, weight: float) -> None:
    """The probabilities of the two results follow from the drawn number at which the result changes."""

    class Fixed:
        def __init__(self, drawn: int) -> None:
            self.bit_generator, self.drawn = self, drawn

        def random_raw(self, size: int) -> np.ndarray:
            return np.full(size, self.drawn, dtype=np.uint64)

    ring = Ring(20, {"x": Part(1, 1.0)})

    def whole(drawn: int) -> int:
        words = ring.encode({"x": np.array([value])}, {}, Fixed(drawn), weights={"x": weight})  # type: ignore[arg-type]
        return int(words[:1].view(np.int32)[0])

    lower = whole(0)
    upper = bisect_left(range(2**32), lower + 1, key=whole)  # from this drawn number on, the result is the upper number
    assert lower + (2**32 - upper) / 2**32 == pytest.approx(value * weight * ring.scale, abs=1e-7)


@pytest.mark.parametrize("sites", [1, 10, 64])
@pytest.mark.parametrize("bound", [1.0, 0.37, 1e-30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weight", [0.0, 1 / 3, 1.0])
def test_a_message_is_the_rule_of_rounding_in_whole_numbers(
    sites: int, bound: float, dtype: type, weight: float
) -> None:
    ring = Ring(sites, {"x": Part(64, bound), "y": Part(6, bound)})
    ends = np.array([0.0, -0.0, 1, -1, 1e-12, -1e-12, 0.5, -0.5, 1 - 2**-24, 2**-24 - 1])
    inside = np.concatenate([ends, np.random.default_rng(0).uniform(-1, 1, 54)])
    parts = {"x": (inside * bound).astype(dtype), "y": (np.linspace(-3, 2, 6) * bound).astype(dtype)}
    words = ring.encode(parts, {}, rounding(0, 1, 2, 0), weights=dict.fromkeys(parts, weight))
    pairs = iter(rounding(0, 1, 2, 0).bit_generator.random_raw(35).tolist())
    wanted = []
    for values in parts.values():
        unit, pair = max(bound, *(abs(value) for value in values.tolist())), 0
        for place, value in enumerate(values.tolist()):
            pair = pair >> 32 if place % 2 else next(pairs)
            exact = value / unit * (weight * ring.scale * 2**32)
            wanted.append(((int(exact) + pair % 2**32) >> 32) % 2**32)
    assert words[:-1].tolist() == wanted


def test_roundings_are_uniform_and_independent_between_elements() -> None:
    ring = Ring(LARGEST // 4, {"x": Part(40_000, 1.0)})  # Q is 4, so 0.3 is between 1 and 2
    words = ring.encode({"x": np.full(40_000, 0.3)}, {}, rounding(0, 1, 0, 0))[:-1].astype(float)
    assert set(words) == {1.0, 2.0}
    assert words.mean() == pytest.approx(1.2, abs=4 * np.sqrt(0.16 / 40_000))
    pairs = np.corrcoef(words[:-1], words[1:])[0, 1]
    assert abs(pairs) < 4 / np.sqrt(40_000)


def test_a_vector_out_of_range_keeps_its_direction_and_is_counted() -> None:
    ring = Ring(3, {"x": Part(3, 1.0), "y": Part(2, 1.0)}, {"n": 9})
    small = ring.encode({"x": [0.5, 0, 0], "y": [1, -1]}, {"n": 2}, rounding(0, 1, 0, 0))
    large = ring.encode({"x": [8.0, -4.0, 2.0], "y": [0, 0]}, {"n": 3}, rounding(0, 1, 1, 0))
    total = ring.decode(add([small, large]), 2)
    assert total.scaled == 1
    assert total.counts == {"n": 5}
    np.testing.assert_allclose(total.parts["x"], [1.5, -0.5, 0.25], atol=4 / ring.scale)
    np.testing.assert_allclose(total.parts["y"], [1, -1], atol=4 / ring.scale)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_that_are_not_finite_are_withheld(value: float, dtype: type) -> None:
    ring = Ring(3, {"x": Part(2, 1.0)})
    with pytest.raises(WithheldError, match=r"contains NaN or infinity\. Reduce training\.lr"):
        ring.encode({"x": np.array([0, value], dtype=dtype)}, {}, rounding(0, 1, 0, 0))


def test_weights_and_counts_out_of_range_are_withheld_without_their_value() -> None:
    ring = Ring(3, {"x": Part(1, 1.0)}, {"n": 9})
    for weight in (1.1, -0.1, np.nan):
        with pytest.raises(WithheldError, match=r"its number of samples is above privacy\.largest") as raised:
            ring.encode({"x": [0.0]}, {"n": 1}, rounding(0, 1, 0, 0), weights={"x": weight})
        assert str(weight) not in str(raised.value)
    for count in (-1, 10):
        with pytest.raises(WithheldError, match="n is not between 0 and 9") as raised:
            ring.encode({"x": [0.0]}, {"n": count}, rounding(0, 1, 0, 0))
        assert str(count) not in str(raised.value)


@pytest.mark.parametrize(
    ("place", "word", "problem"),
    [
        (0, 2 * (LARGEST // 3) + 1, "the sum of x"),
        (0, 2**32 - 2 * (LARGEST // 3) - 1, "the sum of x"),
        (0, 2**31, "the sum of x"),
        (1, 19, "the sum of n"),
        (2, 3, "its count of scaled parts is larger"),
    ],
)
def test_a_sum_that_two_sites_cannot_have_is_refused(place: int, word: int, problem: str) -> None:
    ring = Ring(3, {"x": Part(1, 1.0)}, {"n": 9})
    total = np.zeros(3, dtype=np.uint32)
    total[place] = word - 1 if word < 2**31 else word + 1
    if word != 2**31:
        ring.decode(total, 2)
    total[place] = word
    with pytest.raises(ReplyRefusedError, match=problem):
        ring.decode(total, 2)


def test_a_sum_of_another_length_or_dtype_is_refused() -> None:
    ring = Ring(3, {"x": Part(1, 1.0)})
    for total in (np.zeros(3, dtype=np.uint32), np.zeros(2, dtype=np.int32)):
        with pytest.raises(ReplyRefusedError, match=r"but must have shape \(2,\) and type uint32"):
            ring.decode(total, 2)


def test_long_vectors_are_encoded_in_chunks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(5, {"x": Part(1000, 1.0)})
    values = {"x": np.linspace(-1, 1, 1000)}
    whole = ring.encode(values, {}, rounding(0, 1, 0, 0))
    monkeypatch.setattr(module, "_CHUNK", 6)
    assert (ring.encode(values, {}, rounding(0, 1, 0, 0)) == whole).all()


def test_roundings_depend_on_seed_round_client_and_exchange() -> None:
    draws = {rounding(*key).random() for key in [(0, 1, 2, 3), (1, 1, 2, 3), (0, 2, 2, 3), (0, 1, 3, 3), (0, 1, 2, 4)]}
    assert len(draws) == 5
    assert rounding(0, 1, 2, 3).random() == rounding(0, 1, 2, 3).random()


@pytest.mark.parametrize("bound", [0.0, -1.0, np.inf, np.nan])
def test_a_range_that_cannot_be_used_is_refused(bound: float) -> None:
    with pytest.raises(SpecError, match="must be positive and finite"):
        Part(1, bound)
