from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, PositiveInt

import fedstrata as fs
from fedstrata.base.config import FromRegistry, Registry, Setting, from_word, plain
from fedstrata.base.errors import SpecError
from fedstrata.base.loading import load_object
from fedstrata.evaluation.settings import Evaluation
from fedstrata.federation.settings import Training
from fedstrata.methods.base import METHODS
from fedstrata.spec.experiment import Experiment


class Shape(Setting):
    """What the test's registry holds."""

    size: PositiveInt = 1


class Inner(Setting):
    depth: int = 0


class Circle(Shape):
    inner: Inner = Inner()
    colour: str | None = None


class Other:
    """No shape."""


SHAPES: Registry[Shape] = Registry("shape", Shape, {"circle": f"{__name__}:Circle", "lost": "nowhere_at_all:Lost"})


def test_a_name_a_table_and_an_object_mean_the_same():
    assert SHAPES.parse("circle") == SHAPES.parse({"name": "circle"}) == SHAPES.parse(Circle()) == Circle()
    assert SHAPES.parse({"name": "circle", "size": 3}).size == 3
    assert SHAPES.parse(f"{__name__}:Circle") == Circle()
    assert list(SHAPES) == ["circle", "lost"]


def test_to_spec_leaves_out_what_is_not_set_and_reads_back():
    circle = Circle(size=2, inner={"depth": 4})
    assert circle.to_spec() == {"name": "circle", "size": 2, "inner": {"depth": 4}}
    assert SHAPES.parse(circle.to_spec()) == circle
    assert plain({"a": (circle, None), "b": None}) == {"a": [circle.to_spec(), None]}


def test_to_spec_leaves_out_later_settings_with_their_defaults():
    class Grown(Inner):
        later_settings = ("width",)
        width: int = 5

    assert Grown().to_spec() == Grown(width=5).to_spec() == {"depth": 0}
    assert Grown(width=6).to_spec() == {"depth": 0, "width": 6}


def test_a_class_of_ones_own_is_called_by_its_path():
    class Local(Shape):
        pass

    assert Local().to_spec()["name"] == f"{__name__}:{Local.__qualname__}"
    assert "name" not in Training().to_spec()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("circel", r"name = 'circel': is not a known shape; did you mean 'circle'\? Use one of: circle, lost"),
        ({"size": 2}, r"name: is required, but not set. Use one of: circle, lost"),
        (3, r"3: must be a name, or a table"),
        ({"name": "circle", "size": 0}, r"size = 0: must be greater than 0"),
        (
            {"name": "circle", "siez": 2},
            r"siez = 2: is not a known key; did you mean 'size'\? Use one of: size, inner.*",
        ),
        (
            {"name": "circle", "inner": {"dept": 1}},
            r"inner\.dept = 1: is not a known key; did you mean 'depth'\? Use one of: depth\.",
        ),
        ({"name": "circle", "inner": {"depth": "deep"}}, r"inner\.depth = 'deep': .*integer"),
        (f"{__name__}:Other", r"is not a subclass of Shape\. Derive the class"),
        (f"{__name__}:plain", r"is not a subclass of Shape\. Derive the class"),
        (f"{__name__}:Nothing", r"the module 'tests\.base\.test_config' does not define 'Nothing'\. Check the"),
        ("nowhere_at_all:Thing", r"the module 'nowhere_at_all' was not found"),
    ],
)
def test_what_is_wrong_is_named(value, message):
    with pytest.raises(SpecError, match=message):
        SHAPES.parse(value)


def test_a_module_that_imports_what_is_not_installed_says_so(tmp_path, monkeypatch):
    """The error about a model that needs peft said 'Correct the module'."""
    (tmp_path / "needy.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError, match=r"No module named 'nowhere_at_all'\. Install 'nowhere_at_all'\.$"):
        SHAPES.parse("needy:Thing")


class Ink(Setting):
    colour: str = "black"
    width: PositiveInt = 1


class Drawing(Setting):
    """Fields that are read from a registry, or from a word."""

    shape: Annotated[Shape, FromRegistry(SHAPES)] = Circle()
    frame: Annotated[Shape, FromRegistry(SHAPES, default="circle")] | None = None
    ink: Annotated[Ink, from_word(Ink, "colour")] = Ink()


def test_a_field_takes_a_name_a_table_and_an_object():
    for shape in ("circle", {"name": "circle"}, Circle()):
        assert Drawing(shape=shape).shape == Circle()
    assert Drawing(frame={"size": 3}).frame == Circle(size=3)
    assert Drawing(ink="red").ink == Drawing(ink={"colour": "red"}).ink == Ink(colour="red")
    assert Drawing.model_validate(Drawing(frame="circle").to_spec()) == Drawing(frame="circle")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shape": "circel"}, r"^shape\.name = 'circel': is not a known shape; did you mean 'circle'"),
        ({"shape": {"size": 2}}, r"^shape\.name: is required, but not set"),
        ({"shape": 3}, r"^shape = 3: must be a name, or a table"),
        ({"frame": {"siz": 2}}, r"^frame\.siz = 2: is not a known key; did you mean 'size'\? Use one of: .*\.$"),
        (
            {"frame": {"points": 2}},
            r"^frame\.points = 2: is not a known key. .*\. .* so 'circle' is used\. Set 'name'\.$",
        ),
        ({"ink": {"width": 0}}, r"^ink\.width = 0: must be greater than 0"),
    ],
)
def test_what_is_wrong_in_a_field_is_named_with_the_field(given, message):
    with pytest.raises(SpecError, match=message):
        Drawing(**given)


def test_settings_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        Training().lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import certainly_not_installed", "ModuleNotFoundError: No module named 'certainly_not_installed'"),
        ("import fails_on_impor", "ModuleNotFoundError: No module named 'fails_on_impor'"),
        ("def (", r"SyntaxError: invalid syntax \(fails_on_import.py, line 1\)"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_users_module_that_fails_on_import_is_named_with_its_own_error(tmp_path, monkeypatch, text, message):
    Path(tmp_path, "fails_on_import.py").write_text(text + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError, match=f"name = 'fails_on_import:value': .* with {message}") as caught:
        load_object("fails_on_import:value", "thing")
    assert caught.value.__cause__ is not None


def test_a_module_in_thousands_of_packages_is_refused():
    with pytest.raises(SpecError, match=r"name = 'a\.a\.a"):
        load_object(".".join(["a"] * 5000) + ":value", "thing")


HUGE = 10**30


@pytest.mark.parametrize(
    ("section", "table", "key"),
    [
        ("seed", 10**5000, "seed"),
        ("seed", 2**128, "seed"),
        ("training", {"batch_size": HUGE}, "training.batch_size"),
        ("training", {"rounds": HUGE}, "training.rounds"),
        ("training", {"threads": 100_000}, "training.threads"),
        ("training", {"workers": 100_000}, "training.workers"),
        ("training", {"lr": 1.7e308}, "training.lr"),
        ("evaluation", {"batch_size": HUGE}, "evaluation.batch_size"),
        ("evaluation", {"every": HUGE}, "evaluation.every"),
        ("data", {"limit": HUGE}, "data.limit"),
        ("availability", {"speed_spread": 10_000}, "availability.speed_spread"),
        ("availability", {"seconds_per_sample": 1e300}, "availability.seconds_per_sample"),
        ("availability", {"name": "persistent", "period": HUGE}, "availability.period"),
        ("model", {"hidden": [HUGE]}, "model.hidden"),
        ("model", {"name": "cnn", "channels": [8, HUGE]}, "model.channels"),
        ("partition", {"clients": HUGE, "min_size": 0}, "partition.clients"),
        ("partition", {"clients": 2**31 - 1, "min_size": 0}, "partition.clients"),
        ("partition", {"name": "groups", "groups": [{"clients": 2**31, "classes": 1}]}, "partition.clients"),
        ("partition", {"name": "given", "indices": [[0, HUGE], [1]]}, "partition.indices"),
        ("partition", {"name": "given", "indices": 5}, "partition.indices"),
        ("partition", {"name": "shards", "per_client": HUGE}, "partition.per_client"),
        ("partition", {"name": "classes", "size": HUGE}, "partition.size"),
        ("method", {"name": "stratify", "cap": HUGE}, "method.cap"),
        ("method", {"name": "stratify", "batch_size": HUGE}, "method.batch_size"),
        ("method", {"name": "stratify", "chunk_size": HUGE}, "method.chunk_size"),
        ("method", {"name": "fedsampling", "samples": HUGE}, "method.samples"),
        ("method", {"name": "fedsampling", "bound": HUGE}, "method.bound"),
        ("method", {"aggregator": {"name": "size", "server": {"lr": 1.7e308}}}, "method.aggregator.server.lr"),
        ("method", {"objective": {"name": "fedprox", "mu": 1e300}}, "method.objective.mu"),
    ],
    ids=lambda value: str(value)[:60] if not isinstance(value, int) else "number",
)
def test_a_number_too_large_to_be_served_is_refused(section, table, key):
    with pytest.raises(SpecError, match=r"(less than or equal to|at most) \d|must be a list") as caught:
        Experiment.from_table({section: table})
    assert caught.value.key == key


class Chosen(Setting):
    count: Annotated[int, Field(le=2**40)] = 0
    share: Annotated[float, Field(lt=1e200)] = 0.0
    below: float = 0.0


def test_a_setting_may_declare_a_bound_of_its_own():
    assert Chosen(count=2**40, share=1e199).share == 1e199
    with pytest.raises(SpecError, match=f"count = {2**40 + 1}: must be less than or equal to {2**40}"):
        Chosen(count=2**40 + 1)
    with pytest.raises(SpecError, match=r"below = -1e\+19: is too large\. Use at most 1e\+18\."):
        Chosen(below=-1e19)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fs.Dirichlet(alpha=0), r"^alpha = 0: must be greater than or equal to 0.000000001\.$"),
        (lambda: fs.Data(limit=0), r"^limit = 0: must be greater than 0\.$"),
        (lambda: fs.Training(lr="fast"), "^lr = 'fast': must be a number"),
        (lambda: fs.Training(self=1), "^self = 1: is not a known key"),
        (lambda: fs.Experiment(training={"lr": 0}), r"^training.lr = 0: must be greater than 0\.$"),
        (lambda: fs.Experiment(partition={"alpha": 0}), "^partition.alpha = 0: "),
        (lambda: fs.Experiment(method=fs.FedAvg(), modle="cnn"), "^modle = 'cnn': is not a known key. .*'model'"),
    ],
)
def test_python_gets_the_same_errors_as_a_spec(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_every_registered_method_is_there_under_its_name():
    for name in METHODS:
        method = METHODS.find(name)
        assert method.name == name
        assert (method.__doc__ or "").strip()
        assert method.paper
        assert METHODS.parse(METHODS.parse(name).to_spec()) == METHODS.parse(name)


def test_schedules_by_hand():
    assert [Training(lr=0.6, schedule="inverse").lr_at(t) for t in (1, 2, 3)] == pytest.approx([0.6, 0.3, 0.2])
    cosine = Training(lr=0.4, schedule="cosine", rounds=4)
    assert [cosine.lr_at(t) for t in (1, 2, 3, 4, 5)] == pytest.approx([0.4, 0.341421356, 0.2, 0.058578644, 0.0])
    assert {Training(lr=0.1).lr_at(t) for t in (1, 500)} == {0.1}


def test_epochs_or_steps_and_not_both():
    with pytest.raises(SpecError, match=r"^local_steps = 5: cannot be set together with local_epochs"):
        Training(local_epochs=2, local_steps=5)
    assert Training(local_steps=5).local_steps == 5


def test_invited_and_due():
    assert [Training().invited(n) for n in (3, 10, 500)] == [3, 10, 10]
    assert Training(clients_per_round=7).invited(100) == 7
    assert Evaluation(every=3).evaluated_rounds(7) == {3, 6, 7}
    assert Evaluation(every=0).evaluated_rounds(7) == {7}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"name": "groups"},
            "availability.groups: is required, but not set. Set this key to a table with the keys: clients, p",
        ),
        ({"name": "groups", "groups": [{"clients": 4}]}, "availability.groups.0.p: is required, but not set"),
        (
            {"name": "groups", "groups": [{"clients": 4, "prob": 0.1}]},
            "availability.groups.0.prob = 0.1: is not a known key. Use one of: clients, p",
        ),
    ],
    ids=str,
)
def test_what_is_missing_comes_with_what_is_accepted(given, message):
    with pytest.raises(SpecError) as caught:
        Experiment.from_table({"availability": given})
    assert str(caught.value).startswith(message)
