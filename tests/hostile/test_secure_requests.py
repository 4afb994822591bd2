"""Mutated requests of secure sums to sites that accept only secure sums: see ``tests/sites/support/secure_fuzz.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from secure_fuzz import ROUNDS, Conversation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "rounds"),
    [(0, 16), *(pytest.param(seed, ROUNDS, marks=pytest.mark.long) for seed in range(3))],
)
def test_sites_keep_their_promises_whatever_request_is_mutated(seed: int, rounds: int, tmp_path: Path) -> None:
    conversation = Conversation(tmp_path, seed, rounds)
    conversation.run()
    kinds = {"Masked", "request for keys", "Roster", "RevealAll", "Propose", "RevealSet", "Opened"}
    assert kinds <= conversation.sent.keys()
    assert {"refused", "MaskedReply", "Package", "Dealt", "Vote", "Shares"} <= conversation.promises.answers.keys()
    assert conversation.promises.answers["refused"] > conversation.sent.total() / 3
