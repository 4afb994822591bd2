"""Compute keyed hashes of labels. Without the key, the hashes look like values of a random function (PRF)."""

from __future__ import annotations

import hashlib
import hmac
import unicodedata

KEY_SIZE, TAG_SIZE = 32, 16


def label_bytes(name: str) -> bytes:
    r"""Return the bytes of a class name: the same bytes for all Unicode forms of the name.

    >>> label_bytes("caf\u00e9") == label_bytes("cafe\u0301")
    True
    """
    return unicodedata.normalize("NFC", name).encode()


def tag(key: bytes, name: str) -> bytes:
    """Return the tag of a class name: the first 16 bytes of its HMAC-SHA256.

    Without the key, tags reveal only which labels are equal. Among 10,000 different labels, the probability that at
    least two have the same tag is 1e-31.

    >>> tag(bytes(32), "cat") == tag(bytes(32), "cat"), len(tag(bytes(32), "cat"))
    (True, 16)
    """
    return hmac.digest(key, b"fedstrata/label/" + label_bytes(name), hashlib.sha256)[:TAG_SIZE]


def order_seed(key: bytes, seed: int) -> int:
    """Derive a seed from the experiment's seed and the key. Without the key, nobody can guess the result."""
    digest = hmac.digest(key, b"fedstrata/order/" + str(seed).encode(), hashlib.sha256)
    return int.from_bytes(digest[:8], "big")
