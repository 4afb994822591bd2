"""A stranger's models through every method that takes them: equal bytes where bytes are promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import strangers
import torch
import torch.nn.functional as F
from quick import others_long
from stranger_specs import ELSEWHERE, METHODS, MORE, NAMES, bytes_of, here, refused, spec
from strangers import DRAWS

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.federation.messages import Weights
from fedstrata.runs.simulation import Simulation
from fedstrata.stratify import client_single
from fedstrata.stratify.client_single import AutogradStepper, TracedStepper

pytestmark = pytest.mark.slow

Note = Callable[[str, object], None]


@pytest.mark.parametrize(
    "method",
    [
        method if method in {"fedavg", "scaffold", "stratify"} else pytest.param(method, marks=pytest.mark.long)
        for method in [*METHODS, *MORE]
    ],
)
@pytest.mark.parametrize(
    "model", others_long(NAMES, ["LoRA", "Rebound", "RandomSlopes", "Dropped", "Attention", "TwoHeads"])
)
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


@pytest.mark.parametrize("model", others_long(NAMES, ["Rebound", "Dropped", "Attention", "Grouped", "TwoHeads"]))
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


@pytest.mark.parametrize(
    "model",
    others_long([name for name in NAMES if name != "Rebound"], ["LoRA", "Attention", "Embedded"]),
)
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


@pytest.mark.long
@pytest.mark.xdist_group("servers")
@pytest.mark.parametrize(("model", "method"), ELSEWHERE)
def test_ray_gives_the_bytes_of_the_local_engine(
    on_ray: Callable[[fs.Experiment], fs.History],
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
