"""Runs in which the server sees only the sum of the clients' updates (``privacy.sums``)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import SpecError
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.secure.requests import MaskedReply
from fedstrata.methods.base import METHODS
from fedstrata.sites.disclosure import declaration_of

pytest.importorskip("cryptography")


def spec(sums: str = "secure", **sections: Any) -> fs.Experiment:
    """Return a spec whose runs have eight clients of different sizes, six of which are invited in a round."""
    settings: dict[str, Any] = {
        "seed": 3,
        "training": {"rounds": 3, "clients_per_round": 6, "local_epochs": 1, "workers": 1},
        "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 8},
        "evaluation": {"every": 1},
        "privacy": {"sums": sums},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section if isinstance(section, dict) else section
    return fs.Experiment(**settings)


TIMED = {"seconds", "checksum"}
"""The time that a round took, and the checksum of a line that contains it."""


def written(made: fs.Experiment, folder: Path, **how: Any) -> dict[str, Any]:
    """Return the model, the records without times, and the events of a run."""
    fs.run(made, out=folder, **how)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    events = (folder / "events.jsonl").read_text(encoding="utf-8") if (folder / "events.jsonl").exists() else ""
    return {
        "model": (folder / "model.safetensors").read_bytes(),
        "records": [{key: value for key, value in line.items() if key not in TIMED} for line in lines],
        "events": events,
    }


CASES: dict[str, dict[str, Any]] = {
    "all answer": {},
    "dropouts": {"availability": {"name": "bernoulli", "p": 0.8}},
    "many dropouts": {"availability": {"name": "bernoulli", "p": 0.35}},
    "late clients": {"availability": {"name": "always", "speed_spread": 1.0, "deadline": 0.6, "bandwidth_up": 1e5}},
    "a client above the largest size": {"privacy": {"largest": 300}},
    "updates out of range": {"privacy": {"range": 0.01}},
    "states of clients": {
        "training": {"optimizer_state": "keep", "momentum": 0.9, "lr": 0.01},
        "availability": {"name": "bernoulli", "p": 0.7},
        "privacy": {"largest": 300},
    },
    "kept states": {"training": {"optimizer_state": "keep", "momentum": 0.9, "lr": 0.02}},
    "a server optimiser": {"method": {"name": "fedavg", "aggregator": {"name": "size", "server": "adam"}}},
    "steps instead of epochs": {"training": {"local_epochs": None, "local_steps": 4}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_masks_change_no_byte_of_a_run(case: str, tmp_path: Path) -> None:
    sections = CASES[case]
    results = []
    for masks in (False, True):
        privacy = sections.get("privacy", {}) | {"simulate_masks": masks}
        results.append(written(spec(**{**sections, "privacy": privacy}), tmp_path / str(masks)))
    assert results[0]["records"] == results[1]["records"]
    assert results[0] == results[1]
    failed = results[0]["events"].count("secure sum failed")
    trained = [line["clients_trained"] for line in results[0]["records"]]
    assert failed == trained.count(0)
    assert (failed > 0) == (case == "many dropouts")
    if case in ("late clients", "a client above the largest size", "states of clients"):
        assert any(line["clients_late"] + line["clients_failed"] for line in results[0]["records"])
    assert (sum(line["scaled"] for line in results[0]["records"]) > 0) == (case == "updates out of range")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["all answer", "dropouts", "kept states", "a server optimiser", "steps instead of epochs"]
)
def test_results_differ_from_plain_sums_by_rounding(case: str) -> None:
    plain, secure = (list(fs.run(spec(sums, **CASES[case]))) for sums in ("plain", "secure"))
    for one, other in zip(plain, secure, strict=True):
        for name in ("clients_trained", "samples", "clients_dropped", "accuracy"):
            assert one[name] == other[name]
        assert one["train_loss"] == pytest.approx(other["train_loss"], abs=1e-5)
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert other["bytes_up"] > one["bytes_up"]


def watched(monkeypatch: pytest.MonkeyPatch, see: Callable[[Mapping[int, Any], Mapping[int, Any]], None]) -> None:
    """Call a function with the requests and the replies of each exchange."""
    ask = LocalEngine.ask

    def listen(self: LocalEngine, requests: Mapping[int, Any], *, together: bool) -> Mapping[int, Any]:
        replies = ask(self, requests, together=together)
        see(requests, replies)
        return replies

    monkeypatch.setattr(LocalEngine, "ask", listen)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["all answer", "a client above the largest size", "dropouts", "many dropouts"])
def test_the_bytes_in_the_record_are_those_of_the_messages(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {"up": 0, "down": 0}

    def count(requests: Mapping[int, Any], replies: Mapping[int, Any]) -> None:
        sent["down"] += sum(map(records.size, requests.values()))
        sent["up"] += sum(records.size(each) for each in replies.values() if isinstance(each, records.Message))

    watched(monkeypatch, count)
    privacy = CASES[case].get("privacy", {}) | {"simulate_masks": True}
    history = list(fs.run(spec(**{**CASES[case], "privacy": privacy})))
    assert sum(line["bytes_up"] for line in history) == sent["up"]
    # A round with too few clients ends before their question is sent, but the log counts it when it looks for them.
    assert (sum(line["bytes_down"] for line in history) == sent["down"]) == (case != "many dropouts")


@pytest.mark.slow
@pytest.mark.parametrize("masks", [False, True])
def test_late_clients_count_in_the_threshold(masks: bool) -> None:
    """Of six clients that exchanged shares, five must answer, and not three of the four that are in time."""
    made = spec(
        availability={"name": "always", "speed_spread": 1.0, "deadline": 0.35}, privacy={"simulate_masks": masks}
    )
    history = list(fs.run(made))
    assert [(line["clients_late"], line["clients_trained"]) for line in history] == [(2, 0), (0, 6), (2, 0)]


@pytest.mark.slow
def test_the_server_sees_no_vector_with_masks_but_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[bool, list[dict[int, np.ndarray]]] = {False: [], True: []}
    for masks in seen:

        def keep(requests: Mapping[int, Any], replies: Mapping[int, Any], masks: bool = masks) -> None:
            vectors = {client: each for client, each in replies.items() if isinstance(each, MaskedReply)}
            if vectors:
                words = {client: each.vector.numpy().view(np.uint32) for client, each in vectors.items()}
                seen[masks].append(words)

        with monkeypatch.context() as patch:
            watched(patch, keep)
            fs.run(spec(privacy={"simulate_masks": masks}))
    assert len(seen[False]) == len(seen[True]) == 3
    for plain, masked in zip(seen[False], seen[True], strict=True):
        assert plain.keys() == masked.keys()
        for client, vector in plain.items():
            assert (masked[client] == vector).sum() <= 1  # of a few thousand elements, one in 2³² is equal by chance
        assert (sum(masked.values()) != sum(plain.values())).any()  # self masks hide the sum, too


@pytest.mark.slow
def test_a_run_with_masks_can_be_resumed(tmp_path: Path) -> None:
    made = spec(privacy={"simulate_masks": True}, availability={"name": "bernoulli", "p": 0.8})
    whole = written(made, tmp_path / "whole")
    first = made.model_copy(update={"training": made.training.model_copy(update={"rounds": 2})})
    fs.run(first, out=tmp_path / "parts")
    resumed = written(made, tmp_path / "parts", resume=True)
    assert resumed["model"] == whole["model"]
    assert resumed["records"] == whole["records"]


@pytest.mark.long
def test_sums_are_equal_on_ray(on_ray: Callable[..., fs.History]) -> None:
    history = list(on_ray(spec(**CASES["dropouts"])))
    expected = list(fs.run(spec(**CASES["dropouts"])))
    assert [line["loss"] for line in history] == [line["loss"] for line in expected]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an attack": ({"attack": {"name": "sign-flip", "clients": [1]}}, "attack = 'sign-flip': the server does not see"),
    "a codec": ({"communication": {"up": "powersgd"}}, "communication: codecs have no secure sum yet"),
    "diversity": ({"evaluation": {"weight_diversity": True}}, "evaluation.weight_diversity = True: the server does"),
    "own tests": ({"evaluation": {"client_test": 0.2}}, "evaluation: the metrics of single clients are no sums"),
    "noise": (
        {"privacy": {"dp": {"clip": 1.0, "noise": 1.0}}},
        "privacy.dp: is not supported with privacy.sums = 'secure' yet",
    ),
    "two clients": ({"training": {"clients_per_round": 2}}, "training.clients_per_round = 2: a secure sum needs 3 to"),
    "many clients": (
        {"training": {"clients_per_round": 65}, "partition": {"clients": 70}},
        "training.clients_per_round = 65: a secure sum needs 3 to 64",
    ),
    "many parties": ({"privacy": {"parties": 7}}, "training.clients_per_round = 6: a secure sum needs 7 to 64"),
    "few parties": ({"privacy": {"parties": 2}}, "privacy.parties = 2"),
    "a large bound": ({"privacy": {"largest": 10**9}}, r"privacy.sums = 'secure': the sums do not fit into 32 bits"),
    "a robust aggregator": (
        {"method": {"name": "fedavg", "aggregator": "median"}},
        "method.aggregator = 'median': compares single updates",
    ),
    "equal weights": (
        {"method": {"name": "fedavg", "aggregator": "mean"}},
        "method.aggregator = 'mean': is not implemented yet",
    ),
    "draws with replacement": (
        {"method": {"name": "fedavg", "client_sampler": {"name": "uniform", "replacement": True}}},
        "method.client_sampler = 'uniform': draws clients",
    ),
    "another data sampler": (
        {"method": {"name": "fedavg", "data_sampler": "fedsampling"}},
        "method.data_sampler = 'fedsampling': asks clients for more",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_need_single_updates_are_refused_before_the_first_round(what: str) -> None:
    sections, problem = REFUSED[what]
    with pytest.raises(SpecError, match=problem):
        fs.prepare(spec(**sections))


def test_a_model_with_buffers_is_refused() -> None:
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    with pytest.raises(SpecError, match=r"model.*: has buffers, which have no secure sum yet"):
        fs.prepare(spec(), model=norm)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "fedavg"])
def test_other_methods_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(SpecError, match=r"^method\.\w+ = .*(secure sum|privacy\.sums).*Use method\.name = 'fedavg'"):
        fs.prepare(spec(method={"name": name}))


@pytest.mark.parametrize("key", ["simulate_masks", "range", "largest", "parties"])
def test_settings_without_effect_are_refused(key: str) -> None:
    value: Any = {"simulate_masks": True, "range": 2.0, "largest": 9, "parties": 4}[key]
    with pytest.raises(SpecError, match=rf"privacy\.{key} = .*has an effect only with sums = 'secure'"):
        spec("plain", privacy={key: value})


def test_the_simulator_of_sites_refuses_secure_sums() -> None:
    pytest.importorskip("nvflare")
    with pytest.raises(SpecError, match=r"privacy\.sums = 'secure': needs certificates, which NVFlare's simulator"):
        fs.run(spec(), engine="nvflare")


def test_a_job_declares_only_requests_for_sums() -> None:
    declaration = declaration_of(spec(evaluation={"client_test": 0.2}), own_data=True)
    assert [allowed.label for allowed in declaration.allowed or ()] == ["Masked of Fit", "SiteStep"]
    assert declaration_of(spec(), own_data=False).discloses == frozenset()
    with pytest.raises(SpecError, match=r"privacy\.sums = 'secure': the reply to LabelReport has no secure sum"):
        declaration_of(spec(method={"name": "stratify"}))


def test_masks_need_the_local_engine_and_no_listener() -> None:
    prepared = fs.prepare(spec(privacy={"simulate_masks": True}))
    with pytest.raises(SpecError, match=r"privacy\.simulate_masks = True: is not for the engine 'ray'\. Use 'local'"):
        fs.Simulation(prepared, engine="ray")
    with pytest.raises(SpecError, match=r"privacy\.sums = 'secure': a listener, such as an audit"):
        fs.Simulation(prepared, listener=lambda round, replies: None)


@pytest.mark.slow
def test_without_the_library_a_run_is_refused_before_it_starts() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import fedstrata as fs\n"
        "from fedstrata.base.errors import FedstrataError\n"
        "fs.prepare(fs.Experiment())\n"
        "try: fs.prepare(fs.Experiment(privacy={'sums': 'secure'}))\n"
        "except FedstrataError as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ExtraMissingError secure sums needs an extra")
    assert "'fedstrata[secure]'" in done.stdout


def test_a_state_is_kept_only_if_the_sum_was_opened() -> None:
    """A client above the largest size does not answer: no sum, so the momentum of the others stays empty."""
    made = spec(
        training={"rounds": 1, "clients_per_round": 3, "optimizer_state": "keep", "momentum": 0.9},
        partition={"name": "dirichlet", "alpha": 0.3, "clients": 3},
        privacy={"simulate_masks": True, "largest": 400},
    )
    with fs.Simulation(fs.prepare(made)) as simulation:
        before = {name: w.clone() for name, w in simulation.state.weights.params.items()}
        record = simulation.step()
        assert record["clients_failed"] > 0
        assert record["clients_trained"] == 0
        assert simulation.store.clients == set()
        assert all(torch.equal(w, before[name]) for name, w in simulation.state.weights.params.items())
        last = simulation.events[-1]
        assert last["kind"] == "secure sum failed"
        assert re.fullmatch(r"[0-2] clients answered, but the sum needs 3\.", last["reason"])
