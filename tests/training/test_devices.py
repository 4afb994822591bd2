from __future__ import annotations

import pytest

import fedstrata as fs
from fedstrata.errors import SpecError


def test_a_device_that_is_none_says_which_there_are():
    with pytest.raises(SpecError, match=r"training\.device = 'gpu': expected cpu, cuda, cuda:N or auto"):
        fs.Experiment.from_table({"training": {"device": "gpu"}})
