"""The messages of secure sums, and the statements that sites sign.

The protocol is by Bonawitz et al. (2017): the variant that resists an active server, with masks for all pairs of sites.
Sites create keys and shares for several exchanges in advance. ``Site`` and ``Server`` are the two state machines.

A *roster* is a set of n sites with a threshold t. Each site has two seeds per exchange. The *self seed* gives a mask
that the site adds to its vector. The *pair seed* gives a private key, from which the site derives one mask for each
other site. Each pair of sites has a common mask, which one site adds and the other site subtracts. The sites hold
shares of both seeds of each site, and any t shares determine a seed. To open (unmask) the sum over a set U of sites,
the server needs the self seeds of the sites in U. The server also needs the pair seeds of the sites outside U, because
their vectors are missing.

====================  ==========================================  =====================================================
message to a site     reply                                       checks of the site before it replies
====================  ==========================================  =====================================================
(none)                ``Package``
``Roster``            ``Deal``                                    own package fresh; signatures; peers; distinct keys;
                                                                  threshold
``Begin``             ``MaskedVector``                            boxes; the members R' of the sums; exchange unused;
                                                                  request not answered before
``RevealAll``         ``Shares`` of the self seeds of R'          "in" signed by all members; enough samples; not voted
``Propose``           ``Vote``                                    as before, for U ⊆ R' with t sites or more
``RevealSet``         ``Shares``: self seeds of U, pair seeds of  t votes for the U that the site voted for
                      R' without U
``Opened``            (none)                                      the site did not vote for another set
====================  ==========================================  =====================================================

Security
--------

Let m sites collude with an active server, and let 2t > n + m and m ≤ t − 2. Then, per exchange, **the secrets of at
most one set are revealed, the two seeds of an honest site are never both revealed, and each unmasked sum contains the
vectors of at least t − m honest sites.** The proof needs three checks by honest sites:

1. A site votes once per exchange: it answers ``RevealAll``, or it signs one set U.

2. A site reveals shares for U only after t different members of R' have signed U.

3. Each signature depends on its *context*: the job, the roster, R', the exchange and the request.

*At most one set is signed t times.* At least t − m honest sites sign such a set. Two sets would need 2(t − m) votes.
The n − m honest sites have fewer than 2(t − m) votes.

*Suppose that a set U is signed t times.* Then at most (n − m) − (t − m) = n − t honest sites have not signed U. Honest
sites that answered ``RevealAll`` have revealed shares of self seeds. Consider an honest site outside U. With the
colluders' shares, the server has at most n − t + m < t shares of this site's self seed, so the seed stays secret. Only
colluders reveal shares of the pair seed of a site in U, so the server has only m < t shares. Hence the server never
learns both seeds of an honest site. The masks of pairs of honest sites in U cancel only in the sum over all honest
sites in U. An honest site signs only sets that contain the site itself, so U contains at least t − m honest sites.

*Suppose that no set is signed t times.* Then only colluders reveal shares of pair seeds. The masks cancel only in the
sum over all honest sites of R'. R' has at least t members, so at least t − m of the members are honest.

Unlike in the paper, ``RevealAll`` therefore needs no round of signatures. A site's answer to ``RevealAll`` is its vote,
and the few sites that vote differently cannot reach the threshold. The server may also send different contexts to
different sites. Honest sites with different contexts do not accept each other's signatures. Each signed set and each
revealed R' therefore needs t − m honest votes in a single context, so the proof above remains valid.

The proof needs a threshold t with 2t > n + m. If a server could choose t close to n / 2, the protocol would not
tolerate even one colluder. Sites therefore refuse a roster with a threshold below ``default_threshold``.

If a request *continues* the previous request, both sums contain the vectors of the same sites. A site then votes only
for the set for which it voted before, and hashes the request with this set (``continued``). Therefore, all honest sites
of this set have already voted for this set. The previous sum cannot have been unmasked for another set.

The protocol has limits. If a request does not continue the previous request, the server can unmask sums over two sets
that differ by only one site. A site that sends a wrong vector can corrupt the sum without being detected. The server
can always stop a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import Tensor

from fedstrata.base.errors import WithheldError
from fedstrata.base.records import Message, record
from fedstrata.federation.secure import primitives
from fedstrata.federation.secure.primitives import KEY_BYTES, agree, derive, digest, statement, valid
from fedstrata.federation.secure.ring import Words

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

MOST_SITES = 64
MOST_EXCHANGES = 64
FEWEST = 3
"""The minimum number of sites in a sum.

With two sites, each site could compute the other site's vector from the sum.
"""

Confirm = Literal["needed", "always"]
"""When sites must sign the set of contributors before they reveal shares: if a site is missing (``needed``), or
``always``."""
Seed = Literal["self", "pair"]


def default_threshold(sites: int, colluding: int = 0) -> int:
    """Return the threshold t of a roster: the minimum number of sites that are needed to unmask a sum.

    Args:
        sites: Number n of sites.
        colluding: Number m of sites that may collude with the server. The threshold is chosen so that 2t > n + m.

    >>> [default_threshold(n) for n in (3, 4, 5, 10, 20)], default_threshold(5, colluding=3)
    ([3, 3, 4, 7, 14], 5)
    """
    return max(2 * sites // 3, (sites + colluding) // 2) + 1


class RefusedError(WithheldError):
    """The error that a site raises if a message from the server fails a check.

    Args:
        check: The name of the check that failed.
        problem: The problem: the text after the colon in the error message.
    """

    def __init__(self, check: str, problem: str) -> None:
        self.check, self.problem = check, problem
        super().__init__(f"the site refused a message of a secure sum: {problem}.")

    def __reduce__(self) -> tuple[type[RefusedError], tuple[str, str]]:
        return RefusedError, (self.check, self.problem)


@record("secure/Package")
class Package(Message):
    """A site's public keys for one roster (group of sites). The sites of a roster compute one secure sum per exchange.

    Args:
        name: The site's name.
        certificate: The site's certificate, DER-encoded.
        job_key: The Ed25519 key with which the site signs in this job.
        credential: The signature of ``job_key``, made with the certificate's key.
        box_key: The X25519 key with which other sites encrypt messages (boxes) for this site in this job.
        keys: For each exchange, the site's public X25519 key.
        self_commitments: For each exchange, the hash of the site's secret self seed.
        pair_commitments: For each exchange, the hash of the site's secret pair seed.
        signature: The signature of all keys and hashes, made with ``job_key``.
    """

    name: str
    certificate: bytes
    job_key: bytes
    credential: bytes
    box_key: bytes
    keys: bytes
    self_commitments: bytes
    pair_commitments: bytes
    signature: bytes

    def signed(self, job: bytes) -> bytes:
        """Return the bytes that the site signs with ``job_key`` to compute ``signature``."""
        public = self.box_key, self.keys, self.self_commitments, self.pair_commitments
        return statement("package", job, self.name, *public)

    def hash(self, job: bytes) -> bytes:
        """Return the hash of the whole package: all keys, the certificate and the signed hashes."""
        return digest("whole package", self.signed(job), self.certificate, self.job_key)

    @property
    def exchanges(self) -> int:
        """Number of exchanges for which the package has keys."""
        return len(self.keys) // KEY_BYTES

    def key(self, exchange: int) -> bytes:
        """Return the site's public X25519 key for an exchange (counted from 0)."""
        return _entry(self.keys, exchange)

    def commitment(self, kind: Seed, exchange: int) -> bytes:
        """Return the published hash of the site's self seed or pair seed for an exchange."""
        return _entry(self.self_commitments if kind == "self" else self.pair_commitments, exchange)

    def form_defect(self) -> str:
        """Return the reason why the keys are invalid; an empty string if they are valid. Signatures are not checked."""
        lengths = {len(self.keys), len(self.self_commitments), len(self.pair_commitments)}
        if len(lengths) > 1 or len(self.keys) % KEY_BYTES or not 1 <= self.exchanges <= MOST_EXCHANGES:
            return "its package has a wrong number of keys or hashes"
        if len(self.job_key) != KEY_BYTES:
            return "its job key has a wrong length"
        if not all(map(primitives.agreeable, [self.box_key, *map(self.key, range(self.exchanges))])):
            return "one of its keys is weak"
        return ""

    def signature_defect(self, job: bytes) -> str:
        """Return the reason why the package's signature is wrong; an empty string if the signature is correct."""
        return "" if valid(self.job_key, self.signature, self.signed(job)) else "the signature of its package is wrong"


@record("secure/Roster")
class Roster(Message):
    """The group of sites that takes part in several secure sums.

    Args:
        packages: The message ``Package`` of each site, sorted by the sites' names.
        threshold: Number t of sites that are needed to unmask a sum.
    """

    packages: list[Package]
    threshold: int

    @property
    def names(self) -> list[str]:
        """The names of the sites."""
        return [package.name for package in self.packages]

    def hash(self, job: bytes) -> bytes:
        """Return the roster's hash. All later signatures and keys depend on this hash."""
        return digest("roster", job, self.threshold, [package.hash(job) for package in self.packages])


def repeated(packages: Sequence[Package]) -> set[str]:
    """Return the sites that use a key or a seed twice, or have the same name, key or seed as another site."""
    owners: dict[bytes, str] = {}
    names: set[str] = set()
    for package in packages:
        entries = [package.name.encode("utf-8", "surrogatepass"), package.job_key, package.box_key]
        for many in (package.keys, package.self_commitments, package.pair_commitments):
            entries += [many[begin : begin + KEY_BYTES] for begin in range(0, len(many), KEY_BYTES)]
        for entry in entries:
            if entry in owners:
                names |= {owners[entry], package.name}
            owners[entry] = package.name
    return names


@record("secure/Deal")
class Deal(Message):
    """The message in which a site sends shares of its seeds to the other sites.

    Args:
        boxes: A mapping from each other site to its box: encrypted shares of this site's seeds for all exchanges.
    """

    boxes: dict[str, bytes]


@record("secure/Delivery")
class Delivery(Message):
    """The sites of a roster that take part in the sums, and the boxes (encrypted shares) that they sent to one site.

    Args:
        members: The sites that have sent shares (R'), in ascending order.
        boxes: A mapping from each of the other members to the encrypted shares that it sent to this site.
    """

    members: list[str]
    boxes: dict[str, bytes]


@record("secure/Begin")
class Begin(Message):
    """The message that begins an exchange. A site receives this message together with the request.

    Args:
        roster: The hash of the roster.
        exchange: The index of the exchange in the roster, counted from 0.
        delivery: The members and boxes if this is the site's first exchange in the roster; otherwise None.
    """

    roster: bytes
    exchange: int
    delivery: Delivery | None


@record("secure/In")
class In(Message):
    """A site's signed statement that it has sent its masked vector.

    Args:
        enough: Whether at least ``privacy.min_samples`` samples contribute to the vector.
        signature: The signature, made with the site's job key.
    """

    enough: bool
    signature: bytes


@record("secure/Vector")
class MaskedVector(Message):
    """A site's masked vector.

    Args:
        vector: The vector modulo 2³², stored in an int32 tensor.
        present: The site's signed statement that it has sent the vector.
    """

    vector: Tensor
    present: In


@record("secure/RevealAll")
class RevealAll(Message):
    """A request for shares, sent after all members have sent their vectors.

    Args:
        exchange: The index of the exchange.
        present: The signed statement (``In``) of each member.
    """

    exchange: int
    present: dict[str, In]


@record("secure/Propose")
class Propose(Message):
    """A request to vote for a set of members over which the sum is taken.

    Args:
        exchange: The index of the exchange.
        present: The signed statements (``In``) of the sites in the set U.
    """

    exchange: int
    present: dict[str, In]


@record("secure/Vote")
class Vote(Message):
    """A site's vote for the set of sites whose vectors are added up.

    Args:
        signature: The signature, made with the site's job key.
    """

    signature: bytes


@record("secure/RevealSet")
class RevealSet(Message):
    """A request for shares, sent after t sites have voted for the same set of sites.

    Args:
        exchange: The index of the exchange.
        votes: A mapping from each voter (site) to the signature of its vote.
    """

    exchange: int
    votes: dict[str, bytes]


@record("secure/Shares")
class Shares(Message):
    """The shares that a site reveals: shares of other sites' seeds and of its own seeds.

    Args:
        selfs: A mapping from sites to the shares of their self seeds.
        pairs: A mapping from sites to the shares of their pair seeds. No site is in both mappings.
    """

    selfs: dict[str, bytes]
    pairs: dict[str, bytes]


@record("secure/Opened")
class Opened(Message):
    """An announcement: the server has unmasked the sum over a set of sites.

    Args:
        exchange: The index of the exchange.
        members: The sites of the set U, in ascending order.
    """

    exchange: int
    members: list[str]


def continued(question: bytes, members: Sequence[str]) -> bytes:
    """Return the hash of a request for a sum over the same sites (``members``) as the previous sum."""
    return digest("continued", question, members)


def context(job: bytes, roster: bytes, members: Sequence[str], exchange: int, question: bytes) -> bytes:
    """Return the hash of an exchange's context. All signatures and masks of the exchange depend on this hash.

    Args:
        job: The job's hash.
        roster: The roster's hash.
        members: The sites of the roster that take part in its sums (R').
        exchange: The index of the exchange.
        question: The hash of the request and of its model, as the site decoded them.
    """
    return digest("exchange", job, roster, members, exchange, question)


def present_statement(context: bytes, name: str, enough: bool) -> bytes:
    """Return the bytes that a site signs when it sends its masked vector."""
    return statement("in", context, name, int(enough))


def vote_statement(context: bytes, members: Sequence[str]) -> bytes:
    """Return the bytes that a site signs when it votes for the set of sites whose vectors are added up."""
    return statement("vote", context, members)


def job_key_statement(job: bytes, name: str, job_key: bytes) -> bytes:
    """Return the bytes that a site signs once per job with its certificate's key."""
    return statement("job key", job, name, job_key)


def commitment(job: bytes, name: str, kind: Seed, exchange: int, seed: bytes) -> bytes:
    """Return the hash of a seed. The seed's owner publishes the hash before any site sends a vector."""
    return digest("seed", job, name, kind, exchange, seed)


def exchange_key(job: bytes, name: str, exchange: int, pair_seed: bytes) -> X25519PrivateKey:
    """Return a site's private key for an exchange, derived from the site's pair seed."""
    key = derive(pair_seed, b"", statement("exchange key", job, name, exchange))
    return primitives.agreement_key(key)


def self_mask(context: bytes, name: str, self_seed: bytes, length: int) -> Words:
    """Return the mask that a site derives from its self seed, shape (``length``,)."""
    return primitives.mask(derive(self_seed, context, statement("self mask", name)), length)


def pair_mask(context: bytes, key: X25519PrivateKey, owner: str, other: Package, exchange: int, length: int) -> Words:
    """Return a site's mask for another site, shape (``length``,).

    The site adds this mask, and the other site subtracts it. The private key of either site is enough to compute the
    mask.

    Args:
        context: The exchange's context.
        key: The private key of one of the two sites for the exchange.
        owner: The name of this site.
        other: The package of the other site.
        exchange: The index of the exchange.
        length: Number of elements.
    """
    names = sorted((owner, other.name))
    secret = agree(key, other.key(exchange))
    words = primitives.mask(derive(secret, context, statement("pair mask", names)), length)
    return words if owner == names[0] else np.negative(words)


def _entry(many: bytes, place: int) -> bytes:
    return many[place * KEY_BYTES : (place + 1) * KEY_BYTES]
