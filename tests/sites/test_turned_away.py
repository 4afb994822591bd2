"""Who is turned away is told so, where it looks, and not each time."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.config
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstrata.sites.certificates import own, renew
from fedstrata.sites.kits import LOGGING
from fedstrata.sites.start import start
from fedstrata.sites.turned_away import REFUSED, Handshake, Once, tell_handshakes

pytestmark = pytest.mark.xdist_group("kits")


@pytest.fixture
def fed(federations: Path, tmp_path: Path) -> Path:
    shutil.copytree(federations / "fed", tmp_path / "fed")
    return tmp_path / "fed"


def heartbeat() -> None:
    """As NVFlare's client does it: what it writes down is not what it was told."""
    from nvflare.apis.fl_exception import FLCommunicationError

    logger = logging.getLogger("nvflare.private.fed.client.communicator.Communicator")
    try:
        try:
            raise FLCommunicationError("error:client_quit Client 'a' is disabled")
        except FLCommunicationError as error:
            raise FLCommunicationError("error:client_quit", error)  # noqa: B904  # as it stands there
    except FLCommunicationError as error:
        logger.info(f"Failed to send heartbeat. Will try again. Exception: {error}")


def registration() -> None:
    logger = logging.getLogger("nvflare.private.fed.authenticator.Authenticator")
    logger.error("registration rejected: Client 'a' is disabled")


@pytest.mark.parametrize("said", [heartbeat, registration])
def test_a_site_that_is_turned_away_reads_it_once(
    fed: Path, tmp_path: Path, said: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Its console had three lines of its start, and no more."""
    start(fed / "a", verbose=False)
    config = json.loads((fed / "a" / LOGGING).read_text())
    names = config["loggers"].keys() - {"root"}
    before = {name: (logging.getLogger(name).level, list(logging.getLogger(name).filters)) for name in names}
    loggers = {name: each for name, each in config["loggers"].items() if name != "root"}
    try:
        logging.config.dictConfig(
            {"version": 1, "disable_existing_loggers": False, "filters": config["filters"], "loggers": loggers}
            | {"incremental": False}
        )
        logging.getLogger("nvflare.private.fed.client.communicator.Communicator").info("Received from server")
        for _ in range(3):
            said()
    finally:
        for name, (level, filters) in before.items():
            logging.getLogger(name).setLevel(level)
            logging.getLogger(name).filters = filters
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("ERROR", REFUSED)]


@pytest.mark.parametrize("whose", ["ours", "another federation's", "expired", "nobody's"])
def test_a_server_says_why_a_certificate_does_not_fit(
    fed: Path, federations: Path, whose: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handshake, "new", Once())
    path, key = own(federations / "other" / "a" if whose.startswith("another") else fed / "a")
    if whose == "expired":
        renew(fed / "authority", path, -1)
    client, server = (ssl.SSLContext(each) for each in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    if whose != "nobody's":
        client.load_cert_chain(path, key)
    server.load_cert_chain(*own(fed / "server"))
    server.load_verify_locations(fed / "server" / "startup" / "rootCA.pem")
    server.verify_mode = ssl.CERT_REQUIRED
    tell_handshakes(server)
    for _ in range(2):
        shake(server, client)
    wanted = {"ours": "", "another federation's": "issuer", "expired": "expired", "nobody's": "PEER_DID_NOT_RETURN"}
    assert wanted[whose] in caplog.text
    assert [("certificates do not fit" in each.getMessage()) for each in caplog.records] == [True] * (whose != "ours")


def answered(server: ssl.SSLContext, sent: bytes) -> None:
    """What somebody sends to a server's port and hangs up, from 127.0.0.1."""

    async def talk() -> None:
        listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=server)
        _, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(sent)
        await writer.drain()
        writer.close()
        await asyncio.sleep(0.2)
        listening.close()

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("sent", "why"),
    [(b"GET / HTTP/1.1\r\n\r\n", "HTTP_REQUEST"), (b"SSH-2.0-OpenSSH_9.6\r\n", "WRONG_VERSION_NUMBER"), (b"", "")],
)
def test_a_server_does_not_blame_certificates_for_what_is_no_tls(
    fed: Path, sent: bytes, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever looked whether the port is open was told of as if its certificates did not fit."""
    monkeypatch.setattr(Handshake, "new", Once())
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*own(fed / "server"))
    tell_handshakes(server)
    answered(server, sent)
    said = [record.getMessage() for record in caplog.records if "turned away" in record.getMessage()]
    assert said == ([f"a connection from 127.0.0.1 is turned away, its TLS handshake failed: {why}"] if why else [])


def test_who_hangs_up_in_a_handshake_is_not_told_of(
    fed: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handshake, "new", Once())
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*own(fed / "server"))
    tell_handshakes(server)
    received = ssl.MemoryBIO()
    received.write_eof()
    with pytest.raises(ssl.SSLEOFError):
        server.wrap_bio(received, ssl.MemoryBIO(), server_side=True).do_handshake()
    assert caplog.text == ""


def test_what_goes_on_is_told_again() -> None:
    """Tried each minute, it was told once and never again, and so was what went wrong elsewhere for the same reason."""
    seconds = iter(range(0, 1800, 60))
    new = Once(lambda: next(seconds))
    assert [new("a") for _ in range(30)].count(True) == 3


def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """A handshake in memory, as asyncio does it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return
