from __future__ import annotations

import pickle

import pytest

from fedstrata.errors import ExtraMissingError, SpecError


@pytest.mark.parametrize(
    "error", [SpecError("a.b", "is wrong", 3), SpecError("a", "x"), ExtraMissingError("this", "he")]
)
def test_errors_cross_from_worker_processes(error):
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)
