"""No answer goes out with fewer samples behind it than ``privacy.min_samples``."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.clients.handlers.fedtan import FitTogether
from fedstrata.clients.handlers.sequential import Visit
from fedstrata.evaluation.messages import Evaluate
from fedstrata.federation.messages import Fit
from fedstrata.federation.settings import Privacy
from fedstrata.sampling.client_sizes import SizeReport
from fedstrata.sampling.label_counts import LabelReport
from fedstrata.sampling.power_of_choice import LossReport
from fedstrata.sampling.sketches import Compress, Sketch
from fedstrata.stratify.messages import Reserve, Steps

NONE = torch.empty(0, dtype=torch.int64)


def with_minimum(federation, least: int):
    """The same federation at sites that want more than the spec does."""
    engine = federation.engine
    engine.context = dataclasses.replace(engine.context, privacy=Privacy(min_samples=least), prepared={})
    return federation


QUESTIONS = {
    "an update": lambda w: Fit(1, w, {}, 1.0),
    "an update with others": lambda w: FitTogether(1, w),
    "a size": lambda w: SizeReport(1, 0, 1.0),
    "a compressed gradient": lambda w: Compress(1, w, 4, 0),
    "a sketch": lambda w: Sketch(1, w, 0),
    "a loss": lambda w: LossReport(1, w),
}


@pytest.mark.parametrize("what", QUESTIONS)
def test_who_has_too_few_does_not_answer_and_the_others_do(tiny, what):
    federation = with_minimum(tiny(3, sizes=[5, 6, 9], batch_size=9), 6)
    question = QUESTIONS[what](federation.weights)
    replies = federation.ask(range(3), question)
    assert sorted(replies) == [1, 2]
    (reason,) = federation.reasons("refused")
    assert "client 0" in reason
    assert "fewer than privacy.min_samples = 6" in reason
    assert "5" not in reason  # how many it has is not told
    # The control: without a minimum all answer.
    free = tiny(3, sizes=[5, 6, 9])
    assert sorted(free.ask(range(3), question)) == [0, 1, 2]


@pytest.mark.slow
def test_of_a_travelling_model_too(tiny):
    federation = with_minimum(tiny(3, sizes=[5, 6, 9]), 6)
    relayed = federation.relay([(k, Visit(1)) for k in range(3)], federation.weights)
    assert sorted(relayed.replies) == [1, 2]
    task = Steps(1, torch.tensor([0]), NONE, True)
    assert federation.relay([(1, task)], federation.weights).replies == {}
    assert len(federation.reasons("refused")) == 2
    assert len(tiny(3).relay([(1, task)], federation.weights).replies) == 1


def test_an_update_is_over_the_samples_that_are_kept(tiny):
    """Of 40 samples about four are kept."""
    federation = with_minimum(tiny(1, sizes=[40]), 20)
    assert federation.ask([0], Fit(1, federation.weights, {}, 0.1)) == {}
    assert len(federation.ask([0], Fit(1, federation.weights, {}, 1.0))) == 1


def test_a_randomised_size_is_told_whatever_the_size(tiny):
    """Silence would tell that it is small."""
    federation = with_minimum(tiny(2, sizes=[1, 9]), 6)
    assert sorted(federation.ask(range(2), SizeReport(1, 20, 0.2))) == [0, 1]


def test_labels_of_few_samples_are_left_out(tiny):
    federation = with_minimum(tiny(2, sizes=[7, 2]), 3)
    replies = federation.ask(range(2), LabelReport())
    # Labels 0, 1, 2 in turn: three, two and two of the first client, one and one of the second.
    assert dict(zip(replies[0].labels.tolist(), replies[0].counts.tolist(), strict=True)) == {0: 3}
    assert len(replies[1].labels) == 0


def test_everybody_too_small_is_no_error_of_the_program(start):
    spec = fs.Experiment.from_table(
        {
            "partition": {"name": "iid", "clients": 3},
            "data": {"name": "digits", "limit": 90},
            "model": {"name": "mlp", "hidden": []},
            "privacy": {"min_samples": 100},
            "training": {"rounds": 1, "local_epochs": 1},
        }
    )
    started = start(spec)
    before = started.state.weights.params
    record = started.step()
    assert (record["clients_trained"], record["clients_failed"]) == (0, 3)
    assert all(torch.equal(w, before[name]) for name, w in started.state.weights.params.items())


@pytest.mark.slow
def test_prototypes_of_few_samples_are_left_out_and_the_others_are_the_same(start):
    sent = []
    for least in (1, 8):
        spec = fs.Experiment.from_table(
            {
                "method": "rebafl",
                "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 6},
                "data": {"name": "digits", "limit": 300},
                "privacy": {"min_samples": least},
                "training": {"rounds": 1, "local_epochs": 1},
            }
        )
        heard = {}
        simulation = fs.Simulation(fs.prepare(spec), listener=lambda round, replies, heard=heard: heard.update(replies))
        with simulation:
            simulation.step()
            labels, assignment = simulation.context.data.y_train.numpy(), simulation.prepared.assignment
            large = [k for k in range(6) if len(assignment[k]) >= least]
        assert sorted(heard) == large
        sent.append({k: reply.message["prototypes"] for k, reply in heard.items()})
    plain, private = sent
    left_out = 0
    for client, table in private.items():
        counts = torch.bincount(torch.from_numpy(labels[assignment[client]]), minlength=10)
        enough = counts >= 8
        left_out += int(((counts > 0) & ~enough).sum())
        assert torch.equal(table["samples"], torch.where(enough, counts, 0).float())
        assert torch.equal(table["means"][enough], plain[client]["means"][enough])
        assert not table["means"][~enough].any()
    assert left_out > 5


def test_a_measurement_on_few_samples_is_not_told(start):
    spec = fs.Experiment.from_table(
        {
            "partition": {"name": "iid", "clients": 3},
            "data": {"name": "digits", "limit": 90},
            "model": {"name": "mlp", "hidden": []},
            "evaluation": {"client_test": 0.2},
            "privacy": {"min_samples": 10},
        }
    )
    started = start(spec)
    question = Evaluate(1, started.state.weights, "test", False, 0, 0, 0)
    replies, _ = started.federation.measure(question)
    assert replies == {}
    reasons = [event["reason"] for event in started.federation.events if event["kind"] == "not measured"]
    assert len(reasons) == 3
    assert all("privacy.min_samples = 10" in reason for reason in reasons)


@pytest.mark.parametrize("table", [{"min_samples": 0}, {"below": "hide"}, {"least": 3}])
def test_what_a_spec_may_say(table):
    with pytest.raises(SpecError, match=r"^privacy\."):
        fs.Experiment.from_table({"privacy": table})


def test_a_spec_without_a_minimum_says_nothing_of_it():
    assert "privacy" not in fs.Experiment().to_spec()
    spec = fs.Experiment(privacy={"min_samples": 4})
    assert spec.to_spec()["privacy"].items() >= {"min_samples": 4, "below": "hold-back"}.items()
    assert fs.Experiment.from_table(spec.to_spec()) == spec


SEES = r"privacy\.min_samples = 5: .*\.local_steps × training\.batch_size = {} × {} = {} sample.* to at most {}\."


@pytest.mark.parametrize("method", ["fedavg", "sfl", "fedssar", "scaffold"])
@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (2, 2), (1, 5), (5, 1)])
def test_behind_an_update_are_the_samples_that_its_steps_see(tiny, steps: int, batch: int, method: str) -> None:
    """Of a step on one sample the update is that sample's gradient, however many others there are."""
    spec = fs.Experiment(
        data={"name": "digits", "limit": 200},
        partition={"name": "iid", "clients": 4},
        method=method,
        training={"rounds": 1, "local_steps": steps, "batch_size": batch},
        privacy={"min_samples": 5},
    )
    if steps * batch < 5:  # nobody would ever answer
        with pytest.raises(SpecError, match=SEES.format(steps, batch, steps * batch, steps * batch)):
            fs.run(spec)
    else:
        (record,) = fs.run(spec)
        assert record["clients_returned"] == 4
    # Clients count for themselves too, whatever a spec's own check says.
    federation = with_minimum(tiny(2, sizes=[9, 9], local_steps=steps, batch_size=batch), 5)
    assert len(federation.fit()) == (2 if steps * batch >= 5 else 0)


@pytest.mark.parametrize(("least", "answers"), [(8, True), (9, False)])
def test_accumulated_batches_are_behind_an_update(tiny, least: int, answers: bool) -> None:
    """Two steps on 2 × 2 samples each see eight."""
    training = {"rounds": 1, "local_steps": 2, "batch_size": 2, "accumulate": 2}
    spec = fs.Experiment(
        data={"name": "digits", "limit": 200},
        partition={"name": "iid", "clients": 4},
        training=training,
        privacy={"min_samples": least},
    )
    if answers:
        (record,) = fs.run(spec)
        assert record["clients_returned"] == 4
    else:
        product = r"training\.local_steps × training\.batch_size × training\.accumulate = 2 × 2 × 2 = 8 samples"
        with pytest.raises(SpecError, match=rf"privacy\.min_samples = 9: .* {product}"):
            fs.run(spec)
    federation = with_minimum(tiny(2, sizes=[20, 20], **training), least)
    assert len(federation.fit()) == 2 * answers


def together(least: int, batch: int) -> fs.Experiment:
    return fs.Experiment.from_table(
        {
            "data": {"name": "digits", "limit": 120},
            "partition": {"name": "iid", "clients": 3},
            "method": "fedtan",
            "model": {"name": "resnet20", "norm": "bn"},
            "training": {"rounds": 1, "local_epochs": 1, "batch_size": batch},
            "privacy": {"min_samples": least},
        }
    )


@pytest.mark.slow
def test_the_sums_over_a_first_batch_are_over_enough_samples(tiny):
    """FedTAN's group adds up over the first batch alone, however many samples there are."""
    federation = with_minimum(tiny(2, sizes=[9, 9], batch_size=5), 6)
    assert federation.ask(range(2), FitTogether(1, federation.weights)) == {}
    assert len(federation.reasons("refused")) == 2
    accepted = r"training\.batch_size = 5 samples.* Set privacy\.min_samples to at most 5\."
    with pytest.raises(SpecError, match=rf"privacy\.min_samples = 6: all clients .* 'FitTogether', .*{accepted}"):
        fs.prepare(together(6, 5))
    assert fs.prepare(together(5, 5)).spec.privacy.min_samples == 5


def test_parts_of_batches_that_are_never_enough_are_refused_unless_they_are_merged():
    table = {
        "data": {"name": "digits", "limit": 90},
        "partition": {"name": "iid", "clients": 3},
        "method": {"name": "stratify", "batch_size": 6},
        "model": {"name": "mlp", "hidden": []},
        "training": {"rounds": 1},
    }
    for least, below, runs in ((7, "refuse", False), (7, "hold-back", True), (6, "refuse", True)):
        spec = fs.Experiment.from_table({**table, "privacy": {"min_samples": least, "below": below}})
        if runs:
            fs.prepare(spec)
            continue
        with pytest.raises(
            SpecError, match=r"privacy\.min_samples = 7: .* 'Gradient', because a reply uses a part of a batch of 6"
        ):
            fs.prepare(spec)


@pytest.mark.parametrize("least", [1, 3])
def test_what_is_not_named_in_enrolment_is_not_told_without_it(tiny, least):
    """A server that skips enrolment asks for labels by their numbers."""
    federation = with_minimum(tiny(2, sizes=[7, 2]), least)  # three, two and two of the first client
    labels = torch.arange(3).repeat_interleave(4)
    batches = torch.arange(12)
    replies = federation.ask(range(2), Reserve(1, batches, labels, NONE, True))
    served = [[int((~reply.missing[labels == label]).sum()) for label in range(3)] for reply in replies.values()]
    if least == 1:
        assert served == [[3, 2, 2], [0, 1, 1]]
        return
    held = [int(reply.held.sum()) for reply in replies.values()]
    assert served == [[3, 0, 0], [0, 0, 0]]
    assert held == [0, 0], "as if there were none"
    assert [sorted(reply.exhausted.tolist()) for reply in replies.values()] == [[0, 1, 2], [0, 1, 2]]
    # Of a label that nobody has, the answer is the same.
    other = federation.ask([1], Reserve(2, batches, torch.full((12,), 0), NONE, True))[1]
    few = federation.ask([1], Reserve(2, batches, torch.full((12,), 1), NONE, True))[1]
    assert torch.equal(other.missing, few.missing)
    assert torch.equal(other.held, few.held)
