"""Samples with several inputs: what is stored, normalised, refused, saved and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_cases import Networks, data_of, spec_of
from torch import nn

import fedstrata as fs
from fedstrata.base.errors import DataError, SpecError
from fedstrata.runs.identity import fingerprint_of_data

IDS = np.array([[1, 2], [3, 0], [2, 2]])
MASK = np.array([[True, True], [True, False], [True, True]])
AGE = np.array([10.0, 20.0, 30.0])
CASE = "classification, several inputs"


def data(**changes: Any) -> fs.Dataset:
    x = {"ids": IDS, "mask": MASK, "age": AGE}
    given = {
        "x_train": x,
        "y_train": [0, 1, 0],
        "x_test": {name: part[:2] for name, part in x.items()},
        "y_test": [0, 1],
    }
    return fs.from_arrays(**given | changes)


def test_whole_numbers_and_masks_stay_as_they_are_and_floats_are_normalised():
    made = data()
    batch = made.inputs(np.array([2, 0]))
    assert batch["ids"].tolist() == [[2, 2], [1, 2]]
    assert batch["ids"].dtype == torch.int64
    assert batch["mask"].tolist() == [[True, True], [True, True]]
    deviation = np.sqrt(200 / 3)
    torch.testing.assert_close(batch["age"], torch.tensor([10 / deviation, -10 / deviation], dtype=torch.float32))
    assert made.shape == {"ids": (2,), "mask": (2,), "age": ()}
    assert made.sample_bytes == 2 * 8 + 2 + 4
    assert data(normalize="none").inputs(slice(0, 1))["age"].tolist() == [10.0]
    assert data(normalize="unit").inputs(slice(0, 3))["age"].tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": IDS}, "x_test is a mapping of several inputs, but x_train is not"),
        ({"x_test": {"ids": IDS, "mask": MASK}}, "x_train has the inputs ids, mask, age, but x_test has ids, mask"),
        (
            {"x_train": {"ids": IDS, "mask": MASK, "age": AGE[:2]}},
            "different numbers of samples: 3 of ids, 3 of mask, 2",
        ),
        (
            {"x_train": {"ids": IDS, "mask": MASK, "age": [1.0, np.nan, 2.0]}},
            "x_train.age: 1 values are NaN or infinite",
        ),
        (
            {"x_train": {"ids": IDS[:, :1], "mask": MASK, "age": AGE}},
            "a sample of x_train.ids has size 1, but a sample of x_test.ids has size 2",
        ),
        (
            {"x_train": {"ids": [["a"]], "mask": MASK, "age": AGE}},
            "x_train.ids is of type <U1. Inputs must be numbers",
        ),
        ({"x_train": {"ids": [[1], [1, 2], [3]], "mask": MASK, "age": AGE}}, "x_train.ids cannot be"),
        ({"x_train": {}}, "x_train contains no arrays"),
        (
            {"x_train": {"my ids": IDS, "mask": MASK, "age": AGE}},
            "x_train: 'my ids' is not a valid argument name",
        ),
        ({"y_train": [0, 1]}, "y_train has 2 values for 3 samples"),
    ],
)
def test_wrong_inputs_are_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(DataError) as caught:
        data(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_depends_on_names_and_values():
    other = {
        "x_train": {"ids": IDS, "mask": MASK, "old": AGE},
        "x_test": {"ids": IDS[:2], "mask": MASK[:2], "old": AGE[:2]},
    }
    changed = data(x_test={"ids": IDS[:2] + 1, "mask": MASK[:2], "age": AGE[:2]})
    prints = [fingerprint_of_data(made) for made in (data(), data(), data(**other), changed)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_models_for_one_input_are_refused_before_the_first_round():
    with pytest.raises(
        SpecError, match=r"^model\.name = 'mlp': takes one input, but the samples have 3 inputs \(ids, mask, num"
    ):
        fs.prepare(spec_of(), data=data_of(CASE))


def test_a_module_with_other_arguments_is_refused_by_their_names():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 3)

        def forward(self, ids: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
            return self.head(ids.float())

    with pytest.raises(
        SpecError, match=r"batches of shape ids \(B, 5\), mask \(B, 5\), numbers \(B, 2\).*unexpected keyword"
    ):
        fs.prepare(spec_of(), data=data_of(CASE), model=Two)


@pytest.mark.slow
def test_a_file_of_several_inputs_gives_the_same_run_and_predictor(tmp_path: Path):
    made = data_of(CASE)
    numbers = {
        split: {name: part.numpy() for name, part in x.items()}
        for split, x in (("train", made.x_train), ("test", made.x_test))
    }
    arrays = {f"x_{split}.{name}": part for split, parts in numbers.items() for name, part in parts.items()}
    np.savez(tmp_path / "several.npz", y_train=made.y_train, y_test=made.y_test, **arrays)
    spec = spec_of(data=str(tmp_path / "several.npz"))
    history = fs.run(spec, model=Networks(CASE), out=tmp_path / "run")
    assert history.final_accuracy == fs.run(spec_of(), data=made, model=Networks(CASE)).final_accuracy
    predictor = fs.load(tmp_path / "run", model=Networks(CASE))
    assert predictor.shape == {"ids": (5,), "mask": (5,), "numbers": (2,)}
    assert (predictor.predict(numbers["test"]) == made.y_test.numpy()).mean() == history.final_accuracy
    torch.testing.assert_close(
        predictor.inputs(numbers["test"])["numbers"], made.inputs(slice(None), "test")["numbers"]
    )
    with pytest.raises(DataError, match=r"x has the inputs ids, but this model takes the inputs ids \(B, 5\), mask"):
        predictor.predict({"ids": numbers["test"]["ids"]})
    with pytest.raises(DataError, match=r"x\.ids has the shape \(12, 4\)"):
        predictor.predict(numbers["test"] | {"ids": numbers["test"]["ids"][:, :4]})


def test_a_limit_and_validation_cut_all_inputs(tmp_path: Path):
    made = data_of(CASE)
    arrays = {
        f"x_{split}.{name}": part
        for split, x in (("train", made.x_train), ("test", made.x_test))
        for name, part in x.items()
    }
    np.savez(tmp_path / "several.npz", y_train=made.y_train, y_test=made.y_test, **arrays)
    limited = fs.Data(str(tmp_path / "several.npz"), limit=20).load()
    assert {name: len(part) for name, part in limited.x_train.items()} == {"ids": 20, "mask": 20, "numbers": 20}
    prepared = fs.prepare(spec_of(evaluation={"validation": 0.2}), data=made, model=Networks(CASE))
    assert len(prepared.held.validation) == 8
    for key in ("shape", "shift"):
        with pytest.raises(SpecError, match="several inputs"):
            fs.Data(
                str(tmp_path / "several.npz"),
                **({"shape": [5], "classes": 3} if key == "shape" else {"shift": [1], "scale": [1]}),
            ).load()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", {"name": "stratify", "batch_size": 8}])
@pytest.mark.parametrize("execution", ["per-client", "fused"])
def test_augmentation_gets_all_inputs_of_a_client(method: Any, execution: str):
    spec = spec_of(method, training={"rounds": 1, "execution": execution})
    plain = fs.run(spec, data=data_of(CASE), model=Networks(CASE))
    table = spec.to_spec() | {"data": {"augment": f"{__name__}:hide"}}
    hidden = fs.run(fs.Experiment.from_table(table), data=data_of(CASE), model=Networks(CASE))
    assert not torch.equal(plain.params["words.weight"], hidden.params["words.weight"])
    prepared = fs.prepare(spec, data=data_of(CASE), model=Networks(CASE))
    start = prepared.config.model.params()["words.weight"]
    assert torch.equal(hidden.params["words.weight"][1:], start[1:])  # all ids were 0


def hide(x: Any, generator: torch.Generator) -> Any:
    """An augmentation that replaces all ids by 0."""
    return {**x, "ids": torch.zeros_like(x["ids"])}
