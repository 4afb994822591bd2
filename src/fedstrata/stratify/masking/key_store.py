"""The clients' keys: made by a client, shared by the clients, never seen by the server.

``KeyRing`` fills the slot ``keys`` of a client's context. Nothing on the server's side of enrolling can reach it.
Keys can be neither encoded into a message nor
written into a checkpoint, and pickling a ring carries only the name of its folder. The public halves leave it as
bytes in a ``PublicKeys`` reply.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from functools import cached_property
from pathlib import Path
from typing import Any

from fedstrata.base import records
from fedstrata.base.errors import DataError, FedstrataError, WireError
from fedstrata.clients.context import ClientContext
from fedstrata.stratify.masking.ckks import COMPARING, COUNTING, Opener, generate
from fedstrata.stratify.masking.prf import KEY_SIZE, order_seed

VARIABLE = "FEDSTRATA_KEYS"
"""Names the folder of a site's keys."""

FILE = "clients.key"
_FORMAT = 1


class Keys:
    """A set of keys.

    Args:
        parts: Their bytes, by name.

    Raises:
        DataError: Something is missing.
    """

    _NAMES = ("counting", "counting_public", "comparing", "comparing_public", "prf")

    def __init__(self, parts: dict[str, bytes]) -> None:
        if parts.keys() != set(self._NAMES) or not all(isinstance(part, bytes) for part in parts.values()):
            raise DataError(f"no set of keys: it has {sorted(parts)}, expected {sorted(self._NAMES)}")
        self._parts = parts

    @classmethod
    def make(cls) -> Keys:
        """New ones, from the operating system's randomness: the experiment's seed is no secret."""
        counting, counting_public = generate(COUNTING)
        comparing, comparing_public = generate(COMPARING)
        return cls(
            {
                "counting": counting,
                "counting_public": counting_public,
                "comparing": comparing,
                "comparing_public": comparing_public,
                "prf": secrets.token_bytes(KEY_SIZE),
            }
        )

    def __reduce__(self) -> Any:
        raise TypeError("keys do not travel")

    def __repr__(self) -> str:
        return f"Keys({self.name})"

    @cached_property
    def name(self) -> str:
        """The fingerprint, which tells nothing about the keys: of the public halves."""
        public = self.counting_public + self.comparing_public
        return hashlib.sha256(public).hexdigest()[:16]

    @property
    def counting_public(self) -> bytes:
        """What the server needs to add counts."""
        return self._parts["counting_public"]

    @property
    def comparing_public(self) -> bytes:
        """What the server needs to compare labels."""
        return self._parts["comparing_public"]

    @cached_property
    def counting(self) -> Opener:
        """The secret key for counts."""
        return Opener(self._parts["counting"], COUNTING)

    @cached_property
    def comparing(self) -> Opener:
        """The secret key for comparisons."""
        return Opener(self._parts["comparing"], COMPARING)

    @property
    def prf(self) -> bytes:
        """The key of the pseudo-random function."""
        return self._parts["prf"]

    def write(self, folder: Path) -> Path:
        """Write a file that only its owner may read.

        Raises:
            DataError: There are keys already.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Complete before it has its name: another process of the same site may look for it.
        draft = folder / f"{FILE}.{secrets.token_hex(4)}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(records.encode({"format": _FORMAT, **self._parts}))
        try:
            os.link(draft, folder / FILE)
        except FileExistsError:
            raise DataError(f"{folder / FILE} exists; keys are never written over") from None
        finally:
            draft.unlink()
        return folder / FILE

    @classmethod
    def read(cls, folder: Path) -> Keys:
        """Read what ``write`` wrote.

        Raises:
            DataError: There is no such file, others may read it, or it is damaged.
        """
        path = folder / FILE
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            data = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"no keys at {path} ({error.strerror}): make them with 'fedstrata keys --out DIR', give every client's "
                f"site a copy and set {VARIABLE}=DIR there, never at the server"
            ) from None
        if os.name == "posix" and mode & 0o077:
            raise DataError(f"{path} may be read by others (mode {mode:o}); make it 600")
        try:
            parts = records.decode(data)
        except WireError as error:
            raise DataError(f"{path} is damaged: {error}") from None
        if not isinstance(parts, dict) or parts.pop("format", None) != _FORMAT:
            raise DataError(f"{path} is no file of keys")
        return cls(parts)


class KeyRing:
    """Where the clients of one process find the keys that all clients share.

    Without a folder they live in memory, made by the first client that is asked to: a simulation in one process.
    With one they are read from the file that an operator put there.

    Args:
        folder: The folder of the key file.
        create: Whether a client that is asked to may make the file: a simulation in several processes.
    """

    def __init__(self, folder: Path | None = None, *, create: bool = False) -> None:
        self.folder, self.create = folder, create
        self._keys: Keys | None = None

    @classmethod
    def of_site(cls) -> KeyRing:
        """The ring of this machine: the folder that ``FEDSTRATA_KEYS`` names, or memory."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder).expanduser() if folder else None)

    def __reduce__(self) -> Any:
        return _ring, (self.folder, self.create)

    def __repr__(self) -> str:
        return f"KeyRing({str(self.folder) if self.folder else 'in memory'})"

    def open(self) -> Keys:
        """The keys.

        Raises:
            FedstrataError: There are none yet.
            DataError: Their file is missing or damaged.
        """
        if self._keys is None:
            if self.folder is None:
                raise FedstrataError(
                    f"this client has no keys: they were made in another process; make a file of them with "
                    f"'fedstrata keys' and set {VARIABLE}"
                )
            self._keys = Keys.read(self.folder)
        return self._keys

    def make(self) -> Keys:
        """The keys; new ones where there are none yet and this ring may make them."""
        if self._keys is None and (self.folder is None or (self.create and not (self.folder / FILE).exists())):
            self._keys = Keys.make()
            if self.folder is not None:
                self._keys.write(self.folder)
        return self.open()

    def order_seed(self, seed: int) -> int:
        """The seed of the order in which clients present their labels.

        Placeholders are numbered in that order, so a server that could guess it could tell which placeholder is the
        client's smallest class. With an operator's key file it is derived from the file's secret. In a simulation,
        which hides nothing from whoever runs it, it is the experiment's seed, so that a spec has one result.
        """
        return seed if self.folder is None or self.create else order_seed(self.open().prf, seed)


def _ring(folder: Path | None, create: bool) -> KeyRing:
    return KeyRing(folder, create=create)


def ring_of(context: ClientContext) -> KeyRing:
    """Where the clients of a process find their keys: what their context was given, or this machine's ring."""
    ring: KeyRing = context.keys if context.keys is not None else context.once(_site_ring)
    return ring


def _site_ring(_: ClientContext) -> KeyRing:
    return KeyRing.of_site()
