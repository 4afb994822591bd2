from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import PositiveInt

from fedstrata.config import FromRegistry, Registry, Setting, from_word, load_object, plain
from fedstrata.errors import SpecError
from fedstrata.methods.base import METHODS
from fedstrata.settings import Evaluation, Training
from fedstrata.spec import Experiment


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


def test_a_class_of_ones_own_is_called_by_its_path():
    class Local(Shape):
        pass

    assert Local().to_spec()["name"] == f"{__name__}:{Local.__qualname__}"
    assert "name" not in Training().to_spec()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("circel", r"name = 'circel': no such shape; there are: circle, lost.*did you mean 'circle'"),
        ({"size": 2}, r"name: which shape\? There are: circle, lost"),
        (3, r"3: a shape is a name or a table"),
        ({"name": "circle", "size": 0}, r"size = 0: input should be greater than 0"),
        ({"name": "circle", "siez": 2}, r"siez = 2: unknown key; accepted here: size, inner.*; did you mean 'size'"),
        ({"name": "circle", "inner": {"dept": 1}}, r"inner\.dept = 1: unknown key; accepted here: depth"),
        ({"name": "circle", "inner": {"depth": "deep"}}, r"inner\.depth = 'deep': .*integer"),
        (f"{__name__}:Other", r"is no shape \(a class derived from Shape\)"),
        (f"{__name__}:plain", r"is no shape"),
        (f"{__name__}:Nothing", r"has no 'Nothing'"),
        ("nowhere_at_all:Thing", r"no module 'nowhere_at_all' to load the shape from"),
    ],
)
def test_what_is_wrong_is_named(value, message):
    with pytest.raises(SpecError, match=message):
        SHAPES.parse(value)


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
        ({"shape": "circel"}, r"^shape\.name = 'circel': no such shape; .*did you mean 'circle'"),
        ({"shape": {"size": 2}}, r"^shape\.name: which shape\?"),
        ({"shape": 3}, r"^shape = 3: a shape is a name or a table"),
        ({"frame": {"siz": 2}}, r"^frame\.siz = 2: unknown key; .*; did you mean 'size'\?$"),
        ({"frame": {"points": 2}}, r"^frame\.points = 2: unknown key; .* \(without a name this is 'circle'\)$"),
        ({"ink": {"width": 0}}, r"^ink\.width = 0: input should be greater than 0"),
    ],
)
def test_what_is_wrong_in_a_field_is_named_with_the_field(given, message):
    with pytest.raises(SpecError, match=message):
        Drawing(**given)


def test_settings_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        Training().lr = 1.0  # type: ignore[misc]


def test_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    Path(tmp_path, "beside_the_spec.py").write_text("value = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load_object("beside_the_spec:value", "thing") == 7


def test_an_import_error_inside_a_users_module_is_not_hidden(tmp_path, monkeypatch):
    Path(tmp_path, "imports_what_is_not.py").write_text("import certainly_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="certainly_not_installed"):
        load_object("imports_what_is_not:value", "thing")


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
    with pytest.raises(ValueError, match="exclude each other"):
        Training(local_epochs=2, local_steps=5)
    assert Training(local_steps=5).local_steps == 5


def test_invited_and_due():
    assert [Training().invited(n) for n in (3, 10, 500)] == [3, 10, 10]
    assert Training(clients_per_round=7).invited(100) == 7
    assert [r for r in range(1, 8) if Evaluation(every=3).due(r, 7)] == [3, 6, 7]
    assert [r for r in range(1, 8) if Evaluation(every=0).due(r, 7)] == [7]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "groups"}, "availability.groups: needed, and not given; its keys are clients, p"),
        ({"name": "groups", "groups": [{"clients": 4}]}, "availability.groups.0.p: needed, and not given"),
        (
            {"name": "groups", "groups": [{"clients": 4, "prob": 0.1}]},
            "availability.groups.0.prob = 0.1: unknown key; accepted here: clients, p",
        ),
    ],
    ids=str,
)
def test_what_is_missing_comes_with_what_is_accepted(given, message):
    with pytest.raises(SpecError) as caught:
        Experiment.from_table({"availability": given})
    assert str(caught.value).startswith(message)
