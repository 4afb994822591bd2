"""The callback in docs/guides/tracking.md, with a stand-in for W&B, which needs an account."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import fedstrata as fs

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "tracking.md"


@pytest.fixture
def heard(monkeypatch):
    """What wandb would hear."""
    calls: list[tuple[str, dict]] = []

    def init(**how):
        calls.append(("init", how))
        return SimpleNamespace(
            log=lambda values, step: calls.append(("log", {"step": step, **values})),
            finish=lambda **how: calls.append(("finish", how)),
        )

    module = ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


@pytest.mark.slow
def test_the_callback_of_the_page(heard):
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "wandb" in block)
    found: dict = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), found)
    assert len([line for line in code.split("class ")[1].splitlines() if line.strip()]) <= 10
    spec = fs.Experiment(
        training={"rounds": 2, "local_epochs": 1}, partition=fs.IID(clients=3), evaluation={"validation": 0.1}
    )
    history = fs.run(spec, callbacks=[found["WandB"](project="mine")])
    assert [name for name, _ in heard] == ["init", "log", "log", "finish"]
    assert heard[0][1]["config"] == spec.to_spec()
    assert [call["validation.accuracy"] for name, call in heard if name == "log"] == [
        record["validation"]["accuracy"] for record in history
    ]
    assert heard[-1][1] == {"exit_code": 0}

    def clumsy(record):
        raise KeyError

    with pytest.raises(KeyError):
        fs.run(spec, callbacks=[found["WandB"](), clumsy])
    assert heard[-1] == ("finish", {"exit_code": 1})
