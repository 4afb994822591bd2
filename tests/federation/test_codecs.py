from __future__ import annotations

import math
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, ReplyRefusedError, SpecError
from fedstrata.federation.communication.codecs import (
    CODECS,
    QSGD,
    BFloat16,
    Codec,
    PowerSGD,
    TopK,
    Uncompressed,
    pack,
    rounded,
    unpack,
    with_frame,
)

EVERY: list[Codec] = [
    Uncompressed(),
    BFloat16(),
    QSGD(),
    QSGD(levels=300, bucket=7),
    TopK(fraction=0.2),
    PowerSGD(rank=2),
    PowerSGD(rank=1, factors="bfloat16"),
    PowerSGD(rank=2, factors="int8"),
]


def chance(number: int = 0) -> np.random.Generator:
    return np.random.default_rng(number)


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.from_numpy(chance(number).standard_normal(shape, np.float32))


SHAPES: dict[str, dict[str, Tensor]] = {
    "nothing": {},
    "a scalar": {"a": torch.tensor(2.5)},
    "empty": {"a": torch.zeros(0, 3), "b": torch.zeros(0)},
    "vectors": {"a": normal(5), "b": normal(1)},
    "matrices": {"a": normal(20, 30), "b": normal(30, 20).T, "c": normal(20)},
    "a convolution": {"a": normal(8, 4, 3, 3), "b": normal(8)},
    "not contiguous": {"a": normal(30, 40)[::2, 1::3], "b": normal(2, 3, 4).permute(2, 0, 1)},
    "other dtypes": {"a": normal(6, 6).double(), "b": normal(6).half(), "c": normal(20, 20).bfloat16()},
    "zeros": {"a": torch.zeros(20, 30), "b": torch.zeros(7)},
}


@pytest.mark.parametrize("codec", EVERY, ids=repr)
@pytest.mark.parametrize("label", SHAPES)
def test_every_shape_and_dtype_comes_back_in_the_form_that_is_known_beforehand(codec: Codec, label: str) -> None:
    change = SHAPES[label]
    payload = codec.encode(change, chance())
    packed = pack(payload, codec.forms(change))
    there = records.decode(records.encode({"payload": packed}))["payload"]
    assert len(packed) == sum(
        math.prod(shape) * dtype.itemsize + (dtype == torch.int8 and math.prod(shape) > 0)
        for parts in codec.forms(change).values()
        for shape, dtype in parts.values()
    )
    # What its sender remembers of a payload is what its receiver reads.
    read = unpack(there, codec.forms(change))
    assert all(torch.equal(read[name][part], t) for name, parts in payload.items() for part, t in parts.items())
    found = codec.decode(unpack(there, codec.forms(change)), change)
    assert found.keys() == change.keys()
    assert all(found[name].shape == tensor.shape for name, tensor in change.items())
    if label == "zeros":
        assert all(not tensor.any() for tensor in found.values())


def test_bfloat16_is_off_by_at_most_a_256th() -> None:
    change = {"a": normal(1000)}
    found = BFloat16().decode(BFloat16().encode(change, chance()), change)["a"]
    assert ((found - change["a"]).abs() <= change["a"].abs() / 256).all()
    assert (found != change["a"]).any()


def test_a_byte_by_hand() -> None:
    # The smallest power of two of which 127 reach 100 is 1; of 0.3 of it nothing is left.
    assert rounded(torch.tensor([100.0, -3.4, 0.3]), torch.int8).tolist() == [100.0, -3.0, 0.0]
    forms = {"a": {"": ((2,), torch.int8)}}
    packed = pack({"a": {"": torch.tensor([6.0, -254.0])}}, forms)
    assert packed.tolist() == [3, 256 - 127, 1]
    assert unpack(packed, forms)["a"][""].tolist() == [6.0, -254.0]


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-3, 1.0, 127.0, 127.00001, 63.5, 3e38])
def test_a_byte_is_off_by_at_most_a_127th_of_the_largest_value_and_rounds_once(scale: float) -> None:
    values = (torch.linspace(-1, 1, 2001).double() * scale).float()
    found = rounded(values, torch.int8)
    assert ((found - values).abs().double() <= max(scale / 127, 2.0**-129)).all()
    assert torch.equal(rounded(found, torch.int8), found)
    forms = {"a": {"": ((2001,), torch.int8)}}
    assert torch.equal(unpack(pack({"a": {"": found}}, forms), forms)["a"][""], found)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_infinity_in_a_byte_is_refused_by_who_reads_it(value: float) -> None:
    forms = {"a": {"": ((2,), torch.int8)}}
    with pytest.raises(ReplyRefusedError, match="NaN or infinity"):
        unpack(pack({"a": {"": rounded(torch.tensor([value, 1.0]), torch.int8)}}, forms), forms)


def test_qsgd_by_hand() -> None:
    # Two buckets: of 4 with the steps -4, -2, 0, 2, 4, and of 1 with -1, -0.5, 0, 0.5, 1. All of these lie on a step.
    codec, change = QSGD(levels=2, bucket=3), {"a": torch.tensor([4.0, -2.0, 0.0, 1.0, -0.5])}
    payload = codec.encode(change, chance())["all"]
    assert payload["scales"].tolist() == [4.0, 1.0]
    # Codes of 3 bits: 4 1 2 4 1 is 100 001 010 100 001.
    assert payload["codes"].tolist() == [0b10000101, 0b01000010]
    assert torch.equal(codec.decode({"all": payload}, change)["a"], change["a"])


def test_a_bucket_larger_than_the_change_takes_only_the_memory_of_the_change() -> None:
    change = {"a": normal(1000)}
    payloads = []
    tracemalloc.start()
    for bucket in (1000, 10**7):
        codec = QSGD(bucket=bucket)
        payload = codec.encode(change, chance())
        codec.decode(payload, change)
        payloads.append(pack(payload, codec.forms(change)).tolist())
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert payloads[0] == payloads[1]
    assert most < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("codec", [QSGD(levels=1, bucket=16), QSGD(levels=7)], ids=repr)
def test_qsgd_is_unbiased_and_its_variance_is_bounded(codec: QSGD) -> None:
    change, trials = {"a": normal(64)}, 4000
    found = torch.stack([codec.decode(codec.encode(change, chance(n)), change)["a"] for n in range(trials)])
    error = (found.mean(0) - change["a"]).abs()
    assert (error <= 4 * found.std(0) / trials**0.5 + 1e-6).all()
    largest = (
        change["a"].abs().reshape(-1, min(codec.bucket, 64)).max(1).values.repeat_interleave(min(codec.bucket, 64))
    )
    assert (found.var(0) <= (largest / codec.levels) ** 2 / 4 * 1.1).all()


def test_top_k_by_hand() -> None:
    codec = TopK(fraction=0.4)
    change = {"a": torch.tensor([[0.5, -3.0], [1.0, 0.0]]), "b": torch.tensor([2.0])}
    payload = codec.encode(change, chance())["all"]
    assert payload["values"].tolist() == [-3.0, 2.0]
    assert payload["places"].tolist() == [0b00110000]  # places 1 and 4 of 5, of 3 bits each: 001 100
    found = codec.decode({"all": payload}, change)
    assert found["a"].tolist() == [[0.0, -3.0], [0.0, 0.0]]
    assert found["b"].tolist() == [2.0]


def test_of_equal_values_top_k_sends_the_first() -> None:
    codec, change = TopK(fraction=0.5), {"a": torch.tensor([2.0, -1.0, -2.0, 3.0, 2.0, 0.0])}
    found = codec.decode(codec.encode(change, chance()), change)
    assert found["a"].tolist() == [2.0, 0.0, -2.0, 3.0, 0.0, 0.0]


@pytest.mark.slow
def test_power_sgd_by_hand_for_two_clients() -> None:
    codec = PowerSGD(rank=1)
    ones = torch.ones(3, 1)
    first = {"w": torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])}
    second = {"w": torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0]])}
    # M_k Q is the sum of the columns: (1, 0, 0) and (2, 0, 3), together (3, 0, 3).
    parts = [codec.project(change, {"w": {"q": ones}}) for change in (first, second)]
    assert [part["w"]["p"].flatten().tolist() for part in parts] == [[1.0, 0.0, 0.0], [2.0, 0.0, 3.0]]
    frame = codec.orthonormal({"w": {"p": parts[0]["w"]["p"] + parts[1]["w"]["p"]}})
    root = 0.5**0.5
    torch.testing.assert_close(frame["w"]["p"].abs().flatten(), torch.tensor([root, 0.0, root]))
    # P Qᵀ projects the columns on (1, 0, 1) / √2: the first has 1 in a corner, of which each end keeps a half.
    decoded = [codec.decode(with_frame(codec.coefficients(c, frame), frame), c)["w"] for c in (first, second)]
    torch.testing.assert_close(decoded[0], torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0]]))
    torch.testing.assert_close(decoded[1], torch.tensor([[1.5, 1.0, 0.0], [0.0, 0.0, 0.0], [1.5, 1.0, 0.0]]))


@pytest.mark.slow
def test_the_next_basis_has_length_one_and_stays_where_a_sum_is_zero() -> None:
    """By hand: Q is divided by its norm, here √(9 + 16 + 64 + 80) = 13."""
    codec = PowerSGD(rank=2)
    before = {"v": {"q": torch.full((2, 1), 7.0)}, "w": {"q": torch.zeros(2, 2)}}
    summed = {"v": {"q": torch.zeros(2, 1)}, "w": {"q": torch.tensor([[3.0, 4.0], [8.0, 80.0**0.5]])}}
    after = codec.next_basis(summed, before)
    torch.testing.assert_close(after["w"]["q"], summed["w"]["q"] / 13)
    assert after["w"]["q"].norm().item() == pytest.approx(1)
    assert torch.equal(after["v"]["q"], before["v"]["q"])


@pytest.mark.slow
def test_however_large_a_change_is_the_next_one_is_encoded() -> None:
    """Without its length of 1, the basis of one exchange times the matrix of the next would be infinite."""
    codec, change = PowerSGD(rank=1), {"w": 1e20 * normal(20, 1) @ normal(1, 30)}
    basis = codec.first_basis(change, chance())
    for _ in range(2):
        payload = codec.coefficients(change, frame := codec.orthonormal(codec.project(change, basis)))
        basis = codec.next_basis(payload, basis)
    found = codec.decode(with_frame(payload, frame), change)
    torch.testing.assert_close(found["w"], change["w"], atol=1e15, rtol=1e-4)


def test_power_sgd_alone_makes_two_iterations() -> None:
    """P is M Mᵀ M Q of the first basis Q, normalised."""
    codec, change = PowerSGD(rank=1), {"w": normal(5, 7)}
    first = codec.first_basis(change, chance())["w"]["q"].double()
    matrix = change["w"].double()
    frame = matrix @ matrix.T @ matrix @ first
    frame /= frame.norm()
    found = codec.decode(codec.encode(change, chance()), change)["w"]
    torch.testing.assert_close(found, (frame @ frame.T @ matrix).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rank", [1, 3])
def test_power_sgd_alone_is_exact_up_to_its_rank(rank: int) -> None:
    codec = PowerSGD(rank=rank)
    exact = {"w": normal(20, rank) @ normal(rank, 30), "b": normal(20)}
    found = codec.decode(codec.encode(exact, chance()), exact)
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)
    beyond = {"w": normal(20, 30)}
    error = (codec.decode(codec.encode(beyond, chance()), beyond)["w"] - beyond["w"]).norm() ** 2
    spectrum = torch.linalg.svdvals(beyond["w"]) ** 2
    # Never better than the best matrix of that rank, and near it after two iterations.
    assert spectrum[rank:].sum() * 0.999 <= error <= spectrum[rank:].sum() * 1.25


@pytest.mark.parametrize("codec", [Uncompressed(), PowerSGD(rank=2), PowerSGD(rank=2, factors="int8")], ids=repr)
def test_linear_codecs_commute_with_the_sum(codec: Codec) -> None:
    changes = [{"w": normal(20, 30, number=n), "b": normal(9, number=n)} for n in range(4)]
    if isinstance(codec, PowerSGD):
        basis = codec.first_basis(changes[0], chance())
        frame = codec.orthonormal(added([codec.project(change, basis) for change in changes]))
        payloads = [codec.coefficients(change, frame) for change in changes]
        decode = lambda payload: codec.decode(with_frame(payload, frame), changes[0])  # noqa: E731
    else:
        payloads = [codec.encode(change, chance()) for change in changes]
        decode = lambda payload: codec.decode(payload, changes[0])  # noqa: E731
    assert codec.linear
    torch.testing.assert_close(decode(added(payloads)), added([decode(p) for p in payloads]), atol=1e-5, rtol=1e-6)


def added(trees: list[Any]) -> Any:
    total = trees[0]
    for tree in trees[1:]:
        total = records.add(total, tree)
    return total


@pytest.mark.slow
def test_ten_thousand_damaged_payloads_are_refused_or_read() -> None:
    like = {"w": normal(12, 10), "b": normal(12)}
    dice = random.Random(0)
    outcomes = {"read": 0, "refused": 0}
    good = [(codec, pack(codec.encode(like, chance()), codec.forms(like))) for codec in EVERY]
    for _ in range(10_000):
        codec, packed = dice.choice(good)
        try:
            found = codec.decode(unpack(damaged(packed, dice), codec.forms(like)), like)
        except ReplyRefusedError:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
            assert all(found[name].shape == tensor.shape for name, tensor in like.items())
    assert min(outcomes.values()) > 1000, outcomes


def damaged(packed: torch.Tensor, dice: random.Random) -> torch.Tensor:
    """The same with bytes missing, some more, in another shape or dtype, or with other values."""
    kind, at = dice.randrange(8), dice.randrange(len(packed))
    if kind == 0:
        return packed[:at]
    if kind == 1:
        return torch.cat([packed, packed[:at]])
    if kind == 2:
        return packed.to(dice.choice([torch.int64, torch.float64, torch.bool, torch.int8]))
    if kind == 3:
        return packed.expand(3, -1) if dice.random() < 0.5 else packed[None]
    changed = packed.clone()
    if kind == 4:
        changed[at : at + 8] = 255  # NaN in every floating-point type
    else:
        changed[at] = dice.randrange(256)
    return changed


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"a": {"": ((3,), torch.float32)}}, "'a' has the layout .*float64.* but must have .*float32"),
        ({"b": {"": ((2,), torch.float64)}}, "'a' has the layout .* but must have None"),
        ({"a": {"": ((2,), torch.float64)}, "b": {"": ((), torch.bool)}}, "'b' has the layout None"),
    ],
)
def test_a_codec_whose_payload_is_not_what_it_said_fails_where_it_encodes(form: Any, problem: str) -> None:
    with pytest.raises(FedstrataError, match=problem):
        pack({"a": {"": torch.zeros(2).double()}}, form)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "gzip"}, "is not a known codec. Use one of: none, bf16, qsgd, top-k, powersgd"),
        ({"name": "qsgd", "levels": 0}, "levels = 0"),
        ({"name": "top-k", "fraction": 0}, "fraction = 0"),
        ({"name": "powersgd", "rank": 0}, "rank = 0"),
        ({"name": "powersgd", "factors": "int4"}, "factors = 'int4'"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        CODECS.parse(settings)
