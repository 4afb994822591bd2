"""Stratify trains alike under every mode of masking, and the server never receives what it must not know."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quick import others_long

pytest.importorskip("tenseal")
import tenseal

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import ExtraMissingError, SpecError
from fedstrata.base.jsonl import read_jsonl
from fedstrata.clients.client import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.runs.simulation import Simulation, make_context, run_prepared
from fedstrata.stratify.masking.key_store import KeyRing, Keys
from fedstrata.stratify.masking.messages import PublicKeys
from fedstrata.stratify.messages import Reserve

MODES = ("none", "prf", "ckks")


def spec(masking: str, **options: Any) -> fs.Experiment:
    return fs.Experiment(
        data=fs.Data("digits"),
        partition=fs.Classes(per_client=3, clients=5),
        method=fs.Stratify(**{"masking": masking, "cap": 30, **options}),
        training=fs.Training(rounds=2, batch_size=50),
    )


def trained(masking: str, **options: Any) -> fs.History:
    return fs.run(spec(masking, **options))


COMPARED = ("accuracy", "loss", "scheduled", "samples", "train_loss", "clients_invited", "bytes_up", "bytes_down")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"selection": "weighted", "schedule": "uncapped"}, {"mode": "single", "selection": "weighted"}],
    ids=("batch", "weighted", "single"),
)
def test_every_mode_trains_the_same_model(options: dict[str, Any]) -> None:
    runs = {masking: trained(masking, **options) for masking in MODES}
    plain = runs.pop("none")
    for masking, run in runs.items():
        for name, tensor in plain.params.items():
            assert torch.equal(tensor, run.params[name]), (masking, name)
        for a, b in zip(plain, run, strict=True):
            assert {key: a[key] for key in COMPARED if key in a} == {key: b[key] for key in COMPARED if key in b}


@pytest.mark.slow
def test_what_can_be_set_aside_tells_how_many_samples_of_a_placeholder_there_are() -> None:
    """A server that asks for more than a client has learns n_k(p), and never which label it is."""
    with Simulation(fs.prepare(spec("prf"))) as simulation:
        federation, holders = simulation.federation, simulation.state.holders
        federation.begin(1)
        theirs = [p for place, p in enumerate(holders.placeholders.tolist()) if 0 in holders.of_placeholder(place)[0]]
        wanted, none = torch.tensor(theirs).repeat_interleave(500), torch.zeros(0, dtype=torch.int64)
        question = Reserve(1, torch.zeros_like(wanted), wanted, none, True)
        (reply,) = federation.ask([0], question).values()
        prepared = simulation.prepared
        labels = prepared.data.y_train[prepared.assignment[0]]
    served = (~reply.missing).reshape(len(theirs), -1).sum(dim=1)
    assert sorted(served.tolist()) == sorted(torch.unique(labels, return_counts=True)[1].tolist())


@pytest.mark.slow
def test_a_masked_run_resumes_without_enrolling_again(tmp_path: Path) -> None:
    whole = fs.run(spec("ckks"), out=tmp_path / "whole")
    half = spec("ckks").model_copy(update={"evaluation": fs.Evaluation(checkpoint_every=1)})

    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fs.run(half, out=tmp_path / "half", callbacks=[stop])
    resumed = fs.run(half, out=tmp_path / "half", resume=True)
    for name, tensor in whole.params.items():
        assert torch.equal(tensor, resumed.params[name])
    events = read_jsonl(tmp_path / "half" / "events.jsonl")
    assert sum(event["kind"] == "enrolled" for event in events) == 1


def test_too_many_classes_and_a_missing_extra_are_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fs.prepare(spec("none")).config
    with pytest.raises(SpecError, match="at most 60000 classes"):
        fs.Stratify(masking="ckks").check(type(config)(**{**vars(config), "strata": 60_001}))
    for unknown in ("rot13", "ckks-paper"):
        with pytest.raises(SpecError, match=f"method.masking = '{unknown}': .*'none', 'prf' or 'ckks'"):
            fs.Experiment.from_table({"method": {"name": "stratify", "masking": unknown}})
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(ExtraMissingError, match=re.escape("fedstrata[he]")):
        fs.prepare(spec("prf"))


NAMES = ["melanoma in situ", "naevus, benign", "-7700770077", "carcinoma"]


@pytest.fixture
def listened(wire: Any) -> Callable[[str], tuple[Any, KeyRing]]:
    """Runs Stratify on classes with names that stick out, and gives the wire and the clients' keys."""

    def run(masking: str, selection: str = "uniform") -> tuple[Any, KeyRing]:
        generator = np.random.default_rng(0)
        y = np.array(NAMES * 30)
        x = generator.normal(size=(120, 4)).astype(np.float32)
        spec = fs.Experiment(
            partition=fs.Dirichlet(alpha=0.5, clients=5),
            method=fs.Stratify(masking=masking, selection=selection),
            training=fs.Training(rounds=1, batch_size=16, execution="per-client"),
        )
        prepared, ring = fs.prepare(spec, data=(x, y, x, y)), KeyRing()
        tapped = wire(LocalEngine(make_context(prepared, ring), StateStore()))
        run_prepared(prepared, engine=tapped)
        return tapped, ring

    return run


def secrets_of(keys: Keys) -> list[bytes]:
    """Pieces of every secret, as they would stand in any message that held it."""
    pieces = [keys.prf, keys.prf.hex().encode()]
    for opener in (keys.counting, keys.comparing):
        options = {"save_public_key": False, "save_galois_keys": False, "save_relin_keys": False}
        with_key = opener.context.serialize(save_secret_key=True, **options)
        without = opener.context.serialize(save_secret_key=False, **options)
        assert len(with_key) > len(without) + 10_000
        own = with_key[len(without) + 500 : -500]
        pieces += [own[at : at + 48] for at in range(0, len(own) - 48, 4096)]
    return pieces


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masking", "selection"),
    others_long(
        [("prf", "uniform"), ("prf", "weighted"), ("ckks", "uniform"), ("ckks", "weighted")],
        [("prf", "weighted"), ("ckks", "uniform"), ("ckks", "weighted")],
    ),
)
def test_the_server_receives_no_label_and_no_secret(
    masking: str, selection: str, listened: Callable[..., tuple[Any, KeyRing]]
) -> None:
    wire, ring = listened(masking, selection)
    transcript = b"\n".join(wire.received)
    assert len(wire.received) > 15
    for piece in secrets_of(ring.open()):
        assert piece not in transcript
    for name in NAMES:
        assert name.encode() not in transcript
        assert name.encode("utf-16-le") not in transcript
    assert struct.pack("<q", -7700770077) not in transcript
    assert struct.pack("<d", -7700770077.0) not in transcript
    kinds = {type(records.decode(message)).__name__ for message in wire.received}
    assert "LabelReply" not in kinds
    assert ("ShareReply" in kinds) == (selection == "weighted")


@pytest.mark.slow
def test_the_scan_would_find_what_it_looks_for(listened: Callable[..., tuple[Any, KeyRing]]) -> None:
    _, ring = listened("prf")
    keys = ring.open()
    leak = b"".join(part for part in keys._parts.values())
    found = [piece in leak for piece in secrets_of(keys)]
    assert sum(found) >= len(found) - 1  # all but the key in hexadecimal


@pytest.mark.slow
def test_the_contexts_that_the_server_received_cannot_decrypt(listened: Callable[..., tuple[Any, KeyRing]]) -> None:
    wire, _ = listened("ckks")
    messages = [records.decode(message) for message in wire.received]
    keys = next(message for message in messages if isinstance(message, PublicKeys))
    for data in (keys.counting, keys.comparing):
        context = tenseal.context_from(data)
        assert not context.has_secret_key()
        with pytest.raises(ValueError, match="doesn't hold a secret_key"):
            tenseal.ckks_vector(context, [1.0]).decrypt()
        with pytest.raises(ValueError, match="Secret"):
            context.secret_key()


@pytest.mark.slow
def test_replies_to_comparisons_are_positions_only(listened: Callable[..., tuple[Any, KeyRing]]) -> None:
    wire, _ = listened("ckks")
    messages = [records.decode(message) for message in wire.received]
    replies = [message for message in messages if type(message).__name__ == "CompareReply"]
    assert replies
    for reply in replies:
        assert vars(reply).keys() == {"places"}
        assert reply.places.dtype == torch.int64


def test_names_that_only_look_different_share_a_placeholder() -> None:
    """A site may write é as one character, another as two: the hash sees the same bytes."""
    from fedstrata.stratify.masking.prf import tag

    assert tag(bytes(32), "caf\u00e9") == tag(bytes(32), "cafe\u0301")
    assert tag(bytes(32), "caf\u00e9") != tag(bytes(32), "cafe")
    assert tag(bytes(32), "1") != tag(bytes(32), "-1") != tag(bytes(31) + b"1", "-1")
