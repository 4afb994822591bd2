"""Who is turned away is told so, once, where it looks."""

from __future__ import annotations

import json
import logging
import logging.config
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstrata.deploy.certificates import own, renew
from fedstrata.deploy.kits import LOGGING
from fedstrata.deploy.start import start
from fedstrata.deploy.turned_away import REFUSED, Handshake, Once, tell_handshakes

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
    assert len(caplog.records) == int(whose != "ours")


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
