"""The signed manifest of a result: versions, hashes of the spec and all files, and fingerprints of the sites' data."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
from pathlib import Path
from typing import Any

from fedstrata.base.errors import DataError
from fedstrata.base.jsonl import replace_file, write_json
from fedstrata.runs.run_folder import RUN, SPEC, WEIGHTS
from fedstrata.sites.certificates import ROOT, key_pair, read
from fedstrata.sites.settings import USER

LOG = logging.getLogger(__name__)
AGAIN = "Ask the administrator to send the folder again."

MANIFEST, SIGNATURE, CERTIFICATE = "manifest.json", "manifest.sig", "manifest.crt"
"""Files in an administrator's copy of a run folder: the manifest, its signature, and the signer's certificate."""

FINGERPRINTS = "fingerprints.json"
"""The file in the server's run folder that maps each site to the fingerprint of its data."""

SECRET = "fingerprint.key"
"""The file with the secret key of a site's fingerprints. Without this key, nobody can compare guesses about the data
with a fingerprint."""


def fingerprint(data: Path | None, folder: Path) -> str:
    """Return a keyed hash (HMAC) of a site's data file. If ``data`` is None, return an empty string.

    Args:
        data: The site's data file.
        folder: The folder that contains the key. The key is created if it does not exist.
    """
    if data is None:
        return ""
    path = folder / SECRET
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, secrets.token_bytes(32), mode=0o600)
    return hmac.new(path.read_bytes(), data.read_bytes(), hashlib.sha256).hexdigest()


def sign(run: Path, kit: Path) -> Path:
    """Write the manifest of a run folder, sign it with the administrator's key, and return the manifest's path.

    Args:
        run: The run folder.
        kit: The administrator's folder.
    """
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import padding

    certificate, key = key_pair(kit)
    signer: Any = serialization.load_pem_private_key(key.read_bytes(), None)
    fingerprints = run / FINGERPRINTS
    table = {
        "spec": _sha256(run / SPEC),
        "sites": json.loads(fingerprints.read_text(encoding="utf-8")) if fingerprints.exists() else {},
        "versions": json.loads((run / RUN).read_text(encoding="utf-8")).get("made_with", {}),
        "result": {name: _sha256(run / name) for name in _files(run)},
    }
    path = run / MANIFEST
    write_json(path, table)
    replace_file(run / SIGNATURE, signer.sign(path.read_bytes(), padding.PKCS1v15(), hashes.SHA256()))
    replace_file(run / CERTIFICATE, certificate.read_bytes())
    return path


def verify(run: Path, kit: Path) -> dict[str, Any]:
    """Check the signature of a run folder's manifest and the hashes of all files, and return the manifest.

    Only the administrator's signature is accepted; a site's signature is rejected. If a file (such as a report) is not
    in the manifest, a message is logged.

    Args:
        run: The run folder.
        kit: The folder of the server, a site or the administrator, which contains the federation's root certificate.

    Raises:
        DataError: The administrator did not sign the manifest, or a file is missing or was changed.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding
    from cryptography.x509.oid import NameOID

    certificate, root = read(run / CERTIFICATE), read(kit / "startup" / ROOT)
    try:
        certificate.verify_directly_issued_by(root)
        key: Any = certificate.public_key()
        data = (run / MANIFEST).read_bytes()
        key.verify((run / SIGNATURE).read_bytes(), data, padding.PKCS1v15(), hashes.SHA256())
    except Exception as error:
        raise DataError(
            f"{run / MANIFEST} does not have a valid signature of this federation ({type(error).__name__}). {AGAIN}"
        ) from None
    names = [str(each.value) for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [USER]:
        signer = ", ".join(names) or "nobody"
        raise DataError(
            f"{run / MANIFEST} is signed by {signer}, but must be signed by the administrator, {USER}. {AGAIN}"
        )
    table: dict[str, Any] = json.loads(data)
    signed = {SPEC: table["spec"], **table["result"]}
    if WEIGHTS not in signed:
        raise DataError(f"{run / MANIFEST} does not list {WEIGHTS}. {AGAIN}")
    files = _files(run)
    wrong = [
        f"{name} ({'changed' if name in files else 'missing'})"
        for name, wanted in sorted(signed.items())
        if name not in files or _sha256(run / name) != wanted
    ]
    if wrong:
        raise DataError(
            f"{run} was changed after the administrator signed it: {', '.join(wrong)}. Restore these files."
        )
    for name in files:
        if name not in signed:
            LOG.warning("%s is not signed", run / name)
    return table


def _files(run: Path) -> list[str]:
    """Return the relative paths of a run folder's files, except the manifest, its signature and the certificate."""
    names = (path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(set(names) - {MANIFEST, SIGNATURE, CERTIFICATE})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
