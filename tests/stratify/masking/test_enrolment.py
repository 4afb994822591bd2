"""Enrolling: every mode finds the same holders and counts, and what goes wrong ends in no wrong count."""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quick import others_long

pytest.importorskip("tenseal")

from printed_protocol import CompareOne, OpenPrintedTotals, SealPairs

import fedstrata.stratify.masking
from fedstrata.base.errors import ClientsFailedError, QuorumError, ReplyRefusedError
from fedstrata.sampling.label_counts import LabelReport
from fedstrata.stratify.masking.ckks import COUNTING
from fedstrata.stratify.masking.enrolment import Roll, enrol
from fedstrata.stratify.masking.key_store import Keys
from fedstrata.stratify.masking.messages import (
    Assign,
    Compare,
    CountReport,
    Enlist,
    OpenKeys,
    OpenTotals,
    SealLabels,
    ShareReport,
    TagReport,
)
from fedstrata.stratify.masking.public_keys import Public
from fedstrata.stratify.masking.slot_layout import SlotLayout
from fedstrata.stratify.masking.unique_list import UniqueList

MODES = ("none", "prf", "ckks", "ckks-paper")
MASKED = MODES[1:]
Sites = Callable[..., Any]

HOLDINGS: list[dict[Any, int]] = [
    {"cat": 3, "dog": 1},
    {},
    {"dog": 5, "emu": 2, "cat": 1, "fox": 9},
    {"gnu": 4},
    {"fox": 1, "cat": 7},
]


def roll_of(federation: Any, masking: str, **options: Any) -> Roll:
    return enrol(federation, masking, **options)


def numbered(federation: Any, roll: Roll, client: int) -> dict[int, int]:
    """What a client was told, by the server's own numbers for the placeholders: {number: class}."""
    numbers = {name: number for number, name in enumerate(roll.names.tolist())}
    return {numbers[name]: label for name, label in federation.map_of(client).items()}


def check_against(federation: Any, roll: Roll, holdings: list[dict[Any, int]], clients: set[int] | None = None) -> None:
    """The roll says of those clients exactly what they hold."""
    names = federation.engine.engine.context.data.class_names
    clients = set(range(len(holdings))) if clients is None else clients
    assert set(roll.held) == clients
    meaning: dict[int, str] = {}
    assert sorted(roll.names.tolist()) == list(range(len(roll.totals)))
    for client in clients:
        told = {p: names[label] for p, label in numbered(federation, roll, client).items()}
        assert set(told) == set(roll.held[client].tolist())
        assert sorted(told.values()) == sorted(map(str, holdings[client]))
        for p, name in told.items():
            assert meaning.setdefault(p, name) == name  # the same placeholder means the same at everybody
    expected: Counter[str] = Counter()
    for client in clients:
        expected.update({str(label): n for label, n in holdings[client].items()})
    found = {meaning[p]: n for p, n in enumerate(roll.totals.tolist()) if n}
    assert found == dict(expected)
    holders = roll.holders()
    present = np.flatnonzero(roll.totals)
    assert holders.totals.tolist() == roll.totals[present].tolist()
    assert holders.placeholders.tolist() == roll.names[present].tolist()
    for place, p in enumerate(present.tolist()):
        who, counts = holders.of_placeholder(place)
        assert set(who.tolist()) == {c for c in clients if meaning[p] in map(str, holdings[c])}
        assert (counts > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("masking", MODES)
def test_every_mode_finds_who_holds_what(masking: str, site: Sites) -> None:
    federation = site(HOLDINGS)
    check_against(federation, roll_of(federation, masking), HOLDINGS)
    assert federation.reasons("enrolled") == [f"5 of 5 clients, 5 placeholders, masking {masking}"]


@pytest.mark.slow
def test_all_modes_number_the_labels_alike(site: Sites) -> None:
    rolls, maps = [], []
    for masking in MODES:
        federation = site(HOLDINGS)
        rolls.append(roll_of(federation, masking))
        maps.append([numbered(federation, rolls[-1], client) for client in range(5)])
    for one, other in pairwise(zip(rolls, maps, strict=True)):
        assert one[1] == other[1]
        assert one[0].totals.tolist() == other[0].totals.tolist()
        assert [held.tolist() for held in one[0].held.values()] == [held.tolist() for held in other[0].held.values()]


@pytest.mark.slow
@pytest.mark.parametrize("masking", ["prf", "ckks"])
def test_names_do_not_say_who_brought_a_label(masking: str, site: Sites) -> None:
    """Numbers in the order of discovery would: what a client is told is a random permutation of them."""
    holdings = [dict.fromkeys(range(30), 1)]
    told = []
    for _ in range(2):
        federation = site(holdings)
        roll = roll_of(federation, masking)
        told.append(roll.names.tolist())
    assert sorted(told[0]) == sorted(told[1]) == list(range(30))
    assert told[0] != told[1]
    assert list(range(30)) not in told


AWKWARD: dict[str, list[dict[Any, int]]] = {
    "strings": [{"": 1, "naïve": 2, "a, b\n": 3}, {"naïve": 4, "日本": 1}],
    "negative": [{-3: 1, -1: 2}, {-3: 2, 0: 4, 5: 1}],
    "huge": [{2**62: 1, -(2**62): 2}, {2**62: 3, 2**62 - 1: 1}],
    "one label each": [{0: 3}, {1: 3}, {0: 3}],
    "one label in all": [{"only": 2}, {"only": 5}],
    "everybody all": [dict.fromkeys(range(9), 2)] * 3,
    "nothing at first": [{}, {}, {4: 1, 2: 3}],
}


@pytest.mark.slow
@pytest.mark.parametrize("masking", ["prf", "ckks"])
@pytest.mark.parametrize("holdings", AWKWARD.values(), ids=AWKWARD.keys())
def test_labels_and_holdings_of_all_kinds(masking: str, holdings: list[dict[Any, int]], site: Sites) -> None:
    federation = site(holdings)
    check_against(federation, roll_of(federation, masking), holdings)


@pytest.mark.slow
@pytest.mark.parametrize("masking", ["prf", "ckks"])
def test_thousands_of_classes(masking: str, site: Sites) -> None:
    """More than a ciphertext has slots, so that list and counts have several pages."""
    names = [f"species {i}" for i in range(5000)]
    holdings = [{names[i]: 1 + i % 7 for i in range(k, 5000, 500)} for k in (0, 1, 250)]
    holdings[1][names[0]] = 11
    federation = site(holdings, names=names)
    check_against(federation, roll_of(federation, masking), holdings)


@pytest.mark.slow
@pytest.mark.parametrize("masking", MODES)
def test_a_class_that_nobody_holds_is_no_placeholder(masking: str, site: Sites) -> None:
    federation = site(HOLDINGS, names=["ant", "cat", "dog", "emu", "fox", "gnu", "yak"])
    check_against(federation, roll_of(federation, masking), HOLDINGS)


@pytest.mark.slow
def test_the_unique_list_stops_when_it_is_complete(site: Sites) -> None:
    holdings = [{"a": 1, "b": 1}, {"b": 1, "c": 2}, *[{"c": 1, "a": 1}] * 10]
    federation = site(holdings)
    check_against(federation, roll_of(federation, "ckks"), holdings)
    assert federation.count(Enlist) == 2
    assert federation.count(SealLabels) == len(holdings)
    assert federation.log.exchanges < 2 + 3 * 2 + 2 * 2 + 2 + 2  # the ten others are asked together


@pytest.mark.slow
def test_packing_takes_one_ciphertext_for_a_hundred_comparisons(site: Sites) -> None:
    holdings = [dict.fromkeys(range(10), 1), dict.fromkeys(range(10), 1)]
    sent: dict[type, int] = Counter()
    federation = site(holdings)
    ask = federation.engine.ask

    def counting(requests: Mapping[int, Any], *, together: bool) -> Any:
        for request in requests.values():
            sent[type(request)] += len(getattr(request, "differences", ()))
        return ask(requests, together=together)

    federation.engine.ask = counting
    roll_of(federation, "ckks")
    assert sent[Compare] == 1
    roll_of(federation, "ckks-paper")
    assert sent[CompareOne] == 100


@pytest.mark.slow
@pytest.mark.parametrize("masking", MODES)
def test_shares_give_the_counts_for_weighted_selection(masking: str, site: Sites) -> None:
    federation = site(HOLDINGS)
    roll = roll_of(federation, masking, weighted=True)
    check_against(federation, roll, HOLDINGS)
    names = federation.engine.engine.context.data.class_names
    for client, held in enumerate(HOLDINGS):
        told = numbered(federation, roll, client)
        counts = zip(roll.held[client].tolist(), roll.counts[client].tolist(), strict=True)
        assert {names[told[p]]: n for p, n in counts} == held


@pytest.mark.slow
@pytest.mark.parametrize("masking", MASKED)
def test_uniform_selection_reveals_no_clients_counts(masking: str, site: Sites) -> None:
    federation = site(HOLDINGS)
    roll = roll_of(federation, masking)
    assert roll.counts == {}
    assert federation.count(ShareReport) == 0
    assert federation.count(LabelReport) == 0
    holders = roll.holders()
    for place in range(len(holders.placeholders)):
        _, counts = holders.of_placeholder(place)
        assert np.ptp(counts) <= 1  # the total spread evenly


def test_a_share_that_contradicts_the_totals_is_not_believed(site: Sites) -> None:
    federation = site(HOLDINGS)
    federation.engine.tamper[4, ShareReport] = lambda reply: dataclasses.replace(reply, shares=reply.shares * 0 + 0.9)
    roll = roll_of(federation, "prf", weighted=True)
    assert roll.counts == {}
    assert "do not add up" in federation.reasons("refused")[0]
    check_against(federation, roll, HOLDINGS)


def test_shares_that_leave_nothing_for_who_is_silent_are_not_believed(site: Sites) -> None:
    """Client 2 gave no share and holds at least one cat, so the other two cannot hold all eleven."""
    federation = site([{"cat": 3}, {"cat": 1}, {"cat": 7}])
    federation.engine.cut[2] = ShareReport
    federation.engine.tamper[0, ShareReport] = lambda reply: dataclasses.replace(
        reply, shares=reply.shares * 0 + 10 / 11
    )
    roll = roll_of(federation, "prf", weighted=True)
    assert roll.counts == {}
    assert "do not add up" in federation.reasons("refused")[0]


def test_counts_are_the_shares_of_the_totals_to_the_sample(site: Sites) -> None:
    """In floating point 1 / 49 of 49 is a little less than 1."""
    assert 1 / 49 * 49 < 1
    holdings: list[dict[Any, int]] = [{"cat": 1}, {"cat": 48}]
    roll = roll_of(site(holdings), "prf", weighted=True)
    assert [roll.counts[client].tolist() for client in (0, 1)] == [[1], [48]]


def test_a_share_of_less_than_a_sample_is_refused(site: Sites) -> None:
    """Whose counts are 0 would be all that is left to be drawn from when the others are away."""
    federation = site(HOLDINGS)
    federation.engine.tamper[4, ShareReport] = lambda reply: dataclasses.replace(reply, shares=reply.shares * 0 + 1e-9)
    federation.engine.cut[3] = ShareReport  # what is missing may be another's
    roll = roll_of(federation, "prf", weighted=True)
    assert "less than one sample" in federation.reasons("refused")[0]
    check_against(federation, roll, HOLDINGS)
    assert roll.holders().counts.min() >= 1


@pytest.mark.slow
def test_a_client_that_gives_no_share_leaves_the_rest_to_itself(site: Sites) -> None:
    federation = site(HOLDINGS)
    federation.engine.cut[4] = ShareReport
    roll = roll_of(federation, "ckks", weighted=True)
    check_against(federation, roll, HOLDINGS)
    holders = roll.holders()
    names = federation.engine.engine.context.data.class_names
    told = federation.map_of(4)
    found = {}
    for place, p in enumerate(holders.placeholders.tolist()):  # what the client calls it
        who, counts = holders.of_placeholder(place)
        if 4 in who:
            found[names[told[p]]] = int(counts[who == 4][0])
    assert found == HOLDINGS[4]


VANISHING = [
    ("none", LabelReport, (0, 3)),
    ("none", Assign, (0, 3)),
    ("prf", OpenKeys, (0, 1)),
    ("prf", TagReport, (2, 3)),
    ("prf", CountReport, (0, 3)),
    ("prf", OpenTotals, (0, 1)),
    ("ckks", OpenKeys, (0,)),
    ("ckks", SealLabels, (0,)),
    ("ckks", SealLabels, (2, 4)),
    ("ckks", Compare, (0, 3)),
    ("ckks", Compare, (4,)),
    ("ckks", Enlist, (2,)),
    ("ckks", CountReport, (0, 3)),
    ("ckks", OpenTotals, (0, 1, 2)),
    ("ckks-paper", SealPairs, (2,)),
    ("ckks-paper", CompareOne, (2, 4)),
    ("ckks-paper", Assign, (3,)),
    ("ckks-paper", OpenPrintedTotals, (0,)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("masking", "kind", "who"), others_long(VANISHING, [*VANISHING[::2], *VANISHING[-3::2]]))
def test_clients_that_vanish_are_left_out_and_the_counts_are_those_of_the_others(
    masking: str, kind: type, who: tuple[int, ...], site: Sites
) -> None:
    federation = site(HOLDINGS)
    federation.engine.cut = dict.fromkeys(who, kind)
    roll = roll_of(federation, masking)
    assert federation.engine.gone == set(who)
    # Who vanishes after it was counted still counts.
    check_against(federation, roll, HOLDINGS, set(range(5)) - set(who if not issubclass(kind, OpenTotals) else ()))
    assert "connection lost" in federation.reasons("failed")[0]


@pytest.mark.parametrize("masking", MODES)
def test_nobody_left_is_a_clear_error(masking: str, site: Sites) -> None:
    federation = site(HOLDINGS)
    kind = LabelReport if masking == "none" else OpenKeys
    federation.engine.cut = dict.fromkeys(range(5), kind)
    with pytest.raises(QuorumError, match=r"none of the \d+ clients could report|no client"):
        roll_of(federation, masking)


@pytest.mark.slow
@pytest.mark.parametrize("masking", MASKED)
def test_totals_that_nobody_can_decrypt_are_a_clear_error(masking: str, site: Sites) -> None:
    federation = site(HOLDINGS)
    federation.engine.cut = dict.fromkeys(range(5), OpenPrintedTotals if masking == "ckks-paper" else OpenTotals)
    with pytest.raises(QuorumError, match=r"no client could decrypt the totals.*connection lost"):
        roll_of(federation, masking)


def garbled(reply: Any) -> Any:
    """The same reply with garbage for its ciphertexts."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(reply):
        value = getattr(reply, field.name)
        if isinstance(value, tuple):
            changes[field.name] = tuple(b"garbage" for _ in value)
        elif isinstance(value, dict):
            changes[field.name] = dict.fromkeys(value, b"garbage")
        elif isinstance(value, torch.Tensor):
            changes[field.name] = torch.zeros(3, 3)
    return dataclasses.replace(reply, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masking", "kind"),
    [
        ("none", LabelReport),
        ("prf", TagReport),
        ("prf", CountReport),
        ("ckks", SealLabels),
        ("ckks", Compare),
        ("ckks", Enlist),
        ("ckks", CountReport),
        ("ckks-paper", SealPairs),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_garbage_is_refused_and_costs_only_its_sender(masking: str, kind: type, site: Sites) -> None:
    federation = site(HOLDINGS)
    federation.engine.tamper[2, kind] = garbled
    roll = roll_of(federation, masking)
    check_against(federation, roll, HOLDINGS, {0, 1, 3, 4})
    assert len(federation.reasons("refused")) == 1
    assert "client 2" in federation.reasons("refused")[0]


@pytest.mark.slow
def test_garbled_totals_are_refused_and_another_client_decrypts_them(site: Sites) -> None:
    federation = site(HOLDINGS)
    federation.engine.tamper[0, OpenTotals] = lambda reply: dataclasses.replace(reply, totals=reply.totals - 10)
    check_against(federation, roll_of(federation, "ckks"), HOLDINGS)
    assert "a label has fewer samples than clients" in federation.reasons("refused")[0]


@pytest.mark.slow
@pytest.mark.parametrize("masking", ["prf", "ckks"])
def test_a_well_formed_ciphertext_under_a_foreign_key_never_gives_a_count(masking: str, site: Sites) -> None:
    foreign = Keys.make().counting.seal(np.ones(COUNTING.slots)).serialize()
    federation = site(HOLDINGS)
    federation.engine.tamper[2, CountReport] = lambda reply: dataclasses.replace(reply, pages=(foreign,))
    with pytest.raises(QuorumError, match=r"decrypt the totals.*another key"):
        roll_of(federation, masking)


class Claimed(UniqueList):
    """A list of two labels, with what each client claims to be on it."""

    def __init__(self, federation: Any, claims: dict[int, list[int]]) -> None:
        self.federation, self.classes, self.claims = federation, federation.config.strata, claims

    def __len__(self) -> int:
        return 2

    def sealed(self, clients: Any) -> Any:
        return dict.fromkeys(clients)

    def match(self, clients: Any) -> Any:
        return {client: np.array(self.claims[client]) for client in clients}

    def enlist(self, client: int, sealed: Any, labels: Any) -> bool:
        return True


def test_places_that_cannot_be_true_leave_their_client_out(site: Sites) -> None:
    federation = site(HOLDINGS[:3], names=["cat", "dog", "emu"])
    claimed = Claimed(federation, {0: [0, 1], 1: [1, 1], 2: [0, -1]})
    assert claimed.locate([0, 1, 2]).keys() == {0}
    same, unknown = federation.reasons("refused")
    assert "two of the client's labels match the same entry" in same
    assert "room for only 0 more" in unknown
    assert claimed.discover([1, 2])[0].keys() == {2}


@pytest.mark.slow
def test_a_client_that_claims_matches_where_there_is_nothing_is_left_out(site: Sites) -> None:
    claims = {2: lambda places: places * 0 + 3, 3: lambda places: places * 0 + 10**9, 4: lambda places: places[:0]}
    federation = site(HOLDINGS, names=["ant", "cat", "dog", "emu", "fox", "gnu", "yak"])
    for client, claim in claims.items():
        federation.engine.tamper[client, Compare] = lambda reply, claim=claim: dataclasses.replace(
            reply, places=claim(reply.places)
        )
    roll = roll_of(federation, "ckks")
    assert {0, 1} <= set(roll.held) <= {0, 1, 4}
    assert roll.totals[: len(HOLDINGS[0])].sum() == 4


@pytest.mark.slow
@pytest.mark.parametrize("masking", MODES)
def test_clients_that_join_later_keep_the_placeholders(masking: str, site: Sites) -> None:
    holdings = [*HOLDINGS, {"yak": 2, "cat": 1}, {"dog": 1}]
    federation = site(holdings)
    federation.engine.cut = dict.fromkeys((2, 5, 6), OpenKeys)
    federation.engine.gone = {2, 5, 6}
    early = roll_of(federation, masking)
    check_against(federation, early, holdings, {0, 1, 3, 4})
    before = [federation.map_of(client) for client in (0, 3, 4)]

    federation.engine.cut, federation.engine.gone, federation.engine.asked = {}, set(), []
    late = roll_of(federation, masking, before=early)

    check_against(federation, late, holdings)
    assert [federation.map_of(client) for client in (0, 3, 4)] == before
    labels = {LabelReport, TagReport, SealLabels, SealPairs}
    assert {client for client, kind in federation.engine.asked if kind in labels} == {2, 5, 6}
    with pytest.raises(ValueError, match="masking"):
        enrol(federation, "none" if masking != "none" else "prf", before=late)


def test_a_bug_in_everybody_is_raised_with_its_reason(site: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = site(HOLDINGS)
    monkeypatch.setattr(SlotLayout, "sheets_of", lambda self, labels: 1 / 0)
    with pytest.raises((ClientsFailedError, QuorumError)):
        roll_of(federation, "ckks")
    assert any("ZeroDivisionError" in reason for reason in federation.reasons("failed"))


@pytest.mark.slow
def test_a_secret_key_that_arrives_at_the_server_is_refused(site: Sites) -> None:
    federation = site(HOLDINGS)
    parts = federation.engine.engine.context.keys.make()._parts
    federation.engine.tamper[0, OpenKeys] = lambda reply: dataclasses.replace(reply, counting=parts["counting"])
    roll = roll_of(federation, "prf")
    assert "contains a secret key" in federation.reasons("refused")[0]
    check_against(federation, roll, HOLDINGS)  # the next client sent the public one
    stolen = Public(dataclasses.replace(roll.register.keys, counting=parts["counting"]))
    with pytest.raises(ReplyRefusedError):
        _ = stolen.counting


def test_the_servers_side_imports_neither_keys_nor_clients() -> None:
    package = fedstrata.stratify.masking.__name__
    folder = Path(fedstrata.stratify.masking.__file__).parent
    server = {path for path in folder.glob("*.py") if path.name not in ("client.py", "key_store.py")}
    assert len(server) > 8
    for path in server:
        assert "Opener" not in path.read_text(encoding="utf-8") or path.name == "ckks.py", path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            forbidden = ("fedstrata.clients", f"{package}.client", f"{package}.key_store")
            assert not [name for name in modules if name.startswith(forbidden)], path
