"""A stranger's models through every method that takes them: equal bytes where bytes are promised."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from workers import two_workers

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.clients.store import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.messages import Weights
from fedstrata.runs.simulation import Simulation, make_context, run_prepared
from fedstrata.sites.simulator import simulate
from fedstrata.stratify import client_single
from fedstrata.stratify.client_single import AutogradStepper, TracedStepper

sys.path.insert(0, str(Path(__file__).parent))
import strangers
from strangers import DRAWS, ZOO

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {},
    "moon": {},
    "rebafl": {},
    "feddyn": {},
    "fedbabu": {},
    "fedssar": {},
    "fedstas": {"strata": 2, "fraction": 0.5},
    "sfl": {},
    "stratify": {"cap": 6},
    "stratify, single": {"name": "stratify", "mode": "single", "cap": 4},
    "stratify, together": {"name": "stratify", "cap": 6},
    "fedtan": {},
}
TOGETHER = ("stratify, together", "fedtan")
"""Those that a model with BatchNorm takes through sums over all clients in the middle of a pass."""

MORE: dict[str, dict[str, Any]] = {
    "fedprox": {},
    "fedsts": {"strata": 2},
    "fedsampling": {"samples": 60},
    "clustered": {},
    "power-of-choice": {},
    "fedrs": {},
    "fedlc": {},
    "bsm-fedavg": {},
    "fedavg-ft": {"per_class": 2},
}
"""The other methods; their parts are those of the first."""

PARTITION = {"name": "dirichlet", "alpha": 0.5, "clients": 4, "min_size": 4}
SPARING = {"name": "classes", "per_client": 4, "size": 10, "clients": 4}
"""It leaves the server samples, as FedAvg-FT needs."""

KINDS = {
    "scaffold": "ask, state",
    "stratify": "sum, pools",
    "stratify, together": "together, pools",
    "sfl": "relay",
    "stratify, single": "relay, pools",
}
"""One method for each kind of exchange and state, for engines whose processes take long to start."""

NAMES = [model.__name__ for model in ZOO]


def spec(model: str, method: str, **training: Any) -> fs.Experiment:
    settings = {"rounds": 2, "clients_per_round": 3, "batch_size": 16, "lr": 0.02}
    settings |= {} if "local_steps" in training else {"local_epochs": 1}
    return fs.Experiment.from_table(
        {
            "data": {"name": "digits", "limit": 120, "normalize": "unit"},
            "partition": SPARING if method == "fedavg-ft" else PARTITION,
            "model": f"strangers:{model}{'Normed' if method in TOGETHER else ''}",
            "method": {"name": method, **METHODS.get(method, MORE.get(method, {}))},
            "training": {**settings, **training},
            "evaluation": {"every": 0},
        }
    )


def bytes_of(history: fs.History) -> bytes:
    assert history.params is not None
    return safetensors.torch.save(history.params)


def refused(model: str, method: str) -> bool:
    """Where clients share a generator, as threads of one process, a model that draws has no numbers of its own."""
    return method in TOGETHER and model in {m.__name__ for m in DRAWS}


Note = Callable[[str, object], None]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=pytest.mark.long) if method in {*MORE, "stratify, single"} else method
        for method in [*METHODS, *MORE]
    ],
)
@pytest.mark.parametrize("model", NAMES)
def test_a_run_repeats_to_the_bit_and_nobody_fails(model: str, method: str, record_property: Note) -> None:
    if refused(model, method):
        with pytest.raises(SpecError, match="draws random numbers") as error:
            fs.run(spec(model, method, execution="per-client", workers=1))
        record_property("refused", str(error.value))
        return
    first = fs.run(spec(model, method, execution="per-client", workers=1))
    assert sum(record["clients_failed"] for record in first) == 0
    assert all(torch.isfinite(tensor).all() for tensor in first.params.values())
    assert bytes_of(fs.run(spec(model, method, execution="per-client", workers=1))) == bytes_of(first)


@pytest.mark.parametrize("model", NAMES)
def test_workers_give_the_same_bits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Sharing is forced: such small work would not pay.
    monkeypatch.setattr("fedstrata.engines.local.STARTING_PAYS", -1.0)
    monkeypatch.setattr("fedstrata.engines.local.ASKING_PAYS", -1.0)
    alone, shared = (fs.run(spec(model, "scaffold", workers=workers, local_steps=3)) for workers in (1, 2))
    assert bytes_of(alone) == bytes_of(shared)


@pytest.mark.parametrize("model", [name for name in NAMES if name not in {m.__name__ for m in DRAWS} | {"Rebound"}])
def test_a_fused_batch_is_the_sum_of_its_parts(model: str) -> None:
    """Not of models that draw (each client draws its own numbers), nor of statistics of whole batches."""
    fused, parts = (fs.run(spec(model, "stratify", execution=way)).params for way in ("fused", "per-client"))
    for name, tensor in fused.items():
        torch.testing.assert_close(tensor, parts[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [name for name in NAMES if name != "Rebound"])
def test_single_sample_steps_are_those_of_autograd(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    single = spec(model, "stratify").model_copy(update={"method": fs.Stratify(mode="single", cap=6)})
    ours = fs.run(single)
    used: list[Any] = []
    monkeypatch.setattr(client_single, "_make_stepper", lambda *args: used.append(AutogradStepper(*args)) or used[-1])
    plain = fs.run(single)
    assert used
    for name, tensor in plain.params.items():
        torch.testing.assert_close(ours.params[name], tensor, rtol=1e-3, atol=1e-5)
    assert ours[-1]["train_loss"] == pytest.approx(plain[-1]["train_loss"], rel=1e-3)


def test_products_of_parameters_take_every_factor_before_it_moves() -> None:
    """A weight's gradient went into it before another gradient had read it: 33.6 % where autograd had 63.3."""
    with Simulation(fs.prepare(spec("LowRank", "stratify"))) as simulation:
        context, model = simulation.context, simulation.prepared.config.model
        x, y = context.data.inputs(slice(0, 5)), context.data.y_train[:5]
        start = Weights(model.params(), {})
        after = []
        for stepper in (TracedStepper(context, model), AutogradStepper(context, model)):
            stepper.load(start)
            losses = stepper.run(x, y, 0.5)
            after.append([losses, *stepper.weights().params.values()])
        for traced, plain in zip(*after, strict=True):
            torch.testing.assert_close(traced, plain, rtol=1e-4, atol=1e-6)


def test_a_trace_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TracedStepper.run
    monkeypatch.setattr(TracedStepper, "run", lambda self, x, y, lr: run(self, x, y, 2 * lr))
    with Simulation(fs.prepare(spec("LowRank", "stratify"))) as simulation:
        stepper = client_single.stepper_of(simulation.context, simulation.prepared.config.model)
    assert isinstance(stepper, AutogradStepper)


def test_rebound_buffers_travel_and_leak_from_nobody() -> None:
    model = fs.Model(strangers.Rebound((8, 8), 10))
    x = torch.ones(3, 8, 8)
    with model.loaded(model.params(), model.buffers(), train=True) as params:
        model(params, x)
        once = model.current_buffers()["ema"]
        model(params, x)
        twice = model.current_buffers()["ema"]
    assert once.any()
    torch.testing.assert_close(twice, 1.9 * once)
    with model.loaded(model.params(), model.buffers(), train=True):
        assert not model.current_buffers()["ema"].any()  # the next client starts with what it was sent
    with model.loaded(model.params(), {"ema": once}, train=False) as params:
        hidden = F.linear(x.flatten(1), params["enter.weight"], params["enter.bias"])
        torch.testing.assert_close(model.with_features(params, x)[0], torch.tanh(hidden - once))


@pytest.mark.parametrize("model", [model.__name__ for model in DRAWS])
def test_clients_of_a_batch_draw_numbers_of_their_own(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients of a batch had one dropout mask: keyed by the batch for everybody."""
    from fedstrata.stratify import client_batch

    seen: list[tuple[Any, ...]] = []
    seeded = client_batch.torch_seeded
    monkeypatch.setattr(client_batch, "torch_seeded", lambda *key: seen.append(key) or seeded(*key))
    fs.run(spec(model, "stratify", execution="per-client", rounds=1))
    assert len({key[-1] for key in seen}) == 4
    assert len(set(seen)) == len(seen)


@pytest.fixture(scope="module")
def reachable() -> Iterator[None]:
    """Processes find the models like a package of their own that they installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def on_ray(reachable: None) -> Iterator[Callable[[fs.Experiment], fs.History]]:
    """``fedstrata.run`` on two workers of Ray's."""
    from fedstrata.engines.ray import RayEngine
    from fedstrata.runs import simulation

    with two_workers() as pool:

        def run(spec: fs.Experiment) -> fs.History:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(simulation, "make_engine", lambda name, *rest: RayEngine(*rest, pool=pool))
                return fs.run(spec, engine="ray")

        yield run


@pytest.fixture(scope="module")
def here() -> Callable[[str, str], bytes]:
    """What the local engine leaves."""

    @cache
    def run(model: str, method: str) -> bytes:
        prepared = fs.prepare(spec(model, method, execution="per-client"))
        return bytes_of(run_prepared(prepared, engine=LocalEngine(make_context(prepared), StateStore())))

    return run


ELSEWHERE = [(model, method) for model in NAMES for method in KINDS]
PAIRS = [pair for pair in ELSEWHERE if not refused(*pair)]
BRIEF = [(model, list(KINDS)[number % len(KINDS)]) for number, model in enumerate(NAMES)]
"""Every model once and every kind twice, for ``make test``."""


@pytest.mark.xdist_group("servers")
@pytest.mark.parametrize(
    ("model", "method"),
    [pytest.param(*pair, marks=pytest.mark.slow if pair in BRIEF else pytest.mark.long) for pair in ELSEWHERE],
)
def test_ray_gives_the_bytes_of_the_local_engine(
    on_ray: Callable[[fs.Experiment], fs.History],
    here: Callable[[str, str], bytes],
    model: str,
    method: str,
    record_property: Note,
) -> None:
    if refused(model, method):
        with pytest.raises(SpecError, match="draws random numbers") as error:
            on_ray(spec(model, method, execution="per-client"))
        record_property("refused", str(error.value))
        return
    assert bytes_of(on_ray(spec(model, method, execution="per-client"))) == here(model, method)


@pytest.fixture(scope="module")
def at_sites(reachable: None, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], bytes]:
    """What one session of NVFlare's simulator leaves."""
    place = tmp_path_factory.mktemp("strangers")
    runs = [(spec(*pair, execution="per-client"), place / str(n)) for n, pair in enumerate(PAIRS)]
    histories = simulate(runs, sites=2)
    return {pair: bytes_of(history) for pair, history in zip(PAIRS, histories, strict=True)}


@pytest.mark.long
@pytest.mark.xdist_group("servers")
@pytest.mark.parametrize(("model", "method"), PAIRS)
def test_nvflare_gives_the_bytes_of_the_local_engine(
    at_sites: dict[tuple[str, str], bytes], here: Callable[[str, str], bytes], model: str, method: str
) -> None:
    assert at_sites[model, method] == here(model, method)


@pytest.mark.long
@pytest.mark.xdist_group("servers")
@pytest.mark.parametrize(("model", "method"), [pair for pair in ELSEWHERE if refused(*pair)][:1])
def test_nvflare_refuses_by_name(reachable: None, model: str, method: str, record_property: Note) -> None:
    with pytest.raises(SpecError, match="draws random numbers") as error:
        simulate([(spec(model, method, execution="per-client"), None)], sites=2)
    record_property("refused", str(error.value))
