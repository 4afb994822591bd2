from __future__ import annotations

import pytest

from fedstrata.base import outer
from fedstrata.base.errors import FedstrataError


def test_a_package_that_is_absent_has_no_commands_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "find_spec", lambda name: None)
    assert outer.installed() == outer.commands() == []
    with pytest.raises(FedstrataError, match=r"the package fedstrata\.sites is not installed"):
        outer.load("sites.simulator:simulate")
