"""What server and clients say to each other when clients enrol: who holds which label, without saying which.

A client *presents* its labels in an order of its own (``fedstrata.stratify.masking.client``), the same in every mode; "the
i-th label" is meant in that order. Ciphertexts are TenSEAL's bytes. ``key`` is the fingerprint of the key they were
made with.
"""

from __future__ import annotations

from torch import Tensor

from fedstrata.federation.messages import Reply, Request
from fedstrata.records import record


@record
class OpenKeys(Request):
    """Send the public keys of all clients; make the keys first if there are none.

    Args:
        comparing: Whether the key for comparisons is wanted beside that for counts.
    """

    comparing: bool


@record
class PublicKeys(Reply):
    """What the server needs to compute on ciphertexts. No secret key ever goes this way.

    Args:
        key: The keys' fingerprint.
        counting: The public key for counts.
        comparing: The public key for comparisons, empty where it was not asked for.
    """

    key: str
    counting: bytes
    comparing: bytes


@record
class Assign(Request):
    """From now on your labels go by these numbers.

    Args:
        placeholders: One for each of the client's labels, int64.
    """

    placeholders: Tensor


@record
class Assigned(Reply):
    """Understood.

    Args:
        labels: How many labels the client holds.
    """

    labels: int


@record
class TagReport(Request):
    """Send a keyed hash of each of your labels (mode ``prf``)."""


@record
class TagReply(Reply):
    """HMAC-SHA256 of every label under the clients' key, cut to 16 bytes.

    Args:
        key: Fingerprint.
        tags: uint8, shape (L, 16).
    """

    key: str
    tags: Tensor


@record
class SealLabels(Request):
    """Send your labels encrypted, laid out for a list of ``classes`` unique labels (mode ``ckks``).

    Args:
        classes: C.
    """

    classes: int


@record
class SealedLabels(Reply):
    """Encrypted labels.

    Args:
        key: Fingerprint.
        sheets: See ``fedstrata.stratify.masking.slot_layout``.
    """

    key: str
    sheets: tuple[bytes, ...]


@record
class Compare(Request):
    """Scrambled differences between your labels and the unique list: which of them are zero?

    Args:
        classes: C.
        sheets: Which of the client's sheets each ciphertext compares, int64.
        differences: Ciphertexts.
    """

    classes: int
    sheets: Tensor
    differences: tuple[bytes, ...]


@record
class CompareReply(Reply):
    """Where each label was found.

    Args:
        places: For each of the client's labels: number of the ciphertext times the grid's width, plus the column of
            the zero; −1 where there is none. int64, shape (L,).
    """

    places: Tensor


@record
class Enlist(Request):
    """Some of your labels are new: send them for the unique list.

    Args:
        classes: C.
        labels: Which of the client's labels, int64.
        places: Where on the list each one goes: page times the grid's width, plus the column. int64.
    """

    classes: int
    labels: Tensor
    places: Tensor


@record
class Enlisted(Reply):
    """New entries, to be added to the list.

    Args:
        key: Fingerprint.
        pages: A ciphertext for every page of the list that gets an entry.
    """

    key: str
    pages: dict[int, bytes]


@record
class SealPairs(Request):
    """Send [E(l), E(n(l))] for every label (mode ``ckks-paper``)."""


@record
class SealedPairs(Reply):
    """One ciphertext for each label, and one for each count.

    Args:
        key: Fingerprint.
        labels: E(l).
        counts: E(n(l)).
    """

    key: str
    labels: tuple[bytes, ...]
    counts: tuple[bytes, ...]


@record
class CompareOne(Request):
    """Differences between one of your labels and every entry of the unique list (mode ``ckks-paper``).

    Args:
        differences: E(l − u), one for each entry.
    """

    differences: tuple[bytes, ...]


@record
class CompareOneReply(Reply):
    """Which entry it is.

    Args:
        entry: Its place on the list; −1 for none.
    """

    entry: int


@record
class CountReport(Request):
    """Your labels go by these numbers; send the encrypted number of samples of each.

    Args:
        placeholders: One for each of the client's labels, int64.
        size: P, how many placeholders there are.
    """

    placeholders: Tensor
    size: int


@record
class CountReply(Reply):
    """Encrypted counts.

    Args:
        key: Fingerprint.
        pages: The counts by placeholder, 0 where the client holds none, in ciphertexts of so many slots each.
    """

    key: str
    pages: tuple[bytes, ...]


@record
class OpenTotals(Request):
    """Decrypt sums over clients.

    Args:
        pages: Encrypted totals by placeholder.
        size: P.
        packed: Whether a ciphertext holds many totals (or one each, mode ``ckks-paper``).
    """

    pages: tuple[bytes, ...]
    size: int
    packed: bool


@record
class Totals(Reply):
    """Sums over clients.

    Args:
        totals: N(p), int64, shape (P,).
    """

    totals: Tensor


@record
class ShareReport(Request):
    """What part of all samples of each of your placeholders do you hold?

    Only asked for weighted selection.

    Args:
        totals: N(p) for each of the client's labels, int64.
    """

    totals: Tensor


@record
class ShareReply(Reply):
    """Shares.

    Args:
        shares: n_k(p) / N(p) for each of the client's labels, float64.
    """

    shares: Tensor
