"""The requests and replies of an enrolment, in which the server learns which clients share a label.

A *placeholder* is a number that stands for a label. The *unique list* is the server's list of all labels, encrypted.
Each client puts its labels in a random order (see ``presented`` in ``fedstrata.stratify.masking.client``). All arrays
over a client's labels have this order. C is the number of classes, L the number of a client's labels, and P the number
of placeholders. Ciphertexts are bytes that TenSEAL serialised, and ``key`` is the fingerprint of the keys with which
they were made.
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
    """The public keys that the server needs to compute on ciphertexts. Secret keys are never sent.

    Args:
        key: The keys' fingerprint.
        counting: The public key for counts.
        comparing: The public key for comparisons; empty if the request did not ask for it.
    """

    key: str
    counting: bytes
    comparing: bytes


@record("OpenKeys")
class OpenKeys(Request):
    """Ask a client for the public keys that all clients share; the client makes the keys if there are none.

    Args:
        comparing: Whether the key for comparisons is needed, and not only the key for counts.
    """

    reply_type: ClassVar[type[Reply]] = PublicKeys
    rule = RequestRule("the public keys that all clients share", phase="enrolment")

    comparing: bool

    def check(self, reply: PublicKeys) -> None:
        """Refuse secret keys, and keys with other encryption parameters than expected."""
        sealer(reply.counting, COUNTING)
        if self.comparing:
            sealer(reply.comparing, COMPARING)


@record("Assigned")
class Assigned(Reply):
    """The confirmation of ``Assign``.

    Args:
        labels: The number of labels that the client holds.
    """

    labels: int


@record("Assign")
class Assign(Request):
    """Tell a client the numbers that stand for its labels in later requests (placeholders).

    Args:
        placeholders: One such number for each of the client's labels, int64.
    """

    reply_type: ClassVar[type[Reply]] = Assigned
    rule = RequestRule("how many labels it holds", phase="enrolment")

    placeholders: Tensor


@record("TagReply")
class TagReply(Reply):
    """A tag of each of the client's labels: its HMAC-SHA256 under the clients' key, cut to 16 bytes.

    Args:
        key: The keys' fingerprint.
        tags: The tags, uint8, shape (L, 16).
    """

    key: str
    tags: Tensor

    def require(self, public: Any, classes: int) -> None:
        """Refuse tags that were made with other keys, and more tags than classes."""
        public.check_key(self.key)
        if len(self.tags) > classes:
            raise ReplyRefusedError(f"there are {len(self.tags)} tags, but only {classes} classes")


@record("TagReport")
class TagReport(Request):
    """Ask for a keyed hash of each of the client's labels (masking ``prf``)."""

    reply_type: ClassVar[type[Reply]] = TagReply
    rule = RequestRule("a keyed hash of each of its labels", phase="enrolment")

    def check(self, reply: TagReply) -> None:
        """Refuse duplicate tags."""
        require_shape(reply.tags, (-1, TAG_SIZE), torch.uint8, "tags")
        if len(torch.unique(reply.tags, dim=0)) != len(reply.tags):
            raise ReplyRefusedError("a tag occurs twice")


@record("SealedLabels")
class SealedLabels(Reply):
    """A client's labels, encrypted.

    Args:
        key: The keys' fingerprint.
        sheets: The ciphertexts. ``fedstrata.stratify.masking.slot_layout`` describes which labels each contains.
    """

    key: str
    sheets: tuple[bytes, ...]


@record("SealLabels")
class SealLabels(Request):
    """Ask for the client's labels, encrypted, so that the server can compare them with its list (masking ``ckks``).

    Args:
        classes: C, the number of classes.
    """

    reply_type: ClassVar[type[Reply]] = SealedLabels
    rule = RequestRule("its labels, encrypted", phase="enrolment")

    classes: int

    def check(self, reply: SealedLabels) -> None:
        """Refuse a reply with more ciphertexts than all classes need, or with none."""
        if not 1 <= len(reply.sheets) <= SlotLayout(self.classes).sheets(self.classes):
            raise ReplyRefusedError(f"the reply has {len(reply.sheets)} sheets for {self.classes} classes")


@record("CompareReply")
class CompareReply(Reply):
    """The entries of the server's encrypted list of labels (the unique list) that equal the client's labels.

    Args:
        places: For each label of the client: i · width + c if its difference in column c of the request's ciphertext i
            is zero, so that the label equals the list's entry there; −1 if none of its differences is zero. int64,
            shape (L,). ``SlotLayout`` defines columns and width.
    """

    places: Tensor


@record("Compare")
class Compare(Request):
    """Ask which scrambled differences between the client's labels and the server's list of labels are zero.

    Args:
        classes: C, the number of classes.
        sheets: For each ciphertext of differences, the index (in ``SealedLabels.sheets``) of the client's ciphertext
            that it compares with the list, int64.
        differences: The ciphertexts of the differences.
    """

    reply_type: ClassVar[type[Reply]] = CompareReply
    rule = RequestRule("which of its labels are on the encrypted list of all labels", phase="enrolment")

    classes: int
    sheets: Tensor
    differences: tuple[bytes, ...]

    def check(self, reply: CompareReply) -> None:
        """Refuse replies about more labels than there are classes."""
        require_shape(reply.places, (-1,), torch.int64, "places")
        if len(reply.places) > self.classes:
            raise ReplyRefusedError(f"the reply has {len(reply.places)} places for {self.classes} classes")


@record("Enlisted")
class Enlisted(Reply):
    """New entries of the server's list of labels, encrypted.

    Args:
        key: The keys' fingerprint.
        pages: A mapping from each page (ciphertext) of the list that gets an entry to the ciphertext to add to it.
    """

    key: str
    pages: dict[int, bytes]


@record("Enlist")
class Enlist(Request):
    """Ask for encrypted entries for the client's labels that are not on the server's list of labels yet.

    Args:
        classes: C, the number of classes.
        labels: The indices of these labels in the order of the client's labels, int64.
        places: The index of the entry that each of them gets: page · width + column, int64. A page is one ciphertext of
            the list; ``SlotLayout`` defines columns and width.
    """

    reply_type: ClassVar[type[Reply]] = Enlisted
    rule = RequestRule("those that are not, encrypted for the list", phase="enrolment")

    classes: int
    labels: Tensor
    places: Tensor

    def check(self, reply: Enlisted) -> None:
        """Refuse a reply without exactly one ciphertext for each ciphertext (page) of the list that gets an entry."""
        width = SlotLayout(self.classes).width
        pages = {place // width for place in self.places.tolist()}
        if reply.pages.keys() != pages:
            raise ReplyRefusedError(f"the reply has the pages {sorted(reply.pages)}, expected {sorted(pages)}")


@record("CountReply")
class CountReply(Reply):
    """A client's encrypted counts.

    Args:
        key: The keys' fingerprint.
        pages: The ciphertexts, which together contain the client's number of samples of each of the P placeholders
            (numbers that stand for labels): 0 for labels that the client does not hold.
    """

    key: str
    pages: tuple[bytes, ...]


@record("CountReport")
class CountReport(Request):
    """Tell a client the numbers that stand for its labels (placeholders), and ask for its encrypted sample counts.

    Args:
        placeholders: One placeholder for each of the client's labels, int64.
        size: P, the number of placeholders: the number of labels of all clients.
    """

    reply_type: ClassVar[type[Reply]] = CountReply
    rule = RequestRule("how many samples of each label it holds, encrypted", phase="enrolment")

    placeholders: Tensor
    size: int

    def check(self, reply: CountReply) -> None:
        """Refuse a reply whose number of ciphertexts does not fit the number of placeholders."""
        if len(reply.pages) != -(-self.size // COUNTING.slots):
            raise ReplyRefusedError(f"the reply has {len(reply.pages)} pages of counts for {self.size} placeholders")


@record("Totals")
class Totals(Reply):
    """The number of samples of each label over all clients, which one client has decrypted.

    Args:
        totals: The totals, int64, shape (P,), in the order of the placeholders (the numbers that stand for labels).
    """

    totals: Tensor

    def require(self, holders: Any) -> None:
        """Refuse impossible totals: fewer samples of a label than clients that hold it, or samples that nobody holds.

        Args:
            holders: The number of clients that hold each label, int64, shape (P,).
        """
        totals = self.totals.numpy()
        if (totals < holders).any() or (totals[holders == 0] != 0).any():
            raise ReplyRefusedError(
                "a total is smaller than the number of clients that hold the label, or no client holds the label"
            )


@record("OpenTotals")
class OpenTotals(Request):
    """Ask a client to decrypt the number of samples of each label over all clients.

    Args:
        pages: The ciphertexts, of which each contains many of these numbers.
        size: P, the number of labels.
    """

    reply_type: ClassVar[type[Reply]] = Totals
    rule = RequestRule("sums over all clients, label by label under random names, which it decrypts", phase="enrolment")

    pages: tuple[bytes, ...]
    size: int

    def check(self, reply: Totals) -> None:
        """Refuse a reply without one total per label."""
        require_shape(reply.totals, (self.size,), torch.int64, "totals")


@record("ShareReply")
class ShareReply(Reply):
    """For each of a client's labels, the client's share of all samples of the label.

    Args:
        shares: The client's number of samples of each of its labels, divided by that of all clients, float64, shape
            (L,).
    """

    shares: Tensor


@record("ShareReport")
class ShareReport(Request):
    """Ask a client for its share of all samples of each of its labels.

    The share is the client's number of samples divided by that of all clients. Only weighted selection needs it.

    Args:
        totals: The number of samples over all clients, for each of the client's labels, int64, shape (L,).
    """

    reply_type: ClassVar[type[Reply]] = ShareReply
    rule = RequestRule(
        "its share of all samples of each of its labels, under random names",
        phase="enrolment",
        discloses=frozenset({"sizes"}),
    )

    totals: Tensor

    def check(self, reply: ShareReply) -> None:
        """Refuse shares of less than one sample or of more than all samples."""
        require_shape(reply.shares, (len(self.totals),), torch.float64, "shares")
        if bool(((reply.shares * self.totals).round() < 1).any()) or bool((reply.shares > 1).any()):
            raise ReplyRefusedError("a share is not in (0, 1], or stands for less than one sample")
