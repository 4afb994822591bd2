"""Runs in which the server sees only the sum of the clients' updates (``privacy.sums``)."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from quick import others_long
from secure_methods import METHOD_CASES, NEEDS_REPLIES
from task_cases import CASES as TASKS
from task_cases import prepared_of

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import SpecError
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.secure.requests import MaskedReply

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
        changed = isinstance(section, dict) and "name" not in section
        settings[name] = settings.get(name, {}) | section if changed else section
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


SMALL: dict[str, Any] = {"data": {"name": "digits", "limit": 400}, "model": {"name": "mlp", "hidden": [8]}}
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
    "names of two lengths": {
        **SMALL,
        "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 14},
        "training": {"clients_per_round": 12, "rounds": 2},
        "availability": {"name": "bernoulli", "p": 0.9},
    },
    "noise": {**SMALL, "privacy": {"dp": {"clip": 1.0, "noise": 0.5}}},
    "noise in steps": {
        **SMALL,
        "training": {"local_epochs": None, "local_steps": 4},
        "privacy": {"dp": {"clip": 1.0, "noise": 0.5, "budget": 50.0}},
    },
}


LONG = ("all answer", "kept states", "a server optimiser", "steps instead of epochs", "noise")
"""Cases that are in quick tests together with other settings, such as dropouts, and compared with plain sums."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case in LONG else case for case in CASES]
)
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
    "case",
    others_long(
        [
            *("all answer", "dropouts", "kept states", "a server optimiser", "steps instead of epochs"),
            *("noise", "noise in steps"),
        ],
        ["dropouts", "kept states", "a server optimiser", "noise in steps"],
    ),
)
def test_results_differ_from_plain_sums_by_rounding(case: str) -> None:
    plain, secure = (list(fs.run(spec(sums, **CASES[case]))) for sums in ("plain", "secure"))
    for one, other in zip(plain, secure, strict=True):
        for name in ("clients_trained", "samples", "clients_dropped", "accuracy"):
            assert one[name] == other[name]
        assert one["train_loss"] == pytest.approx(other["train_loss"], abs=1e-5)
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one.get("epsilon") == other.get("epsilon")
        assert other["bytes_up"] > one["bytes_up"]


FEW = ("scaffold", "rebafl", "fedsampling")
"""Methods in quick tests: their clients have states, send messages, or answer two requests."""


def methods() -> list[Any]:
    """Return the methods that need only sums as parameters; all except ``FEW`` are in long tests."""
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in METHOD_CASES]


def of_method(name: str, **sections: Any) -> fs.Experiment:
    """Return the spec of a method."""
    return spec(**{"training": {"rounds": 2}} | METHOD_CASES[name] | sections)


@pytest.mark.slow
@pytest.mark.parametrize("name", methods())
def test_masks_change_no_byte_of_a_method(name: str, tmp_path: Path) -> None:
    """One or two of six clients are offline, or have more samples than ``largest`` and do not answer."""
    results = []
    for masks in (False, True):
        privacy = {"sums": "secure", "simulate_masks": masks, "largest": 330}
        made = of_method(name, privacy=privacy, availability={"name": "bernoulli", "p": 0.9})
        results.append(written(made, tmp_path / str(masks)))
    assert results[0] == results[1]
    assert any(line["clients_trained"] for line in results[0]["records"])


@pytest.mark.slow
@pytest.mark.parametrize("name", methods())
def test_a_method_differs_from_plain_sums_by_rounding(name: str) -> None:
    histories = []
    for sums in ("plain", "secure"):
        with fs.Simulation(fs.prepare(of_method(name, privacy={"sums": sums}))) as simulation:
            histories.append((list(simulation), simulation.evaluated().params))
    (plain, expected), (secure, found) = histories
    for one, other in zip(plain, secure, strict=True):
        differing = {"train_loss", "loss", "seconds", "bytes_up", "bytes_down", "exchanges"}
        for key in one.keys() - differing:
            assert one[key] == other[key], key
        assert one["train_loss"] == pytest.approx(other["train_loss"], abs=1e-5)
        assert other["scaled"] == 0
    assert all(torch.allclose(w, found[name], atol=2e-5) for name, w in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        case if case in ("classification", "next-token, domains") else pytest.param(case, marks=pytest.mark.long)
        for case in TASKS
    ],
)
def test_sums_of_each_task_with_batchnorm(case: str) -> None:
    """The mean is weighted by tokens and pixels, and BatchNorm's statistics are averaged, but not its counters."""
    models, lines = [], []
    secure = {"sums": "secure", "range": 4.0}
    for privacy in ({}, secure, secure | {"simulate_masks": True}):
        with fs.Simulation(prepared_of(case, norm=True, privacy=privacy)) as simulation:
            start = simulation.evaluated()
            lines.append([(line["samples"], line["clients_trained"]) for line in simulation])
            models.append(simulation.evaluated())
    plain, summed, masked = models
    assert lines[0] == lines[1] == lines[2]
    for name, w in plain.params.items():
        assert torch.allclose(w, summed.params[name], atol=1e-5)
        assert torch.equal(summed.params[name], masked.params[name])
    for name, b in summed.buffers.items():
        assert torch.equal(b, masked.buffers[name])
        assert torch.allclose(b, plain.buffers[name] if b.is_floating_point() else start.buffers[name], atol=1e-4)
        assert torch.equal(b, start.buffers[name]) != b.is_floating_point()


STRATIFY: dict[str, dict[str, Any]] = {
    "all answer": {},
    "several steps": {"method": {"name": "stratify", "local_steps": 2}},
    "dropouts": {"availability": {"name": "bernoulli", "p": 0.7}},
    "late clients": {"availability": {"name": "always", "speed_spread": 1.0, "deadline": 0.035}},
    "few samples in a batch": {"privacy": {"min_samples": 5}},
    "masked labels": {"method": {"name": "stratify", "masking": "prf"}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case == "late clients" else pytest.param(case, marks=pytest.mark.long) for case in STRATIFY]
)
def test_stratify_sums_the_gradients_of_each_batch(case: str, tmp_path: Path) -> None:
    own = {"training": {"rounds": 2, "batch_size": 100, "execution": "per-client"}, "method": "stratify"}
    least = STRATIFY[case].get("privacy", {})
    results = []
    for privacy in ({}, {"sums": "secure", "range": 16.0}, {"sums": "secure", "range": 16.0, "simulate_masks": True}):
        made = spec("plain", **own | STRATIFY[case] | {"privacy": least | privacy})
        results.append(written(made, tmp_path / str(len(results))))
    plain, summed, masked = results
    assert summed == masked
    expected, found = (safetensors.torch.load(result["model"]) for result in (plain, summed))
    # Each of the 30 steps starts at a rounded model, so the difference is larger than after one round of training.
    assert all(torch.allclose(w, found[name], atol=1e-3) for name, w in expected.items())
    for one, other in zip(plain["records"], summed["records"], strict=True):
        assert one["samples"] == other["samples"] > 1000
        assert one["train_loss"] == pytest.approx(other["train_loss"], abs=1e-4)
        assert other["scaled"] == 0


@pytest.mark.slow
def test_stratify_skips_batches_of_too_few_clients() -> None:
    """With batches of two samples, at most two clients have samples in a batch, but a sum needs three."""
    training = {"rounds": 1, "batch_size": 2}
    with fs.Simulation(fs.prepare(spec(training=training, method="stratify"))) as simulation:
        before = records.encode(simulation.state.weights)
        record = simulation.step()
        assert records.encode(simulation.state.weights) == before
        assert record["samples"] == 0
        reasons = {event["reason"] for event in simulation.events}
    assert "it has samples of 2 clients, but a secure sum needs 3" in reasons


def test_batches_with_batchnorm_are_refused() -> None:
    with pytest.raises(SpecError, match="model: BatchNorm adds up the clients' statistics in each batch"):
        prepared_of("classification", "stratify", norm=True, privacy={"sums": "secure"})


@pytest.mark.slow
def test_a_client_with_too_few_samples_does_not_answer() -> None:
    """Two of eight clients have fewer than 120 samples, and the sum needs six clients."""
    training, few = {"rounds": 2, "clients_per_round": 8}, {"min_samples": 120}
    for sums in ("plain", "secure"):
        history = list(fs.run(spec(training=training, privacy={"sums": sums} | few)))
        assert [(line["clients_failed"], line["clients_trained"]) for line in history] == [(2, 6), (2, 6)]


@pytest.mark.long
@pytest.mark.parametrize("name", METHOD_CASES)
def test_the_sums_of_a_method_are_equal_on_ray(name: str, on_ray: Callable[..., fs.History], tmp_path: Path) -> None:
    made = of_method(name, availability={"name": "bernoulli", "p": 0.8})
    on_ray(made, out=tmp_path / "ray")
    fs.run(made, out=tmp_path / "local")
    ray, local = (tmp_path / engine / "model.safetensors" for engine in ("ray", "local"))
    assert ray.read_bytes() == local.read_bytes()


def watched(monkeypatch: pytest.MonkeyPatch, see: Callable[[Mapping[int, Any], Mapping[int, Any]], None]) -> None:
    """Call a function with the requests and the replies of each exchange."""
    ask = LocalEngine.ask

    def listen(self: LocalEngine, requests: Mapping[int, Any], *, together: bool) -> Mapping[int, Any]:
        replies = ask(self, requests, together=together)
        see(requests, replies)
        return replies

    monkeypatch.setattr(LocalEngine, "ask", listen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["all answer", "a client above the largest size", "dropouts", "many dropouts", "names of two lengths"]
)
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
    "diversity": ({"evaluation": {"weight_diversity": True}}, "evaluation.weight_diversity = True: the server does"),
    "own tests": ({"evaluation": {"client_test": 0.2}}, "evaluation: metrics of individual clients are not sums"),
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
        "method.aggregator = 'median': compares individual updates",
    ),
    "draws with replacement": (
        {"method": {"name": "fedavg", "client_sampler": {"name": "uniform", "replacement": True}}},
        "method.client_sampler.replacement = True: can draw a client twice",
    ),
    "a sampler by size": (
        {"method": {"name": "fedavg", "client_sampler": "weighted"}},
        "method.client_sampler = 'weighted': asks each client for its number of samples, but with privacy.sums",
    ),
    "sizes of single clients": (
        {"method": {"name": "fedavg", "data_sampler": "fedsampling"}},
        "method.data_sampler.reuse = True: requires each client's reply",
    ),
    "private sizes": (
        {"method": {"name": "fedavg", "data_sampler": {"name": "fedstas", "epsilon": 3}}},
        "method.data_sampler = 'fedstas': asks each client for its number of samples",
    ),
    "weights of strata": (
        {"method": {"name": "fedavg", "aggregator": "stratum"}},
        "method.aggregator = 'stratum': gives each client a weight that depends on its stratum",
    ),
    "single samples": (
        {"method": {"name": "stratify", "mode": "single"}},
        "method.mode = 'single': trains on single samples",
    ),
    "all of many clients": (
        {"method": {"name": "fedavg", "client_sampler": "all"}, "partition": {"clients": 70}},
        "partition.clients = 70: a secure sum needs 3 to 64",
    ),
    "a range that is too large for counts": (
        {"method": "rebafl", "privacy": {"largest": 10**9}},
        "the sums do not fit into 32 bits",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_need_single_updates_are_refused_before_the_first_round(what: str) -> None:
    sections, problem = REFUSED[what]
    with pytest.raises(SpecError, match=problem):
        fs.prepare(spec(**sections))


@pytest.mark.parametrize("name", NEEDS_REPLIES)
def test_methods_that_need_single_replies_are_refused_with_the_reason(name: str) -> None:
    problem = rf"^method\.\w+ = .*: {NEEDS_REPLIES[name]}, but with .* the server sees only sums.* Use another "
    with pytest.raises(SpecError, match=problem):
        fs.prepare(spec(method={"name": name}))


class Favourite(fs.MeanBySize):
    """An aggregator that does not say whether sums are enough."""

    def coefficients(self, selection: Any, returned: Any, samples: Any) -> Any:
        return np.eye(len(returned))[0]


class OwnRounds(fs.FedAvg):
    """A method that does not say whether sums are enough."""

    def run_round(self, federation: Any, state: Any) -> Any:
        return super().run_round(federation, state)


@pytest.mark.parametrize("method", [fs.FedAvg(aggregator=Favourite()), OwnRounds()])
def test_classes_that_do_not_declare_what_they_need_are_refused(method: fs.Method) -> None:
    with pytest.raises(SpecError, match=r"does not declare that the server needs only sums of replies"):
        fs.prepare(spec(method=method))


@pytest.mark.parametrize("key", ["simulate_masks", "range", "buffer_range", "message_range", "largest", "parties"])
def test_settings_without_effect_are_refused(key: str) -> None:
    value: Any = {"simulate_masks": True, "largest": 9, "parties": 4}.get(key, 2.0)
    with pytest.raises(SpecError, match=rf"privacy\.{key} = .*has an effect only with sums = 'secure'"):
        spec("plain", privacy={key: value})


@pytest.mark.slow
def test_the_simulator_of_sites_refuses_secure_sums() -> None:
    pytest.importorskip("nvflare")
    with pytest.raises(SpecError, match=r"privacy\.sums = 'secure': needs certificates, which NVFlare's simulator"):
        fs.run(spec(), engine="nvflare")


def test_a_job_declares_only_requests_for_sums() -> None:
    declaration_of = pytest.importorskip("fedstrata.sites.disclosure").declaration_of
    declaration = declaration_of(spec(evaluation={"client_test": 0.2}), own_data=True)
    assert [allowed.label for allowed in declaration.allowed or ()] == ["Masked of Fit", "SiteStep"]
    assert declaration_of(spec(), own_data=False).discloses == frozenset()
    with pytest.raises(
        SpecError, match=r"privacy\.sums = 'secure': secure sums do not support the reply to SizeReport"
    ):
        declaration_of(spec(method={"name": "fedsampling", "reuse": False}))


def test_masks_need_the_local_engine_and_no_listener() -> None:
    prepared = fs.prepare(spec(privacy={"simulate_masks": True}))
    with pytest.raises(
        SpecError, match=r"privacy\.simulate_masks = True: has no effect with the engine 'ray'\. Use the engine 'local'"
    ):
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
    assert done.stdout.startswith("ExtraMissingError secure sums: optional packages are not installed")
    assert "'fedstrata[secure]'" in done.stdout


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "momentum": ({"training": {"optimizer_state": "keep", "momentum": 0.9, "lr": 0.02}}, "optimizer"),
    "scaffold": ({"method": "scaffold"}, "objective"),
    "feddyn": ({"method": "feddyn"}, "objective"),
    "moon": ({"method": "moon"}, "objective"),
    "fedlesam": ({"method": "fedlesam"}, "objective"),
    "rebafl": ({"method": "rebafl"}, "objective"),
    "fedper": ({"method": "fedper"}, "layers"),
}
"""Specs whose clients keep a state between rounds, and the key of the state."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "masks"),
    others_long(
        itertools.product(STATES, [False, True]), [*((case, True) for case in STATES), (next(iter(STATES)), False)]
    ),
)
def test_a_state_is_kept_only_if_the_sum_was_opened(case: str, masks: bool) -> None:
    """In round 1, a client above the largest size does not answer: no sum, so all states stay as they were."""
    sections, key = STATES[case]
    privacy = {"sums": "secure", "simulate_masks": masks}
    partition = {"name": "dirichlet", "alpha": 0.3, "clients": 3}
    training = {"rounds": 2, "clients_per_round": 3} | sections.get("training", {})
    made = spec(**sections | {"training": training, "partition": partition, "privacy": privacy})
    small = spec(**sections | {"training": training, "partition": partition, "privacy": privacy | {"largest": 400}})
    for each, opened in ((small, False), (made, True)):
        with fs.Simulation(fs.prepare(each)) as simulation:
            before = records.encode(simulation.state)
            record = simulation.step()
            assert (records.encode(simulation.state) == before) != opened
            assert record["clients_trained"] == 3 * opened
            assert simulation.store.clients == ({0, 1, 2} if opened else set())
            if opened:
                assert all(key in simulation.store.get(client) for client in range(3))
                continue
            assert record["clients_failed"] > 0
            last = simulation.events[-1]
            assert last["kind"] == "secure sum failed"
            assert re.fullmatch(r"[0-2] clients answered, but the sum needs 3\.", last["reason"])
