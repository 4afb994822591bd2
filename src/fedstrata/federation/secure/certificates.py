"""Certificates, which prove that the keys in a secure sum belong to the sites that take part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from fedstrata.base.errors import ExtraMissingError

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import NameOID
except ImportError:
    raise ExtraMissingError("secure sums", "secure") from None


@dataclass(frozen=True)
class Identity:
    """A site's name and certificate, and a function that signs with the certificate's private key.

    Args:
        name: The site's name, which is the common name of the certificate.
        certificate: The certificate, DER-encoded.
        sign: A function that signs bytes with the certificate's private key.
    """

    name: str
    certificate: bytes
    sign: Callable[[bytes], bytes]

    @classmethod
    def of(cls, certificate: x509.Certificate, key: RSAPrivateKey | Ed25519PrivateKey) -> Identity:
        """Create an identity from a certificate and its private key."""

        def sign(signed: bytes) -> bytes:
            if isinstance(key, RSAPrivateKey):
                return key.sign(signed, _PADDING, SHA256())
            return key.sign(signed)

        return cls(_common_name(certificate), certificate.public_bytes(Encoding.DER), sign)


class Trust(Protocol):
    """The rules that decide whether a certificate and a signature are accepted."""

    def defect(self, name: str, certificate: bytes, signature: bytes, signed: bytes) -> str:
        """Return the reason why a signature is not accepted; an empty string if the signature is accepted.

        Args:
            name: The name of the site that supposedly signed the message.
            certificate: The site's certificate, DER-encoded.
            signature: The signature.
            signed: The bytes that were signed.
        """


@dataclass(frozen=True)
class IssuedBy:
    """Rules that accept every certificate issued by a given root certificate.

    Args:
        root: The root certificate.
    """

    root: x509.Certificate

    def defect(self, name: str, certificate: bytes, signature: bytes, signed: bytes) -> str:
        """Return the reason why a signature is not accepted; an empty string if the signature is accepted."""
        try:
            read = x509.load_der_x509_certificate(certificate)
            common_name, key = _common_name(read), read.public_key()
        except Exception as error:  # another party sent the bytes, and the parser raises errors of many classes
            return f"its certificate cannot be read ({type(error).__name__})"
        if common_name != name:
            return "its certificate has another name"
        try:
            read.verify_directly_issued_by(self.root)
        except Exception:
            return "its certificate was not issued by the root certificate"
        if not read.not_valid_before_utc <= datetime.now(UTC) <= read.not_valid_after_utc:
            return "its certificate is not valid today"
        return "" if _signed_by(key, signature, signed) else "the signature of its certificate is wrong"


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 hash of a DER-encoded certificate, in hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()


def stranger(certificate: bytes, peers: Collection[str] | None) -> bool:
    """Return True if this site does not accept the certificate of another site.

    Args:
        certificate: The certificate, DER-encoded.
        peers: The fingerprints of the accepted certificates; None to accept all.
    """
    return peers is not None and fingerprint(certificate) not in peers


_PADDING = PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH)


def _signed_by(key: Any, signature: bytes, signed: bytes) -> bool:
    try:
        if isinstance(key, RSAPublicKey):
            key.verify(signature, signed, _PADDING, SHA256())
        elif isinstance(key, Ed25519PublicKey):
            key.verify(signature, signed)
        else:
            return False
    except InvalidSignature:
        return False
    return True


def _common_name(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
