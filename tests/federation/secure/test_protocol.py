from __future__ import annotations

import importlib
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key as generate_rsa
from secure_world import JOB, LENGTH, Authority, World, authority, identity, plain, question, words

from fedstrata.base.errors import ExtraMissingError, SpecError
from fedstrata.federation.secure import protocol
from fedstrata.federation.secure.certificates import Identity, fingerprint, stranger
from fedstrata.federation.secure.primitives import Part, mask, seal, statement, unseal
from fedstrata.federation.secure.protocol import default_threshold
from fedstrata.federation.secure.server import run
from fedstrata.federation.secure.site import Site


@pytest.mark.slow
@pytest.mark.parametrize("confirm", ["needed", "always"])
@pytest.mark.parametrize("names", ["abc", "abcd", "abcdefg"])
def test_the_server_gets_the_sum_and_all_sites_commit(names: str, confirm: str) -> None:
    world = World(names, confirm=confirm).join()
    for number in range(2):
        assert world.run(number) == world.sum_of(names)
        assert world.committed == set(names)
        world.committed.clear()
    assert world.server.begin(question(2), LENGTH) is None
    assert world.server.events == world.refusals == []


@pytest.mark.slow
def test_without_dropouts_confirm_always_takes_one_more_message() -> None:
    stages = {}
    for confirm in ("needed", "always"):
        world = World("abc", confirm=confirm).join()
        exchange, seen = world.begin(), []
        while exchange.stage not in ("opened", "failed"):
            seen.append(exchange.stage)
            world.step(exchange, "abc")
        stages[confirm] = seen
    assert stages == {"needed": ["masking", "revealing"], "always": ["masking", "voting", "opening"]}


def test_a_site_that_was_lost_is_in_later_sums_of_the_same_roster() -> None:
    world = World("abcd").join()
    first = world.begin()
    while first.stage != "opened":
        world.step(first, "bcd")
    assert plain(first.total) == world.sum_of("bcd")
    for name, message in first.outgoing.items():
        world.answer(name, message)
    assert world.committed == set("bcd")
    assert [(name, error.check) for name, error in world.refusals] == [("a", "exchange")]
    assert world.run(1) == world.sum_of("abcd")


def test_sites_that_dealt_no_shares_are_left_out_and_the_threshold_stays() -> None:
    world = World("abcde").join(offline="e")
    assert world.server.members == list("abcd")
    assert world.run() == world.sum_of("abcd")
    exchange = world.begin(1)
    world.step(exchange, "abc", 1)  # three sites of a roster of five, whose threshold is four
    assert exchange.stage == "failed"


def test_a_masked_vector_differs_in_every_exchange_and_from_the_vector() -> None:
    world = World("abc", exchanges=3).join()
    world.vectors["a"][:] = 7
    seen = [world.vectors["a"]]
    for number in range(3):
        exchange = world.begin(number)
        seen.append(words(world.answer("a", exchange.outgoing["a"], number)))
        exchange.outgoing.clear()
    values = [int(word) for vector in seen[1:] for word in vector]
    assert len(set(values)) == 3 * LENGTH
    assert all((one != other).all() for one, other in pairwise(seen))


def test_a_refused_message_changes_nothing() -> None:
    world = World("abc").join()
    exchange = world.begin()
    begin = exchange.outgoing["a"]
    assert world.answer("a", protocol.Begin(begin.roster, 7, begin.delivery)) is None
    assert world.answer("a", protocol.Begin(bytes(32), 0, begin.delivery)) is None
    assert [error.check for _, error in world.refusals] == ["exchange", "roster"]
    assert plain(run(exchange, world.answer)) == world.sum_of("abc")


@pytest.mark.slow
def test_sites_reveal_shares_for_all_only_if_all_have_signed_and_the_policy_allows_it() -> None:
    for confirm, missing, check in [("always", "", "confirm"), ("needed", "b", "all")]:
        world = World("abcd", confirm=confirm).join()
        exchange = world.begin()
        masked = {name: world.answer(name, begin) for name, begin in exchange.outgoing.items()}
        present = {name: each.present for name, each in masked.items() if name != missing}
        assert world.answer("a", protocol.RevealAll(0, present)) is None
        assert [error.check for _, error in world.refusals] == [check]


def test_boxes_may_be_delivered_twice() -> None:
    world = World("abc").join()
    world.answer("a", world.begin().outgoing["a"])  # the reply is lost, so the server sends the boxes again
    second = world.begin(1)
    assert all(begin.delivery is not None for begin in second.outgoing.values())  # type: ignore[attr-defined]
    assert plain(run(second, lambda name, message: world.answer(name, message, 1))) == world.sum_of("abc")


def test_default_thresholds_tolerate_the_documented_numbers_of_colluders() -> None:
    tolerated = {n: min(2 * default_threshold(n) - n - 1, default_threshold(n) - 2) for n in range(3, 65)}
    assert [tolerated[n] for n in (3, 4, 5, 10, 20)] == [1, 1, 2, 3, 7]
    assert all(3 <= default_threshold(n) <= n for n in tolerated)
    assert all(m >= (n - 1) // 3 for n, m in tolerated.items())
    for n in tolerated:
        for m in range(n - 1):
            t = default_threshold(n, m)
            assert 2 * t > n + m
            assert m <= t - 2 <= n - 2
            assert t == default_threshold(n) if m <= tolerated[n] else t > default_threshold(n)


def test_pair_masks_cancel_and_either_key_gives_both() -> None:
    sites = {name: Site(JOB, identity(name), authority().trust, exchanges=1) for name in "ab"}
    packages = {name: site.package() for name, site in sites.items()}
    seeds = {name: site._own.seeds[0]["pair"] for name, site in sites.items()}  # type: ignore[union-attr]
    keys = {name: protocol.exchange_key(JOB, name, 0, seed) for name, seed in seeds.items()}
    one = protocol.pair_mask(b"c" * 32, keys["a"], "a", packages["b"], 0, 9)
    other = protocol.pair_mask(b"c" * 32, keys["b"], "b", packages["a"], 0, 9)
    assert (one + other == 0).all()
    assert (one != 0).all()
    assert (one != protocol.pair_mask(b"d" * 32, keys["a"], "a", packages["b"], 0, 9)).all()


def test_every_bit_of_a_seed_changes_the_mask() -> None:
    """Another framework folded seeds to 32 bits, so that masks could be guessed."""
    seed = bytes(range(16))
    others = [bytes(byte ^ (1 << bit) * (i == place) for i, byte in enumerate(seed))
              for place in range(16) for bit in range(8)]  # fmt: skip
    masks = {protocol.self_mask(b"c" * 32, "a", each, 4).tobytes() for each in [seed, *others]}
    assert len(masks) == 129


def test_a_mask_is_the_key_stream_of_chacha20() -> None:
    """The key stream for the zero key and nonce: RFC 8439, A.1, test vector 1."""
    stream = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert mask(bytes(32), 8).tobytes() == np.frombuffer(stream, "<u4").astype(np.uint32).tobytes()


def test_masks_are_uniform() -> None:
    bits = np.unpackbits(mask(b"k" * 32, 20_000).view(np.uint8)).reshape(-1, 32).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 5 * 0.5 / np.sqrt(20_000)


PLAIN = st.sampled_from([b"", b"a", b"1:", b"s1:", "", "a", "b1:a", "\u00e4", 0, 1, 11, -1])
PARTS = st.one_of(PLAIN, st.lists(PLAIN, max_size=2))


@pytest.mark.slow
@settings(max_examples=50)
@given(st.lists(PARTS, max_size=3), st.lists(PARTS, max_size=3))
def test_different_parts_give_different_statements(first: list[Part], second: list[Part]) -> None:
    assert (statement("x", *first) == statement("x", *second)) == (first == second)
    assert statement("x", *first) != statement("y", *first)


def test_parts_do_not_run_together() -> None:
    assert statement("x", "a", "b") != statement("x", "asb")
    assert statement("x", ["a"], "b") != statement("x", ["a", "b"])


def test_a_box_opens_only_with_its_key_and_public_bytes() -> None:
    key, other = b"k" * 32, b"l" * 32
    box = seal(key, b"shares", b"public")
    assert unseal(key, box, b"public") == b"shares"
    changed = box[:-1] + bytes([box[-1] ^ 1])
    for attempt in [(other, box, b"public"), (key, box, b"other"), (key, changed, b"public"), (key, b"", b"public")]:
        assert unseal(*attempt) is None


@pytest.mark.slow
def test_keys_of_kits_which_are_rsa_sign_too() -> None:
    key = generate_rsa(65537, 2048)
    made = Identity.of(authority().certificate("rsa", key), key)
    assert authority().trust.defect("rsa", made.certificate, made.sign(b"text"), b"text") == ""
    assert "signature" in authority().trust.defect("rsa", made.certificate, made.sign(b"text"), b"other")


def test_certificates_are_refused_with_the_reason() -> None:
    key, trust = Ed25519PrivateKey.generate(), authority().trust
    good = identity("a")

    def defect(made: Identity, name: str = "a", signature: bytes | None = None) -> str:
        return trust.defect(name, made.certificate, signature or made.sign(b"text"), b"text")

    assert defect(good) == ""
    assert defect(good, "b") == "its certificate has another name"
    assert defect(good, signature=bytes(64)) == "the signature of its certificate is wrong"
    assert defect(Authority().identity("a")) == "its certificate was not issued by the root certificate"
    for days in [(-3, -1), (1, 3)]:
        made = Identity.of(authority().certificate("a", key, days), key)
        assert defect(made) == "its certificate is not valid today"
    assert defect(Identity("a", b"nonsense", good.sign)) == "its certificate cannot be read (ValueError)"
    curve = authority().certificate("a", generate_private_key(SECP256R1()))  # type: ignore[arg-type]
    assert defect(Identity("a", curve.public_bytes(_der()), good.sign)) == "the signature of its certificate is wrong"


def _der() -> object:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.DER


def test_peers_are_known_by_the_fingerprints_of_their_certificates() -> None:
    known, unknown = identity("a").certificate, identity("b").certificate
    assert not stranger(known, {fingerprint(known)})
    assert stranger(unknown, {fingerprint(known)})
    assert not stranger(unknown, None)


def test_sums_of_fewer_than_three_sites_are_never_allowed() -> None:
    with pytest.raises(SpecError, match=r"parties = 2: must be at least 3.*Use a larger number"):
        Site(JOB, identity("a"), authority().trust, parties=2)


@pytest.mark.parametrize("module", ["primitives", "certificates"])
def test_without_the_library_the_error_names_the_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"fedstrata.federation.secure.{module}")
    for name in ("cryptography", "cryptography.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ExtraMissingError, match=r"secure sums: optional packages are not installed.*'fedstrata\[secure\]"
    ):
        importlib.import_module(f"fedstrata.federation.secure.{module}")
