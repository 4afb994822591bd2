"""Requests and replies of an enrolment, in which the server learns which clients have labels in common.

A *placeholder* is a number that stands for a label. The *unique list* is the server's encrypted list of all labels.
Each client puts its labels in a random order (see ``presented`` in ``fedstrata.stratify.masking.client``). All arrays
with one entry per label have this order. C is the number of classes, L is the number of a client's labels, and P is the
number of placeholders. Ciphertexts are bytes in TenSEAL's format. The field ``key`` is the fingerprint of the keys with
which the ciphertexts were encrypted.
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
        comparing: The public key for comparisons; empty if the server does not request this key.
    """

    key: str
    counting: bytes
    comparing: bytes


@record("OpenKeys")
class OpenKeys(Request):
    """A request for the public keys that all clients share. If the keys do not exist yet, the client makes them.

    Args:
        comparing: Whether the server needs the key for comparisons in addition to the key for counts.
    """

    reply_type: ClassVar[type[Reply]] = PublicKeys
    rule = RequestRule("the public keys that all clients share", phase="enrolment")

    comparing: bool

    def check(self, reply: PublicKeys) -> None:
        """Raise ``ReplyRefusedError`` if a key is secret, or if its encryption parameters are wrong."""
        sealer(reply.counting, COUNTING)
        if self.comparing:
            sealer(reply.comparing, COMPARING)


@record("Assigned")
class Assigned(Reply):
    """The reply to ``Assign``, in which the client confirms the placeholders of its labels.

    Args:
        labels: The number of different labels of the client.
    """

    labels: int


@record("Assign")
class Assign(Request):
    """A request that gives a client its placeholders: the numbers that stand for its labels in later requests.

    Args:
        placeholders: One placeholder (number) for each of the client's labels, int64.
    """

    reply_type: ClassVar[type[Reply]] = Assigned
    rule = RequestRule("its number of labels", phase="enrolment")

    placeholders: Tensor


@record("TagReply")
class TagReply(Reply):
    """A tag for each of the client's labels: the first 16 bytes of the label's HMAC-SHA256 with the clients' key.

    Args:
        key: The keys' fingerprint.
        tags: The tags, uint8, shape (L, 16).
    """

    key: str
    tags: Tensor

    def require(self, public: Any, classes: int) -> None:
        """Raise ``ReplyRefusedError`` if the tags belong to another key, or if there are more tags than classes."""
        public.check_key(self.key)
        if len(self.tags) > classes:
            raise ReplyRefusedError(f"the reply has {len(self.tags)} tags, but there are only {classes} classes")


@record("TagReport")
class TagReport(Request):
    """A request for a keyed hash of each of the client's labels (masking ``prf``)."""

    reply_type: ClassVar[type[Reply]] = TagReply
    rule = RequestRule("a keyed hash of each of its labels", phase="enrolment")

    def check(self, reply: TagReply) -> None:
        """Raise ``ReplyRefusedError`` if the reply contains the same tag twice."""
        require_shape(reply.tags, (-1, TAG_SIZE), torch.uint8, "tags")
        if len(torch.unique(reply.tags, dim=0)) != len(reply.tags):
            raise ReplyRefusedError("the reply contains the same tag (keyed hash of a label) twice")


@record("SealedLabels")
class SealedLabels(Reply):
    """A client's labels in encrypted form.

    Args:
        key: The keys' fingerprint.
        sheets: The ciphertexts. ``fedstrata.stratify.masking.slot_layout`` describes which labels each ciphertext
            contains.
    """

    key: str
    sheets: tuple[bytes, ...]


@record("SealLabels")
class SealLabels(Request):
    """A request for the client's encrypted labels, which the server compares with its list (masking ``ckks``).

    Args:
        classes: The number C of classes.
    """

    reply_type: ClassVar[type[Reply]] = SealedLabels
    rule = RequestRule("its labels in encrypted form", phase="enrolment")

    classes: int

    def check(self, reply: SealedLabels) -> None:
        """Raise ``ReplyRefusedError`` if the reply has no ciphertext, or more than are needed for all classes."""
        if not 1 <= len(reply.sheets) <= SlotLayout(self.classes).sheets(self.classes):
            problem = f"the reply has too few or too many ciphertexts ({len(reply.sheets)}) for {self.classes} classes"
            raise ReplyRefusedError(problem)


@record("CompareReply")
class CompareReply(Reply):
    """The positions of the client's labels in the server's encrypted list of labels (the unique list).

    Args:
        places: For each label of the client, the position of a zero difference, or −1 if no difference is zero, int64,
            shape (L,). Column c of ciphertext i in the request is at position i · width + c. A label with a zero
            difference is on the server's list. ``SlotLayout`` defines columns and width.
    """

    places: Tensor


@record("Compare")
class Compare(Request):
    """A request to report the zeros among the scrambled differences between the client's labels and the server's list.

    Args:
        classes: The number C of classes.
        sheets: For each entry of ``differences``, the index (into ``SealedLabels.sheets``) of the client's ciphertext
            from which the entry was computed, int64.
        differences: The ciphertexts of the differences.
    """

    reply_type: ClassVar[type[Reply]] = CompareReply
    rule = RequestRule("which of its labels are on the encrypted list of all labels", phase="enrolment")

    classes: int
    sheets: Tensor
    differences: tuple[bytes, ...]

    def check(self, reply: CompareReply) -> None:
        """Raise ``ReplyRefusedError`` if the reply contains more labels than there are classes."""
        require_shape(reply.places, (-1,), torch.int64, "places")
        if len(reply.places) > self.classes:
            raise ReplyRefusedError(
                f"the reply contains {len(reply.places)} positions, but there are only {self.classes} classes"
            )


@record("Enlisted")
class Enlisted(Reply):
    """New encrypted entries for the server's list of labels.

    Args:
        key: The keys' fingerprint.
        pages: A mapping from a page's index to the ciphertext that is added to this page. The list
            consists of several ciphertexts, called pages.
    """

    key: str
    pages: dict[int, bytes]


@record("Enlist")
class Enlist(Request):
    """A request to encrypt entries for the client's labels that are not on the server's list yet.

    Args:
        classes: The number C of classes.
        labels: The indices of the requested labels among the client's labels, int64.
        places: The index of the new entry for each requested label, int64. The index is page · width + column. A page
            is one ciphertext of the list. ``SlotLayout`` defines columns and width.
    """

    reply_type: ClassVar[type[Reply]] = Enlisted
    rule = RequestRule("its labels that are not on the list yet, in encrypted form", phase="enrolment")

    classes: int
    labels: Tensor
    places: Tensor

    def check(self, reply: Enlisted) -> None:
        """Raise ``ReplyRefusedError`` if the reply does not contain exactly one ciphertext per page of new entries."""
        width = SlotLayout(self.classes).width
        pages = {place // width for place in self.places.tolist()}
        if reply.pages.keys() != pages:
            raise ReplyRefusedError(
                f"the reply has ciphertexts for the pages {sorted(reply.pages)} of the label list, but the pages "
                f"{sorted(pages)} were requested"
            )


@record("CountReply")
class CountReply(Reply):
    """A client's encrypted sample counts.

    Args:
        key: The keys' fingerprint.
        pages: The ciphertexts of the client's sample counts for all P placeholders (numbers that stand for labels). The
            count is 0 for labels that the client does not have.
    """

    key: str
    pages: tuple[bytes, ...]


@record("CountReport")
class CountReport(Request):
    """A request for encrypted sample counts, which also gives a client the placeholders of its labels.

    Args:
        placeholders: One placeholder (number) for each of the client's labels, int64.
        size: The number P of placeholders: the number of different labels of all clients.
    """

    reply_type: ClassVar[type[Reply]] = CountReply
    rule = RequestRule("its number of samples of each label, in encrypted form", phase="enrolment")

    placeholders: Tensor
    size: int

    def check(self, reply: CountReply) -> None:
        """Raise ``ReplyRefusedError`` if the number of ciphertexts does not fit the number of placeholders."""
        if len(reply.pages) != -(-self.size // COUNTING.slots):
            problem = f"the reply has too few or too many ciphertexts ({len(reply.pages)}) for {self.size} counts"
            raise ReplyRefusedError(problem)


@record("Totals")
class Totals(Reply):
    """The total number of samples of each label, as decrypted by one client.

    Args:
        totals: The totals, int64, shape (P,), in the order of the placeholders (the numbers that stand for labels).
    """

    totals: Tensor

    def require(self, holders: Any) -> None:
        """Raise ``ReplyRefusedError`` if a total is impossible, for example if a label has more clients than samples.

        Args:
            holders: For each label, the number of clients that have samples of this label, int64, shape (P,).
        """
        totals = self.totals.numpy()
        if (totals < holders).any() or (totals[holders == 0] != 0).any():
            raise ReplyRefusedError(
                "the totals are impossible: a label has fewer samples than clients, or samples without a client"
            )


@record("OpenTotals")
class OpenTotals(Request):
    """A request to decrypt the total number of samples of each label.

    Args:
        pages: The ciphertexts. Each ciphertext contains many totals.
        size: The number P of labels.
    """

    reply_type: ClassVar[type[Reply]] = Totals
    rule = RequestRule("sample counts over all clients, decrypted, under random names of labels", phase="enrolment")

    pages: tuple[bytes, ...]
    size: int

    def check(self, reply: Totals) -> None:
        """Raise ``ReplyRefusedError`` if the reply does not contain exactly one total per label."""
        require_shape(reply.totals, (self.size,), torch.int64, "totals")


@record("ShareReply")
class ShareReply(Reply):
    """For each label of a client, the client's fraction of all samples with this label.

    Args:
        shares: For each label, the client's number of samples with this label, divided by the number of all clients'
            samples with this label, float64, shape (L,).
    """

    shares: Tensor


@record("ShareReport")
class ShareReport(Request):
    """A request to report, for each label of the client, which fraction of all samples with this label the client has.

    Only weighted selection needs these fractions.

    Args:
        totals: For each of the client's labels, the number of all clients' samples with this label, int64, shape (L,).
    """

    reply_type: ClassVar[type[Reply]] = ShareReply
    rule = RequestRule(
        "for each of its labels, its fraction of all samples, under random names of labels",
        phase="enrolment",
        discloses=frozenset({"sizes"}),
    )

    totals: Tensor

    def check(self, reply: ShareReply) -> None:
        """Raise ``ReplyRefusedError`` if a fraction represents less than one sample, or more than all samples."""
        require_shape(reply.shares, (len(self.totals),), torch.float64, "shares")
        if bool(((reply.shares * self.totals).round() < 1).any()) or bool((reply.shares > 1).any()):
            raise ReplyRefusedError("a fraction of samples is above 1, or so small that it is less than one sample")
