from __future__ import annotations

import tomllib

import pytest

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.evaluation.metrics import FunctionMetric
from fedstrata.spec.reference import rows


def test_what_a_spec_says_is_read_back():
    made = fs.Evaluation(
        metrics=["accuracy", "macro-f1", {"name": "ece", "bins": 5}],
        targets={"accuracy": [0.5], "ece": [0.1]},
        validation=0.1,
        client_test=0.2,
        fine_tune=0,
    )
    table = made.to_spec()
    assert table["metrics"] == ["accuracy", "macro-f1", {"name": "ece", "bins": 5}]
    assert fs.Evaluation(**table) == made
    spec = fs.Experiment(evaluation=made)
    assert fs.Experiment.from_table(tomllib.loads(spec.to_toml())) == spec
    assert made.labels == ["accuracy", "macro-f1", "ece"]
    assert made.accuracy_targets == [0.5]
    assert made.metric_targets == {"ece": [0.1]}
    assert made.lower == {"loss", "ece"}


def test_errors_have_the_whole_key_and_a_function_has_no_key_of_its_own(tmp_path):
    (tmp_path / "spec.toml").write_text("[evaluation]\nmetrics = ['acc']\n")
    with pytest.raises(
        SpecError,
        match=r"^evaluation.metrics.name = 'acc' \(.*spec.toml, line 2\): is not a known metric\. Use one of: acc.*",
    ):
        fs.Experiment.from_toml(tmp_path / "spec.toml")
    (tmp_path / "spec.toml").write_text("[evaluation]\nevery = 2\nfine_tune = 3\n")
    with pytest.raises(SpecError, match=r"^evaluation.fine_tune = 3 \(.*spec.toml, line 3\): "):
        fs.Experiment.from_toml(tmp_path / "spec.toml")
    with pytest.raises(
        SpecError, match=r"^evaluation.evry = 2: is not a known key; did you mean 'every'\? Use one of: every, "
    ):
        fs.Experiment.from_table({"evaluation": {"evry": 2}})
    assert [row[0] for row in rows(FunctionMetric)] == ["lower_is_better"]


def test_what_is_not_asked_for_is_not_in_the_spec():
    table = fs.Evaluation().to_spec()
    assert not {"validation", "client_test", "test_clients", "fine_tune", "primary"} & table.keys()
    assert "callbacks" not in fs.Experiment().to_spec()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"metrics": ["acuracy"]},
            r"metrics.name = 'acuracy': is not a known metric; did you mean 'accuracy'",
        ),
        ({"metrics": []}, "metrics = .*at least 1 item"),
        (
            {"metrics": ["ece", {"name": "ece", "bins": 3}]},
            r"'ece', 'bins': 3\}\]: the list contains 'ece' twice\. Remove one of the two\.",
        ),
        ({"metrics": [{"name": "ece", "bins": 0}]}, "bins = 0"),
        ({"metrics": [{"name": "accuracy", "bins": 3}]}, "metrics.bins = 3: is not a known key"),
        (
            {"targets": {"macro-f1": [0.5]}},
            "targets = 'macro-f1': is not a metric of this run. Use one of: accuracy, loss",
        ),
        (
            {"targets": 90},
            r"targets = 90: must be a list of accuracies, as fractions\. Use, for example, \[0\.9\]\.",
        ),
        ({"targets": {"accuracy": [1.5]}}, r"1\.5 is not between 0 \(excluded\) and 1"),
        ({"targets": [0.0]}, r"0\.0 is not between 0 \(excluded\) and 1"),
        (
            {"metrics": ["auroc"], "primary": "aurok"},
            r"primary = 'aurok': is not a metric of this run; did you mean 'auroc'\? Add the metric to "
            r"evaluation.metrics, or use one of: accuracy, loss, auroc\.",
        ),
        ({"validation": 0}, "validation = 0.*greater than 0"),
        ({"client_test": 1.0}, "client_test = 1.0.*less than 1"),
        ({"test_clients": -0.1}, "test_clients = -0.1"),
        ({"fine_tune": 1}, "fine_tune = 1: requires that clients have their own test samples"),
        ({"fine_tune": -1, "client_test": 0.1}, "fine_tune = -1"),
    ],
)
def test_what_is_refused(settings, problem):
    with pytest.raises(SpecError, match=problem):
        fs.Evaluation(**settings)
