"""What a party finds out before it starts; certificates that end, are renewed, or are no good any more."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fedstrata as fs
from fedstrata.base.errors import DataError, FedstrataError, SpecError
from fedstrata.cli import main
from fedstrata.sites.certificates import ROOT, ROOT_DAYS, faults, federation_of, key_pair, read, renew
from fedstrata.sites.check import check
from fedstrata.sites.ledger import PLACE
from fedstrata.sites.members import members, revoke
from fedstrata.sites.policy import Policy
from fedstrata.sites.privacy_budget import PrivacyBudget
from fedstrata.sites.start import start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kits")]
GOOD = "age,ill\n" + "".join(f"{20 + n},{'yes' if n % 2 else 'no'}\n" for n in range(40))


@pytest.fixture
def made(federations: Path, tmp_path: Path) -> Path:
    shutil.copytree(federations, tmp_path / "made")
    return tmp_path / "made"


@pytest.fixture
def fed(federations: Path, tmp_path: Path) -> Path:
    shutil.copytree(federations / "fed", tmp_path / "fed")
    (tmp_path / "fed" / "a" / "local" / "fedstrata.toml").write_text('data = "own.csv"\n')
    (tmp_path / "fed" / "a" / "own.csv").write_text(GOOD)
    return tmp_path / "fed"


def problems(kit: Path, **options: bool) -> str:
    return " | ".join(each.text for each in check(kit, **options) if each.state == "problem")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOD, ""),
        (GOOD.replace("age", "years"), "'age': .* has no such column. Use one of: years, ill"),
        (GOOD + "900,no\n", "line 42, column 'age' = '900'"),
        (GOOD + "30,perhaps\n", "perhaps"),
        ("age,ill\n30,no\n", "1 training samples|training samples"),
    ],
)
def test_a_file_is_looked_at_before_anything_starts(fed: Path, text: str, problem: str) -> None:
    (fed / "a" / "own.csv").write_text(text)
    found = problems(fed / "a", server=False)
    assert re.search(problem, found) if problem else found == "", found


def test_code_that_a_kits_spec_names_is_imported_from_what_the_kit_allows(
    fed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, spec = fed / "a", fed / "a" / "local" / "spec.toml"
    (tmp_path / "brought.py").write_text("from pathlib import Path\nPath('ran').write_text('')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    spec.write_text(spec.read_text().replace('"mlp"', '"brought:net"'))
    assert "The party's list 'allow' is empty" in problems(kit, server=False)
    assert not Path("ran").exists()
    (kit / "local" / "fedstrata.toml").write_text('data = "own.csv"\nallow = ["brought"]\n')
    assert "brought" in problems(kit, server=False)
    assert Path("ran").exists()


def test_what_is_wrong_with_settings_is_said(fed: Path) -> None:
    (fed / "a" / "local" / "fedstrata.toml").write_text('date = "own.csv"\n')
    assert "fedstrata.toml, line 1): is not a known key" in problems(fed / "a", server=False, data=False)
    (fed / "a" / "local" / "fedstrata.toml").write_text('data = "gone.csv"\nkeys = "none"\n')
    found = problems(fed / "a", server=False)
    assert "the folder does not exist" in found
    assert "gone.csv" in found


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('min_samples = "many"', "min_samples = 'many' .*policy.toml, line 1.*integer"),
        ("samples = 5", "samples = 5 .*: is not a known key.*min_samples.*"),
        ("min_samples =", "policy = .*policy.toml.*is not valid TOML"),
    ],
)
def test_a_slip_in_the_policy_is_found_before_a_job_begins(
    fed: Path, line: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was found when one began, and ended it for everybody."""
    (fed / "a" / "local" / "policy.toml").write_text(f"{line}\n")
    assert re.search(problem, problems(fed / "a", server=False))
    assert start(fed / "a", verbose=False) == 1
    assert re.search(f"problem  {problem}", capsys.readouterr().out)
    (fed / "a" / "local" / "policy.toml").unlink()
    assert re.search("refused by the rule 'policy.approved'", problems(fed / "a", server=False)), "the default"


def test_a_policy_that_refuses_the_kits_job_is_a_problem_and_the_site_may_start(
    fed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fed / "a" / "local" / "policy.toml").write_text('jobs = "within-policy"\nmethods = ["scaffold"]\n')
    said = "the job in local/spec.toml: refused by the rule 'policy.methods': this site does not accept the method "
    said += "'fedavg'. Use one of: scaffold"
    assert said in problems(fed / "a", server=False)
    assert start(fed / "a", verbose=False) == 0
    assert f"warning  {said}" in capsys.readouterr().out
    (fed / "a" / "local" / "spec.toml").write_text("[training]\nrounds = 0\n")
    assert "local/spec.toml: training.rounds = 0" in problems(fed / "a", server=False)


def test_the_privacy_loss_of_the_whole_job_is_known_before_it_starts(fed: Path) -> None:
    kit = fed / "a"
    with (kit / "local" / "spec.toml").open("a") as spec:
        spec.write("\n[privacy.dp]\nclip = 1.0\nnoise = 2.0\n")
    policy = kit / "local" / "policy.toml"

    def said(lines: str) -> str:
        policy.write_text(f'jobs = "within-policy"\ndelta = 1e-4\n{lines}')
        (text,) = [str(each) for each in check(kit, server=False) if each.text.startswith("privacy: ")]
        return text

    training, samples = fs.Experiment.from_toml(kit / "local" / "spec.toml").training, 32
    rate, steps = training.poisson(samples)

    def budget(federation: Path) -> PrivacyBudget:
        return PrivacyBudget(kit / PLACE, Policy.read(kit), federation_of(federation))

    def total(rounds: int) -> float:
        return budget(kit).total_after("job", 0, noise=2.0, rate=rate, steps=rounds * steps)

    text, whole = said(""), total(training.rounds)
    assert text.startswith(f"ok       privacy: the job's {training.rounds} rounds together spend ε = ")
    assert text.endswith(f"at δ = 0.0001. Together with earlier jobs, the total ε is then {whole:.3g}")
    text = said(f'budget = {whole / 2}\noutside_dp = ["sizes", "normalization", "imputation", "evaluation"]\n')
    allowed = int(re.search(r"after (\d+) rounds", text)[1])
    assert text.startswith("warning")
    assert total(allowed) <= whole / 2 < total(allowed + 1)
    said("")
    budget(kit).spend("job", 0, noise=2.0, rate=rate, steps=steps)
    assert said("").endswith(f"{total(training.rounds):.3g}"), "earlier steps count"
    (kit / PLACE / "privacy.json").write_text("{")
    assert re.match("problem  privacy: .*privacy.json: the file is damaged", said(""))


def test_a_federation_is_told_from_another_by_its_root_certificate(fed: Path, made: Path) -> None:
    assert federation_of(fed / "a") == federation_of(fed / "b") != federation_of(made / "other" / "a")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_a_problem(fed: Path) -> None:
    """It was found when the job began."""
    (fed / "a" / "local" / "policy.toml").write_text('jobs = "within-policy"\n')
    spec = fed / "a" / "local" / "spec.toml"
    assert problems(fed / "a", server=False) == ""
    spec.write_text(spec.read_text().replace('device = "cpu"', 'device = "cuda"'))
    assert "training.device = 'cuda': PyTorch finds 0 CUDA devices" in problems(fed / "a", server=False)


def at(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


@pytest.mark.parametrize(
    ("when", "ends", "text"),
    [
        (0, None, ""),
        (345, False, r"client.crt expires on .*, in (19|20) days\. Ask for a new certificate"),
        (366, True, "client.crt has been invalid since"),
        (-1, True, "Check this machine's clock"),
    ],
)
def test_a_certificate_that_ends_soon_is_warned_of(fed: Path, when: float, ends: bool | None, text: str) -> None:
    found = list(faults(fed / "a", at(when)))
    assert [one for one, _ in found][:1] == ([] if ends is None else [ends])
    assert re.search(text, " ".join(why for _, why in found))


def test_a_foreign_certificate_is_told_from_ours(fed: Path, made: Path) -> None:
    other = made / "other" / "a" / "startup"
    shutil.copy(other / "client.crt", fed / "a" / "startup")
    found = problems(fed / "a", server=False, data=False)
    assert "does not belong to this federation" in found
    assert "client.key does not belong to client.crt" in found
    shutil.copy(other / "client.key", fed / "a" / "startup")
    assert "client.key does not belong" not in problems(fed / "a", server=False, data=False)


def test_a_kit_with_the_certificate_of_another_site_does_not_start(fed: Path) -> None:
    """It started, was turned away by the server, and tried again for ever; its log did not say why."""
    for name in ("client.crt", "client.key"):
        shutil.copy(fed / "b" / "startup" / name, fed / "a" / "startup")
    found = problems(fed / "a", server=False, data=False)
    assert "client.crt is the certificate of 'b', but this folder belongs to 'a'" in found
    assert start(fed / "a", verbose=False) == 1


def test_a_certificate_is_renewed_without_its_key(fed: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, key = key_pair(fed / "server")
    before = read(path)
    renew(fed / "authority", path, 2)
    assert [ends for ends, _ in faults(fed / "server")] == [False]
    key_before = key.read_bytes()
    assert main(["renew", str(fed / "authority"), str(path), "--days", "700"]) == 0
    assert "valid until" in capsys.readouterr().out
    assert main(["renew", str(fed / "authority"), str(path), "--days", "700", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == [str(path)]
    after = read(path)
    assert list(faults(fed / "server", at(600))) == []
    assert (after.subject, list(after.extensions)) == (before.subject, list(before.extensions))
    assert after.serial_number != before.serial_number
    assert key.read_bytes() == key_before
    with pytest.raises(FedstrataError, match="so it belongs to another federation"):
        renew(made / "other" / "authority", path, 30)
    with pytest.raises(FedstrataError, match="does not contain the private key of a root certificate"):
        renew(fed / "a", path, 30)
    with pytest.raises(DataError, match=r"cannot be read as a certificate: Is a directory. Give the file of a cert"):
        renew(fed / "authority", fed / "a", 30)


def test_no_certificate_outlives_the_root_that_signed_it(fed: Path) -> None:
    path, _ = key_pair(fed / "a")
    end = read(path.with_name(ROOT)).not_valid_after_utc
    assert renew(fed / "authority", path, 10 * ROOT_DAYS) == read(path).not_valid_after_utc == end


def test_the_authority_keeps_no_partys_key(fed: Path) -> None:
    text = (fed / "authority" / "cert.json").read_text()
    assert text.count("PRIVATE KEY") == 2  # the begin and the end of the root's


@pytest.mark.long
def test_a_kit_whose_certificate_has_ended_does_not_start(fed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It printed nothing, and tried again for ever."""
    path, _ = key_pair(fed / "a")
    assert start(fed / "a", verbose=False) == 0
    assert capsys.readouterr().out == ""
    renew(fed / "authority", path, 20)
    assert start(fed / "a", verbose=False) == 0
    assert "warning  certificates: client.crt expires on" in capsys.readouterr().out
    renew(fed / "authority", path, -1)
    assert start(fed / "a", verbose=False) == 1
    assert "client.crt has been invalid since" in capsys.readouterr().out
    done = subprocess.run(
        ["bash", str(fed / "a" / "startup" / "sub_start.sh"), "--once"],
        env={"PATH": "/usr/bin:/bin", "FEDSTRATA_PYTHON": sys.executable, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "client.crt has been invalid since" in done.stdout


class Hello(BaseHTTPRequestHandler):
    """Answers as NVFlare's server does: with a date, and no more."""

    ahead = 0.0

    def do_GET(self) -> None:
        self.send_response(426)
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string((datetime.now(UTC) + timedelta(seconds=self.ahead)).timestamp())

    def log_message(self, *args: object) -> None:
        pass


def serve(kit: Path, ahead: float = 0.0) -> HTTPServer:
    import json

    target = json.loads((kit.parent / "a" / "startup" / "fed_client.json").read_text())["servers"][0]
    port = int(target["service"]["target"].rpartition(":")[2])
    server = HTTPServer(("localhost", port), type("Answers", (Hello,), {"ahead": ahead}))
    path, key = key_pair(kit)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key)
    context.load_verify_locations(path.with_name("rootCA.pem"))
    context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *args: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


@pytest.mark.parametrize(("ahead", "state"), [(0.0, "ok"), (600.0, "warning")])
def test_the_server_is_there_and_its_clock_is_ours(
    fed: Path, ahead: float, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(fed / "server", ahead)
    try:
        assert main(["check", str(fed / "a")]) == 0
        said = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in said] == ["ok"] * 7 + [state]
        assert "belongs to this federation and accepts this party's certificate" in said[6]
        if ahead:
            assert "behind the server's" in said[7]
        shutil.copy(fed.parent / "fed" / "b" / "startup" / "client.crt", fed / "a" / "startup")
        assert "the certificates cannot be used" in problems(fed / "a", data=False)
    finally:
        server.shutdown()
        server.server_close()


def test_another_federations_server_is_told_from_ours(made: Path, fed: Path) -> None:
    server = serve(made / "other" / "server")
    try:
        assert "does not belong to this federation" in problems(fed / "a", data=False)
        for name in ("client.crt", "client.key"):
            shutil.copy(fed / "b" / "startup" / name, made / "other" / "b" / "startup")
        found = problems(made / "other" / "b", data=False)
        assert "refused this party" in found
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_that_is_not_there(fed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(fed / "a")]) == 1
    assert "cannot be reached: Connection refused. Start the server" in capsys.readouterr().out
    assert main(["check", str(fed)]) == 1
    capsys.readouterr()
    assert main(["check", str(fed / "a"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert any(each["state"] == "problem" and "cannot be reached" in each["text"] for each in found)


class Nvflare:
    """What of NVFlare's server a gate sees.

    Args:
        fed: The federation's folder.
        clients: Who is registered.
    """

    def __init__(self, fed: Path, *clients: str) -> None:
        from fedstrata.sites.gate import Gate

        self.gate = Gate(str(fed / "server" / "records"))
        self.clients = {f"token of {name}": SimpleNamespace(name=name) for name in clients}
        self.client_manager = SimpleNamespace(is_client_disabled=lambda name: False, get_clients=lambda: self.clients)
        self.logout_client = self.clients.pop

    def fire(self, event: str) -> Nvflare:
        self.gate.handle_event(event, SimpleNamespace(get_engine=lambda: SimpleNamespace(server=self)))
        return self


@pytest.mark.parametrize("event", ["CLIENT_HEARTBEAT_RECEIVED", "CLIENT_REGISTER_RECEIVED", "SUBMIT_JOB"])
def test_whatever_a_server_that_was_started_anew_hears_first_a_revoked_site_is_refused(fed: Path, event: str) -> None:
    """Sites that went on only sent heartbeats, and were let in whoever was revoked; and jobs went to them."""
    from nvflare.apis.event_type import EventType

    revoke(fed / "server", "b")
    server = Nvflare(fed, "a", "b").fire(getattr(EventType, event))
    assert [server.client_manager.is_client_disabled(name) for name in "ab"] == [False, True]
    assert list(server.clients) == ["token of a"]
    revoke(fed / "server", "b", undo=True)
    assert not server.client_manager.is_client_disabled("b")


def test_the_list_is_read_once_however_many_are_connected(fed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read for each of them at each one's heartbeat."""
    reads: list[Path] = []

    def read_it(kit: Path) -> list[str]:
        reads.append(kit)
        return members(kit)

    monkeypatch.setattr("fedstrata.sites.members.members", read_it)
    assert list(Nvflare(fed, "a", "b", "c").fire("_client_heartbeat_received").clients) == ["token of a", "token of b"]
    assert len(reads) == 1


def test_who_is_struck_off_the_list_may_not_connect(
    fed: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from nvflare.apis.event_type import EventType

    manager = Nvflare(fed).fire(EventType.CLIENT_REGISTER_RECEIVED).client_manager

    def refused() -> list[str]:
        return [name for name in ("a", "b", "c", "admin@fedstrata.local") if manager.is_client_disabled(name)]

    assert members(fed / "server") == ["a", "b"]
    assert refused() == ["c"]
    assert main(["revoke", str(fed / "server"), "a"]) == 0
    assert "sites that may connect: b" in capsys.readouterr().out
    assert main(["revoke", str(fed / "server"), "a", "--undo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"members": ["a", "b"]}
    assert main(["revoke", str(fed / "server"), "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"members": ["b"]}
    assert [refused(), refused()] == [["a", "c"]] * 2
    assert caplog.text.count("a is not on the list of sites that may connect") == 1
    with pytest.raises(SpecError, match=r"is not on the list of sites that may connect\. The list contains: b"):
        revoke(fed / "server", "a")
    assert revoke(fed / "server", "a", undo=True) == ["a", "b"]
    assert refused() == ["c"]
    assert main(["revoke", str(fed / "server"), "aa", "--undo"]) == 2
    assert (
        "SITE = 'aa': is not a site of this federation; did you mean 'a'? Use one of: a, b." in capsys.readouterr().err
    )
    assert members(fed / "server") == ["a", "b"]
    with pytest.raises(SpecError, match="is not the folder of a server"):
        revoke(fed / "a", "b")
