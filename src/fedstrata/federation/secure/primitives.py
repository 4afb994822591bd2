"""Create keys, signatures, boxes (encrypted messages) and masks for secure sums, with the library ``cryptography``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from fedstrata.base.errors import ExtraMissingError
from fedstrata.federation.secure.ring import Words

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    raise ExtraMissingError("secure sums", "secure") from None

KEY_BYTES = 32
"""Length of keys and hashes in bytes."""
SEED_BYTES = 16

_VERSION = "fedstrata secure sums 1"
_PROBE = X25519PrivateKey.from_private_bytes(b"\1" * KEY_BYTES)

Part = bytes | str | int | Sequence["Part"]


def statement(use: str, *parts: Part) -> bytes:
    """Encode a purpose and several values unambiguously as bytes, for signatures, hashes and derived keys.

    Args:
        use: What the bytes are used for. Statements for different purposes never have the same bytes.
        parts: Strings, bytes, integers, and sequences of strings, bytes and integers.

    >>> statement("vote", "a", "bc") != statement("vote", "ab", "c")
    True
    """
    return _flat([_VERSION, use, *parts])


def _flat(part: Part) -> bytes:
    if isinstance(part, str):
        # The text may be a name that another party chose, and may contain characters that UTF-8 cannot encode.
        kind, content = b"s", part.encode("utf-8", "surrogatepass")
    elif isinstance(part, bytes):
        kind, content = b"b", part
    elif isinstance(part, int):
        kind, content = b"i", str(part).encode()
    else:
        kind, content = b"l", b"".join(map(_flat, part))
    return b"%b%d:%b" % (kind, len(content), content)


def digest(use: str, *parts: Part) -> bytes:
    """Return the SHA-256 hash of a ``statement`` with this purpose and these values."""
    return hashlib.sha256(statement(use, *parts)).digest()


def derive(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """Return a key of 32 bytes, derived from a secret by HKDF with SHA-256.

    Args:
        secret: Random secret bytes, such as a seed or the shared secret of a key agreement.
        salt: Public bytes, such as a roster's hash.
        info: A statement that contains the purpose of the key.
    """
    return HKDF(SHA256(), KEY_BYTES, salt, info).derive(secret)


def public_key(key: Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    """Return the public key that belongs to a private key, as 32 bytes."""
    return key.public_key().public_bytes_raw()


def valid(key: bytes, signature: bytes, signed: bytes) -> bool:
    """Return True if a signature by an Ed25519 key is valid.

    Args:
        key: The public key.
        signature: The signature.
        signed: The bytes that were signed.
    """
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, signed)
    except (InvalidSignature, ValueError):
        return False
    return True


def signing_key() -> Ed25519PrivateKey:
    """Return a new private key for signatures."""
    return Ed25519PrivateKey.generate()


def agreement_key(secret: bytes | None = None) -> X25519PrivateKey:
    """Return a private key with which a site can agree on a secret with another site.

    Args:
        secret: The 32 bytes from which the key is computed. Default: random bytes from the operating system.
    """
    return X25519PrivateKey.generate() if secret is None else X25519PrivateKey.from_private_bytes(secret)


def agree(own: X25519PrivateKey, other: bytes) -> bytes:
    """Return the secret that only the owners of two X25519 keys can compute.

    Raises:
        ValueError: The other site's public key is invalid, or has a small order, so that the secret would be zero.
    """
    return own.exchange(X25519PublicKey.from_public_bytes(other))


def agreeable(key: bytes) -> bool:
    """Return True if a public X25519 key can be used. For a key of small order, every agreed secret would be zero."""
    try:
        agree(_PROBE, key)
    except ValueError:
        return False
    return True


def seal(key: bytes, content: bytes, public: bytes) -> bytes:
    """Encrypt content with a key that is used only for this content.

    Args:
        key: The key.
        content: The content.
        public: Bytes that are authenticated but not sent, because the receiver already has them.
    """
    return ChaCha20Poly1305(key).encrypt(bytes(12), content, public)


def unseal(key: bytes, box: bytes, public: bytes) -> bytes | None:
    """Decrypt a box. Return None if the box was changed, or if the key or the public bytes are wrong."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), box, public)
    except (InvalidTag, ValueError):
        return None


def mask(key: bytes, length: int) -> Words:
    """Return a pseudo-random vector of shape (``length``,), which is the key stream of ChaCha20.

    Args:
        key: A key that is used for one mask only.
        length: Number of elements.
    """
    stream = bytearray(4 * length)
    # Each key is used for one mask only, so the nonce may be constant. Encrypting zeros in place gives the key stream.
    Cipher(ChaCha20(key, bytes(16)), None).encryptor().update_into(stream, stream)
    return np.frombuffer(stream, dtype="<u4").astype(np.uint32, copy=False)
