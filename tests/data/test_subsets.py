from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.data.subsets import stratified


@pytest.mark.slow
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.data())
def test_stratified_keeps_proportions(counts, data):
    size = data.draw(st.integers(1, sum(counts)))
    codes = np.repeat(np.arange(len(counts)), counts)
    kept = stratified(codes, size, np.random.default_rng(0))
    assert len(np.unique(kept)) == size
    amounts = np.bincount(codes[kept], minlength=len(counts))
    assert np.abs(amounts - np.array(counts) * size / sum(counts)).max() < 1
