"""Every method with every codec: it runs in fewer bytes, or is refused with a reason."""

from __future__ import annotations

from typing import Any

import matrix
import pytest

import fedstrata as fs
from fedstrata.base.errors import SpecError

POWER, TOP = {"name": "powersgd", "rank": 1}, {"name": "top-k", "fraction": 0.05}
PAIRS: dict[str, dict[str, Any]] = {
    "powersgd, top-k": {"up": POWER, "down": TOP},
    "top-k, powersgd": {"up": TOP, "down": POWER},
    "qsgd": {"up": "qsgd", "down": "qsgd"},
    "bf16": {"up": "bf16", "down": "bf16"},
}


def check(method: str, pair: str) -> None:
    spec = matrix.EVERY_METHOD[method]
    settings = spec.model_copy(update={"communication": fs.Communication(**PAIRS[pair])})
    if not spec.method.asks_for_changes():
        with pytest.raises(SpecError, match="communication"):
            fs.run(settings)
        return
    plain, encoded = fs.run(spec), fs.run(settings)
    assert all(record["clients_failed"] == 0 for record in encoded)
    up, down = (sum(record[f"bytes_{way}"] for record in encoded) for way in ("up", "down"))
    # Questions without a model, and the first model, are as long as ever.
    assert up < sum(record["bytes_up"] for record in plain)
    assert down < 1.35 * sum(record["bytes_down"] for record in plain)
    assert matrix.final_bytes(encoded) != matrix.final_bytes(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        method if method in ("fedavg", "scaffold", "fedau", "ditto") else pytest.param(method, marks=pytest.mark.long)
        for method in matrix.EVERY_METHOD
    ],
)
def test_every_method_takes_codecs_with_memories(method: str) -> None:
    check(method, "powersgd, top-k")


@pytest.mark.long
@pytest.mark.parametrize("pair", list(PAIRS)[1:])
@pytest.mark.parametrize("method", matrix.EVERY_METHOD)
def test_every_method_takes_every_codec(method: str, pair: str) -> None:
    check(method, pair)
