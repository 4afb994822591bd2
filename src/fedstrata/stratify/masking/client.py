"""Enrol a client before the first round: the client reports its labels, and decrypts sums over all clients.

A *placeholder* is a number that stands for a label. The *unique list* is the server's encrypted list of all labels. The
secret keys come from the key ring of the client's context (``key_store.KeyRing``). No reply contains a secret key.
"""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.base.arrays import Ints
from fedstrata.base.errors import FedstrataError
from fedstrata.base.rng import rng
from fedstrata.clients.client import Client
from fedstrata.clients.handling import handles
from fedstrata.sampling.label_counts import LabelReply, LabelReport
from fedstrata.stratify.client_batch import PLACEHOLDERS
from fedstrata.stratify.masking.ckks import COUNTING
from fedstrata.stratify.masking.key_store import ring_of
from fedstrata.stratify.masking.messages import (
    Assign,
    Assigned,
    Compare,
    CompareReply,
    CountReply,
    CountReport,
    Enlist,
    Enlisted,
    OpenKeys,
    OpenTotals,
    PublicKeys,
    SealedLabels,
    SealLabels,
    ShareReply,
    ShareReport,
    TagReply,
    TagReport,
    Totals,
)
from fedstrata.stratify.masking.prf import TAG_SIZE, tag
from fedstrata.stratify.masking.slot_layout import TOLERANCE, SlotLayout

_WHOLE = 0.1
"""The maximum accepted distance between a decrypted sum over clients and the nearest integer.

The error of the encryption is below 0.001 for 1,000 clients.
"""


def presented(client: Client) -> tuple[Ints, Ints]:
    """Return a client's labels in random order, and the number of samples of each label, both of shape (L,).

    The order is the same in every request of a run. Labels with fewer than ``privacy.min_samples`` samples are omitted,
    and are never used for training.
    """
    labels, counts = np.unique(client.labels, return_counts=True)
    context = client.context
    enough = counts >= context.privacy.min_samples
    labels, counts = labels[enough], counts[enough]
    client.n_contributing = int(counts.sum())
    seed = ring_of(context).order_seed(context.config.seed)
    order = rng(seed, "label-order", 0, client.number).permutation(len(labels))
    return labels[order].astype(np.int64), counts[order].astype(np.int64)


@handles(LabelReport)
def report_labels(client: Client, request: LabelReport) -> LabelReply:
    """Report the client's labels and the number of samples of each label, without encryption."""
    labels, counts = presented(client)
    return LabelReply(torch.from_numpy(labels), torch.from_numpy(counts))


@handles(Assign)
def assign(client: Client, request: Assign) -> Assigned:
    """Store the label of each placeholder (a number that the server uses instead of the label)."""
    labels, _ = presented(client)
    _remember(client, labels, request.placeholders.numpy())
    return Assigned(len(labels))


def _remember(client: Client, labels: Ints, placeholders: Ints) -> None:
    if len(placeholders) != len(labels) or len(np.unique(placeholders)) != len(placeholders):
        raise FedstrataError(
            f"the request must contain one placeholder for each of {len(labels)} labels, without repetitions. It "
            f"contains {len(placeholders)} placeholders."
        )
    client.state[PLACEHOLDERS] = dict(zip(placeholders.tolist(), labels.tolist(), strict=True))


@handles(OpenKeys)
def open_keys(client: Client, request: OpenKeys) -> PublicKeys:
    """Send the public keys that all clients share. If the keys do not exist yet, create them."""
    keys = ring_of(client.context).make()
    return PublicKeys(keys.name, keys.counting_public, keys.comparing_public if request.comparing else b"")


@handles(TagReport)
def report_tags(client: Client, request: TagReport) -> TagReply:
    """Send the keyed hash of each label."""
    keys, names = ring_of(client.context).open(), client.context.data.stratum_names
    labels, _ = presented(client)
    tags = b"".join(tag(keys.prf, names[label]) for label in labels.tolist())
    return TagReply(keys.name, torch.from_numpy(np.frombuffer(tags, dtype=np.uint8).reshape(-1, TAG_SIZE).copy()))


@handles(SealLabels)
def seal_labels(client: Client, request: SealLabels) -> SealedLabels:
    """Send all labels in encrypted form, so that the server can compare them with its encrypted list of labels."""
    keys = ring_of(client.context).open()
    labels, _ = presented(client)
    sheets = SlotLayout(request.classes).sheets_of(labels)
    return SealedLabels(keys.name, tuple(keys.comparing.seal(sheet).serialize() for sheet in sheets))


@handles(Compare)
def compare(client: Client, request: Compare) -> CompareReply:
    """Decrypt the differences between the client's labels and the server's list, and report which of them are zero."""
    keys, grid = ring_of(client.context).open(), SlotLayout(request.classes)
    labels, _ = presented(client)
    opener = keys.comparing
    opened = [
        opener.open_whole(opener.load(data, length=grid.slots, product=True), tolerance=TOLERANCE)
        for data in request.differences
    ]
    return CompareReply(torch.from_numpy(grid.find(opened, request.sheets.numpy(), len(labels))))


@handles(Enlist)
def enlist(client: Client, request: Enlist) -> Enlisted:
    """Send the requested labels in encrypted form, so that the server can add them to its list of labels."""
    keys, grid = ring_of(client.context).open(), SlotLayout(request.classes)
    labels, _ = presented(client)
    pages = grid.entries(labels[request.labels.numpy()], request.places.numpy())
    return Enlisted(keys.name, {page: keys.comparing.seal(values).serialize() for page, values in pages.items()})


@handles(CountReport)
def report_counts(client: Client, request: CountReport) -> CountReply:
    """Send the encrypted number of samples of each label, and store which label each placeholder stands for."""
    keys = ring_of(client.context).open()
    labels, counts = presented(client)
    placeholders = request.placeholders.numpy()
    _remember(client, labels, placeholders)
    slots = COUNTING.slots
    pages = np.zeros((-(-request.size // slots), slots))
    pages.reshape(-1)[placeholders] = counts
    return CountReply(keys.name, tuple(keys.counting.seal(page).serialize() for page in pages))


@handles(OpenTotals)
def open_totals(client: Client, request: OpenTotals) -> Totals:
    """Decrypt sums over clients, and round them: the CKKS errors of unrounded sums could reveal the secret key."""
    keys = ring_of(client.context).open()
    opener = keys.counting
    pages = [opener.open_whole(opener.load(data, length=COUNTING.slots), tolerance=_WHOLE) for data in request.pages]
    totals = np.concatenate([*pages, np.empty(0, dtype=np.int64)])[: request.size]
    return Totals(torch.from_numpy(totals))


@handles(ShareReport)
def report_shares(client: Client, request: ShareReport) -> ShareReply:
    """For each label of the client, report which fraction of all samples with this label the client has."""
    _, counts = presented(client)
    return ShareReply(torch.from_numpy(counts / request.totals.numpy()))
