"""A site's side of secure sums: its secrets, its checks of the server's messages, and its votes."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedstrata.base.errors import SpecError
from fedstrata.federation.secure import protocol, shamir
from fedstrata.federation.secure.certificates import Identity, Trust, stranger
from fedstrata.federation.secure.primitives import (
    SEED_BYTES,
    agree,
    agreement_key,
    derive,
    public_key,
    seal,
    signing_key,
    statement,
    unseal,
    valid,
)
from fedstrata.federation.secure.protocol import (
    Begin,
    Confirm,
    Deal,
    Delivery,
    In,
    MaskedVector,
    Opened,
    Package,
    Propose,
    RefusedError,
    RevealAll,
    RevealSet,
    Roster,
    Seed,
    Shares,
    Vote,
)
from fedstrata.federation.secure.ring import Words

SEEDS: tuple[Seed, Seed] = "self", "pair"


@dataclass
class _Own:
    """The public keys of this site for one roster (its ``Package``), and the secret seeds of each exchange."""

    package: Package
    seeds: list[dict[Seed, bytes]]
    dealt: bool = False


@dataclass
class _Joined:
    """A roster (group of sites) to which this site has sent shares of its secret seeds.

    For each exchange, ``shares`` maps the kind and the owner of a seed to this site's share of the seed.
    """

    roster: Roster
    hash: bytes
    own: _Own
    shares: list[dict[tuple[Seed, str], bytes]]
    members: list[str] | None = None
    last: int = -1

    def package(self, name: str) -> Package:
        return self.roster.packages[self.roster.names.index(name)]

    def forget(self, before: int) -> None:
        """Delete the seeds and shares of all earlier exchanges."""
        for exchange in range(before):
            self.shares[exchange].clear()
            self.own.seeds[exchange].clear()


@dataclass
class _Exchange:
    """The exchange in which this site has sent its latest vector."""

    number: int
    context: bytes
    members: list[str]
    voted: list[str] | None = None
    signed: bool = False
    only: list[str] | None = None


class Site:
    """A site that takes part in the secure sums of one job, with its state and its secrets.

    A site that restarts gets new secrets, and joins the next roster. Only ``answered`` must survive a restart. Without
    these hashes, a server could repeat a request to all sites but one, and the difference of the two sums would be the
    vector of this one site.

    Each method checks and answers one message, which may contain any values. If a check fails, the method raises
    ``RefusedError``, and the state does not change.

    Args:
        job: The hash of the job, which includes the spec.
        identity: The site's certificate.
        trust: The certificates that the site accepts.
        parties: Minimum number of sites with enough samples in a sum; at least 3.
        peers: The fingerprints of the other sites' certificates; None to accept every certificate in ``trust``.
        confirm: With "always", the site reveals shares only after t sites have signed the set of contributors. With
            "needed", the site does not wait for signatures if all sites have sent their vectors; this is equally safe.
        exchanges: Number of exchanges for which the site makes keys in advance.
        answered: The hashes of the requests that the site had answered in this job before its restart.
    """

    colluding = 0
    """Number of other sites that may collude with the server. It determines the minimum threshold."""

    def __init__(
        self,
        job: bytes,
        identity: Identity,
        trust: Trust,
        *,
        parties: int = protocol.FEWEST,
        peers: Collection[str] | None = None,
        confirm: Confirm = "needed",
        exchanges: int = protocol.MOST_EXCHANGES,
        answered: Iterable[bytes] = (),
    ) -> None:
        if parties < protocol.FEWEST:
            problem = "because with two sites, each site could compute the other site's vector. Use a larger number."
            raise SpecError("parties", f"must be at least {protocol.FEWEST}, {problem}", parties)
        self.job, self.identity, self.trust = job, identity, trust
        self.parties, self.peers, self.confirm, self.exchanges = parties, peers, confirm, exchanges
        self._job_key, self._box_key = signing_key(), agreement_key()
        signed = protocol.job_key_statement(job, identity.name, public_key(self._job_key))
        self._credential = identity.sign(signed)
        self._own: _Own | None = None
        self._joined: _Joined | None = None
        self._current: _Exchange | None = None
        self._last_vote: list[str] | None = None
        self.answered = set(answered)
        """The hashes of the requests that the site has answered. Save these hashes before a masked vector leaves the
        site."""

    @property
    def name(self) -> str:
        """The name of this site in the roster."""
        return self.identity.name

    def package(self) -> Package:
        """Return new public keys for the next roster. Keys from earlier calls are no longer accepted."""
        seeds: list[dict[Seed, bytes]] = [
            {kind: secrets.token_bytes(SEED_BYTES) for kind in SEEDS} for _ in range(self.exchanges)
        ]

        def commitments(kind: Seed) -> bytes:
            numbered = enumerate(seeds)
            return b"".join(protocol.commitment(self.job, self.name, kind, e, seed[kind]) for e, seed in numbered)

        keys = [protocol.exchange_key(self.job, self.name, e, seed["pair"]) for e, seed in enumerate(seeds)]
        package = Package(
            self.name,
            self.identity.certificate,
            public_key(self._job_key),
            self._credential,
            public_key(self._box_key),
            b"".join(map(public_key, keys)),
            commitments("self"),
            commitments("pair"),
            b"",
        )
        package = replace(package, signature=self._job_key.sign(package.signed(self.job)))
        self._own = _Own(package, seeds)
        return package

    def deal(self, roster: Roster) -> Deal:
        """Join a roster, leave the previous roster, and return shares of this site's seeds for the other sites.

        Raises:
            RefusedError: A check failed.
        """
        own, sites, threshold = self._own, len(roster.packages), roster.threshold
        if own is None:
            raise RefusedError("package", "the site received a roster (list of sites) before it had created its keys")
        self._require("package", not own.dealt, "the site's keys were already used in a roster")
        self._require("package", own.package in roster.packages, "the roster does not contain the site's newest keys")
        self._require("order", roster.names == sorted(roster.names), "the roster is not sorted by site names")
        least = protocol.default_threshold(sites, self.colluding)
        self._require("threshold", sites >= protocol.FEWEST, f"the roster has fewer than {protocol.FEWEST} sites")
        self._require("threshold", sites <= protocol.MOST_SITES, f"the roster has over {protocol.MOST_SITES} sites")
        self._require("threshold", threshold >= least, f"the threshold is {threshold}, but must be at least {least}")
        self._require("threshold", threshold <= sites, f"the threshold is {threshold}, but there are {sites} sites")
        self._require("repeated", not protocol.repeated(roster.packages), "a name or a key occurs twice in the roster")
        for package in roster.packages:
            if package != own.package:
                self._check_package(package, own.package.exchanges)
        roster_hash, contents = roster.hash(self.job), _shares_of(own.seeds, threshold, sites)
        boxes = {
            other.name: seal(*self._box(roster_hash, other, content, sends=True))
            for other, content in zip(roster.packages, contents, strict=True)
            if other.name != self.name
        }
        own.dealt = True
        joined = _Joined(roster, roster_hash, own, [{} for _ in own.seeds])
        _add_shares(joined.shares, self.name, contents[roster.names.index(self.name)])
        self._joined, self._current = joined, None
        return Deal(boxes)

    def mask(
        self, begin: Begin, question: bytes, vector: Words, enough: bool, *, continues: bool = False
    ) -> MaskedVector:
        """Return this site's masked vector. The site never masks a second vector for a request.

        Call this method only after the site's guard has accepted the request.

        Args:
            begin: The message of the server.
            question: The hash of the request, including the model that this site obtained by decoding.
            vector: The site's vector, shape (d,).
            enough: Whether at least ``privacy.min_samples`` samples contribute to the vector.
            continues: Whether the sum must have the same contributors as the site's previous sum.

        Raises:
            RefusedError: A check failed.
        """
        joined, number = self._joined, begin.exchange
        if joined is None or begin.roster != joined.hash:
            raise RefusedError("roster", "the roster is unknown or is not the newest")
        received: list[dict[tuple[Seed, str], bytes]] = [{} for _ in joined.shares]
        members = joined.members
        if begin.delivery is not None:
            fixed = members is None or begin.delivery.members == members
            self._require("members", fixed, "the members of a roster cannot change")
            members = begin.delivery.members
            self._check_members(joined, members)
            if joined.members is None:
                received = self._opened_boxes(joined, begin.delivery)
        if members is None:
            raise RefusedError("members", "the members of the roster are not known")
        if not 0 <= number < len(joined.shares):
            raise RefusedError("exchange", f"the site does not have keys for secure sum {number}")
        self._require("exchange", number > joined.last, f"the keys of secure sum {number} were used before")
        self._require("question", question not in self.answered, "this request was answered before")
        only = self._last_vote if continues else None
        self._require("continued", not continues or only is not None, "the site has not voted in the previous sum")
        context = self._context(members, number, question if only is None else protocol.continued(question, only))
        masked = vector + protocol.self_mask(context, self.name, joined.own.seeds[number]["self"], len(vector))
        key = protocol.exchange_key(self.job, self.name, number, joined.own.seeds[number]["pair"])
        for other in members:
            if other != self.name:
                package = joined.package(other)
                masked += protocol.pair_mask(context, key, self.name, package, number, len(vector))
        joined.forget(number)
        for kept, new in zip(joined.shares[number:], received[number:], strict=True):
            kept.update(new)
        joined.members, joined.last = members, number
        self.answered.add(question)
        self._current, self._last_vote = _Exchange(number, context, members, only=only), None
        signature = self._job_key.sign(protocol.present_statement(context, self.name, enough))
        return MaskedVector(torch.from_numpy(masked.view(np.int32)), In(enough, signature))

    def reveal_all(self, message: RevealAll) -> Shares:
        """Vote for the set of all members, and return the shares that unmask the sum over this set.

        Raises:
            RefusedError: A check failed.
        """
        current, joined = self._exchange(message.exchange)
        self._require("confirm", self.confirm != "always", "the site reveals shares only for a signed set of sites")
        self._require("vote", current.voted is None, "the site has already voted in this exchange")
        self._require("all", sorted(message.present) == current.members, "not all members have sent their vectors")
        self._check_present(current, joined, message.present)
        current.voted = self._last_vote = current.members
        return Shares({name: joined.shares[current.number]["self", name] for name in current.members}, {})

    def propose(self, message: Propose) -> Vote:
        """Vote for the sum over some members.

        Raises:
            RefusedError: A check failed.
        """
        current, joined = self._exchange(message.exchange)
        chosen = sorted(message.present)
        self._require("vote", current.voted is None, "the site has already voted in this exchange")
        self._require("subset", set(chosen) <= set(current.members), "a site in the proposed set is not a member")
        self._require("subset", self.name in chosen, "the proposed set does not contain this site")
        self._require("size", len(chosen) >= joined.roster.threshold, "the proposed set has too few sites")
        self._check_present(current, joined, message.present)
        current.voted, self._last_vote, current.signed = chosen, chosen, True
        return Vote(self._job_key.sign(protocol.vote_statement(current.context, chosen)))

    def reveal_set(self, message: RevealSet) -> Shares:
        """Return the shares that unmask the sum for which this site and at least t − 1 other sites have voted.

        Raises:
            RefusedError: A check failed.
        """
        current, joined = self._exchange(message.exchange)
        if current.voted is None or not current.signed:
            raise RefusedError("votes", "the server asked for key shares before the site signed the set of sites")
        signed = protocol.vote_statement(current.context, current.voted)
        votes = {
            name
            for name, signature in message.votes.items()
            if name in current.voted and valid(joined.package(name).job_key, signature, signed)
        }
        self._require("votes", len(votes) >= joined.roster.threshold, "too few sites have voted for the same set")
        shares, chosen = joined.shares[current.number], set(current.voted)
        return Shares(
            {name: shares["self", name] for name in current.members if name in chosen},
            {name: shares["pair", name] for name in current.members if name not in chosen},
        )

    def opened(self, message: Opened) -> bool:
        """Delete the secrets of an exchange after the server has unmasked its sum.

        Returns:
            True if the server says that the sum contains this site's vector. In this case, the caller must store the
            new state that was computed together with this vector.

        Raises:
            RefusedError: The site has voted for another set, or the exchange is not the site's latest exchange.
        """
        current, joined = self._exchange(message.exchange)
        members = sorted(message.members)
        self._require("opened", current.voted in (None, members), "the site has voted for another set")
        joined.forget(current.number + 1)
        self._current = None
        return self.name in members

    def _require(self, check: str, holds: bool, problem: str) -> None:
        if not holds:
            raise RefusedError(check, problem)

    def _exchange(self, number: int) -> tuple[_Exchange, _Joined]:
        if self._current is None or self._joined is None or self._current.number != number:
            raise RefusedError("exchange", f"the site's latest vector does not belong to secure sum {number}")
        return self._current, self._joined

    def _context(self, members: list[str], number: int, question: bytes) -> bytes:
        assert self._joined is not None
        return protocol.context(self.job, self._joined.hash, members, number, question)

    def _check_package(self, package: Package, exchanges: int) -> None:
        who = f"the package of {package.name!r} is wrong: "
        if defect := package.form_defect():
            raise RefusedError("form", who + defect)
        problem = f"{who}it has keys for {package.exchanges} exchanges, not {exchanges}"
        self._require("form", package.exchanges == exchanges, problem)
        defect = package.signature_defect(self.job)
        self._require("signature", not defect, who + defect)
        signed = protocol.job_key_statement(self.job, package.name, package.job_key)
        defect = self.trust.defect(package.name, package.certificate, package.credential, signed)
        self._require("certificate", not defect, who + defect)
        unknown = stranger(package.certificate, self.peers)
        self._require("peers", not unknown, f"{who}its certificate is not on the list policy.peers")

    def _check_members(self, joined: _Joined, members: list[str]) -> None:
        ordered = members == sorted(set(members).intersection(joined.roster.names))
        self._require("members", ordered, "the members are not sites of the roster in the order of their names")
        self._require("members", self.name in members, "the members do not contain this site")
        self._require("members", len(members) >= joined.roster.threshold, "there are too few members")

    def _opened_boxes(self, joined: _Joined, delivery: Delivery) -> list[dict[tuple[Seed, str], bytes]]:
        shares: list[dict[tuple[Seed, str], bytes]] = [{} for _ in joined.shares]
        for name in delivery.members:
            if name != self.name:
                box = delivery.boxes.get(name)
                if box is None:
                    raise RefusedError("box", f"the encrypted shares from {name!r} are missing")
                content = unseal(*self._box(joined.hash, joined.package(name), box, sends=False))
                right = content is not None and _add_shares(shares, name, content)
                self._require("box", right, f"the encrypted shares from {name!r} cannot be decrypted, or are invalid")
        return shares

    def _box(self, roster: bytes, other: Package, content: bytes, *, sends: bool) -> tuple[bytes, bytes, bytes]:
        """Return the key, the content and the public bytes of a box to or from another site."""
        names = (self.name, other.name) if sends else (other.name, self.name)
        public = statement("box", roster, *names)
        return derive(agree(self._box_key, other.box_key), roster, public), content, public

    def _check_present(self, current: _Exchange, joined: _Joined, present: Mapping[str, In]) -> None:
        same = current.only in (None, sorted(present))
        self._require("continued", same, "the sum does not have the same contributors as the previous sum")
        for name, each in present.items():
            signed = protocol.present_statement(current.context, name, each.enough)
            right = name in current.members and valid(joined.package(name).job_key, each.signature, signed)
            self._require("in", right, f"{name!r} has not signed that it sent its vector in this exchange")
        enough = sum(each.enough for each in present.values())
        self._require("parties", enough >= self.parties, f"fewer than {self.parties} sites have enough samples")


def _shares_of(seeds: Sequence[Mapping[Seed, bytes]], threshold: int, sites: int) -> list[bytes]:
    """Return each site's shares of the seeds of all exchanges, in the order of the roster."""
    contents = [bytearray() for _ in range(sites)]
    for of_exchange in seeds:
        for kind in SEEDS:
            shares = shamir.split(int.from_bytes(of_exchange[kind]), threshold, sites)
            for content, share in zip(contents, shares, strict=True):
                content += share.to_bytes(shamir.SHARE_BYTES)
    return [bytes(content) for content in contents]


def _add_shares(shares: list[dict[tuple[Seed, str], bytes]], owner: str, content: bytes) -> bool:
    """Add the shares of one owner's seeds to the shares of each exchange.

    Args:
        shares: The shares of each exchange, to which the owner's shares are added.
        owner: The owner of the seeds.
        content: The content of a box: the shares of all exchanges.

    Returns:
        False if the content is invalid, so that nothing was added.
    """
    size = shamir.SHARE_BYTES
    if len(content) != len(shares) * len(SEEDS) * size:
        return False
    each = [content[begin : begin + size] for begin in range(0, len(content), size)]
    if any(int.from_bytes(share) >= shamir.PRIME for share in each):
        return False
    for number, held in enumerate(shares):
        held.update({(kind, owner): each[len(SEEDS) * number + place] for place, kind in enumerate(SEEDS)})
    return True
