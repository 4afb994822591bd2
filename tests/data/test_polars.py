"""A data frame of polars is read as a file of the same rows is."""

from __future__ import annotations

import pytest
import torch
from lazy import Lazy

import fedstrata as fs
from fedstrata.base.errors import DataError
from fedstrata.data.sources import Data

polars = Lazy("polars")


@pytest.mark.slow
def test_the_same_data_set_as_its_own_csv(tmp_path):
    frame = polars.DataFrame(
        {
            "age": [31.5, None, 77.0, 45.0, 60.0, 38.0],
            "sex": ["f", "m", "m", "f", "m", "f"],
            "smoker": [True, False, True, True, False, False],
            "sick": ["no", "yes", "yes", "no", "yes", "no"],
        }
    )
    frame.write_csv(tmp_path / "a.csv")
    schema = {
        "label": "sick",
        "test": 0.3,
        "columns": {"age": {"impute": "mean"}, "sex": "category", "smoker": "boolean"},
    }
    first, second = Data(str(tmp_path / "a.csv"), schema=schema).load(), fs.from_dataframe(frame, **schema)
    for name in ("x_train", "y_train", "x_test", "y_test", "shift", "scale"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    with pytest.raises(DataError, match="row 1, column 'age': is missing"):
        fs.from_dataframe(frame, label="sick")
