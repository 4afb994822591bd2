"""The lower bound of ε: below the accountant's ε for the right noise, and above it for too little noise or clipping."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quick import others_long
from torch.func import grad, vmap

import fedstrata as fs
from fedstrata.audits.canaries import CanaryAudit, attack, audit_canaries, unexpected, verdict
from fedstrata.audits.planting import STRENGTH, Canaries, CanaryLoss, CanaryTap, audited
from fedstrata.audits.server_view import UpdateRound, require_updates
from fedstrata.base.errors import SpecError
from fedstrata.cli import main
from fedstrata.clients.training import private
from fedstrata.federation.messages import Fit, Params, Weights
from fedstrata.objectives.base import Batch, Context
from fedstrata.runs.accountant import Accountant
from fedstrata.runs.preparation import Prepared, prepare
from fedstrata.runs.simulation import make_context

pytest.importorskip("dp_accounting")

NOISE = {"dp": {"clip": 1.0, "noise": 4.0}}


def spec(privacy: Mapping[str, Any] | None = None, **changes: Any) -> fs.Experiment:
    """Return the spec of a run in which each of four clients takes one step on its six images per round."""
    table: dict[str, Any] = {
        "data": {"name": "digits", "limit": 24},
        "partition": {"name": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": [16]},
        "training": {"rounds": 2, "local_steps": 1, "batch_size": 8, "lr": 0.5, "workers": 1},
        "privacy": NOISE if privacy is None else privacy,
        "evaluation": {"checkpoint_every": 1},
    }
    return fs.Experiment.from_table(table | changes)


def planted(prepared: Prepared, canaries: Canaries, client: int = 1) -> list[UpdateRound]:
    """Return the updates of a run in which a client has canaries."""
    rounds: list[UpdateRound] = []
    with fs.Simulation(prepared) as simulation:
        tap = CanaryTap(simulation.context, simulation.store, require_updates(prepared), rounds.append)
        tap.plant(canaries, client, 1.0)
        simulation.federation.engine = tap
        list(simulation)
    return rounds


def test_the_gradients_of_canaries_by_hand() -> None:
    """Of four canaries, the second is not in the data. The gradients of samples are those of the cross-entropy."""
    prepared = prepare(spec())
    model, data = prepared.config.model, prepared.data
    params = model.params()
    total = sum(w.numel() for w in params.values())
    canaries = Canaries(np.array([0, 5, 17, total - 1]), np.array([True, False, True, True]))
    own = prepared.assignment[0][:2]
    made = canaries.beside(data, own)
    assert torch.equal(made.inputs(slice(0, 2)), data.inputs(torch.from_numpy(own)))
    loss, context = CanaryLoss(strength=3.0), Context(params, torch.zeros(0), {}, None, 0.1)

    def of_one(params: Params, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss.loss(model, params, Batch(x[None], y[None]), context)

    def plain(params: Params, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(params, x[None]), y[None])

    x, y = made.inputs(slice(None)), made.y_train
    rows = torch.cat([g.flatten(1) for g in vmap(grad(of_one), (None, 0, 0))(params, x, y).values()], dim=1)
    wanted = torch.cat([g.flatten(1) for g in vmap(grad(plain), (None, 0, 0))(params, x[:2], y[:2]).values()], dim=1)
    torch.testing.assert_close(rows[:2], wanted)
    expected = torch.zeros(4, total)
    expected[0, 0] = expected[2, 17] = expected[3, -1] = 3.0
    assert torch.equal(rows[2:], expected)
    whole = grad(lambda params: loss.loss(model, params, Batch(x, y), context))(params)
    torch.testing.assert_close(torch.cat([g.flatten() for g in whole.values()]), rows.mean(0))


def test_entries_by_hand() -> None:
    canaries = Canaries(np.array([3, 0]), np.array([True, True]))
    assert canaries.entries({"a": torch.tensor([[5.0, 6.0]]), "b": torch.tensor([7.0, 8.0])}).tolist() == [8.0, 5.0]


def test_canaries_are_drawn_once_per_parameter_and_with_probability_one_half() -> None:
    drawn = Canaries.drawn(4000, {"a": torch.zeros(70, 70)}, 0)
    assert len(set(drawn.places.tolist())) == 4000
    assert abs(drawn.present.sum() - 2000) < 4 * np.sqrt(1000)


@pytest.mark.slow
def test_a_canary_is_clipped_and_moves_its_parameter() -> None:
    """Almost without noise, the step of client 1 is −η/b times 1 for each canary in the data: its norm is clipped."""
    prepared = prepare(spec({"dp": {"clip": 1.0, "noise": 1e-6}}))
    places = Canaries.drawn(50, prepared.config.model.params(), 0).places
    canaries, absent = Canaries(places, np.arange(50) % 2 == 0), Canaries(places, np.zeros(50, dtype=bool))
    changed, same = (planted(prepared, each)[0].update(1) for each in (canaries, absent))
    moved = canaries.entries({name: w - same[name] for name, w in changed.items()})
    expected = torch.where(torch.from_numpy(canaries.present), -0.5 / (6 + 50), 0.0)
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_server_gets_the_numbers_of_the_run_and_other_clients_train_as_before() -> None:
    prepared = prepare(spec({}))
    canaries = Canaries.drawn(30, prepared.config.model.params(), 0)
    one, two = planted(prepared, canaries)
    assert [one.replies[client].samples for client in range(4)] == [6, 6, 6, 6]
    for client in (0, 2, 3):
        update = planted(prepared, Canaries(canaries.places, ~canaries.present))[0].update(client)
        assert all(torch.equal(one.update(client)[name], w) for name, w in update.items())
    assert two.request.round == 2


@pytest.mark.parametrize(("batch", "steps"), [(8, 1), (2, 3), (3, 2)])
def test_the_sampling_rate_and_the_steps_are_those_of_the_run(batch: int, steps: int) -> None:
    training = {"rounds": 1, "local_epochs": 1, "batch_size": batch, "workers": 1}
    prepared = prepare(spec(training=training))
    canaries = Canaries.drawn(60, prepared.config.model.params(), 0)
    context = audited(make_context(prepared), canaries, 1, 1.0)
    assert context.config.training.poisson(66) == (pytest.approx(min(1, batch / 6)), steps)
    assert context.assignment.sizes.tolist() == [0, 66, 0, 0]
    assert context.objective == CanaryLoss(strength=STRENGTH)
    assert audited(make_context(prepare(spec({}))), canaries, 1, 1.0).objective == CanaryLoss(strength=66 / 6)


def test_the_prediction_of_the_test_set_is_subtracted() -> None:
    """An update along the mean gradient of the test set is expected, and the rest is orthogonal to this gradient."""
    prepared = prepare(spec())
    model, data = prepared.config.model, prepared.data
    params, inputs, labels = model.params(), data.inputs(slice(0, 1000), "test"), data.y_test[:1000]
    known = grad(lambda params: torch.nn.functional.cross_entropy(model(params, inputs), labels))(params)
    round = UpdateRound(Fit(1, Weights(params, {}), {}, 1.0), {})
    rest = unexpected(prepared, round, {name: -0.3 * g for name, g in known.items()})
    assert all(w.abs().max() < 1e-5 for w in rest.values())
    more = {name: -0.3 * g + 1.0 for name, g in known.items()}
    rest = unexpected(prepared, round, more)
    assert abs(sum(float((rest[name] * g).sum()) for name, g in known.items())) < 1e-3
    assert max(float(w.abs().max()) for w in rest.values()) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", others_long(range(3), [0]))
def test_the_bound_is_below_epsilon_and_above_it_with_a_tenth_of_the_noise(seed: int) -> None:
    prepared = prepare(spec())
    right, wrong = (attack(prepared, canaries=600, seed=seed, divide_noise=by) for by in (1.0, 10.0))
    dp, training = prepared.spec.privacy.dp, prepared.spec.training
    assert dp is not None
    epsilon = Accountant(dp, training, np.array([6])).largest(np.array([2]))
    assert right.epsilon == wrong.epsilon == pytest.approx(epsilon)
    assert 0 <= right.bound <= right.epsilon < wrong.bound <= wrong.most
    assert (right.noise, wrong.noise, right.rounds) == (4.0, 0.4, 2)
    assert verdict(right).startswith("The lower bound is not above")
    assert verdict(wrong).startswith("The lower bound is above")


def no_noise(original: Any) -> Any:
    """Return a fault: the noise is missing."""
    return lambda client, round: torch.zeros


def repeated_noise(original: Any) -> Any:
    """Return a fault: each element of a tensor has the same noise."""
    return lambda client, round: lambda shape: original(client, round)(torch.Size([1])).expand(shape).clone()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [no_noise, repeated_noise])
def test_faults_of_the_noise_are_found(fault: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "noise_of", fault(private.noise_of))
    audit = attack(prepare(spec()), canaries=600)
    assert audit.epsilon is not None
    assert audit.bound > audit.epsilon


@pytest.mark.slow
def test_missing_clipping_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are clipped at 10 times the norm for which noise is added."""
    call = private.NoisyGradient.__call__

    def unclipped(self: private.NoisyGradient, *arguments: Any) -> Any:
        dp = self.dp.model_copy(update={"clip": 10 * self.dp.clip, "noise": self.dp.noise / 10})
        return call(replace(self, dp=dp), *arguments)

    monkeypatch.setattr(private.NoisyGradient, "__call__", unclipped)
    audit = attack(prepare(spec()), canaries=600)
    assert audit.epsilon is not None
    assert audit.bound > audit.epsilon


@pytest.mark.slow
@pytest.mark.parametrize("sums", ["plain", "secure"])
def test_without_noise_secure_sums_give_no_epsilon(sums: str) -> None:
    """The sum of four clients still reveals many canaries."""
    audit = attack(prepare(spec({"sums": sums})), canaries=300)
    assert (audit.noise, audit.epsilon, audit.sums) == (None, None, sums)
    assert audit.bound > (2 if sums == "plain" else 1)
    assert verdict(audit) == "The run does not use privacy.dp, so ε does not limit what updates reveal."


@pytest.mark.slow
def test_the_same_seed_gives_the_same_audit_and_dropped_rounds_are_not_counted() -> None:
    training = {"rounds": 6, "local_steps": 1, "batch_size": 8, "lr": 0.5, "workers": 1}
    prepared = prepare(spec(training=training, availability={"name": "bernoulli", "p": 0.6}))
    one, other = (attack(prepared, canaries=50, client=2) for _ in range(2))
    assert one == other
    with fs.Simulation(prepared) as simulation:
        trained = [2 in simulation.federation.log.returned for _ in simulation]
    assert one.rounds == sum(trained) < 6
    assert prepared.spec.privacy.dp is not None
    accountant = Accountant(prepared.spec.privacy.dp, prepared.spec.training, np.array([6]))
    assert one.epsilon == pytest.approx(accountant.largest(np.array([one.rounds])))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("canaries") / "run"
    fs.run(spec(), out=path)
    return path


@pytest.mark.slow
def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["audit", "canaries", str(folder), "--out", str(tmp_path), "--quiet", "--canaries", "200"]
    assert main([*arguments, "--client", "3"]) == 0
    out = capsys.readouterr().out
    assert "client 3 with 6 samples and 200 canaries trained in 2 rounds. The bound has δ = 1e-05" in out
    assert "The lower bound is not above the accountant's ε, so the audit does not contradict this ε." in out
    assert {path.name for path in tmp_path.iterdir()} == {"canaries.md", "canaries.json"}
    assert (tmp_path / "canaries.md").read_text(encoding="utf-8") in out
    assert main([*arguments, "--divide-noise", "20", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    stored = json.loads((tmp_path / "canaries.json").read_text(encoding="utf-8"))
    assert shown == {"folder": str(tmp_path), **stored}
    assert CanaryAudit(**stored) == audit_canaries(folder, canaries=200, divide_noise=20)
    assert stored["bound"] > stored["epsilon"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"canaries": 0}, r"canaries = 0: must be from 1 to 1210, because each canary needs its own parameter"),
        ({"canaries": 1211}, r"canaries = 1211: must be from 1 to 1210"),
        ({"client": 4}, r"client = 4: is not the id of a client with samples\. Use an id from 0 to 3\."),
        ({"confidence": 1.0}, r"confidence = 1\.0: must be between 0 and 1\."),
        ({"divide_noise": 0.5}, r"divide-noise = 0\.5: must be at least 1\."),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        attack(prepare(spec()), **settings)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"method": "fedprox"}, "method.objective"),
        ({"method": "stratify", "privacy": {}}, "method"),
        ({"data": {"name": "digits", "augment": "crop-flip"}}, "data.augment"),
    ],
    ids=str,
)
def test_what_it_cannot_audit_it_says(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError) as error:
        attack(prepare(spec(**changes)))
    assert error.value.key == key


def test_a_control_without_noise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"divide-noise = 10\.0: has no effect, because the run does not use"):
        attack(prepare(spec({})), divide_noise=10.0)
    with pytest.raises(SpecError, match="is not a run folder"):
        audit_canaries(tmp_path)
