"""Store the secret keys that all clients share. One client makes the keys, and the server never sees them.

A client gets the keys from ``ClientContext.keys``, which the server cannot access. Keys cannot be encoded in messages
or checkpoints. A pickled key ring contains only the path of its folder. Clients send only the public keys, in a
``PublicKeys`` reply.
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
from fedstrata.clients.client import ClientContext
from fedstrata.stratify.masking.ckks import COMPARING, COUNTING, Opener, generate
from fedstrata.stratify.masking.prf import KEY_SIZE, order_seed

VARIABLE = "FEDSTRATA_KEYS"
"""The environment variable with the path of the folder that contains a site's keys."""

FILE = "clients.key"
_FORMAT = 1


class Keys:
    """The secret and public keys that the clients of a federation share.

    Args:
        parts: A mapping from each key's name to the key's bytes. The names are in ``_NAMES``.

    Raises:
        DataError: A key is missing or unknown.
    """

    _NAMES = ("counting", "counting_public", "comparing", "comparing_public", "prf")

    def __init__(self, parts: dict[str, bytes]) -> None:
        if parts.keys() != set(self._NAMES) or not all(isinstance(part, bytes) for part in parts.values()):
            raise DataError(
                f"the key file has the fields {sorted(parts)}, but must have the fields {sorted(self._NAMES)}"
            )
        self._parts = parts
        self.counting_public, self.comparing_public = parts["counting_public"], parts["comparing_public"]
        """The public keys: the server uses the first key to add counts, and the second to compare labels."""
        self.prf = parts["prf"]
        """The key of the pseudo-random function that hashes labels."""

    @classmethod
    def make(cls) -> Keys:
        """Make new keys from the operating system's randomness, because the experiment's seed is not secret."""
        parts = (*generate(COUNTING), *generate(COMPARING), secrets.token_bytes(KEY_SIZE))
        return cls(dict(zip(cls._NAMES, parts, strict=True)))

    def __reduce__(self) -> Any:
        raise TypeError("secret keys cannot be pickled, because they must not leave this process")

    def __repr__(self) -> str:
        return f"Keys({self.name})"

    @cached_property
    def name(self) -> str:
        """The fingerprint of the public keys."""
        return hashlib.sha256(self.counting_public + self.comparing_public).hexdigest()[:16]

    @cached_property
    def counting(self) -> Opener:
        """The secret key that decrypts counts."""
        return Opener(self._parts["counting"], COUNTING)

    @cached_property
    def comparing(self) -> Opener:
        """The secret key that decrypts comparisons of labels."""
        return Opener(self._parts["comparing"], COMPARING)

    def write(self, folder: Path) -> Path:
        """Write the keys to a file in ``folder``, readable only by the owner of the file, and return its path.

        Raises:
            DataError: The folder already contains a key file.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Write the file under another name first, so that other processes of the site never read an incomplete file.
        draft = folder / f"{FILE}.{secrets.token_hex(4)}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(records.encode({"format": _FORMAT, **self._parts}))
        try:
            os.link(draft, folder / FILE)
        except FileExistsError:
            raise DataError(
                f"out = {str(folder)!r}: already contains {FILE}, and keys are never overwritten. Use another folder."
            ) from None
        finally:
            draft.unlink()
        return folder / FILE

    @classmethod
    def read(cls, folder: Path) -> Keys:
        """Read the keys that ``write`` wrote to a folder.

        Raises:
            DataError: The file does not exist, is damaged, or can be read by other users.
        """
        path = folder / FILE
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            data = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"the key file {path} cannot be read ({error.strerror}). Create keys with 'fedstrata keys --out DIR', "
                f"and copy them to the site of every client. Set {VARIABLE}=DIR at the sites, but never on the server."
            ) from None
        if os.name == "posix" and mode & 0o077:
            raise DataError(f"{path} can be read by other users (mode {mode:o}). Change the file's mode to 600.")
        try:
            parts = records.decode(data)
        except WireError as error:
            raise DataError(f"{path} is damaged: {error}. Restore the file.") from None
        if not isinstance(parts, dict) or parts.pop("format", None) != _FORMAT:
            raise DataError(f"{path} is not a key file. Create a key file with 'fedstrata keys'.")
        return cls(parts)


class KeyRing:
    """Provides the shared keys to all clients in one process.

    The keys come from one of three places:

    - In simulations in one process, the keys are in memory (``folder`` is None). The keys are made when the server
      first requests the public keys.

    - In simulations in several processes, the first client whose public keys are requested writes the key file
      (``folder`` is set, ``create`` is True).

    - In deployments, an operator puts the key file into the folder before the run (``folder`` is set, and ``create`` is
      False).

    Args:
        folder: The folder of the key file; None to keep the keys in memory.
        create: Whether a client may create the key file when the server requests the public keys.
    """

    def __init__(self, folder: Path | None = None, create: bool = False) -> None:
        self.folder, self.create = folder, create
        self._keys: Keys | None = None

    @classmethod
    def of_site(cls) -> KeyRing:
        """Return the key ring of this machine, with the folder from ``FEDSTRATA_KEYS``.

        Without this environment variable, the keys are in memory.
        """
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder).expanduser() if folder else None)

    def __reduce__(self) -> Any:
        return KeyRing, (self.folder, self.create)

    def __repr__(self) -> str:
        return f"KeyRing({str(self.folder) if self.folder else 'in memory'})"

    def open(self) -> Keys:
        """Return the keys.

        Raises:
            FedstrataError: The keys do not exist yet.
            DataError: The key file is missing or damaged.
        """
        if self._keys is None:
            if self.folder is None:
                raise FedstrataError(
                    "the client does not have the keys, because another process created them. Create key files with "
                    f"'fedstrata keys', and set {VARIABLE}."
                )
            self._keys = Keys.read(self.folder)
        return self._keys

    def make(self) -> Keys:
        """Return the keys. If the keys do not exist yet and this key ring may make keys, make new keys."""
        if self._keys is None and (self.folder is None or (self.create and not (self.folder / FILE).exists())):
            self._keys = Keys.make()
            if self.folder is not None:
                self._keys.write(self.folder)
        return self.open()

    def order_seed(self, seed: int) -> int:
        """Return the seed of the random order in which clients report their labels.

        A server that guesses this order knows the label of each placeholder (a number that stands for a label). In a
        deployment, the seed is therefore derived from a secret in the key file. In a simulation, the function returns
        the experiment's seed, so that a spec always gives the same result.

        Args:
            seed: The experiment's seed.
        """
        return seed if self.folder is None or self.create else order_seed(self.open().prf, seed)


def ring_of(context: ClientContext) -> KeyRing:
    """Return the key ring of a client's context. If the context has no key ring, return this machine's key ring."""
    ring: KeyRing = context.keys if context.keys is not None else context.cached(_site_ring)
    return ring


def _site_ring(_: ClientContext) -> KeyRing:
    return KeyRing.of_site()
