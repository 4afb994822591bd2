"""A transformer with LoRA adapters: what travels, what is stored, which base is accepted, and every engine."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import FOLDER, WORDS, find_example, passages, spec_of, write_passages
from lazy import Lazy
from safetensors.torch import load_file
from torch import nn
from waiting import free_port

import fedstrata as fs
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.cli import main
from fedstrata.clients.client import StateStore
from fedstrata.engines.local import LocalEngine
from fedstrata.federation.engine import Engine
from fedstrata.runs.preparation import Prepared
from fedstrata.runs.simulation import make_context, run_prepared
from fedstrata.spec.experiment import variants

peft, transformers = Lazy("peft"), Lazy("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning:transformers")]

LAYER = "base_model.model.bert.encoder.layer.0.attention.self"
HEAD = "base_model.model.classifier.modules_to_save.default"
TRAINED = [f"{LAYER}.{part}.lora_{factor}.default.weight" for part in ("query", "value") for factor in "AB"] + [
    f"{HEAD}.weight",
    f"{HEAD}.bias",
]


@pytest.fixture(scope="module", autouse=True)
def _example() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        find_example(patch)
        yield


def train(spec: fs.Experiment, **more: Any) -> fs.History:
    return fs.run(spec, data=passages(), **more)


def size_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def same(one: fs.History, other: fs.History) -> None:
    volatile = {"seconds", "bytes_evaluation"}
    rows = [[{key: row[key] for key in row if key not in volatile} for row in each] for each in (one, other)]
    assert json.dumps(rows[0]) == json.dumps(rows[1])
    assert one.params.keys() == other.params.keys()
    assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)


@pytest.mark.long
def test_the_parameters_have_the_names_that_peft_gives_them():
    history = train(spec_of())
    assert list(history.params) == TRAINED
    from bert import adapted

    module = adapted(None, 3, words=WORDS, hidden=64, layers=1)
    assert not module.load_state_dict(history.params, strict=False).unexpected_keys
    assert torch.equal(module.get_parameter(TRAINED[0]), history.params[TRAINED[0]])


class Masked:
    """Makes masked-language models, whose decoder is tied to the embeddings of words."""

    def __init__(self, frozen: bool) -> None:
        self.frozen = frozen

    def __call__(self) -> nn.Module:
        config = transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        module = transformers.BertForMaskedLM(config)
        module.bert.embeddings.word_embeddings.weight.requires_grad_(not self.frozen)
        return module


@pytest.mark.parametrize("frozen", [False, True])
def test_tied_parameters_are_one_tensor_under_its_first_name(frozen: bool, tmp_path: Path):
    x = passages()[0]
    y = np.where(x["attention_mask"] > 0, (x["input_ids"] + 1) % WORDS, -100)
    spec = fs.Experiment(
        task={"name": "next-token"}, partition=fs.IID(clients=2), training=fs.Training(rounds=1, local_steps=2)
    )
    history = fs.run(spec, data=(x, y, x, y), model=Masked(frozen), out=tmp_path / "run")
    first, other = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    assert (first in history.params) is not frozen
    assert other not in history.params
    module = fs.load(tmp_path / "run", model=Masked(frozen)).module if not frozen else None
    if module is not None:
        assert module.get_parameter(first) is module.get_parameter(other)
        assert torch.equal(module.get_parameter(first), history.params[first])


def test_the_spec_of_the_example_is_valid():
    experiments = variants(tomllib.loads((FOLDER / "lora.toml").read_text()))
    assert list(experiments) == ["fedavg", "fedprox", "powersgd"]
    assert {experiment.training.optimizer.label for experiment in experiments.values()} == {"adamw"}


METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg", "training": {"lr": 0.2}},
    "fedprox with adamw": {
        "method": {"name": "fedprox", "mu": 0.01},
        "training": {"optimizer": "adamw", "lr": 0.003, "warmup": 1},
    },
    "powersgd": {
        "method": "fedavg",
        "training": {"optimizer": "adamw", "lr": 0.003},
        "communication": {"up": {"name": "powersgd", "rank": 2}},
    },
}


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_methods_learn_on_adapters(name: str):
    tables = dict(METHODS[name])
    training = {"rounds": 12, "local_epochs": 2} | tables.pop("training", {})
    history = train(spec_of(**tables, training=training))
    assert min(record["loss"] for record in history) < 0.85 * history[0]["loss"]
    assert history.best_accuracy > 0.55  # of three classes
    ratio = history[-1]["bytes_up"] / history[-1]["bytes_down"]
    assert ratio < 0.3 if name == "powersgd" else ratio > 0.95


def full(**tables: Any) -> fs.Experiment:
    """Return a spec of the example's encoder, which has more than ten million parameters."""
    return spec_of(model={"words": 20_000, "hidden": 512}, **tables)


def test_only_adapters_travel_and_are_stored(tmp_path: Path):
    prepared = fs.prepare(full(), data=passages())
    base = size_of(prepared.config.model.untrained.frozen)
    assert base > 4 * 10_000_000
    trained = size_of(prepared.config.model.params())
    assert trained < base / 300
    history = train(full(), out=tmp_path / "run")
    for record in history:
        assert record["bytes_up"] == pytest.approx(4 * trained, rel=0.01)
        assert record["bytes_down"] == pytest.approx(4 * trained, rel=0.01)
    assert list(load_file(tmp_path / "run" / "model.safetensors")) == sorted(TRAINED)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any("checkpoint" in path.parts for path in files)
    assert all(path.stat().st_size < 3 * trained for path in files)
    about = json.loads((tmp_path / "run" / "model.json").read_text())["frozen"]
    assert about["fingerprints"].keys() == prepared.config.model.untrained.frozen.keys()


def test_another_base_is_refused_by_name(tmp_path: Path):
    from bert import adapted

    def on(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return adapted(None, 3, words=WORDS, hidden=64, layers=1)

    run = tmp_path / "run"
    history = train(spec_of(), model=on(0), out=run)
    named = r"^model: the frozen tensor base_model\.model\.bert\.embeddings\.word_embeddings\.weight .* \w{12}… here"
    with pytest.raises(SpecError, match=rf"{named}, but \w{{12}}… in the run in .*same model weights, or the"):
        fs.load(run, model=on(1))
    with pytest.raises(SpecError, match=named):
        train(spec_of(training={"rounds": 3}), model=on(1), out=run, resume=True)
    assert (fs.load(run, model=on(0)).predict(passages()[2]) == passages()[3]).mean() == history.final_accuracy
    with pytest.raises(SpecError, match=r"whose code the folder does not contain\. Pass the module"):
        fs.load(run)
    assert len(train(spec_of(training={"rounds": 3}), model=on(0), out=run, resume=True)) == 3


@pytest.mark.long
def test_a_factory_in_the_spec_builds_the_base_again(tmp_path: Path):
    run = tmp_path / "run"
    history = train(spec_of(), out=run)
    predictor = fs.load(run)
    assert (predictor.predict(passages()[2]) == passages()[3]).mean() == history.final_accuracy
    about = json.loads((run / "model.json").read_text())
    about["frozen"]["seed"] += 1
    (run / "model.json").write_text(json.dumps({key: value for key, value in about.items() if key != "checksum"}))
    with pytest.raises(SpecError, match=r"the frozen tensor base_model\.model\.bert\.embeddings"):
        fs.load(run)


CLIENTS_OF_ONE_BASE = """
import sys
from pathlib import Path
import torch
import fedstrata as fs
from adapters import passages, spec_of
from fedstrata.clients.client import StateStore
from fedstrata.engines import local
from fedstrata.runs.simulation import make_context, run_prepared
torch.set_num_threads(1)
local.STARTING_PAYS = local.ASKING_PAYS = -1
clients, workers = int(sys.argv[1]), int(sys.argv[2])
prepared = fs.prepare(spec_of(
    model={"words": 20_000, "hidden": 512},
    partition={"name": "iid", "clients": clients},
    training={"clients_per_round": clients, "batch_size": 8, "local_epochs": None, "local_steps": 2},
), data=passages())
base = prepared.config.model.untrained.frozen
words = base["base_model.model.bert.embeddings.word_embeddings.weight"].data_ptr()

def private(lines):
    inside = False
    for line in lines:
        if line.partition(" ")[0].count("-") == 1:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            inside = begin <= words < end
        elif inside and line.startswith("Private_"):
            yield int(line.split()[1])

copied = {}
def look(record):
    for path in Path("/proc/self/task").glob("*/children"):
        for child in path.read_text().split():
            copied[child] = sum(private(Path(f"/proc/{child}/smaps").read_text().splitlines()))

engine = local.LocalEngine(make_context(prepared), StateStore(), workers)
history = run_prepared(prepared, None, engine, [look])
assert history[-1]["clients_trained"] == clients
status = Path("/proc/self/status").read_text().splitlines()
peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
print(sum(tensor.numel() * 4 for tensor in base.values()) // 1024, peak, len(copied), max(copied.values(), default=0))
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_clients_share_the_base():
    code = f"import sys; sys.path[:0] = {[str(Path(__file__).parents[1] / 'support'), str(FOLDER)]!r}\n"
    code += CLIENTS_OF_ONE_BASE

    def kilobytes(clients: int, workers: int) -> list[int]:
        command = [sys.executable, "-c", code, str(clients), str(workers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [int(each) for each in done.stdout.split()]

    base, one, *_ = kilobytes(1, 1)
    _, ten, *_ = kilobytes(10, 1)
    *_, helpers, copied = kilobytes(10, 2)
    assert ten - one < base / 2
    assert helpers == 1
    assert copied < base / 10


def test_dropout_layers_of_a_mapping_are_noticed():
    assert fs.prepare(spec_of(), data=passages()).config.random
    from bert import adapted

    module = adapted(None, 3, words=WORDS, hidden=64, layers=1)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    assert not fs.prepare(spec_of(), data=passages(), model=module).config.random


class Normed(nn.Module):
    """An encoder with adapters whose outputs are normalised over the samples of all clients."""

    def __init__(self) -> None:
        from bert import adapted

        super().__init__()
        self.encoder, self.norm = adapted(None, 3, words=WORDS, hidden=64, layers=1), nn.BatchNorm1d(3)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.encoder(**inputs).logits)
        return normed


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedtan", {"name": "stratify", "batch_size": 8}])
def test_dropout_layers_are_refused_where_clients_run_as_a_group(method: Any):
    with pytest.raises(SpecError, match=r"^model: the model draws random numbers.*training.execution = 'fused'"):
        train(spec_of(method, training={"execution": "per-client"}), model=Normed)


@pytest.mark.long
def test_stratify_repeats_dropout_to_the_bit():
    stratify = spec_of({"name": "stratify", "batch_size": 8}, training={"execution": "per-client"})
    same(train(stratify), train(stratify))


def alone(prepared: Prepared, workers: int = 1) -> Engine:
    return LocalEngine(make_context(prepared), StateStore(), workers)


@pytest.fixture(scope="module")
def specs(_example: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, fs.Experiment]:
    """Return a spec of each method, on passages in a file, so that other processes can read them."""
    data = write_passages(tmp_path_factory.mktemp("passages") / "passages.npz")
    return {name: spec_of(**tables, data=data) for name, tables in METHODS.items()}


@pytest.fixture(scope="module")
def expected(specs: dict[str, fs.Experiment]) -> dict[str, fs.History]:
    prepared = {name: fs.prepare(spec) for name, spec in specs.items()}
    return {name: run_prepared(each, None, alone(each)) for name, each in prepared.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_worker_processes_give_the_same_bytes(name: str, specs: Any, expected: Any, monkeypatch: pytest.MonkeyPatch):
    for threshold in ("STARTING_PAYS", "ASKING_PAYS"):
        monkeypatch.setattr(f"fedstrata.engines.local.{threshold}", -1.0)
    prepared = fs.prepare(specs[name])
    same(run_prepared(prepared, None, alone(prepared, workers=2)), expected[name])


@pytest.mark.long
@pytest.mark.xdist_group("servers")
@pytest.mark.parametrize("name", METHODS)
def test_ray_gives_the_same_bytes(name: str, specs: Any, expected: Any, pool: Any):
    from fedstrata.engines.ray import RayEngine

    prepared = fs.prepare(specs[name])
    same(run_prepared(prepared, None, RayEngine(make_context(prepared), StateStore(), pool=pool)), expected[name])


@pytest.mark.long
@pytest.mark.xdist_group("servers")
def test_two_nvflare_sites_give_the_same_bytes(specs: Any, expected: Any):
    pytest.importorskip("nvflare")
    from fedstrata.sites.simulator import simulate

    for name, history in zip(specs, simulate([(spec, None) for spec in specs.values()], sites=2), strict=True):
        same(history, expected[name])


@pytest.mark.long
@pytest.mark.xdist_group("servers")
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["fedprox with adamw", "powersgd"])
def test_two_sites_with_mutual_tls_end_with_the_same_model(name: str, specs: Any, expected: Any, tmp_path: Path):
    pytest.importorskip("nvflare")
    (tmp_path / "spec.toml").write_text(specs[name].to_toml())
    rights = f'allow = ["bert"]\ncatalog = ["{specs[name].data.name}"]\n'
    parties = (f"[server]\nport = {free_port()}", "[site.one]", "[site.two]")
    (tmp_path / "sites.toml").write_text("".join(f"{party}\n{rights}" for party in parties))
    words = (str(tmp_path / "spec.toml"), "--sites", str(tmp_path / "sites.toml"), "--out", str(tmp_path / "kits"))
    assert main(["deploy", *words, "--try"]) == 0
    same(fs.History.load(tmp_path / "kits" / "result"), expected[name])


@pytest.mark.long
@pytest.mark.xdist_group("servers")
def test_nvflare_sites_with_another_base_are_refused_by_name(specs: Any):
    pytest.importorskip("nvflare")
    from fedstrata.sites.simulator import simulate

    support = Path(__file__).parents[1] / "support"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(support)
        patch.setenv("PYTHONPATH", str(support), prepend=":")
        table = specs["fedavg"].to_spec() | {"model": {"name": "adapters:unseeded"}}
        with pytest.raises(
            FedstrataError, match=r"the frozen tensor base_model\.model\.bert\.\S+ differs: .* in the server's"
        ):
            simulate([(fs.Experiment.from_table(table), None)], sites=2)
