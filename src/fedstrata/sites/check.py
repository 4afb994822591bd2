"""Check a party (server, site or administrator) before it starts: settings, policy, data, certificates, connection."""

from __future__ import annotations

import json
import socket
import ssl
from bisect import bisect_right
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedstrata.base.errors import DataError, FedstrataError, SpecError
from fedstrata.base.loading import only_from
from fedstrata.sites.certificates import ROOT, faults, federation_of, fingerprint, key_pair
from fedstrata.sites.policy import FILE as POLICY
from fedstrata.sites.policy import Policy, RuleError
from fedstrata.sites.settings import SiteSettings

if TYPE_CHECKING:
    from fedstrata.sites.disclosure import Declaration
    from fedstrata.sites.wire import Survey

PART = Path("local") / "part.json"
"""A file in a site's folder: the id of the site's client, the total number of clients, and a boolean (True if the site
needs test samples)."""

SPEC = Path("local") / "spec.toml"
"""The file with the experiment's spec, in a site's folder."""

CLOCKS = 60.0
"""The maximum difference in seconds between the clocks of this machine and the server. A larger difference causes a
warning."""

REFUSED = "Ask the administrator whether the certificate of this party is valid and not revoked."
"""The advice to a site or administrator if the server refuses the connection."""

SECONDS = 10.0
"""The number of seconds within which the server must answer."""


class Finding(NamedTuple):
    """The result of one check of a party (the server, a site or the administrator).

    Args:
        state: The severity: ``ok``, ``warning`` or ``problem``. A party with a ``problem`` cannot take part.
        text: A description of the result.
    """

    state: str
    text: str

    def __str__(self) -> str:
        return f"{self.state:<8} {self.text}"


def check(kit: Path, *, server: bool = True, data: bool = True) -> list[Finding]:
    """Check everything that a party (the server, a site or the administrator) needs to take part.

    Args:
        kit: The party's folder, which ``fedstrata deploy`` made.
        server: Whether to test the connection to the server.
        data: Whether to check the site's data too. If False, and the site would refuse the job in its folder, this
            is only a warning, because the site may be started for a different job.

    Raises:
        FedstrataError: ``kit`` is not the folder of a party.
    """
    key_pair(kit)
    site = (kit / "startup" / "fed_client.json").exists()
    findings = _outcome(lambda: _settings(kit))
    if site:
        findings += _outcome(lambda: _policy(kit))
    if (kit / SPEC).exists() and all(each.state == "ok" for each in findings):
        findings += _outcome(lambda: _job(kit), "problem" if data else "warning")
    wrong = [Finding("problem" if ends else "warning", f"certificates: {text}") for ends, text in faults(kit)]
    findings += wrong or [Finding("ok", "certificates: valid, and from the same federation")]
    if site and not wrong:
        findings += _outcome(lambda: f"fingerprint: {fingerprint(kit)}")
    if data and (kit / PART).exists():
        findings += _outcome(lambda: _data(kit))
        if (kit / SPEC).exists() and all(each.state == "ok" for each in findings):
            findings += _privacy_loss(kit)
    if server and site and key_pair(kit)[1].exists():
        findings += _server(kit)
    return findings


def _outcome(work: Callable[[], str], otherwise: str = "problem") -> list[Finding]:
    try:
        return [Finding("ok", work())]
    except (FedstrataError, ValueError, OSError) as error:
        return [Finding(otherwise, str(error))]


def _settings(kit: Path) -> str:
    settings = SiteSettings.read(kit)
    if settings.keys is not None and not settings.keys.is_dir():
        raise FedstrataError(
            f"keys = {str(settings.keys)!r}: the folder does not exist. Create it, or change local/fedstrata.toml."
        )
    return "settings: local/fedstrata.toml can be read"


def _policy(kit: Path) -> str:
    """Check that the site's policy file can be read.

    Without this check, an error in the file would stop the first job.
    """
    if not (kit / POLICY).exists():
        return f"policy: {POLICY} does not exist, so the defaults apply, and all jobs need approval"
    Policy.read(kit)
    return f"policy: {POLICY} can be read"


def _job(kit: Path) -> str:
    """Check that a site accepts the job in the site's folder, and has the device for this job."""
    from fedstrata.clients.training.devices import device_of
    from fedstrata.spec.experiment import Experiment

    settings = SiteSettings.read(kit)
    try:
        with only_from(settings.packages):
            asked = _declaration(kit, settings)
            Policy.read(kit).check(asked)
            device_of(Experiment.from_toml(kit / SPEC).training.device)
    except RuleError as error:
        raise FedstrataError(
            f"the job in {SPEC}: {str(error).rstrip('.')}. This site's policy is in {POLICY}."
        ) from None
    except (SpecError, ValueError) as error:
        raise FedstrataError(f"{SPEC}: {error}") from None
    return f"job: {asked.job} in {SPEC} is accepted"


def _declaration(kit: Path, settings: SiteSettings) -> Declaration:
    from fedstrata.sites.guard import declared

    clients = json.loads((kit / PART).read_text(encoding="utf-8"))["clients"]
    return declared((kit / SPEC).read_text(encoding="utf-8"), settings, clients=clients, own_data=True)


def _survey(kit: Path) -> Survey:
    """Return the request for statistics that the server sends at the beginning of a run."""
    from fedstrata.sites.wire import Survey

    part = json.loads((kit / PART).read_text(encoding="utf-8"))
    return Survey((kit / SPEC).read_text(encoding="utf-8"), [part["client"]], part["clients"], part["tests"])


def _data(kit: Path) -> str:
    """Check that the site's data fit the spec, by computing the statistics that the server requests before a run."""
    from fedstrata.sites.data_schema import UnusableDataError, survey_of

    settings = SiteSettings.read(kit)
    data = settings.data
    try:
        with only_from(settings.packages):
            survey_of(_survey(kit), data)
    except UnusableDataError as error:
        # The text of this error is for other parties. The site itself may see the cause, which contains more details.
        raise DataError(str(error.__cause__)) from None
    return f"data: {data} fits the spec"


def _privacy_loss(kit: Path) -> list[Finding]:
    """Compute the ε that the site spends with ``privacy.dp`` in all rounds; warn if it exceeds the site's budget."""
    from fedstrata.sites.data_schema import training_samples
    from fedstrata.sites.ledger import PLACE
    from fedstrata.sites.privacy_budget import PrivacyBudget
    from fedstrata.spec.experiment import Experiment

    settings, policy, survey = SiteSettings.read(kit), Policy.read(kit), _survey(kit)
    with only_from(settings.packages):
        spec, job = Experiment.from_toml(kit / SPEC), _declaration(kit, settings).job
        dp, training = spec.privacy.dp, spec.training
        if dp is None:
            return []
        rate, steps = training.poisson(training_samples(survey, settings.data))
        if not steps:
            return []
    budget = PrivacyBudget(kit / PLACE, policy, federation_of(kit))

    def total(rounds: int) -> float:
        return budget.total_after(job, survey.clients[0], noise=dp.noise, rate=rate, steps=rounds * steps)

    try:
        epsilon = budget.epsilon_of(noise=dp.noise, rate=rate, steps=training.rounds * steps)
        after = total(training.rounds)
    except (FedstrataError, OSError) as error:
        return [Finding("problem", f"privacy: {error}")]
    text = f"privacy: the job's {training.rounds} rounds together spend ε = {epsilon:.3g} at δ = {policy.delta:g}. "
    text += f"Together with earlier jobs, the total ε is then {after:.3g}"
    if policy.budget is None or after <= policy.budget:
        return [Finding("ok", text)]
    allowed = bisect_right(range(1, training.rounds + 1), policy.budget, key=total)
    text += f", but policy.budget is {policy.budget:g}. The site will refuse to train after {allowed} rounds."
    return [Finding("warning", text)]


def _server(kit: Path) -> list[Finding]:
    target = json.loads((kit / "startup" / "fed_client.json").read_text(encoding="utf-8"))["servers"][0]
    host, _, port = target["service"]["target"].rpartition(":")
    path, key = key_pair(kit)
    where = f"server {host}:{port}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path.with_name(ROOT))
        context.load_cert_chain(path, key)
        connection = socket.create_connection((host, int(port)), timeout=SECONDS)
    except ssl.SSLError as error:
        return [Finding("problem", f"{where}: the certificates cannot be used: {error.reason or error}. Renew them.")]
    except OSError as error:
        problem = f"{where} cannot be reached: {error.strerror or error}. Start the server, and open its port."
        return [Finding("problem", problem)]
    try:
        with closing(context.wrap_socket(connection, server_hostname=host)) as secured:
            secured.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            answer = secured.recv(4096).decode("latin-1")
    except ssl.SSLCertVerificationError as error:
        return [
            Finding(
                "problem", f"{where} does not belong to this federation: {error.verify_message}. Check the address."
            )
        ]
    except OSError as error:
        return [Finding("problem", f"{where} refused this party: {getattr(error, 'reason', '') or error}. {REFUSED}")]
    if not answer:
        return [Finding("problem", f"{where} refused this party. {REFUSED}")]
    findings = [Finding("ok", f"{where} is reachable, belongs to this federation and accepts this party's certificate")]
    dates = [row.partition(":")[2].strip() for row in answer.splitlines() if row.lower().startswith("date:")]
    if dates:
        apart = (datetime.now(UTC) - parsedate_to_datetime(dates[0])).total_seconds()
        order = "ahead of" if apart > 0 else "behind"
        text = f"clocks: this machine's clock is {abs(apart):.0f} s {order} the server's clock"
        findings.append(Finding("warning" if abs(apart) > CLOCKS else "ok", text))
    return findings
