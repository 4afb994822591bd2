from __future__ import annotations

from pathlib import Path

import pytest

from fedstrata.base.errors import SpecError
from fedstrata.base.locking import occupied


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "/dev/null/inside"], ids=["null", "long", "file"])
def test_a_name_that_no_folder_can_have_is_refused(name):
    with (
        pytest.raises(SpecError, match="the folder cannot be created: "),
        occupied(Path(name)),
    ):
        pass
