"""What updates and their sums reveal, with secure sums and with noise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.audits import updates
from fedstrata.audits.server_view import UpdateRound, UpdateTap, mean_update, require_updates, without_masks
from fedstrata.audits.updates import IMAGES, SeenUpdate, as_gradient, attack, audit_updates, noise_instead
from fedstrata.base.errors import CheckpointError, SpecError
from fedstrata.cli import main
from fedstrata.federation.messages import Fit, FitReply, Weights
from fedstrata.methods.fedavg import FedAvg
from fedstrata.runs.preparation import Prepared, prepare

DP = {"dp": {"clip": 1.0, "noise": 3.0}}


def spec(privacy: Mapping[str, Any] | None = None, **changes: Any) -> fs.Experiment:
    """Return the spec of a run in which each of six clients takes one step on four images per round."""
    table: dict[str, Any] = {
        "data": {"name": "digits", "limit": 24},
        "partition": {"name": "iid", "clients": 6},
        "model": {"name": "mlp", "hidden": [32]},
        "training": {"rounds": 2, "local_steps": 1, "batch_size": 8, "lr": 0.1, "workers": 1},
        "privacy": privacy or {},
        "evaluation": {"checkpoint_every": 1},
    }
    return fs.Experiment.from_table(table | changes)


def hand_made(sizes: list[int]) -> UpdateRound:
    """Return updates of 1, 2, 3 … of a model with one parameter, from clients with these numbers of samples."""
    before = Weights({"w": torch.tensor([0.25])}, {})
    replies = {
        client: FitReply(Weights({"w": torch.tensor([1.25 + client])}, {}), size, 1, size, 0.5, {})
        for client, size in enumerate(sizes)
    }
    return UpdateRound(Fit(1, before, {}, 1.0), replies)


def test_the_mean_update_of_three_clients_by_hand() -> None:
    round = hand_made([1, 1, 2])
    assert [round.update(client)["w"].tolist() for client in range(3)] == [[1.0], [2.0], [3.0]]
    config = prepare(spec()).config
    assert mean_update(FedAvg(), config, round)["w"].tolist() == [(1 + 2 + 3 * 2) / 4]


@pytest.mark.parametrize(("aggregator", "expected"), [("size", 9 / 4), ("mean", 6 / 3)])
def test_the_mean_of_secure_sums_by_hand(aggregator: str, expected: float) -> None:
    """Without samples' weights, the server divides the sum by the number of clients."""
    method = {"name": "fedavg", "aggregator": aggregator}
    prepared = prepare(spec({"sums": "secure", "range": 8.0}, method=method))
    first, round = next(iter(prepared.config.model.params())), hand_made([1, 1, 2])
    params = prepared.config.model.params()
    sent = Weights(params, {})
    replies = {}
    for client, reply in round.replies.items():
        after = params | {first: params[first] + client + 1}
        replies[client] = FitReply(Weights(after, {}), reply.samples, 1, reply.samples, 0.5, {})
    mean = mean_update(require_updates(prepared), prepared.config, UpdateRound(Fit(1, sent, {}, 1.0), replies))
    torch.testing.assert_close(mean[first], torch.full_like(params[first], expected), rtol=0, atol=1e-5)
    assert all(not mean[name].abs().max() > 1e-6 for name in params if name != first)


def states(prepared: Prepared, tapped: bool) -> list[dict[str, torch.Tensor]]:
    """Return the model after each round, with or without a tap."""
    with fs.Simulation(prepared) as simulation:
        if tapped:
            method = require_updates(prepared)
            tap = UpdateTap(simulation.context, simulation.store, method, lambda round: None)
            simulation.federation.engine = tap
        return [simulation.state.weights.params for _ in simulation]


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [{}, {"sums": "secure"}, DP], ids=["plain", "secure", "noise"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_tap_changes_no_bit_of_a_run(privacy: dict[str, Any], method: str) -> None:
    made = prepare(spec(privacy, method=method, availability={"name": "bernoulli", "p": 0.9}))
    for plain, tapped in zip(states(made, False), states(made, True), strict=True):
        assert all(torch.equal(plain[name], tapped[name]) for name in plain)


def seen(prepared: Prepared) -> list[UpdateRound]:
    """Return the updates of a run."""
    rounds: list[UpdateRound] = []
    with fs.Simulation(prepared) as simulation:
        tap = UpdateTap(simulation.context, simulation.store, require_updates(prepared), rounds.append)
        simulation.federation.engine = tap
        list(simulation)
    return rounds


@pytest.mark.slow
def test_the_audit_attacks_the_sum_that_the_server_used() -> None:
    """The mean of secure sums is the change of the global model, and a client that drops out is not in it."""
    prepared = prepare(spec({"sums": "secure"}, availability={"name": "bernoulli", "p": 0.9}))
    rounds = seen(prepared)
    after = states(prepared, False)
    before = prepared.config.model.params()
    assert [len(round.replies) for round in rounds] == [6, 5]
    for round, params in zip(rounds, after, strict=True):
        mean = mean_update(require_updates(prepared), prepared.config, round)
        for name, w in params.items():
            torch.testing.assert_close(before[name] + mean[name], w, rtol=0, atol=1e-6)
        before = params


@pytest.mark.slow
def test_masks_change_no_result() -> None:
    plain, masked = (prepare(spec({"sums": "secure", "simulate_masks": masks})) for masks in (False, True))
    assert without_masks(masked).config.privacy == plain.config.privacy
    one, other = (attack(each, None, 1, parts=1, steps=2) for each in (plain, masked))
    assert one == other


def test_with_one_step_an_update_is_the_gradient() -> None:
    prepared = prepare(spec(training={"rounds": 1, "local_steps": 1, "batch_size": 8, "lr": 0.5, "workers": 1}))
    (round,) = seen(prepared)
    members, model, data = prepared.assignment[2], prepared.config.model, prepared.data
    where = torch.from_numpy(members)
    found = as_gradient(prepared, SeenUpdate(round, round.update(2), [2]), members)
    with model.loaded(model.params(), model.buffers()) as params:
        loss = torch.nn.functional.cross_entropy(
            model(params, data.inputs(where)), data.y_train[where], reduction="sum"
        )
        gradients = torch.autograd.grad(loss, list(params.values()))
    for gradient, wanted in zip(found.gradient.values(), gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4)
    control = noise_instead(found, np.random.default_rng(0))
    for name, gradient in found.gradient.items():
        torch.testing.assert_close(control.gradient[name].norm(), gradient.norm())
        assert not torch.equal(control.gradient[name], gradient)


@pytest.mark.slow
def test_single_samples_are_read_off_and_their_sum_hides_them() -> None:
    """Each client has one sample: its update is a gradient of one sample."""
    training = {"rounds": 1, "local_steps": 1, "clients_per_round": 16, "lr": 0.1, "workers": 1}
    clients = {"data": {"name": "digits", "limit": 16}, "partition": {"name": "iid", "clients": 16}}
    audit = attack(prepare(spec({"sums": "secure"}, training=training, **clients)), None, 1, parts=6, steps=40)
    single, summed = audit.views
    assert (single.seen, summed.seen) == (False, True)
    assert (single.sent, summed.sent, single.samples, summed.samples) == (16, 1, 1.0, 16.0)
    assert (single.inversion.labels, single.inversion.rows) == (1.0, 1.0)
    assert single.membership.rate == 1.0
    assert summed.inversion.rows < 0.2
    assert summed.inversion.recognised < single.inversion.recognised
    assert summed.membership.rate < 1.0
    assert (single.control.rows, single.control.labels) < (0.01, 0.7)


@pytest.mark.slow
def test_noise_hides_samples() -> None:
    """At this ε, the attacks are not better than their controls."""
    pytest.importorskip("dp_accounting")
    made = prepare(spec({"dp": {"clip": 1.0, "noise": 30.0}}))
    audit, plain = (attack(each, None, 2, parts=6, steps=15) for each in (made, prepare(spec())))
    single, open_ = audit.views[0], plain.views[0]
    assert single.seen
    assert audit.epsilon == pytest.approx(list(fs.run(made.spec))[-1]["epsilon"])
    assert plain.epsilon is None
    assert single.inversion.rows == 0.0 < open_.inversion.rows
    assert single.membership.low <= 0.5 <= single.membership.high
    assert open_.membership.low > 0.5
    assert open_.inversion.recognised > 2 * single.inversion.recognised


@pytest.mark.slow
def test_values_of_too_many_samples_are_not_inverted() -> None:
    many = IMAGES // 6 + 2
    made = spec(data={"name": "digits", "limit": 6 * many}, training={"rounds": 1, "local_steps": 1, "workers": 1})
    single, summed = attack(prepare(made), None, 1, parts=2, steps=2).views
    assert (single.inversion.attacked, summed.inversion.attacked) == (2, 0)
    assert summed.inversion.recognised is summed.control.recognised is None
    assert summed.membership.trials == 6 * many
    assert updates.cells(summed)[4:9] == ["–"] * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("updates") / "run"
    fs.run(spec({"sums": "secure"}), out=path)
    return path


@pytest.mark.slow
def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["audit", "updates", str(folder), "--out", str(tmp_path), "--quiet", "--steps", "3", "--parts", "2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "privacy.sums = 'secure', without noise. Each inversion took 3 steps, with seed 0." in out
    assert "| one client | no | 6 | 4 |" in out
    assert "| sum | yes | 1 | 24 |" in out
    assert {path.name for path in tmp_path.iterdir()} == {"updates.md", "updates.json"}
    assert (tmp_path / "updates.md").read_text(encoding="utf-8") in out
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    stored = json.loads((tmp_path / "updates.json").read_text(encoding="utf-8"))
    assert shown == {"folder": str(tmp_path), **stored}
    assert [view["seen"] for view in stored["views"]] == [False, True]
    assert stored["views"][1]["membership"]["trials"] == 24


class SameWeights(FedAvg):
    """A method with rounds of its own."""

    def run_round(self, federation: Any, state: Any) -> Any:
        return super().run_round(federation, state)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"method": {"name": "stratify"}}, "method"),
        ({"method": SameWeights()}, "method"),
        ({"method": {"name": "fedawe"}}, "method.aggregator"),
        ({"method": {"name": "fedsampling"}}, "method.data_sampler"),
        ({"communication": {"up": "bf16"}}, "communication"),
        ({"model": {"name": "resnet20"}}, "model"),
        ({"task": {"name": "classification", "label_smoothing": 0.1}}, "task"),
    ],
    ids=str,
)
def test_what_it_cannot_attack_it_says(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError) as error:
        attack(prepare(spec(**changes)), None, 1)
    assert error.value.key == key


@pytest.mark.slow
def test_wrong_settings_and_runs_without_checkpoint_are_refused(folder: Path, tmp_path: Path) -> None:
    for setting in ("parts", "steps"):
        with pytest.raises(SpecError, match=f"{setting} = 0: must be an integer of at least 1"):
            audit_updates(folder, **{setting: 0})
    with pytest.raises(SpecError, match="is not a run folder"):
        audit_updates(tmp_path)
    fs.run(spec(evaluation={"checkpoint_every": 0}), out=tmp_path / "run")
    with pytest.raises(CheckpointError, match="does not have a checkpoint"):
        audit_updates(tmp_path / "run")
