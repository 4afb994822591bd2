"""List the known data sets, and the folders that fedstrata searches for their files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fedstrata.base.errors import SpecError

KNOWN: Mapping[str, str] = {
    "digits": "10 handwritten digits, 8x8 grey, 1,437 train / 360 test; comes with scikit-learn",
    "mnist": "10 handwritten digits, 28x28 grey, 60,000 train / 10,000 test (LeCun et al. 1998)",
    "fashion_mnist": "10 kinds of garments, 28x28 grey, 60,000 train / 10,000 test (Xiao et al. 2017)",
    "emnist_letters": "26 handwritten letters, 28x28 grey, 124,800 train / 20,800 test (Cohen et al. 2017)",
    "usps": "10 handwritten digits, 16x16 grey, 7,291 train / 2,007 test (Hull 1994)",
    "cifar10": "10 kinds of objects, 32x32 colour, 50,000 train / 10,000 test (Krizhevsky 2009)",
    "cifar100": "100 kinds of objects, 32x32 colour, 50,000 train / 10,000 test (Krizhevsky 2009)",
    "covtype_sample": "7 forest types, a table of 54 features, 84,399 train / 21,098 test (Blackard and Dean 1999)",
    "pacs64": "7 kinds of objects in 4 domains, 64x64 colour, 7,993 train / 1,998 test (Li et al. 2017)",
    "digits3": "10 digits in 3 domains (MNIST, MNIST-M, USPS), 28x28 colour, 9,000 train / 3,000 test",
}
"""A description of each known data set. All data sets except ``digits`` are read from a file ``NAME.npz``."""


def folders() -> list[Path]:
    """Return the folders that fedstrata searches for ``NAME.npz``: ``$FEDSTRATA_DATA``, then ``~/.cache/fedstrata``.

    Raises:
        SpecError: ``$FEDSTRATA_DATA`` begins with ``~USER``, and this user does not exist.
    """
    variable = os.environ.get("FEDSTRATA_DATA")
    try:
        named = [Path(variable).expanduser()] if variable else []
    except RuntimeError:
        raise SpecError(
            "FEDSTRATA_DATA",
            "the user after '~' does not exist. Set FEDSTRATA_DATA to the path of a folder.",
            variable,
        ) from None
    return [*named, Path.home() / ".cache" / "fedstrata"]


def available() -> list[tuple[str, str, bool]]:
    """List the known data sets and all other files in ``folders()``.

    Each entry contains a name, a description, and whether the file exists.
    """
    files = names_there()
    known = [(name, text, name == "digits" or name in files) for name, text in KNOWN.items()]
    return known + [(name, "your own file", True) for name in files if name not in KNOWN]


def names_there() -> list[str]:
    """List the names of all data sets that have a file in ``folders()``."""
    return sorted({path.stem for folder in folders() for path in folder.glob("*.npz")} - {"digits"})
