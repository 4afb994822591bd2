"""Keys: in files that only their owner reads, never in a message."""

from __future__ import annotations

import hmac
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tenseal")

from fedstrata.base import records
from fedstrata.base.errors import DataError, FedstrataError
from fedstrata.cli import main
from fedstrata.stratify.masking.enrolment import enrol
from fedstrata.stratify.masking.key_store import FILE, VARIABLE, KeyRing, Keys
from fedstrata.stratify.masking.prf import order_seed, tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    assert main(["keys", "--out", str(made)]) == 0
    return made


@pytest.mark.slow
def test_the_command_writes_a_file_that_only_its_owner_may_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [path.name for path in folder.iterdir()] == [FILE]
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
    before = (folder / FILE).read_bytes()
    assert main(["keys", "--out", str(folder)]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert (folder / FILE).read_bytes() == before
    assert [path.name for path in folder.iterdir()] == [FILE]


@pytest.mark.slow
def test_keys_are_read_as_they_were_written(folder: Path, tmp_path: Path) -> None:
    keys = Keys.make()
    keys.write(tmp_path / "new" / "folder")
    again = Keys.read(tmp_path / "new" / "folder")
    assert again.name == keys.name
    assert again.prf == keys.prf
    sealed = keys.counting.seal([3.0]).serialize()
    opened = again.counting.open_whole(again.counting.load(sealed, length=1), tolerance=0.1)
    assert opened.tolist() == [3]
    assert keys.name != Keys.read(folder).name


def test_files_that_others_may_read_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / FILE
    copy.write_bytes((folder / FILE).read_bytes())
    copy.chmod(0o640)
    with pytest.raises(DataError, match="can be read by other users"):
        Keys.read(tmp_path)


def test_missing_and_damaged_files_are_errors_that_say_what_to_do(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"fedstrata keys.*{VARIABLE}"):
        Keys.read(tmp_path)
    for data in (b"", (folder / FILE).read_bytes()[:1000], records.encode({"format": 1}), records.encode([1])):
        (tmp_path / FILE).unlink(missing_ok=True)
        (tmp_path / FILE).touch(mode=0o600)
        (tmp_path / FILE).write_bytes(data)
        with pytest.raises(DataError, match=r"damaged|fields"):
            Keys.read(tmp_path)


def test_keys_go_into_no_message_no_checkpoint_and_no_pickle() -> None:
    ring = KeyRing()
    keys = ring.make()
    for secret in (ring, keys):
        with pytest.raises(TypeError):
            records.encode({"keys": secret})
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(keys)
    assert keys.prf.hex() not in repr(keys)
    travelled = pickle.loads(pickle.dumps(ring))
    with pytest.raises(
        FedstrataError, match=r"the client does not have the keys, because another process created them\."
    ):
        travelled.open()


def test_a_ring_in_several_processes_shares_its_file(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path, create=True)
    with pytest.raises(DataError, match=r"the key file .* cannot be read"):
        ring.open()
    made = ring.make()
    travelled = pickle.loads(pickle.dumps(ring))
    assert travelled.open().name == made.name
    assert KeyRing(tmp_path, create=True).make().name == made.name


def test_sites_use_the_operators_keys(folder: Path, monkeypatch: pytest.MonkeyPatch, site: Callable[..., Any]) -> None:
    monkeypatch.setenv(VARIABLE, str(folder))
    federation = site([{"a": 2, "b": 1}, {"b": 3}], keys=KeyRing.of_site())
    roll = enrol(federation, "prf")
    assert roll.register.keys.key == Keys.read(folder).name
    assert sorted(roll.totals.tolist()) == [2, 4]


@pytest.mark.slow
def test_a_client_with_other_keys_is_left_out(folder: Path, site: Callable[..., Any]) -> None:
    """Its site got the wrong file: everybody else enrols."""
    import dataclasses

    from fedstrata.stratify.masking.messages import CountReport, SealLabels, TagReport

    for masking, kind in (("prf", TagReport), ("ckks", SealLabels)):
        federation = site([{"a": 2}, {"a": 1, "b": 4}, {"b": 3}], keys=KeyRing(folder))
        federation.engine.tamper[1, kind] = lambda reply: dataclasses.replace(reply, key="0" * 16)
        roll = enrol(federation, masking)
        assert sorted(roll.held) == [0, 2]
        assert roll.totals.tolist() == [2, 3]
        assert "encrypted with the keys" in federation.reasons("refused")[0]
        assert (1, CountReport) not in federation.engine.asked


def test_tags_and_orders_are_those_of_the_key() -> None:
    """HMAC-SHA256, each for its own purpose, by Python's other implementation."""
    for key in (bytes(32), bytes(range(32))):
        by_hand = [
            hmac.new(key, f"fedstrata/{kind}/{what}".encode(), "sha256").digest()
            for kind, what in (("label", "café"), ("order", "3"))
        ]
        assert tag(key, "cafe\u0301") == by_hand[0][:16]
        assert order_seed(key, 3) == int.from_bytes(by_hand[1][:8], "big")


def test_with_a_key_file_nobody_can_guess_the_order_of_the_placeholders(folder: Path) -> None:
    seeds = {KeyRing(folder).order_seed(seed) for seed in range(20)}
    assert len(seeds) == 20
    assert not seeds & set(range(20))
    assert KeyRing(folder).order_seed(3) == KeyRing(folder).order_seed(3)
    assert KeyRing().order_seed(3) == 3  # a simulation is repeatable


@pytest.mark.slow
def test_the_order_in_which_labels_are_presented_is_no_sorted_one(folder: Path, site: Callable[..., Any]) -> None:
    orders = []
    for ring in (KeyRing(), KeyRing(folder)):
        federation = site([dict.fromkeys(range(12), 1)], keys=ring)
        roll = enrol(federation, "prf")
        orders.append([federation.map_of(0)[p] for p in roll.names.tolist()])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
    assert orders[0] != orders[1]
    assert list(range(12)) not in orders
