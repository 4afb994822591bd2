"""What server and clients say to each other when clients enrol: who holds which label, without saying which.

A client *presents* its labels in an order of its own (``fedstrata.stratify.masking.client``), the same in every mode;
"the i-th label" is meant in that order. Ciphertexts are TenSEAL's bytes. ``key`` is the fingerprint of their key.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstrata.base.errors import ReplyRefusedError
from fedstrata.base.records import record
from fedstrata.federation.messages import Reply, Request, RequestRule
from fedstrata.federation.reply_checks import require_shape
from fedstrata.stratify.masking.ckks import COMPARING, COUNTING, sealer
from fedstrata.stratify.masking.prf import TAG_SIZE
from fedstrata.stratify.masking.slot_layout import SlotLayout


@record("PublicKeys")
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


@record("OpenKeys")
class OpenKeys(Request):
    """Send the public keys of all clients; make the keys first if there are none.

    Args:
        comparing: Whether the key for comparisons is wanted beside that for counts.
    """

    reply_type: ClassVar[type[Reply]] = PublicKeys
    rule = RequestRule("the public keys that all clients share", phase="enrolment")

    comparing: bool

    def check(self, reply: PublicKeys) -> None:
        """Keys that are public, and of our parameters."""
        sealer(reply.counting, COUNTING)
        if self.comparing:
            sealer(reply.comparing, COMPARING)


@record("Assigned")
class Assigned(Reply):
    """Understood.

    Args:
        labels: How many labels the client holds.
    """

    labels: int


@record("Assign")
class Assign(Request):
    """From now on your labels go by these numbers.

    Args:
        placeholders: One for each of the client's labels, int64.
    """

    reply_type: ClassVar[type[Reply]] = Assigned
    rule = RequestRule("how many labels it holds", phase="enrolment")

    placeholders: Tensor


@record("TagReply")
class TagReply(Reply):
    """HMAC-SHA256 of every label under the clients' key, cut to 16 bytes.

    Args:
        key: Fingerprint.
        tags: uint8, shape (L, 16).
    """

    key: str
    tags: Tensor

    def require(self, public: Any, classes: int) -> None:
        """Refuse tags of other keys, and more than there are classes."""
        public.check_key(self.key)
        if len(self.tags) > classes:
            raise ReplyRefusedError(f"{len(self.tags)} tags of {classes} classes, or one twice")


@record("TagReport")
class TagReport(Request):
    """Send a keyed hash of each of your labels (mode ``prf``)."""

    reply_type: ClassVar[type[Reply]] = TagReply
    rule = RequestRule("a keyed hash of each of its labels", phase="enrolment")

    def check(self, reply: TagReply) -> None:
        """Every tag once."""
        require_shape(reply.tags, (-1, TAG_SIZE), torch.uint8, "tags")
        if len(torch.unique(reply.tags, dim=0)) != len(reply.tags):
            raise ReplyRefusedError(f"{len(reply.tags)} tags, or one twice")


@record("SealedLabels")
class SealedLabels(Reply):
    """Encrypted labels.

    Args:
        key: Fingerprint.
        sheets: See ``fedstrata.stratify.masking.slot_layout``.
    """

    key: str
    sheets: tuple[bytes, ...]

    def require(self, public: Any) -> None:
        """Refuse what was not encrypted with these public keys."""
        public.check_key(self.key)
        for sheet in self.sheets:
            public.comparing.load(sheet, length=COMPARING.slots)


@record("SealLabels")
class SealLabels(Request):
    """Send your labels encrypted, laid out for a list of ``classes`` unique labels (mode ``ckks``).

    Args:
        classes: C.
    """

    reply_type: ClassVar[type[Reply]] = SealedLabels
    rule = RequestRule("its labels, encrypted", phase="enrolment")

    classes: int

    def check(self, reply: SealedLabels) -> None:
        """Sheets for no more labels than there are classes."""
        if not 1 <= len(reply.sheets) <= SlotLayout(self.classes).sheets(self.classes):
            raise ReplyRefusedError(f"{len(reply.sheets)} sheets for {self.classes} classes")


@record("CompareReply")
class CompareReply(Reply):
    """Where each label was found.

    Args:
        places: For each of the client's labels: number of the ciphertext times the grid's width, plus the column of
            the zero; −1 where there is none. int64, shape (L,).
    """

    places: Tensor


@record("Compare")
class Compare(Request):
    """Scrambled differences between your labels and the unique list: which of them are zero?

    Args:
        classes: C.
        sheets: Which of the client's sheets each ciphertext compares, int64.
        differences: Ciphertexts.
    """

    reply_type: ClassVar[type[Reply]] = CompareReply
    rule = RequestRule("which of its labels are on the encrypted list of all labels", phase="enrolment")

    classes: int
    sheets: Tensor
    differences: tuple[bytes, ...]

    def check(self, reply: CompareReply) -> None:
        """A place a label."""
        require_shape(reply.places, (-1,), torch.int64, "places")
        if len(reply.places) > self.classes:
            raise ReplyRefusedError(f"{len(reply.places)} places for {self.classes} classes")


@record("Enlisted")
class Enlisted(Reply):
    """New entries, to be added to the list.

    Args:
        key: Fingerprint.
        pages: A ciphertext for every page of the list that gets an entry.
    """

    key: str
    pages: dict[int, bytes]

    def require(self, public: Any) -> None:
        """Refuse what was not encrypted with these public keys."""
        public.check_key(self.key)
        for data in self.pages.values():
            public.comparing.load(data, length=COMPARING.slots)


@record("Enlist")
class Enlist(Request):
    """Some of your labels are new: send them for the unique list.

    Args:
        classes: C.
        labels: Which of the client's labels, int64.
        places: Where on the list each one goes: page times the grid's width, plus the column. int64.
    """

    reply_type: ClassVar[type[Reply]] = Enlisted
    rule = RequestRule("those that are not, encrypted for the list", phase="enrolment")

    classes: int
    labels: Tensor
    places: Tensor

    def check(self, reply: Enlisted) -> None:
        """A ciphertext for every page that gets an entry, and no other."""
        width = SlotLayout(self.classes).width
        pages = {place // width for place in self.places.tolist()}
        if reply.pages.keys() != pages:
            raise ReplyRefusedError(f"pages {sorted(reply.pages)}, expected {sorted(pages)}")


@record("CountReply")
class CountReply(Reply):
    """Encrypted counts.

    Args:
        key: Fingerprint.
        pages: The counts by placeholder, 0 where the client holds none, in ciphertexts of so many slots each.
    """

    key: str
    pages: tuple[bytes, ...]

    def require(self, public: Any) -> None:
        """Refuse what was not encrypted with these public keys."""
        public.check_key(self.key)
        for data in self.pages:
            public.counting.load(data, length=COUNTING.slots)


@record("CountReport")
class CountReport(Request):
    """Your labels go by these numbers; send the encrypted number of samples of each.

    Args:
        placeholders: One for each of the client's labels, int64.
        size: P, how many placeholders there are.
    """

    reply_type: ClassVar[type[Reply]] = CountReply
    rule = RequestRule("how many samples of each label it holds, encrypted", phase="enrolment")

    placeholders: Tensor
    size: int

    def check(self, reply: CountReply) -> None:
        """Pages for all placeholders."""
        if len(reply.pages) != -(-self.size // COUNTING.slots):
            raise ReplyRefusedError(f"{len(reply.pages)} pages of counts for {self.size} placeholders")


@record("Totals")
class Totals(Reply):
    """Sums over clients.

    Args:
        totals: N(p), int64, shape (P,).
    """

    totals: Tensor

    def require(self, holders: Any) -> None:
        """Refuse less than a sample for each holder, and samples of what nobody holds.

        Args:
            holders: How many clients hold each placeholder, int64, shape (P,).
        """
        found = self.totals.numpy()
        if (found < holders).any() or (found[holders == 0] != 0).any():
            raise ReplyRefusedError("a total that is smaller than its number of holders, or of nobody")


@record("OpenTotals")
class OpenTotals(Request):
    """Decrypt sums over clients.

    Args:
        pages: Encrypted totals by placeholder.
        size: P.
    """

    reply_type: ClassVar[type[Reply]] = Totals
    rule = RequestRule("sums over all clients, label by label under random names, which it decrypts", phase="enrolment")

    pages: tuple[bytes, ...]
    size: int

    def check(self, reply: Totals) -> None:
        """A total for each placeholder."""
        require_shape(reply.totals, (self.size,), torch.int64, "totals")


@record("ShareReply")
class ShareReply(Reply):
    """Shares.

    Args:
        shares: n_k(p) / N(p) for each of the client's labels, float64.
    """

    shares: Tensor


@record("ShareReport")
class ShareReport(Request):
    """What part of all samples of each of your placeholders do you hold?

    Only asked for weighted selection.

    Args:
        totals: N(p) for each of the client's labels, int64.
    """

    reply_type: ClassVar[type[Reply]] = ShareReply
    rule = RequestRule(
        "its share of all samples of each of its labels, under random names",
        phase="enrolment",
        discloses=frozenset({"sizes"}),
    )

    totals: Tensor

    def check(self, reply: ShareReply) -> None:
        """A share for each label: of a sample at least, and of all at most."""
        require_shape(reply.shares, (len(self.totals),), torch.float64, "shares")
        if bool(((reply.shares * self.totals).round() < 1).any()) or bool((reply.shares > 1).any()):
            raise ReplyRefusedError("a share outside (0, 1], or of less than a sample")
