"""A model that can be used: what it finds on raw samples is what the run reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from quick import others_long
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import DataError, SpecError
from fedstrata.base.jsonl import write_json
from fedstrata.runs.predictor import describe_model

DIGITS = fs.Data().load()
IMAGES = {"x_train": DIGITS.x_train[:200].numpy(), "y_train": DIGITS.y_train[:200].numpy()}
IMAGES |= {"x_test": DIGITS.x_test.numpy(), "y_test": DIGITS.y_test.numpy()}


def spec(**change: Any) -> fs.Experiment:
    table: dict[str, Any] = {
        "partition": {"name": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": [16]},
        "training": {"rounds": 2, "local_epochs": 1, "lr": 0.05},
    }
    return fs.Experiment.from_table({**table, **change})


class Own(nn.Module):
    """As people write them: in the usual memory order, with BatchNorm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.fc = nn.Linear(width * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.conv(x)))
        return self.fc(hidden.view(len(hidden), -1))


def accuracy(predictor: fs.Predictor, x: object, y: Any) -> float:
    return float((predictor.predict(x) == np.asarray(y)).mean())


def offset(dtype: type) -> dict[str, Any]:
    """Whole numbers whose differences float32 would lose."""
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, size=400)
    x = (2_000_000_000 + 5 * y[:, None] + generator.integers(-4, 5, size=(400, 4))).astype(dtype)
    return {"x_train": x[:300], "y_train": y[:300], "x_test": x[300:], "y_test": y[300:]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on digits: its folder and its history."""
    out = tmp_path_factory.mktemp("trained") / "run"
    return out, fs.run(spec(), out=out)


RUNS: dict[str, tuple[dict[str, Any], Any]] = {
    "mlp": ({}, None),
    "cnn": ({"model": {"name": "cnn", "channels": [4, 8], "hidden": 16}}, IMAGES),
    "resnet20": ({"model": "resnet20", "training": {"rounds": 2, "local_steps": 2}}, IMAGES),
    "local-statistics": (
        {"model": "resnet20", "training": {"rounds": 1, "local_steps": 3, "batch_norm": "local"}},
        IMAGES,
    ),
    "integers": ({"model": {"name": "tabular", "hidden": [8]}}, offset(np.int64)),
    "floats": ({"model": {"name": "tabular", "hidden": [8]}}, offset(np.float64)),
    "unit": ({"data": {"normalize": "unit"}}, IMAGES),
    "none": ({"data": {"normalize": "none"}, "training": {"rounds": 2, "lr": 0.001}}, IMAGES),
    "fedbabu": (
        {
            "method": {"name": "fedbabu", "fine_tune": {"per_class": 4}},
            "partition": {"name": "classes", "clients": 4, "per_client": 3, "size": 60},
        },
        None,
    ),
    "stratify": ({"method": {"name": "stratify", "cap": 20}}, IMAGES),
    "small-batches": ({"evaluation": {"batch_size": 7}}, IMAGES),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", others_long(RUNS, [case for case in RUNS if case not in ("mlp", "floats", "resnet20")])
)
def test_it_finds_on_raw_samples_what_the_run_reported(case: str, tmp_path: Path) -> None:
    change, data = RUNS[case]
    history = fs.run(spec(**change), out=tmp_path / "run", data=data)
    test = data or IMAGES
    predictor = fs.load(tmp_path / "run")
    assert accuracy(predictor, test["x_test"], test["y_test"]) == history.final_accuracy
    assert accuracy(predictor, torch.as_tensor(test["x_test"]), test["y_test"]) == history.final_accuracy
    likely = predictor.predict_proba(test["x_test"])[np.arange(len(test["y_test"])), test["y_test"]]
    assert -np.log(likely).mean() == pytest.approx(history[-1]["loss"], rel=1e-4)
    assert not predictor.module.training


def test_the_parameters_alone_are_not_enough(tmp_path: Path) -> None:
    """What a user did before: 86.0 % on raw inputs where the run reported 90.0."""
    history = fs.run(spec(), out=tmp_path / "run")
    predictor = fs.load(tmp_path / "run")
    raw = torch.as_tensor(IMAGES["x_test"]).float().permute(0, 3, 1, 2)
    with torch.no_grad():
        found = [predictor.module(x).argmax(1).numpy() for x in (raw, predictor.inputs(IMAGES["x_test"]))]
    missed, met = ((each == IMAGES["y_test"]).mean() for each in found)
    assert missed != met == history.final_accuracy


@pytest.mark.slow
def test_a_module_of_the_users_own(tmp_path: Path) -> None:
    given = Own()
    history = fs.run(spec(), out=tmp_path / "run", data=IMAGES, model=given)
    fresh = Own()
    before = [w.clone() for w in fresh.state_dict().values()]
    for module in (fresh, given, fs.Model(Own())):
        predictor = fs.load(tmp_path / "run", model=module)
        assert accuracy(predictor, IMAGES["x_test"], IMAGES["y_test"]) == history.final_accuracy
    assert all(torch.equal(*pair) for pair in zip(before, fresh.state_dict().values(), strict=True))
    model = json.loads((tmp_path / "run" / "model.json").read_text())["model"]
    assert model["name"] == "custom"
    assert model["class"] == f"{__name__}.Own"
    assert model["shapes"]["conv.weight"] == [8, 1, 3, 3]
    assert model["shapes"]["norm.num_batches_tracked"] == []
    with pytest.raises(SpecError, match="model: the run in"):
        fs.load(tmp_path / "run")
    with pytest.raises(SpecError, match=r"conv\.weight is float32 \(9, 1, 3, 3\) in the module, but float32 \(8, 1"):
        fs.load(tmp_path / "run", model=Own(9))
    for module, name in ((nn.Sequential(Own()), r"0\.conv"), (Own().double(), r"conv\.weight is float64")):
        with pytest.raises(SpecError, match=name):
            fs.load(tmp_path / "run", model=module)
    with pytest.raises(SpecError, match=r"model = 'mlp': must be an nn\.Module"):
        fs.load(tmp_path / "run", model="mlp")


@pytest.mark.slow
def test_a_module_with_less_than_the_run_had(tmp_path: Path) -> None:
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Identity())
    fs.run(spec(training={"rounds": 1}), out=tmp_path / "run", data=IMAGES, model=wide)
    slim = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    with pytest.raises(SpecError, match=r"model = 'Sequential': must take .*logits \(B, 10\), but returned \(20, 1\)"):
        fs.load(tmp_path / "run", model=nn.Sequential(nn.Flatten(), *wide[1:], nn.Flatten(0), nn.Unflatten(0, (-1, 1))))
    with pytest.raises(SpecError, match=", but the model failed on a test batch: "):
        fs.load(tmp_path / "run", model=nn.Sequential(nn.Identity(), nn.Linear(64, 10)))
    with pytest.raises(SpecError, match=r"1\.bias is missing in the module, but float32 \(10,\) in model\.safetensors"):
        fs.load(tmp_path / "run", model=slim)


def test_a_factory_that_the_spec_names_is_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_factory.py").write_text(
        "from torch import nn\n\ndef net(shape, classes, width=4):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    history = fs.run(spec(model={"name": "my_factory:net", "width": 8}), out=tmp_path / "run")
    assert accuracy(fs.load(tmp_path / "run"), IMAGES["x_test"], IMAGES["y_test"]) == history.final_accuracy
    about = json.loads((tmp_path / "run" / "model.json").read_text())
    del about["checksum"]  # it says that the file is as the run wrote it
    about["model"]["name"] = "no_such_module:net"
    write_json(tmp_path / "run" / "model.json", about)
    with pytest.raises(SpecError, match=r"the module 'no_such_module' was not found\. Check the name and the working"):
        fs.load(tmp_path / "run")
    again = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    assert accuracy(fs.load(tmp_path / "run", again), IMAGES["x_test"], IMAGES["y_test"]) == history.final_accuracy


@pytest.mark.slow
def test_after_a_kill_there_is_no_model_and_after_resume_there_is(tmp_path: Path) -> None:
    def die(record: Any) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    long = spec(training={"rounds": 3, "local_epochs": 1}, evaluation={"checkpoint_every": 1})
    with pytest.raises(KeyboardInterrupt):
        fs.run(long, out=tmp_path / "run", callbacks=[die])
    with pytest.raises(SpecError, match=r"run_dir = .*has not ended.*run --resume .*resume=True"):
        fs.load(tmp_path / "run")
    history = fs.run(long, out=tmp_path / "run", resume=True)
    assert accuracy(fs.load(tmp_path / "run"), IMAGES["x_test"], IMAGES["y_test"]) == history.final_accuracy


def test_two_files_are_enough(trained, tmp_path: Path) -> None:
    for name in ("model.json", "model.safetensors"):
        shutil.copy(trained[0] / name, tmp_path)
    assert accuracy(fs.load(tmp_path), IMAGES["x_test"], IMAGES["y_test"]) == trained[1].final_accuracy


@pytest.mark.slow
def test_every_form_of_samples_gives_the_same(trained) -> None:
    predictor = fs.load(trained[0])
    x = IMAGES["x_test"][:50]
    likely = predictor.predict_proba(x)
    assert likely.dtype == np.float32
    assert likely.shape == (50, 10)
    np.testing.assert_allclose(likely.sum(1), 1, rtol=1e-5)
    forms = [x[..., 0], x.transpose(0, 3, 1, 2), x.astype(float), x.tolist(), torch.from_numpy(x), x.astype(">i4")]
    for form in forms:
        np.testing.assert_array_equal(predictor.predict_proba(form), likely)
    np.testing.assert_array_equal(predictor.predict(x), likely.argmax(1))
    assert predictor.predict(x).dtype == np.int64
    assert predictor.classes == tuple(range(10))
    assert repr(predictor) == "Predictor(Classifier, shape=(1, 8, 8), classes=10)"


def test_colours_and_names(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    y = np.array(["ant", "bee", "cat"])[np.arange(90) % 3]
    x = generator.normal(size=(90, 3, 8, 8)) + 3 * np.stack([y == "ant", y == "bee", y == "cat"], 1)[..., None, None]
    history = fs.run(spec(), out=tmp_path / "run", data=(x[:60], y[:60], x[60:], y[60:]))
    predictor = fs.load(tmp_path / "run")
    assert predictor.classes == ("ant", "bee", "cat")
    assert accuracy(predictor, x[60:], y[60:]) == history.final_accuracy > 0.5
    np.testing.assert_array_equal(predictor.predict(x.transpose(0, 2, 3, 1)), predictor.predict(x))


@pytest.mark.slow
def test_labels_are_what_the_data_had(tmp_path: Path) -> None:
    data = offset(np.int64)
    labels = np.array([-5, 3, 2**62])
    data |= {key: labels[data[key]] for key in ("y_train", "y_test")}
    history = fs.run(spec(model="tabular"), out=tmp_path / "run", data=data)
    predictor = fs.load(tmp_path / "run")
    assert predictor.classes == (-5, 3, 2**62)
    assert accuracy(predictor, data["x_test"], data["y_test"]) == history.final_accuracy


def test_names_that_only_look_like_numbers_stay_names(tmp_path: Path) -> None:
    """As numbers "07" and "7" would be the same label."""
    data = offset(np.int64)
    labels = np.array(["07", "7", "8"])
    data |= {key: labels[data[key]] for key in ("y_train", "y_test")}
    history = fs.run(spec(model="tabular"), out=tmp_path / "run", data=data)
    predictor = fs.load(tmp_path / "run")
    assert predictor.classes == ("07", "7", "8")
    assert accuracy(predictor, data["x_test"], data["y_test"]) == history.final_accuracy


@pytest.mark.slow
def test_a_single_sample_keeps_its_last_digits(tmp_path: Path) -> None:
    """In a single row of float64 nothing shows that float32 would lose what tells it from the others."""
    data = offset(np.float64)
    fs.run(spec(model="tabular", training={"rounds": 1}), out=tmp_path / "run", data=data)
    predictor = fs.load(tmp_path / "run")
    data = offset(np.float64)
    whole = predictor.inputs(data["x_test"])
    alone = torch.cat([predictor.inputs(row[None]) for row in data["x_test"]])
    assert torch.equal(whole, alone)
    assert whole.std() > 0.5
    assert (data["x_test"] == offset(np.float64)["x_test"]).all()


def test_the_normalisation_comes_back_to_the_bit(tmp_path: Path) -> None:
    x = np.random.default_rng(2).lognormal(size=(60, 5)).astype(np.float32) / 3
    for data in (fs.from_arrays(x, np.arange(60) % 3, x, np.arange(60) % 3), fs.from_arrays(**offset(np.int64))):
        prepared = fs.prepare(spec(model="tabular"), data=data)
        write_json(tmp_path / "model.json", describe_model(prepared))
        found = json.loads((tmp_path / "model.json").read_text())["normalisation"]
        for key in ("shift", "scale"):
            tensor = getattr(data, key)
            assert found["dtype"] == str(tensor.dtype).removeprefix("torch.")
            assert torch.equal(torch.tensor(found[key], dtype=tensor.dtype), tensor)


def test_samples_that_do_not_fit(trained) -> None:
    predictor = fs.load(trained[0])
    x = IMAGES["x_test"]
    with pytest.raises(
        DataError, match=r"x has the shape \(360, 7, 8, 1\), but this model takes samples of shape \(1, 8,"
    ):
        predictor.predict(x[:, 1:])
    with pytest.raises(DataError, match=r"has the shape \(8, 8\), but this model takes samples of shape \(1, 8, 8\)\."):
        predictor.predict_proba(x[0, ..., 0])
    with pytest.raises(DataError, match=r"128 values are NaN or infinite, the first at index \(0, 0, 0, 0\)\. Replace"):
        predictor.predict(np.full((2, 8, 8), np.nan))
    with pytest.raises(DataError, match="No axis may be empty"):
        predictor.predict(x[:0])
    with pytest.raises(DataError, match="Inputs must be numbers"):
        predictor.predict(np.full((2, 8, 8), "a"))


@pytest.mark.slow
def test_statistics_of_batches(tmp_path: Path) -> None:
    local = {"model": "resnet20", "training": {"rounds": 1, "local_steps": 3, "batch_norm": "local"}}
    history = fs.run(spec(**local), out=tmp_path / "run", data=IMAGES)
    predictor = fs.load(tmp_path / "run")
    before = {name: w.clone() for name, w in predictor.module.state_dict().items()}
    for _ in range(2):
        assert accuracy(predictor, IMAGES["x_test"], IMAGES["y_test"]) == history.final_accuracy
    assert all(torch.equal(w, before[name]) for name, w in predictor.module.state_dict().items())
    assert not any(part.training for part in predictor.module.modules())
    with pytest.raises(DataError, match=r"has only one sample\. .*batch_norm = 'local'.*Give several samples at once"):
        predictor.predict(IMAGES["x_test"][:1])
    # Without BatchNorm the setting means nothing.
    plain = fs.prepare(spec(training={"batch_norm": "local"}))
    assert describe_model(plain)["batch_statistics"] is False


def test_no_run_and_damaged_files(trained, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"run_dir = .*is not a run folder"):
        fs.load(tmp_path / "nothing")
    out = tmp_path / "run"
    shutil.copytree(trained[0], out)
    whole = json.loads((out / "model.json").read_text())
    assert whole.pop("checksum") != whole.pop("parameters")
    damaged = ["", "[]", "{}", "[" * 100_000, "\0" * 10]
    wrong = {
        "input_shape": [[], [1, 8], ["8"], [1, 8, -8]],
        "class_names": [[], ["1"], list(range(10))],
        "normalisation": [{}, whole["normalisation"] | {"shift": [None]}, whole["normalisation"] | {"dtype": "int8"}],
        "batch_size": [0, "many"],
        "model": [None, {}, {"name": 3}],
        "format": ["1"],
    }
    damaged += [json.dumps(whole | {key: value}) for key, values in wrong.items() for value in values]
    for text in damaged:
        (out / "model.json").write_text(text)
        with pytest.raises(DataError, match=r"model\.json is damaged"):
            fs.load(out)
    write_json(out / "model.json", whole | {"format": 99, "fedstrata": "9.9"})
    with pytest.raises(DataError, match=r"written by fedstrata 9\.9"):
        fs.load(out)
    write_json(out / "model.json", whole | {"model": {"name": "mlp", "hidden": [17]}})
    with pytest.raises(SpecError, match=r"does not fit the run .*body\.1\.weight is float32 \(17, 64\) in the module"):
        fs.load(out)
    write_json(out / "model.json", whole | {"model": {"name": "mlp", "hiden": [17]}})
    with pytest.raises(SpecError, match=r"model\.hiden"):
        fs.load(out)
    (out / "model.json").unlink()
    with pytest.raises(
        SpecError, match=r"the folder does not contain model\.json, which describes how to use model\.safetensors"
    ):
        fs.load(out)
    write_json(out / "model.json", whole)
    (out / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read"):
        fs.load(out)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_single_digit_or_bit_that_flipped_is_noticed(trained, tmp_path: Path, name: str) -> None:
    """Both files could still be read, and the model was another one."""
    out = tmp_path / "run"
    shutil.copytree(trained[0], out)
    content = (out / name).read_bytes()
    # A digit of the batch size, or a byte of the last parameter.
    place = content.index(b'"batch_size": ') + 14 if name == "model.json" else len(content) - 3
    (out / name).write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
    with pytest.raises(DataError, match=f"{name} is damaged: "):
        fs.load(out)
    if name == "model.safetensors":
        with pytest.raises(DataError, match=r"is damaged: its checksum differs from the checksum in model\.json\."):
            _ = fs.History.load(out).params


def test_the_files_of_parameters_are_what_they_were(trained) -> None:
    out, history = trained
    assert (out / "model.safetensors").read_bytes() == safetensors.torch.save(history.params)


@pytest.mark.slow
def test_the_module_can_be_exported(trained, tmp_path: Path) -> None:
    predictor = fs.load(trained[0])
    x = predictor.inputs(IMAGES["x_test"][:20])
    program = torch.export.export(predictor.module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    more = predictor.inputs(IMAGES["x_test"][:31])
    torch.testing.assert_close(program.module()(more), predictor.module(more))
