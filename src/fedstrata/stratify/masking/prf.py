"""Labels under a keyed pseudo-random function."""

from __future__ import annotations

import hashlib
import hmac
import unicodedata

KEY_SIZE, TAG_SIZE = 32, 16


def label_bytes(name: str) -> bytes:
    r"""The canonical bytes of a class name: alike at all clients, however their labels are numbered or typed.

    >>> label_bytes("caf\u00e9") == label_bytes("cafe\u0301")
    True
    """
    return unicodedata.normalize("NFC", name).encode()


def tag(key: bytes, name: str) -> bytes:
    """HMAC-SHA256 of a class name, cut to 16 bytes.

    Whoever lacks the key can tell equal labels from different ones and nothing else. Two of 10,000 labels share a tag
    with probability 1e-31.

    >>> tag(bytes(32), "cat") == tag(bytes(32), "cat"), len(tag(bytes(32), "cat"))
    (True, 16)
    """
    return hmac.digest(key, b"fedstrata/label/" + label_bytes(name), hashlib.sha256)[:TAG_SIZE]


def order_seed(key: bytes, seed: int) -> int:
    """A seed that nobody without the key can guess."""
    digest = hmac.digest(key, b"fedstrata/order/" + str(seed).encode(), hashlib.sha256)
    return int.from_bytes(digest[:8], "big")
