"""Sites that make their own private keys: the maker of the kits gets only requests for certificates."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID
from waiting import free_port

import fedstrata as fs
from fedstrata.base.errors import SpecError
from fedstrata.cli import main
from fedstrata.sites.certificates import KEY, key_pair, read, renew, request_certificate, requested_keys
from fedstrata.sites.check import check
from fedstrata.sites.start import start

SITES = ("a", "b")


def problems(kit: Path) -> list[str]:
    return [each.text for each in check(kit, server=False, data=False) if each.state == "problem"]


@pytest.mark.slow
def test_the_private_key_of_a_site_never_leaves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nvflare")
    (tmp_path / "requests").mkdir()
    for name in SITES:
        assert main(["request", name, "--out", str(tmp_path / name)]) == 0
        shutil.copy(tmp_path / name / f"{name}.csr", tmp_path / "requests")
    own = {"name": "own.npz", "shape": [4], "classes": 2}
    made = fs.Experiment.from_table({"data": own, "partition": "natural", "evaluation": {"client_test": 0.2}})
    (tmp_path / "spec.toml").write_text(made.to_toml())
    sites = f"own_data = true\nserver.port = {free_port()}\nsite.a = {{}}\nsite.b = {{}}\n"
    (tmp_path / "sites.toml").write_text(sites)
    names = {"--sites": "sites.toml", "--requests": "requests", "--out": "kits"}
    words = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    assert main(["deploy", str(tmp_path / "spec.toml"), *words]) == 0
    with_key = {path.relative_to(tmp_path / "kits").parts[0] for path in (tmp_path / "kits").rglob("*.key")}
    assert with_key == {"server", "admin"}

    kit = tmp_path / "kits" / "a"
    certificate, key = key_pair(kit)
    assert (
        f"Copy the private key that you made with your request (`{KEY}`) to `startup/`."
        in (kit / "README.md").read_text()
    )
    assert problems(kit)[0].startswith(
        "certificates: client.key is missing. If you made the key with 'fedstrata request'"
    )
    assert start(kit, verbose=False) == 1
    shutil.copy(tmp_path / "b" / KEY, key)
    assert "certificates: client.key does not belong to client.crt" in problems(kit)[0]
    shutil.copy(tmp_path / "a" / KEY, key)
    assert problems(kit) == []
    assert start(kit, verbose=False) == 0

    before = read(certificate)
    renew(tmp_path / "kits" / "authority", certificate, 700)
    assert problems(kit) == []
    for one in (before, read(certificate)):
        identifier = one.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        assert identifier == x509.SubjectKeyIdentifier.from_public_key(one.public_key())  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_request_has_no_secret_and_a_key_is_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "request"
    assert main(["request", "a", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"request": str(out / "a.csr"), "key": str(out / KEY)}
    assert (stat.S_IMODE(out.stat().st_mode), stat.S_IMODE((out / KEY).stat().st_mode)) == (0o700, 0o600)
    assert "PRIVATE" not in (out / "a.csr").read_text()
    key = (out / KEY).read_bytes()
    private = load_pem_private_key(key, None)
    assert requested_keys(out, ["a"])["a"] == private.public_key()
    assert main(["request", "a", "--out", str(out)]) == 2
    assert "already contains client.key, and private keys are never overwritten" in capsys.readouterr().err
    assert (out / KEY).read_bytes() == key
    assert main(["request", "../a", "--out", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()


def request_of(name: str, key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return x509.CertificateSigningRequestBuilder(subject).sign(key, SHA256()).public_bytes(Encoding.DER)


def damaged(request: bytes) -> bytes:
    """Change the last byte, which is part of the signature."""
    return request[:-1] + bytes([request[-1] ^ 1])


WRONG = {
    "of another site": lambda: request_of("b", rsa.generate_private_key(65537, 2048)),
    "of a short key": lambda: request_of("a", rsa.generate_private_key(65537, 1024)),
    "of an elliptic curve": lambda: request_of("a", ec.generate_private_key(ec.SECP256R1())),
    "with a wrong signature": lambda: damaged(request_of("a", rsa.generate_private_key(65537, 2048))),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_is_refused(what: str, tmp_path: Path) -> None:
    request = x509.load_der_x509_csr(WRONG[what]())
    (tmp_path / "a.csr").write_bytes(request.public_bytes(Encoding.PEM))
    with pytest.raises(
        SpecError, match=r"a\.csr must be a valid request of site a, with an RSA key of 2048 bits or more"
    ):
        requested_keys(tmp_path, ["a"])


@pytest.mark.slow
def test_every_site_must_send_a_request(tmp_path: Path) -> None:
    request_certificate("a", tmp_path)
    with pytest.raises(SpecError, match=r"--requests = .*: b\.csr cannot be read: No such file.*Ask site b"):
        requested_keys(tmp_path, SITES)
    (tmp_path / "b.csr").write_text("text")
    with pytest.raises(SpecError, match=r"b\.csr cannot be read"):
        requested_keys(tmp_path, SITES)


def test_a_trial_needs_all_private_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sites.toml").write_text("site.a = {}\n")
    (tmp_path / "spec.toml").write_text(fs.Experiment().to_toml())
    words = [
        "--sites",
        str(tmp_path / "sites.toml"),
        "--requests",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--try",
    ]
    assert main(["deploy", str(tmp_path / "spec.toml"), *words]) == 2
    assert "cannot be combined with --try, which needs all private keys" in capsys.readouterr().err
