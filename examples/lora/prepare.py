"""Hide "my" and "me" in Shakespeare's plays: python prepare.py shakespeare.npz pronouns.npz.

The source contains the lines of all roles (``text``, uint8), the position at which each role ends (``ends``), and the
names of the roles (``roles``, "play: ROLE"). A sample is a gap and two words on each side. Each play is a client.
"""

import re
import sys
from collections import Counter

import numpy as np

AROUND, WORDS, UNKNOWN, GAP = 2, 20_000, 1, 2  # the id 0 stands for padding
PRONOUNS = {"my": 0, "me": 1}


def arrays(source):
    """Return the arrays of a data set; every fifth pronoun is a test sample."""
    texts = np.split(source["text"], source["ends"][:-1])
    words = [re.findall("[a-z']+", text.tobytes().decode().lower()) for text in texts]
    common = Counter(word for each in words for word in each).most_common(WORDS - 3)
    ids = {word: i for i, (word, _) in enumerate(common, 3)} | dict.fromkeys(PRONOUNS, GAP)
    x, y, plays = [], [], []
    for each, role in zip(words, source["roles"], strict=True):
        coded = np.pad([ids.get(word, UNKNOWN) for word in each], AROUND)
        for at in [at for at, word in enumerate(each) if word in PRONOUNS]:
            x.append([GAP, *coded[at : at + AROUND], *coded[at + AROUND + 1 : at + 2 * AROUND + 1]])
            y.append(PRONOUNS[each[at]])
            plays.append(role.split(":")[0])
    x, y, plays, test = np.array(x), np.array(y), np.array(plays), np.arange(len(y)) % 5 == 4
    parts = {"classes": np.array([*PRONOUNS])}
    for name, part in (("train", ~test), ("test", test)):
        parts |= {f"x_{name}.input_ids": x[part], f"x_{name}.attention_mask": (x[part] > 0).astype(np.int64)}
        parts |= {f"y_{name}": y[part], f"client_{name}": plays[part]}
    return parts


if __name__ == "__main__":
    with np.load(sys.argv[1]) as source:
        np.savez_compressed(sys.argv[2], **arrays(source))
