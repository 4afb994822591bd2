"""Four hospitals with secure sums and noise, by the commands of the documentation. One of them is killed in a sum."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import free_port, until

import fedstrata as fs
from fedstrata.sites.ledger import PLACE, check
from fedstrata.sites.privacy_budget import FILE

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("servers")]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy" / "secure.md"
KILLED = "va-long-beach"
OTHERS = ("cleveland", "hungary", "switzerland")


def blocks(kind: str) -> list[str]:
    """Return the code blocks of one kind on the page."""
    return [block.partition("```")[0] for block in PAGE.read_text(encoding="utf-8").split(f"```{kind}\n")[1:]]


def kill(kit: Path) -> None:
    """Kill all processes of a site with SIGKILL."""
    for process in psutil.process_iter(["cmdline"]):
        if any(str(kit) in word for word in process.info["cmdline"] or ()):
            process.kill()


def kinds_of(kit: Path) -> list[str]:
    """Return the kinds of a site's answers in round 3 of its ledger."""
    return [entry["kind"] for entry in check(kit / PLACE).entries if entry.get("round") == 3]


def test_four_hospitals_by_hand_as_the_documentation_says(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    for block in blocks("toml"):
        name = block.split()[1]
        (tmp_path / name).write_text(block.replace("8002", str(free_port())), encoding="utf-8")
    kits, halted = tmp_path / "kits", tmp_path / f"{KILLED}.halted"
    own, paths = str(Path(sys.executable).parent), [str(Path(__file__).parent / "halting"), *sys.path]
    environment = os.environ | {"HOSPITALS": str(ROOT / "examples" / "hospitals"), "FEDSTRATA_HALTED": str(halted)}
    environment |= {"PATH": os.pathsep.join([own, os.environ["PATH"]]), "PYTHONPATH": os.pathsep.join(paths)}
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stderr": subprocess.STDOUT}
    said = {}
    try:
        for line in "".join(blocks("bash")).splitlines():
            with (tmp_path / "said.txt").open("wb") as output:
                process = subprocess.Popen(["bash", "-c", line], stdout=output, **options)
            if line.startswith("fedstrata submit"):
                until("a site that waits in a sum", halted.exists, 1500)
                kill(kits / KILLED)
            code, said[line] = process.wait(), (tmp_path / "said.txt").read_text(errors="replace")
            assert code == 0, f"{line}\n{said[line]}"
    finally:  # what a line that fails leaves behind
        for script in kits.glob("*/startup/stop_fl.sh"):
            subprocess.run(["bash", str(script)], stdout=subprocess.PIPE, check=False, **options)

    assert "refused" not in said["fedstrata run job.toml --sites sites.toml --out rehearsed"]
    history = fs.History.load(tmp_path / "result")
    assert [record["clients_trained"] for record in history] == [4] * 3 + [3] * 12
    assert (tmp_path / "result" / "model.safetensors").exists()
    assert "epsilon" not in history[-1], "replies do not contain the sites' numbers of samples"
    assert kinds_of(kits / KILLED) == ["Masked of Fit"], "it was killed before it sent its shares"
    assert kinds_of(kits / "cleveland")[:2] == ["Masked of Fit", "RevealAll"], "the others opened the sum without it"
    for name, rounds in {**dict.fromkeys(OTHERS, 15), KILLED: 3}.items():
        ((_, _, noise, rate, steps),) = json.loads((kits / name / PLACE / FILE).read_text())["steps"]
        assert (noise, steps) == (2.0, rounds * 2 * -(-round(16 / rate) // 16)), name
    (ledgers,) = (text for line, text in said.items() if line.endswith("do fedstrata ledger kits/$site; done"))
    assert ledgers.count("ε") >= 4, ledgers
    assert not [path for name in (*OTHERS, KILLED) for path in tmp_path.glob(f"requests/**/{name}*.key")]
