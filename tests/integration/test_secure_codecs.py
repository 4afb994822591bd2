"""Runs in which the server sees only the sums of the two factors of compressed updates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quick import others_long
from task_cases import prepared_of

import fedstrata as fs
from fedstrata.base import records
from fedstrata.base.errors import SpecError
from fedstrata.clients.client import Client
from fedstrata.clients.handlers.encoded import MEMORY, Residual
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.communication.messages import Coefficients, Encoded
from fedstrata.federation.engine import Failure
from fedstrata.federation.messages import Params
from fedstrata.federation.secure import simulated
from fedstrata.federation.secure.requests import Masked, MaskedReply, Step, words_of
from fedstrata.stratify.messages import Gradient

pytest.importorskip("cryptography")

POWERSGD = {"up": {"name": "powersgd", "rank": 2}}


def spec(method: Any = "stratify", **sections: Any) -> fs.Experiment:
    """Return a spec whose runs have eight clients, compress updates with PowerSGD and sum them securely."""
    training = {"rounds": 2, "clients_per_round": 6, "local_epochs": 1, "batch_size": 100, "workers": 1}
    table: dict[str, Any] = {
        "seed": 3,
        "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 8},
        "communication": POWERSGD,
        "evaluation": {"every": 1},
    }
    table |= sections
    table["training"] = training | {"execution": "per-client"} | sections.get("training", {})
    table["privacy"] = {"sums": "secure"} | sections.get("privacy", {})
    return fs.Experiment(method=method, **table)


def written(made: fs.Experiment, folder: Path, **how: Any) -> dict[str, Any]:
    """Return the model, the records without times, and the events of a run."""
    fs.run(made, out=folder, **how)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    events = (folder / "events.jsonl").read_text(encoding="utf-8") if (folder / "events.jsonl").exists() else ""
    return {
        "model": (folder / "model.safetensors").read_bytes(),
        "records": [{key: line[key] for key in line.keys() - {"seconds", "checksum"}} for line in lines],
        "events": events,
    }


FEW = {"name": "digits", "limit": 600}
"""Data for six batches per round, because each batch of ``stratify`` has two secure sums."""
LATE = {"name": "always", "speed_spread": 1.0, "deadline": 0.035}
CASES: dict[str, dict[str, Any]] = {
    "all answer": {},
    "several steps": {"method": {"name": "stratify", "local_steps": 2}},
    "dropouts": {"availability": {"name": "bernoulli", "p": 0.7}},
    "late clients": {"availability": LATE},
    "few samples in a batch": {"privacy": {"min_samples": 5}},
    "masked labels": {"method": {"name": "stratify", "masking": "prf"}},
    "gradients out of range": {"privacy": {"range": 1e-3}},
    "fedavg": {"method": "fedavg", "availability": {"name": "bernoulli", "p": 0.9}},
    "fedavg, equal weights": {"method": {"name": "fedavg", "aggregator": "mean"}},
    "fednova": {"method": "fednova"},
    "feddyn": {"method": "feddyn"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [each if each == "dropouts" else pytest.param(each, marks=pytest.mark.long) for each in CASES]
)
def test_masks_change_no_byte_of_a_compressed_run(case: str, tmp_path: Path) -> None:
    results = []
    for masks in (False, True):
        privacy = {"simulate_masks": masks} | CASES[case].get("privacy", {})
        made = spec(**CASES[case] | {"privacy": privacy, "data": FEW})
        results.append(written(made, tmp_path / str(masks)))
    assert results[0] == results[1]
    assert all(line["samples"] > 200 for line in results[0]["records"])
    assert (sum(line["scaled"] for line in results[0]["records"]) > 0) == ("range" in case)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["stratify", "fedavg", "fednova"])
def test_a_first_update_differs_from_that_of_plain_sums_by_rounding(method: str) -> None:
    """Later updates differ more: FedAvg's next factor Q is weighted by size, and PowerSGD amplifies rounding."""
    training = {"rounds": 1} | ({"batch_size": 2000} if method == "stratify" else {})
    aggregator = {} if method == "stratify" else {"data_sampler": "all"}
    models = []
    for privacy in ({"sums": "plain"}, {"sums": "secure"}):
        made = spec({"name": method, **aggregator}, training=training, privacy=privacy)
        with fs.Simulation(fs.prepare(made)) as simulation:
            start = simulation.evaluated().params
            simulation.step()
            models.append(simulation.evaluated().params)
    for name, w in models[0].items():
        assert torch.allclose(w, models[1][name], atol=2e-5)
    assert max(float((w - start[name]).abs().max()) for name, w in models[0].items()) > 1e-3


def changed(monkeypatch: pytest.MonkeyPatch, see: Callable[[Mapping[int, Any], dict[int, Any]], None]) -> None:
    """Call a function with the requests and the replies of each exchange; the function may change the replies."""
    ask = LocalEngine.ask

    def listen(self: LocalEngine, requests: Mapping[int, Any], *, together: bool) -> Mapping[int, Any]:
        replies = dict(ask(self, requests, together=together))
        see(requests, replies)
        return replies

    monkeypatch.setattr(LocalEngine, "ask", listen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("all answer", marks=pytest.mark.long),
        "dropouts",
        pytest.param("late clients", marks=pytest.mark.long),
    ],
)
def test_the_opened_sums_are_the_sums_of_the_vectors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without masks, the test adds up the vectors of the contributors. With masks, the sums are bit for bit equal."""
    sums: dict[bool, list[np.ndarray]] = {False: [], True: []}
    add, opened = simulated.add, simulated.Masks.open

    def added(vectors: Iterable[np.ndarray]) -> np.ndarray:
        sums[False].append(add(vectors))
        return sums[False][-1]

    def unmasked(masks: simulated.Masks, answers: Any) -> np.ndarray:
        sums[True].append(opened(masks, answers))
        return sums[True][-1]

    monkeypatch.setattr(simulated, "add", added)
    monkeypatch.setattr(simulated.Masks, "open", unmasked)
    for masks in sums:
        made = spec(**CASES[case], data=FEW, privacy={"simulate_masks": masks})
        with fs.Simulation(fs.prepare(made)) as simulation:
            simulation.step()
    assert len(sums[False]) == len(sums[True]) > 8
    for plain, masked in zip(sums[False], sums[True], strict=True):
        assert plain.dtype == masked.dtype == np.uint32
        assert (plain == masked).all()


@pytest.mark.long
def test_the_server_sees_no_factor_with_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[bool, list[dict[int, np.ndarray]]] = {False: [], True: []}
    for masks, vectors in seen.items():

        def keep(requests: Any, replies: Any, vectors: list[dict[int, np.ndarray]] = vectors) -> None:
            words = {client: words_of(each) for client, each in replies.items() if isinstance(each, MaskedReply)}
            vectors += [words] if words else []

        with monkeypatch.context() as patch:
            changed(patch, keep)
            fs.run(spec(privacy={"simulate_masks": masks}, training={"rounds": 1}))
    assert len(seen[False]) == len(seen[True]) > 20
    for plain, masked in zip(seen[False], seen[True], strict=True):
        assert plain.keys() == masked.keys()
        for client, vector in plain.items():
            assert (masked[client] == vector).sum() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("case", ["all answer", "dropouts"])
def test_the_bytes_in_the_record_are_those_of_the_messages(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {"up": 0, "down": 0}

    def count(requests: Mapping[int, Any], replies: Mapping[int, Any]) -> None:
        if any(isinstance(each, Masked | Step) for each in requests.values()):
            sent["down"] += sum(map(records.size, requests.values()))
            sent["up"] += sum(records.size(each) for each in replies.values() if isinstance(each, records.Message))

    changed(monkeypatch, count)
    with fs.Simulation(fs.prepare(spec("fedavg", **CASES[case], privacy={"simulate_masks": True}))) as simulation:
        history = list(simulation)
    assert sum(line["bytes_up"] for line in history) == sent["up"]
    assert sum(line["bytes_down"] for line in history) == sent["down"]


def lose(kind: type, batch: int, clients: tuple[int, ...]) -> Callable[[Mapping[int, Any], dict[int, Any]], None]:
    """Return a function that loses clients' answers to the first or the second sum of a batch, counted from 0."""

    def see(requests: Mapping[int, Any], replies: dict[int, Any]) -> None:
        for client, request in requests.items():
            inner = getattr(request, "request", None)
            if client in clients and isinstance(inner, kind) and inner.exchange == batch + 1:
                replies[client] = Failure("it was lost")

    return see


def memories(simulation: fs.Simulation) -> dict[int, bytes]:
    """Return each client's encoding error."""
    states = {client: simulation.store.get(client) for client in range(8)}
    return {client: records.encode(state[MEMORY]) for client, state in states.items() if MEMORY in state}


def in_one_batch(**sections: Any) -> fs.Experiment:
    """Return a spec whose rounds are two batches, in which all eight clients have samples."""
    return spec(**{"training": {"batch_size": 720}} | sections)


@pytest.mark.slow
@pytest.mark.parametrize("masks", [False, True])
def test_a_client_that_is_lost_before_the_first_sum_is_left_out(masks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, lose(Encoded, 0, (3,)))
    with fs.Simulation(fs.prepare(in_one_batch(privacy={"simulate_masks": masks}))) as simulation:
        record = simulation.step()
        assert record["clients_failed"] == 1
        assert memories(simulation).keys() == set(range(8)) - {3}
        assert "secure sum failed" not in {event["kind"] for event in simulation.events}


LOST: list[tuple[type, tuple[int, ...]]] = [
    (Coefficients, (3,)),
    (Coefficients, (1, 2, 3)),
    (Encoded, (1, 2, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "clients", "masks"),
    others_long(
        [(*lost, masks) for lost in LOST for masks in (False, True)],
        [*((*lost, True) for lost in LOST), (*LOST[0], False)],
    ),
)
def test_a_batch_that_loses_a_client_between_its_sums_changes_no_state(
    masks: bool, kind: type, clients: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference of two sums over different clients would contain numbers of the client that was lost."""
    made = in_one_batch(privacy={"simulate_masks": masks})
    with fs.Simulation(fs.prepare(made)) as simulation:
        simulation.step()
        before, model, batches = memories(simulation), simulation.evaluated().params, 3
        compression = simulation.compression
        assert compression is not None
        basis = compression.state.basis
        changed(monkeypatch, lose(kind, 2, clients))
        seen: list[Any] = []

        def stop(requests: Mapping[int, Any], replies: Mapping[int, Any]) -> None:
            inner = getattr(next(iter(requests.values())), "request", None)
            if isinstance(inner, Encoded) and inner.exchange == batches + 1:
                seen.append((memories(simulation), inner.request.weights.params, compression.state.basis))

        changed(monkeypatch, stop)
        simulation.step()
        ((after, unchanged, kept),) = seen
        assert after == before
        assert len(before) == 8
        assert all(torch.equal(w, model[name]) for name, w in unchanged.items())
        assert all(torch.equal(basis[name]["q"], kept[name]["q"]) for name in basis)
        (event,) = [each for each in simulation.events if each["kind"] == "secure sum failed"]
        left = 8 - len(clients)
        needed = 8 if kind is Coefficients else 6
        assert event["reason"] == f"{left} clients answered, but the sum needs {needed}."


@pytest.mark.slow
@pytest.mark.parametrize("masks", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_client_that_is_lost_after_its_second_vector_stays_in_the_sum(
    masks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = in_one_batch(privacy={"simulate_masks": masks})
    expected = written(made, tmp_path / "all")

    def drop(requests: Mapping[int, Any], replies: dict[int, Any]) -> None:
        if isinstance(requests.get(3), Step) and type(requests[3].message).__name__ == "RevealAll":
            replies[3] = Failure("it was lost")

    changed(monkeypatch, drop)
    assert written(made, tmp_path / "lost") == expected


@pytest.mark.slow
@pytest.mark.parametrize("wide", [1.0, 1e-3])
def test_memories_and_the_opened_sum_add_up_to_the_gradients(wide: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small range, vectors are scaled down. The memories keep the rest, and the rounding errors of the ring."""
    steps: list[tuple[Params, Params]] = []
    made = in_one_batch(privacy={"range": wide}, training={"batch_size": 720, "rounds": 1})
    with fs.Simulation(fs.prepare(made)) as simulation:
        gradients: list[Params] = []

        def keep(requests: Mapping[int, Any], replies: dict[int, Any]) -> None:
            inner = getattr(next(iter(requests.values())), "request", None)
            if isinstance(inner, Encoded):
                handler = simulation.context.handlers.alone[Gradient]
                for client in requests:
                    state = simulation.store.get(client)
                    gradients.append(handler(Client(client, simulation.context, state), inner.request).gradient)

        total_of = simulated.ask_sums

        def ask_sums(*given: Any, **options: Any) -> Any:
            summed = total_of(*given, **options)
            form = given[3]
            numbers = form.summands["gradient"]
            row = torch.from_numpy(summed.total.parts["gradient"] * numbers.weight.largest)
            residuals = [simulation.store.get(client)[MEMORY] for client in summed.clients]
            assert all(isinstance(each, Residual) for each in residuals)
            steps.append((torch.split(row, [t.numel() for t in numbers.like.values()]), residuals))  # type: ignore
            return summed

        monkeypatch.setattr(simulated, "ask_sums", ask_sums)
        changed(monkeypatch, keep)
        record = simulation.step()
        assert (record["scaled"] > 0) == (wide < 1)
        names = list(simulation.evaluated().params)
        whole = {name: torch.zeros(gradients[0][name].numel(), dtype=torch.float64) for name in names}
        for gradient in gradients:
            for name in names:
                whole[name] += gradient[name].reshape(-1).double()
        _, last = steps[-1]
        for place, name in enumerate(names):
            decoded = sum(parts[place] for parts, _ in steps)
            kept = sum(each.lost[name].reshape(-1).double() for each in last)  # type: ignore[attr-defined]
            assert float(whole[name].abs().max()) > 0.1
            assert torch.allclose(decoded + kept, whole[name], atol=1e-4)


@pytest.mark.slow
@pytest.mark.long
def test_a_compressed_run_can_be_resumed(tmp_path: Path) -> None:
    made = spec(privacy={"simulate_masks": True}, availability={"name": "bernoulli", "p": 0.8})
    whole = written(made, tmp_path / "whole")
    first = made.model_copy(update={"training": made.training.model_copy(update={"rounds": 1})})
    fs.run(first, out=tmp_path / "parts")
    resumed = written(made, tmp_path / "parts", resume=True)
    assert resumed["model"] == whole["model"]
    assert resumed["records"] == whole["records"]


@pytest.mark.long
def test_compressed_sums_are_equal_on_ray(on_ray: Callable[..., fs.History]) -> None:
    for method in ("stratify", "fedavg"):
        history, expected = list(on_ray(spec(method))), list(fs.run(spec(method)))
        assert [line["loss"] for line in history] == [line["loss"] for line in expected]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another codec": ({"communication": {"up": "top-k"}}, r"communication.up = 'top-k': is not possible with secure"),
    "an encoded model": (
        {"communication": POWERSGD | {"down": "bf16"}},
        "communication.down = 'bf16': clients have different versions of the model",
    ),
    "rounded factors": (
        {"communication": {"up": {"name": "powersgd", "factors": "int8"}}},
        r"communication.up.factors = 'int8': is not supported with privacy.sums = 'secure'. Use factors = 'float32'.",
    ),
    "a later start": (
        {"communication": {"up": {"name": "powersgd", "start": 2}}},
        r"communication.up.start = 2: is not supported with privacy.sums = 'secure'. Use start = 1.",
    ),
    "control variates": ({"method": "scaffold"}, "communication.up = 'powersgd': with secure sums, a codec requires"),
    "squared norms": (
        {"method": "fedexp"},
        "communication.up = 'powersgd': with secure sums, a codec requires that",
    ),
    "frozen layers": (
        {"method": "fedbabu"},
        "communication.up = 'powersgd': with secure sums, a codec requires that",
    ),
    "prototypes": ({"method": "rebafl"}, "communication.up = 'powersgd': with secure sums, a codec requires that"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_codecs_without_a_secure_sum_are_refused_before_the_first_round(what: str) -> None:
    sections, problem = REFUSED[what]
    with pytest.raises(SpecError, match=problem):
        fs.prepare(spec(**sections))


def test_codecs_with_buffers_are_refused() -> None:
    with pytest.raises(SpecError, match=r"communication\.up = 'powersgd': with secure sums, a codec"):
        prepared_of("classification", norm=True, privacy={"sums": "secure"}, communication=POWERSGD)
