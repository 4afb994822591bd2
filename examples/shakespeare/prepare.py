"""Cut the lines of each speaking role into sequences of characters: python prepare.py shakespeare.npz roles.npz.

The source contains three arrays: the lines of all roles, one role after another (``text``, uint8), the position at
which each role ends (``ends``), and the names of the roles (``roles``). Each role with at least 5,000 characters is
a client. The last 20 % of its sequences are test samples.
"""

import sys

import numpy as np

SMALLEST, LENGTH, TEST = 5000, 80, 0.2


def sequences(text):
    """Return inputs of 80 characters and their targets, the next characters, both (N, 80); −100 after the end."""
    ids = np.where(text == ord("\n"), 0, text.astype(np.int64) - ord(" ") + 1)  # the ids 0 to 95: \n, and " " to "~"
    rows = -(-(len(ids) - 1) // LENGTH)
    x, y = np.zeros(rows * LENGTH, dtype=np.int64), np.full(rows * LENGTH, -100)
    x[: len(ids) - 1], y[: len(ids) - 1] = ids[:-1], ids[1:]
    return x.reshape(rows, LENGTH), y.reshape(rows, LENGTH)


def arrays(source, smallest=SMALLEST):
    """Return the arrays of a data set with natural clients, under their names in a .npz file."""
    parts = {name: [] for name in ("x_train", "y_train", "client_train", "x_test", "y_test", "client_test")}
    for text, role in zip(np.split(source["text"], source["ends"][:-1]), source["roles"], strict=True):
        if len(text) >= smallest:
            x, y = sequences(text)
            cut = len(x) - round(TEST * len(x))
            for name, rows in (("train", slice(cut)), ("test", slice(cut, None))):
                parts[f"x_{name}"].append(x[rows])
                parts[f"y_{name}"].append(y[rows])
                parts[f"client_{name}"].append(np.full(len(x[rows]), role))
    return {name: np.concatenate(each) for name, each in parts.items()}


if __name__ == "__main__":
    with np.load(sys.argv[1]) as source:
        np.savez_compressed(sys.argv[2], **arrays(source))
