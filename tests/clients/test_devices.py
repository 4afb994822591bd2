"""Where clients compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from adapters import find_example, passages, spec_of

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.clients.training.devices import CPU, device_of, on_device, to_device
from fedstrata.methods.base import METHODS
from fedstrata.runs.simulation import make_context

TABLE = {"partition": {"name": "iid", "clients": 4}, "training": {"rounds": 2, "local_epochs": 1}}


def spec(device: str, method: str = "fedavg") -> fs.Experiment:
    training = {**TABLE["training"], "device": device}
    return fs.Experiment.from_table({**TABLE, "method": method, "training": training})


def test_a_device_that_is_none_says_which_there_are():
    with pytest.raises(
        SpecError, match=r"training\.device = 'gpu': is not a device\. Use one of: cpu, cuda, cuda:N, auto\."
    ):
        spec("gpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_without_a_gpu_one_is_refused_before_anything_is_written(device, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        SpecError, match=rf"training\.device = '{device}': PyTorch finds 0 CUDA devices on this machine. .*'auto'\.$"
    ):
        fs.run(spec(device), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(device_of(name)) for name in ("cpu", "cuda", "cuda:1", "auto")] == ["cpu", "cuda", "cuda:1", "cuda"]
    with pytest.raises(SpecError, match=r"PyTorch finds 2 CUDA devices on this machine\. Use one of: 'cpu', 'auto',"):
        device_of("cuda:2")


@pytest.mark.slow
def test_auto_without_a_gpu_is_the_processor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runs = [fs.run(spec(device)) for device in ("auto", "cpu")]
    assert all(torch.equal(runs[0].params[name], w) for name, w in runs[1].params.items())


def test_on_the_processor_nothing_is_copied():
    prepared = fs.prepare(spec("cpu"))
    place = on_device(make_context(prepared))
    assert (place.device, place.model, place.data) == (CPU, prepared.config.model, prepared.data)


def test_trees_move_as_they_are():
    tree = {"a": {"w": torch.ones(2)}, "n": 3}
    there = to_device(tree, torch.device("meta"))
    assert there["a"]["w"].device.type == "meta"
    assert there["n"] == 3


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def compare(table: dict[str, Any], data: Any = None) -> None:
    """Run a spec on the CPU and on a GPU, and compare accuracy and parameters."""
    here, there = (
        fs.run(
            fs.Experiment.from_table(
                {**table, "training": {**TABLE["training"], "lr": 0.01, **table.get("training", {}), "device": device}}
            ),
            data=data,
        )
        for device in ("cpu", "cuda")
    )
    assert there.final_accuracy == pytest.approx(here.final_accuracy, abs=0.02)
    for name, w in here.params.items():
        assert there.params[name].device.type == "cpu"
        torch.testing.assert_close(there.params[name], w, rtol=1e-2, atol=1e-3)


@needs_gpu
@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_gpu_computes_what_the_processor_does(method):
    settings = {"fedsts": {"strata": 2}, "fedstas": {"strata": 2}, "fedavg-ft": {"per_class": 2}}.get(method, {})
    model = "resnet20" if method == "fedtan" else "mlp"
    partition = {"name": "classes", "clients": 4, "per_client": 5, "size": 250}
    compare({**TABLE, "partition": partition, "method": {"name": method, **settings}, "model": model})


@needs_gpu
def test_a_gpu_adds_the_same_noise_to_gradients():
    pytest.importorskip("dp_accounting")
    compare({**TABLE, "privacy": {"dp": {"clip": 1.0, "noise": 0.5}}})


@needs_gpu
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedprox"])
def test_a_gpu_gives_the_same_secure_sums(method):
    pytest.importorskip("cryptography")
    compare({**TABLE, "method": method, "privacy": {"sums": "secure"}})


@needs_gpu
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_a_gpu_trains_adapters_as_the_processor_does(monkeypatch):
    pytest.importorskip("peft")
    find_example(monkeypatch)
    import bert

    # Dropout draws other random numbers on a GPU.
    config = partial(bert.BertConfig, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    monkeypatch.setattr(bert, "BertConfig", config)
    compare(spec_of().to_spec(), passages())
