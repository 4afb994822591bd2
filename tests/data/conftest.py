from __future__ import annotations

import os

import numpy as np
import pytest

from fedstrata.data import Dataset, from_arrays

# Before any test imports `datasets`: nothing here may reach the network.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def labelled():
    """Builds a table data set with the given training labels (and domains); all else is immaterial."""

    def build(labels: object, domains: object = None) -> Dataset:
        y = np.asarray(labels)
        x = np.arange(len(y), dtype=np.float32)[:, None]
        names = [str(number) for number in range(int(y.max()) + 1)]
        domain = None if domains is None else np.asarray(domains)
        return from_arrays(
            x, y, x[:1], y[:1],
            class_names=names,
            domain_train=domain,
            domain_test=None if domain is None else domain[:1],
            domain_names=None if domain is None else [str(number) for number in range(int(domain.max()) + 1)],
        )  # fmt: skip

    return build
