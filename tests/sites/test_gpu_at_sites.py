"""Sites that train on a GPU, which are processes on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from waiting import free_port

import fedstrata as fs
from fedstrata.sites.federation import Sites
from fedstrata.sites.local_deployment import try_out

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.xdist_group("servers"),
    pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("sums", ["plain", "secure"])
def test_sites_with_a_gpu_compute_what_a_processor_does(tmp_path: Path, sums: str) -> None:
    pytest.importorskip("nvflare")

    def spec(device: str) -> fs.Experiment:
        training = {"rounds": 2, "clients_per_round": 3, "local_epochs": 1, "lr": 0.05, "device": device}
        table = {"partition": {"name": "iid", "clients": 3}, "model": "cnn", "training": training}
        return fs.Experiment.from_table({**table, "privacy": {"sums": sums}})

    own = {"catalog": ["digits"]}
    sites = {"server": {"port": free_port(), **own}, "site": dict.fromkeys(("a", "b", "c"), own)}
    folder = try_out(spec("cuda"), Sites.model_validate(sites), tmp_path / "sites", base_dir=tmp_path)
    there, here = fs.History.load(folder), fs.run(spec("cpu"))
    assert [record["clients_failed"] for record in there] == [0, 0]
    assert there.final_accuracy == pytest.approx(here.final_accuracy, abs=0.02)
    for name, w in here.params.items():
        torch.testing.assert_close(there.params[name], w, rtol=1e-2, atol=1e-3)
