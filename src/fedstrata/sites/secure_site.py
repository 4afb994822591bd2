"""Take part in secure sums as a site with a certificate, a ledger and a list of the requests that it has answered."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import load_pem_private_key
from filelock import FileLock

from fedstrata.base.errors import DataError, SpecError, WireError
from fedstrata.base.locking import LOCK
from fedstrata.clients.client import StateStore
from fedstrata.federation.engine import FederationConfig
from fedstrata.federation.secure.certificates import Identity, IssuedBy, Trust
from fedstrata.federation.secure.member import KeyIsCertificate, Member
from fedstrata.federation.secure.primitives import KEY_BYTES, digest, public_key, signing_key
from fedstrata.federation.secure.protocol import (
    Begin,
    MaskedVector,
    Opened,
    Propose,
    RefusedError,
    RevealAll,
    RevealSet,
    Roster,
)
from fedstrata.federation.secure.requests import Masked, SiteStep
from fedstrata.federation.secure.ring import Words
from fedstrata.federation.secure.site import Site
from fedstrata.sites import wire
from fedstrata.sites.certificates import ASK, ROOT, key_pair, read
from fedstrata.sites.policy import Policy

ANSWERED = ".answered"
"""The folder with one file per job, in a site's folder. Each file contains the hashes of the answered requests."""


@dataclass(frozen=True)
class Credentials:
    """A site's certificate, and the certificates that the site accepts.

    Args:
        identity: The site's certificate.
        trust: The site's rules for accepting the certificates of other sites.
    """

    identity: Identity
    trust: Trust

    @classmethod
    def of_kit(cls, kit: Path) -> Credentials:
        """Read the certificate, its private key and the root certificate from a site's folder.

        Raises:
            DataError: A file cannot be read.
            FedstrataError: The folder has no certificate.
        """
        path, key_path = key_pair(kit)
        try:
            key: Any = load_pem_private_key(key_path.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{key_path}: cannot be read as a private key: {error}. {ASK}") from None
        return cls(Identity.of(read(path), key), trust_of(kit))

    @classmethod
    def of_rehearsal(cls, name: str) -> Credentials:
        """Return credentials without a certificate, for a rehearsal in one process."""
        key = signing_key()
        return cls(Identity(name, public_key(key), key.sign), KeyIsCertificate())


def trust_of(kit: Path) -> Trust:
    """Return rules that accept all certificates issued by the root certificate in a party's folder.

    Raises:
        DataError: The root certificate cannot be read.
        FedstrataError: The folder has no certificate.
    """
    return IssuedBy(read(key_pair(kit)[0].with_name(ROOT)))


def job_of(spec: str) -> bytes:
    """Return the job's hash, on which all keys and signatures of a run depend.

    Args:
        spec: The experiment as TOML.
    """
    return digest("site job", spec)


class Answered:
    """A file with the hashes of the requests that a site has answered in a job.

    Args:
        path: The file.
        most: The maximum number of requests that the site answers; None for any number.
    """

    def __init__(self, path: Path, most: int | None = None) -> None:
        self._path, self._most = path, most
        self._lock = FileLock(path.with_name(LOCK))

    def read(self) -> set[bytes]:
        """Return all hashes in the file. Ignore an incomplete hash that a crash left at the end."""
        data = self._path.read_bytes() if self._path.exists() else b""
        return {data[end - KEY_BYTES : end] for end in range(KEY_BYTES, len(data) + 1, KEY_BYTES)}

    def add(self, question: bytes) -> None:
        """Write a request's hash to the disk, before the reply leaves the site.

        Raises:
            RefusedError: The site has already answered this request, perhaps in another process, or has answered the
                maximum number of requests.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            known = self.read()
            if question in known:
                raise RefusedError("question", "this request was answered before")
            if self._most is not None and len(known) >= self._most:
                raise RefusedError(
                    "participations", f"the site has already sent {self._most} replies, the maximum per job"
                )
            with open(self._path, "ab", opener=partial(os.open, mode=0o600)) as file:
                file.truncate(file.tell() // KEY_BYTES * KEY_BYTES)  # removes an incomplete hash at the end
                file.write(question)
                file.flush()
                os.fsync(file.fileno())


class KeptSite(Site):
    """A site that stores the hash of each request on disk, before it answers the request.

    Args:
        answered_file: The file of the requests that the site has answered in this job.
        job: See ``Site``.
        credentials: The site's certificate, and the accepted certificates.
        settings: Further arguments of ``Site``.
    """

    def __init__(self, answered_file: Answered, job: bytes, credentials: Credentials, **settings: Any) -> None:
        super().__init__(job, credentials.identity, credentials.trust, answered=answered_file.read(), **settings)
        self._answered_file = answered_file

    def mask(
        self, begin: Begin, question: bytes, vector: Words, enough: bool, *, continues: bool = False
    ) -> MaskedVector:
        """Store the hash of the server's request on disk, and then return this site's masked vector.

        Raises:
            RefusedError: A check failed.
            OSError: The hash cannot be written.
        """
        masked = super().mask(begin, question, vector, enough, continues=continues)
        self._answered_file.add(question)
        return masked


def member_of(
    begin: wire.Begin, path: Path, credentials: Credentials, policy: Policy | None, config: FederationConfig
) -> Member:
    """Create new keys, and return the object that represents a site in the secure sums of a run.

    Args:
        begin: The server's first message.
        path: The file of the requests that the site has answered in this job.
        credentials: The site's certificate, and the accepted certificates.
        policy: The site's policy; None if the site has no policy.
        config: The settings that server and clients share.

    Raises:
        SpecError: The site has several clients.
    """
    require_own_sites(["this site"] * len(begin.clients))
    policy, privacy, most = policy or Policy(), config.privacy, None
    # Limit the number of noisy answers, because each answer spends ε, even if the server begins the job again.
    if privacy.clients is not None:
        most = privacy.clients.participations or config.training.rounds
    parties = max(privacy.parties, policy.parties)
    site = KeptSite(Answered(path, most), job_of(begin.spec), credentials, parties=parties, peers=policy.peers)
    site.colluding = privacy.colluding
    return Member(site)


def require_own_sites(site_of_client: Sequence[str]) -> None:
    """Check that each site has only one client, because sites are the parties of a secure sum.

    Args:
        site_of_client: The name of each client's site.

    Raises:
        SpecError: A site has several clients.
    """
    if len(set(site_of_client)) < len(site_of_client):
        problem = "a secure sum needs sites with one client each. "
        problem += "Use one client per site, or set privacy.sums = 'plain'."
        raise SpecError("privacy.sums", problem, "secure")


def learn(member: Member, ack: object, store: StateStore, client: int) -> bool:
    """Process the server's message that a sum was unmasked. The server may send this message several times.

    Args:
        member: The object that represents this site in secure sums.
        ack: The acknowledgement.
        store: The states of the site's clients.
        client: The site's client.

    Returns:
        True if the site received this message for the first time; otherwise False.

    Raises:
        WireError: The acknowledgement has an unexpected class.
    """
    if not isinstance(ack, Opened):
        raise WireError(f"the message is a {type(ack).__name__}, not an acknowledgement")
    try:
        counts = member.site.opened(ack)
    except RefusedError:
        return False
    if counts and member.pending is not None:
        store.put(client, member.pending)
    member.pending = None
    return True


def about(message: object, member: Member) -> dict[str, Any]:
    """Return the fields of a ledger entry that describe a message of a secure sum; empty for other messages.

    Args:
        message: The request that the site answered, or the message about an unmasked sum.
        member: The object that represents this site in secure sums.
    """
    if isinstance(message, Masked) and isinstance(message.begin, Begin):
        return {"exchange": message.begin.exchange, "roster": message.begin.roster.hex()}
    step = message.message if isinstance(message, SiteStep) else message
    fields = {"kind": "Package" if step is None else type(step).__name__}
    if isinstance(step, Roster):
        return fields | {"roster": step.hash(member.site.job).hex(), "members": step.names}
    if isinstance(step, RevealAll | Propose):
        return fields | {"exchange": step.exchange, "members": sorted(step.present)}
    if isinstance(step, Opened):
        return fields | {"exchange": step.exchange, "members": step.members}
    if isinstance(step, RevealSet):
        return fields | {"exchange": step.exchange}
    return fields if isinstance(message, SiteStep) else {}
