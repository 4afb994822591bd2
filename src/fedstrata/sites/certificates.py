"""Request, check and renew the certificates of a party: the server, a site or the administrator of a federation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.base.errors import DataError, FedstrataError, SpecError
from fedstrata.base.jsonl import replace_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.x509 import Certificate, CertificateSigningRequest

ROOT_DAYS = 3650
"""The number of days for which a root certificate is valid. A root certificate must outlast the certificates that it
signs."""

WARNED = timedelta(days=30)
"""If a certificate expires in less than this time, its owner gets a warning."""

ASK = "Ask the administrator of the federation for a new kit."
ROOT = "rootCA.pem"

KEY = "client.key"
"""The file of a site's private key."""

KEY_BITS = 2048
"""The number of bits of the RSA keys that NVFlare creates. A site may use a longer key."""


def key_pair(kit: Path) -> tuple[Path, Path]:
    """Return the paths of the certificate and the private key of a party (the server, a site or the administrator).

    Args:
        kit: The party's folder.

    Raises:
        FedstrataError: The folder does not contain a certificate.
    """
    for name in ("server", "client"):
        path = kit / "startup" / f"{name}.crt"
        if path.exists():
            return path, path.with_suffix(".key")
    raise FedstrataError(
        f"folder = {str(kit)!r}: startup/ does not contain a certificate. Give the folder of a party that 'fedstrata "
        "deploy' created."
    )


def faults(kit: Path, now: datetime | None = None) -> Iterator[tuple[bool, str]]:
    """Yield the problems with the certificates of a party (the server, a site or the administrator).

    Each problem is a pair: a boolean (True if the problem prevents the party from taking part), and a description.

    Args:
        kit: The party's folder.
        now: The time at which the certificates must be valid. Default: the current time.
    """
    now = now or datetime.now(UTC)
    path, key = key_pair(kit)
    try:
        certificate, root = read(path), read(path.with_name(ROOT))
    except DataError as error:
        yield True, str(error)
        return
    try:
        certificate.verify_directly_issued_by(root)
    except Exception:
        yield True, f"{path.name} does not belong to this federation, because it was not signed with {ROOT}. {ASK}"
    if (settings := path.with_name("fed_client.json")).exists():
        name = json.loads(settings.read_text(encoding="utf-8"))["client"]["fqsn"]
        if (other := _common_name(certificate)) != name:
            yield True, f"{path.name} is the certificate of {other!r}, but this folder belongs to {name!r}. {ASK}"
    if not key.exists():
        remedy = "If you made the key with 'fedstrata request', copy it to startup/. Otherwise, ask the "
        yield True, f"{key.name} is missing. {remedy}administrator of the federation for a new kit."
    elif not _fits(certificate, key):
        yield True, f"{key.name} does not belong to {path.name}. {ASK}"
    for one, name in ((certificate, path.name), (root, ROOT)):
        begin, end = one.not_valid_before_utc, one.not_valid_after_utc
        if now < begin:
            text = f"valid only from {begin:%d %B %Y %H:%M} UTC, but the time here is {now:%d %B %Y %H:%M}"
            yield True, f"{name} is {text}. Check this machine's clock."
        elif now > end:
            yield True, f"{name} has been invalid since {end:%d %B %Y}. Ask for a new certificate (fedstrata renew)."
        elif now > end - WARNED:
            days = f"{end:%d %B %Y}, in {(end - now).days} days"
            yield False, f"{name} expires on {days}. Ask for a new certificate (fedstrata renew)."


def read(path: Path, remedy: str = ASK) -> Certificate:
    """Read a certificate in PEM format.

    Args:
        path: The file.
        remedy: A sentence for the error message: what to do if the file cannot be read.

    Raises:
        DataError: The file cannot be read, or is not a certificate.
    """
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read as a certificate: {problem}. {remedy}") from None


def fingerprint(kit: Path) -> str:
    """Return the SHA-256 hash of a party's certificate. Other sites enter this hash as ``peers`` in their policies.

    Args:
        kit: The party's folder.

    Raises:
        DataError: The certificate cannot be read.
    """
    from cryptography.hazmat.primitives.hashes import SHA256

    return read(key_pair(kit)[0]).fingerprint(SHA256()).hex()


def federation_of(kit: Path) -> str:
    """Return a short hash of the root certificate in a party's folder. Each federation has a different hash."""
    return hashlib.sha256((kit / "startup" / ROOT).read_bytes()).hexdigest()[:16]


def request_certificate(name: str, folder: Path) -> Path:
    """Create a private key and a certificate request for a site. The request contains only the public key.

    Args:
        name: The name of the site.
        folder: The folder for the private key (``client.key``) and the request (``NAME.csr``).

    Returns:
        The file of the request.

    Raises:
        SpecError: The folder already contains a private key. Private keys are never overwritten.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    if (folder / KEY).exists():
        problem = f"already contains {KEY}, and private keys are never overwritten. Give another folder."
        raise SpecError("--out", problem, str(folder))
    key = rsa.generate_private_key(65537, KEY_BITS)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder(subject).sign(key, SHA256())
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    replace_file(folder / KEY, private, mode=0o600)
    path = folder / f"{name}.csr"
    replace_file(path, request.public_bytes(Encoding.PEM))
    return path


def requested_keys(folder: Path, names: Iterable[str]) -> dict[str, RSAPublicKey]:
    """Read the certificate requests of all sites, and return the public key of each site.

    Args:
        folder: The folder with a file ``NAME.csr`` for each site.
        names: The names of the sites.

    Raises:
        SpecError: A request is missing, damaged or from another site, or the key in a request is not an RSA key with
            at least ``KEY_BITS`` bits.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    keys = {}
    for name in names:
        path = folder / f"{name}.csr"
        try:
            request = x509.load_pem_x509_csr(path.read_bytes())
            key, valid, other = request.public_key(), request.is_signature_valid, _common_name(request)
        except (OSError, ValueError, LookupError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = f"{path.name} cannot be read: {reason}. Ask site {name} for this file ('fedstrata request')."
            raise SpecError("--requests", problem, str(folder)) from None
        if other != name or not valid or not isinstance(key, RSAPublicKey) or key.key_size < KEY_BITS:
            problem = f"{path.name} must be a valid request of site {name}, with an RSA key of {KEY_BITS} bits or more."
            raise SpecError("--requests", f"{problem} Ask the site for a new request.", str(folder))
        keys[name] = key
    return keys


def renew(authority: Path, path: Path, days: int, key: RSAPublicKey | None = None) -> datetime:
    """Replace a certificate with a new certificate that has the same name, but expires later.

    Args:
        authority: The folder with the root certificate and its private key.
        path: The file of the old certificate, which is replaced. The owner's private key is not needed.
        days: Days for which the new certificate is valid.
        key: The public key of the new certificate. Default: the public key of the old certificate.

    Returns:
        The time at which the new certificate expires. The new certificate expires no later than the root certificate.

    Raises:
        DataError: The folder or the old certificate cannot be read.
        FedstrataError: The root certificate in ``authority`` did not sign the old certificate.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    old = read(path, "Give the file of a certificate, such as client.crt.")
    public_key: Any = old.public_key() if key is None else key
    try:
        state = json.loads((authority / "cert.json").read_text(encoding="utf-8"))
        root = x509.load_pem_x509_certificate(state["root_cert"].encode())
        root_key: Any = serialization.load_pem_private_key(state["root_pri_key"].encode(), None)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{authority}: does not contain the private key of a root certificate ({error}). Give the folder "
            "'authority' that 'fedstrata deploy' created."
        ) from None
    try:
        old.verify_directly_issued_by(root)
    except Exception:
        raise FedstrataError(
            f"the certificate {path} was not signed by the root certificate in {authority}, so it belongs to another "
            "federation."
        ) from None
    now = datetime.now(UTC)
    end = min(now + timedelta(days=days), root.not_valid_after_utc)
    # Begin an hour early, so that the certificate is already valid on a machine whose clock is slow.
    begin = min(now, end) - timedelta(hours=1)
    new = x509.CertificateBuilder(old.issuer, old.subject, public_key, x509.random_serial_number(), begin, end)
    for extension in old.extensions:
        value = extension.value
        if isinstance(value, x509.SubjectKeyIdentifier):
            value = x509.SubjectKeyIdentifier.from_public_key(public_key)
        new = new.add_extension(value, extension.critical)
    replace_file(path, new.sign(root_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    path.chmod(0o600)
    return end


def _common_name(certificate: Certificate | CertificateSigningRequest) -> str:
    from cryptography.x509.oid import NameOID

    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _fits(certificate: Certificate, path: Path) -> bool:
    from cryptography.hazmat.primitives import serialization

    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        return False
    return key.public_key().public_bytes(*form) == certificate.public_key().public_bytes(*form)
