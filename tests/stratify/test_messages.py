"""Which answers to Stratify's questions are refused."""

import pytest
import torch

from fedstrata.federation.reply_checks import defect_of
from fedstrata.sampling.label_counts import MOST_SAMPLES, LabelReply, LabelReport


def told(labels, counts):
    return defect_of(LabelReply(torch.tensor(labels), counts), LabelReport().check_reply)


@pytest.mark.parametrize(
    ("labels", "counts", "problem"),
    [
        ([0, 1], torch.tensor([1.0, 2.5]), "counts"),
        ([0, 1], torch.tensor([1, 2], dtype=torch.complex64), "counts"),
        ([0, 1], torch.tensor([1, 2], dtype=torch.int8), "counts"),
        ([0, 1], torch.tensor([1]), "counts"),
        ([0.0, 1.0], torch.tensor([1, 2]), "labels"),
        ([[0, 1]], torch.tensor([[1, 2]]), "labels"),
        ([1, 1], torch.tensor([1, 2]), "a label occurs twice"),
        ([0, 1], torch.tensor([0, 2]), "a label must have 1 to "),
        ([0, 1], torch.tensor([1, 2**62]), "a label must have 1 to "),
    ],
)
def test_labels_and_counts_that_cannot_be_are_refused(labels, counts, problem):
    assert problem in (told(labels, counts) or "")


def test_labels_and_counts_that_can_be_are_taken():
    assert told([3, 0], torch.tensor([1, MOST_SAMPLES])) is None
