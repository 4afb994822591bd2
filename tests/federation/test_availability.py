from __future__ import annotations

import math

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.data.partitions.base import Assignment
from fedstrata.federation.availability import AvailabilityGroup, Population

EVERYBODY = np.arange(400)


def drawn(model, rounds, seed=0):
    """Who is there, (rounds, clients)."""
    return np.array([model.online(EVERYBODY, round, seed) for round in rounds])


def near_to(share, p, count):
    """Within five standard errors of a binomial share."""
    return abs(share - p) < 5 * math.sqrt(p * (1 - p) / count)


def test_always():
    assert drawn(fs.Always(), range(1, 4)).all()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1.0])
def test_bernoulli_frequencies(p):
    there = drawn(fs.Bernoulli(p=p), range(1, 101))
    assert near_to(there.mean(), p, there.size) if p < 1 else there.all()
    # Neither clients nor rounds have a frequency of their own.
    for axis in (0, 1):
        spread = there.mean(axis=axis).std()
        assert spread == pytest.approx(math.sqrt(p * (1 - p) / there.shape[axis]), rel=0.25)


def test_bernoulli_rounds_are_independent():
    there = drawn(fs.Bernoulli(p=0.5), range(1, 101))
    repeats = (there[1:] == there[:-1]).mean()
    assert near_to(repeats, 0.5, there[1:].size)
    assert (drawn(fs.Bernoulli(p=0.5), [1], seed=1) != there[:1]).any()


def test_persistent_draws_hold_for_a_period_and_no_longer():
    model = fs.Persistent(p=0.3, period=5)
    there = drawn(model, range(1, 501))
    periods = there.reshape(100, 5, -1)
    assert (periods == periods[:, :1]).all()
    assert near_to(periods[:, 0].mean(), 0.3, periods[:, 0].size)
    changes = (periods[1:, 0] != periods[:-1, 0]).mean()
    assert near_to(changes, 2 * 0.3 * 0.7, periods[1:, 0].size)


def test_groups_have_frequencies_of_their_own():
    model = fs.Grouped(
        groups=[
            AvailabilityGroup(clients=100, p=0.2),
            AvailabilityGroup(clients=50, p=1.0),
            AvailabilityGroup(clients=250, p=0.8),
        ]
    )
    there = drawn(model, range(1, 101))
    for part, p in ((slice(0, 100), 0.2), (slice(150, 400), 0.8)):
        assert near_to(there[:, part].mean(), p, there[:, part].size)
    assert there[:, 100:150].all()
    assert (model.online(np.array([399, 120]), 7, 0) == there[6, [399, 120]]).all()
    model.check(Population(400))
    with pytest.raises(SpecError, match=r"the groups have 400 clients in total, but partition\.clients is 401"):
        model.check(Population(401))


@pytest.mark.parametrize("model", [fs.Bernoulli(p=0.4), fs.Persistent(p=0.4, period=3)])
def test_nobodys_fate_depends_on_who_else_is_asked(model):
    there = drawn(model, range(1, 6))
    some = np.array([399, 0, 17])
    for round in range(1, 6):
        assert (model.online(some, round, 0) == there[round - 1, some]).all()
        assert (model.online(np.arange(1000), round, 0)[:400] == there[round - 1]).all()


def trace(tmp_path, text, mode="w"):
    path = tmp_path / "trace.csv"
    path.write_text(text) if mode == "w" else path.write_bytes(text)
    return str(path)


def test_trace(tmp_path):
    text = "client,first,last\n0,1,3\n2,2,2\n0,5,5\n"
    model = fs.Trace(file=trace(tmp_path, text))
    seen = {round: model.online(np.array([2, 0, 1]), round, 0).tolist() for round in range(1, 7)}
    assert seen == {
        1: [False, True, False],
        2: [True, True, False],
        3: [False, True, False],
        4: [False, False, False],
        5: [False, True, False],
        6: [False, False, False],
    }
    model.check(Population(3))
    with pytest.raises(SpecError, match=r"contains client 2, which does not exist\. Use only clients 0 to 1"):
        model.check(Population(2))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("client,from,to\n0,1,2\n", r"not a valid trace of availability \(line 1 must be 'client,first,last'"),
        ("", r"not a valid trace of availability \(line 1 must be 'client,first,last'"),
        ("client,first,last\n0,1,2\n1,x,2\n", r"not a valid trace of availability \(line 3 must have three integers"),
        ("client,first,last\n0,1\n", r"not a valid trace of availability \(line 2 must have three integers"),
        (
            "client,first,last\n0,3,2\n",
            r"not a valid trace of availability \(the columns of line 2 must satisfy 1 <= first <= last",
        ),
        (
            "client,first,last\n0,0,2\n",
            r"not a valid trace of availability \(the columns of line 2 must satisfy 1 <= first <= last",
        ),
        (b"\x80\xff\x00", "is not a valid trace of availability"),
    ],
)
def test_traces_with_errors(tmp_path, text, problem):
    path = trace(tmp_path, text, "w" if isinstance(text, str) else "b")
    with pytest.raises(SpecError, match=problem) as caught:
        fs.Trace(file=path)
    assert (caught.value.key, caught.value.value) == ("file", path)


def test_a_trace_in_seconds(tmp_path):
    text = "client,first,last\n0,0,59.5\n1,60,60\n1,150,400\n"
    model = fs.Trace(file=trace(tmp_path, text), round_seconds=60)
    # Rounds start after 0, 60, 120, 180 seconds.
    online = [model.online(np.array([1, 0]), round, 0).tolist() for round in range(1, 5)]
    assert online == [[False, True], [True, False], [False, False], [True, False]]
    with pytest.raises(SpecError, match="line 2 must have three integers"):
        fs.Trace(file=trace(tmp_path, text.replace("59.5", "5.5").replace("0,0,", "0,0.5,")))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("0,1,x", "line 2 must have an integer and two numbers"),
        ("0.5,1,2", "line 2 must have an integer and two numbers"),
        ("0,-1,2", "the columns of line 2 must satisfy 0 <= first <= last"),
        ("0,nan,2", "the columns of line 2 must satisfy 0 <= first <= last"),
    ],
)
def test_traces_in_seconds_with_errors(tmp_path, line, problem):
    with pytest.raises(SpecError, match=problem):
        fs.Trace(file=trace(tmp_path, f"client,first,last\n{line}\n"), round_seconds=1)


def test_a_trace_beside_the_spec_is_found_from_another_folder(tmp_path, monkeypatch):
    trace(tmp_path, "client,first,last\n0,1,3\n")
    (tmp_path / "one.toml").write_text('[availability]\nname = "trace"\nfile = "trace.csv"\n')
    (tmp_path / "two.toml").write_text('[[availability]]\nname = "trace"\nfile = "trace.csv"\n' * 2)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("one.toml", "two.toml"):
        model = fs.Experiment.from_toml(tmp_path / name).availability
        assert model.online(np.array([0, 1]), 1, 0).tolist() == [True, False]


# Several models.


def combined(*tables):
    return fs.Experiment(availability=list(tables)).availability


def test_a_client_is_online_if_it_is_online_in_each_model(tmp_path):
    file = trace(tmp_path, "client,first,last\n0,1,3\n1,2,2\n2,1,1\n")
    other = tmp_path / "other.csv"
    other.write_text("client,first,last\n0,2,2\n1,1,2\n2,2,3\n")
    model = combined({"name": "trace", "file": file}, {"name": "trace", "file": str(other)})
    seen = [model.online(np.array([2, 0, 1]), round, 0).tolist() for round in (1, 2, 3)]
    assert seen == [[False, False, False], [False, True, True], [False, False, False]]


@pytest.mark.slow
def test_probabilities_multiply_also_of_models_of_one_kind():
    model = combined({"name": "bernoulli", "p": 0.6}, {"name": "bernoulli", "p": 0.5}, {"name": "bernoulli", "p": 0.9})
    there = drawn(model, range(1, 201))
    assert near_to(there.mean(), 0.27, there.size)
    first = drawn(fs.Bernoulli(p=0.6), range(1, 201))
    assert (first | ~there).all()  # the first model draws as it does without the others


def test_each_model_gets_the_population_and_a_copy_of_its_own():
    people = Population(4, 2, Assignment.from_lists([np.array([k]) for k in range(4)]), np.array([0, 0, 1, 1]), 5)
    spec = fs.Experiment(availability=[fs.LabelCorrelated(), fs.LabelCorrelated(), fs.Bernoulli()])
    model = spec.availability.model_copy()
    model.check(people)
    first, second, _ = model.models
    alone = fs.LabelCorrelated()
    alone.check(people)
    assert (first._p == alone._p).all()
    assert (first._p != second._p).any()
    with pytest.raises(AttributeError):
        _ = spec.availability.models[0]._p


def test_the_first_table_has_the_common_settings():
    slow = {"name": "bernoulli", "deadline": 3.0, "speed_spread": 0.5, "announced": True}
    model = combined(slow, "markov", {"name": "cyclic", "deadline": 3.0})
    assert (model.deadline, model.announced, model.simulates_time) == (3.0, True, True)
    work = np.full(400, 100.0)
    assert (model.seconds(EVERYBODY, work, 2) == fs.Bernoulli(speed_spread=0.5).seconds(EVERYBODY, work, 2)).all()
    with pytest.raises(SpecError, match=r"availability\.1\.announced = True: has an effect only in the first"):
        combined("markov", slow)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], r"availability = \[\]: is an empty list. Give at least one availability model."),
        (["markov", "markof"], r"availability.1.name = 'markof': is not a known availability; did you mean 'markov'"),
        (["markov", {"p": 0.5}], r"availability.1.name: is required, but not set. Use one of: always"),
        ([{"name": "markov", "online_rounds": 0.5}], r"availability.0.online_rounds = 0.5: must be greater than or eq"),
    ],
)
def test_lists_with_errors(tables, message):
    with pytest.raises(SpecError, match=message):
        combined(*tables)


def test_a_model_that_does_not_fit_the_federation_has_its_place_in_the_list():
    spec = fs.Experiment(
        partition=fs.IID(clients=3),
        availability=[fs.Markov(), fs.Grouped(groups=[AvailabilityGroup(clients=2, p=0.5)])],
    )
    with pytest.raises(SpecError, match=r"availability\.1\.groups: the groups have 2 clients in total"):
        fs.prepare(spec)


def test_a_list_of_one_is_the_model():
    spec = fs.Experiment(availability=["bernoulli"])
    assert spec == fs.Experiment(availability="bernoulli")
    assert spec.to_toml() == fs.Experiment(availability="bernoulli").to_toml()


def test_speeds_are_lognormal_and_a_clients_own():
    model = fs.Always(speed_spread=0.5, seconds_per_sample=0.01)
    work = np.full(400, 100.0)
    seconds = model.seconds(EVERYBODY, work, seed=0)
    assert np.log(seconds).mean() == pytest.approx(0.0, abs=5 * 0.5 / 20)
    assert np.log(seconds).std() == pytest.approx(0.5, rel=0.15)
    some = np.array([7, 3])
    assert (model.seconds(some, np.array([100.0, 200.0]), 0) == seconds[some] * [1, 2]).all()
    assert (fs.Always().seconds(some, np.array([1.0, 2.0]), 0) == [0.001, 0.002]).all()


def test_each_seed_has_slow_clients_of_its_own():
    model, work = fs.Always(speed_spread=0.5), np.ones(400)
    slow = [set(np.argsort(model.seconds(EVERYBODY, work, seed))[-40:].tolist()) for seed in (0, 1, 2)]
    assert slow[0] == set(np.argsort(model.seconds(EVERYBODY, work, 0))[-40:].tolist())
    # Forty clients drawn twice of 400 have four in common, and more than 15 once in a billion times.
    assert all(len(slow[i] & slow[j]) <= 15 for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize(
    "model",
    [
        fs.Bernoulli(p=0.5),
        fs.Persistent(p=0.5, period=3),
        fs.Grouped(groups=[AvailabilityGroup(clients=400, p=0.5)]),
    ],
    ids=lambda model: model.name,
)
def test_each_seed_draws_who_is_there(model):
    same = (drawn(model, range(1, 31, 3)) == drawn(model, range(1, 31, 3), seed=1)).mean()
    assert near_to(same, 0.5, 4000)


# What the federation makes of it.


@pytest.mark.slow
def test_a_client_is_there_or_not_for_a_whole_round(tiny):
    federation = tiny(40, availability=fs.Bernoulli(p=0.5))
    first = set(federation.fit())
    assert first == set(np.flatnonzero(fs.Bernoulli(p=0.5).online(np.arange(40), 1, 0)))
    assert set(federation.fit()) == first
    log = federation.log
    assert (log.invited, log.returned, log.dropped) == (
        set(range(40)),
        first,
        set(range(40)) - first,
    )
    assert [event["kind"] for event in federation.events] == ["dropped"]  # recorded once
    federation.begin(2)
    assert set(federation.fit()) != first


def test_everybody_is_there_when_clients_enrol(tiny):
    federation = tiny(availability=fs.Bernoulli(p=1e-9))
    federation.begin(0)
    assert len(federation.fit()) == 4
    assert len(federation.candidates()) == 4


def test_announced_availability_is_what_the_server_invites_from(tiny):
    hidden = tiny(40, availability=fs.Bernoulli(p=0.5))
    assert hidden.candidates().tolist() == list(range(40))
    federation = tiny(40, availability=fs.Bernoulli(p=0.5, announced=True))
    candidates = federation.candidates().tolist()
    assert 0 < len(candidates) < 40
    assert list(federation.fit(*candidates)) == candidates
    assert federation.log.dropped == set()


def test_announced_absences_are_of_rounds_and_everybody_may_enrol(tiny):
    federation = tiny(40, availability=fs.Bernoulli(p=0.5, announced=True))
    federation.begin(0)
    assert federation.candidates().tolist() == list(range(40))
    federation.begin(1)
    assert len(federation.candidates()) < 40


def test_late_dropped_failed_and_returned_are_different_counts(tiny, broken):
    # Clients 0 … 7 hold 8, 16, … samples and take 8, 16, … milliseconds for a pass.
    federation = tiny(
        sizes=[8 * (k + 1) for k in range(8)],
        availability=fs.Grouped(
            groups=[AvailabilityGroup(clients=2, p=1e-9), AvailabilityGroup(clients=6, p=1)],
            deadline=0.041,
            seconds_per_sample=0.001,
        ),
        objective=broken(culprits=[2, 3], how="raise 2, nan 3"),
    )
    replies = federation.fit()
    assert list(replies) == [4]
    log = federation.log
    assert log.dropped == {0, 1}
    assert log.late == {5, 6, 7}
    assert log.failed == {2, 3}
    assert log.absent() == {0, 1, 2, 3, 5, 6, 7}
    assert log.metrics() | {"bytes_up": 0, "bytes_down": 0} == {
        "clients_invited": 8,
        "clients_returned": 1,
        "clients_dropped": 2,
        "clients_late": 3,
        "clients_failed": 2,
        "exchanges": 1,
        "hops": 0,
        "bytes_up": 0,
        "bytes_down": 0,
        "simulated_seconds": 0.041,
    }
    assert {event["kind"]: event["clients"] for event in federation.events} == {
        "dropped": [0, 1],
        "late": [5, 6, 7],
        "failed": [2],
        "refused": [3],
    }


def test_without_a_deadline_the_slowest_sets_the_time(tiny):
    federation = tiny(sizes=[8, 80, 16], availability=fs.Always(speed_spread=1.0, seconds_per_sample=0.01))
    assert len(federation.fit()) == 3
    slowest = fs.Always(speed_spread=1.0, seconds_per_sample=0.01).seconds(np.arange(3), np.array([8.0, 80, 16]), 0)
    assert federation.log.simulated_seconds == pytest.approx(slowest.max())
    assert tiny(sizes=[8, 80]).log.simulated_seconds == 0


def test_a_late_client_keeps_the_state_it_had(tiny, broken):
    federation = tiny(sizes=[8, 80], objective=broken(), availability=fs.Always())
    federation.fit()
    before = dict(federation.store.get(1))
    hurried = tiny(sizes=[8, 80], objective=broken(), availability=fs.Always(deadline=0.02))
    hurried.engine = federation.engine
    assert list(hurried.fit()) == [0]
    assert federation.store.get(1) == before == {"objective": {"visits": 1}}
    assert federation.store.get(0) == {"objective": {"visits": 2}}


@pytest.mark.slow
def test_a_round_in_which_nobody_returns_leaves_the_model_as_it_was():
    settings = {"partition": fs.IID(clients=10), "availability": fs.Bernoulli(p=1e-9)}
    for method in ("fedavg", "scaffold", "fedsts", "fedstas", "stratify"):
        spec = fs.Experiment(method=method, training={"rounds": 2}, **settings)
        initial = fs.prepare(spec).config.model.params()
        with pytest.warns(UserWarning, match="the model never changed"):
            history = fs.run(spec)
        assert all((history.params[name] == tensor).all() for name, tensor in initial.items()), method
        assert [record["clients_returned"] for record in history] == [0, 0]
        assert all(record["clients_dropped"] == record["clients_invited"] > 0 for record in history)


def test_the_draws_of_others_do_not_move_when_a_client_joins():
    for model in (fs.Bernoulli(p=0.5), fs.Always(speed_spread=1.0)):
        work = np.ones(11)
        assert (model.online(np.arange(11), 4, 0)[:10] == model.online(np.arange(10), 4, 0)).all()
        assert (model.seconds(np.arange(11), work, 0)[:10] == model.seconds(np.arange(10), work[:10], 0)).all()


def test_the_slowest_of_the_widest_spread_has_a_time(monkeypatch):
    quantiles = np.array([0.0, 1.0 - 2.0**-53])
    monkeypatch.setattr("fedstrata.federation.availability.uniforms", lambda *_: quantiles)
    seconds = fs.Always(speed_spread=10, seconds_per_sample=1e18).seconds(np.arange(2), np.full(2, 1e15), 0)
    assert np.isfinite(seconds).all()


@pytest.mark.parametrize("file", ["~nobody_of_that_name/trace.csv", "a\0b", ".", "x" * 5000])
def test_a_trace_that_is_no_file(file):
    with pytest.raises(SpecError, match="file = "):
        fs.Trace(file=file)
