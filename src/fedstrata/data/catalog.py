"""The data sets that are known by name, and the folders where files of them are looked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

KNOWN: Mapping[str, str] = {
    "digits": "10 handwritten digits, 8x8 grey, 1,437 train / 360 test; comes with scikit-learn",
    "mnist": "10 handwritten digits, 28x28 grey, 60,000 / 10,000 (LeCun et al. 1998)",
    "fashion_mnist": "10 garments, 28x28 grey, 60,000 / 10,000 (Xiao et al. 2017)",
    "emnist_letters": "26 handwritten letters, 28x28 grey, 124,800 / 20,800 (Cohen et al. 2017)",
    "usps": "10 handwritten digits, 16x16 grey, 7,291 / 2,007 (Hull 1994)",
    "cifar10": "10 kinds of objects, 32x32 colour, 50,000 / 10,000 (Krizhevsky 2009)",
    "cifar100": "100 kinds of objects, 32x32 colour, 50,000 / 10,000 (Krizhevsky 2009)",
    "covtype_sample": "7 forest types, a table of 54 features, 84,399 / 21,098 (Blackard and Dean 1999)",
    "pacs64": "7 kinds of objects in 4 domains, 64x64 colour, 7,993 / 1,998 (Li et al. 2017)",
    "digits3": "10 digits in 3 domains (MNIST, MNIST-M, USPS), 28x28 colour, 9,000 / 3,000",
}
"""The data sets that are known by name, in one line each; all but the first are looked for as
``NAME.npz``."""


def folders() -> list[Path]:
    """Where ``NAME.npz`` is looked for: ``$FEDSTRATA_DATA``, then ``~/.cache/fedstrata``."""
    own = os.environ.get("FEDSTRATA_DATA")
    return [*([Path(own).expanduser()] if own else []), Path.home() / ".cache" / "fedstrata"]


def available() -> list[tuple[str, str, bool]]:
    """Name, description and presence of every data set: the known ones, then other files in ``folders()``."""
    there = names_there()
    known = [(name, text, name == "digits" or name in there) for name, text in KNOWN.items()]
    return known + [(name, "your own file", True) for name in there if name not in KNOWN]


def names_there() -> list[str]:
    """The names of the files in ``folders()``."""
    return sorted({path.stem for folder in folders() for path in folder.glob("*.npz")} - {"digits"})
