"""The two components that NVFlare loads through its Collab API: one for the server of a job, and one for a site."""

from __future__ import annotations

import logging
import shutil
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.fl_component import FLComponent
from nvflare.collab import collab
from nvflare.collab.api.exceptions import RunAborted
from nvflare.widgets.info_collector import InfoCollector

from fedstrata.base import records
from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.jsonl import read_jsonl, write_json
from fedstrata.base.loading import only_from
from fedstrata.evaluation.history import History
from fedstrata.runs.preparation import prepare, refuse_attack
from fedstrata.runs.run_folder import METRICS, SPEC, about, is_over
from fedstrata.runs.simulation import run_prepared
from fedstrata.sites.certificates import federation_of
from fedstrata.sites.configuration import ERROR, RESULT, described
from fedstrata.sites.data_schema import prepare_server, surveyed
from fedstrata.sites.engine import NVFlareEngine
from fedstrata.sites.guard import refuse_files
from fedstrata.sites.idempotency import RequestCache, heartbeat
from fedstrata.sites.ledger import HEADS, PLACE, Ledger
from fedstrata.sites.members import Members
from fedstrata.sites.messenger import Messenger
from fedstrata.sites.nvflare_workarounds import JobEnd, bound_growth, survive_kill
from fedstrata.sites.policy import Policy
from fedstrata.sites.privacy_budget import PrivacyBudget
from fedstrata.sites.progress import FEDSTRATA, STATUS, Progress, SiteProgress, about_run
from fedstrata.sites.settings import JobSpec, SiteSettings, run_of
from fedstrata.sites.site_server import SiteServer
from fedstrata.sites.sums import Sums
from fedstrata.sites.transport import STRUCK, Call, CollabTransport, retry
from fedstrata.sites.wire import Refused, SiteLostError
from fedstrata.spec.experiment import Experiment
from fedstrata.spec.tracking import Tracking
from fedstrata.stratify.masking.key_store import KeyRing

if TYPE_CHECKING:
    from fedstrata.federation.secure.certificates import Trust
    from fedstrata.sites.secure_site import Credentials

LOG = logging.getLogger(__name__)

FETCH = 10.0
"""The number of seconds within which another site must begin to send a model to this site. Otherwise, this site sends
its request again."""


class Server(FLComponent):  # type: ignore[misc]  # NVFlare has no types
    """The component at the server, which runs the experiments of a job one after another.

    Args:
        plans: The experiments. Each experiment is a dict with the fields of a ``JobSpec``, because a job is configured
            in JSON.
    """

    def __init__(self, plans: list[dict[str, Any]]) -> None:
        super().__init__()
        bound_growth()
        self.plans = plans
        self._sums: Sums | None = None
        self._transport: CollabTransport | None = None
        self._progress: Progress | None = None

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Report the progress of the run when an administrator requests it."""
        if event_type == InfoCollector.EVENT_TYPE_GET_STATS and self._progress is not None:
            fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR).set_info(FEDSTRATA, self._progress.table())

    @collab.publish  # type: ignore[untyped-decorator]
    def heartbeat(self, number: int, size: int) -> None:
        """Receive a site's heartbeat.

        Args:
            number: The sequence number of the last request that the site began to process.
            size: The size in bytes of the reply to this request; ``AT_WORK`` while the site still computes the reply.
        """
        if self._transport is not None and not self._transport.struck(collab.caller):
            self._transport.hear(collab.caller, number, size)

    @collab.publish  # type: ignore[untyped-decorator]
    def add_up(self, data: bytes) -> bytes:
        """Receive a site's terms for a sum, wait for the other sites' terms, and return the encoded total."""
        if self._sums is None or self._transport is None:
            raise FedstrataError("the run has not begun yet")
        if self._transport.struck(collab.caller):
            raise FedstrataError(STRUCK)
        return self._sums.add_up(collab.caller, data)

    @collab.main  # type: ignore[untyped-decorator]
    def main(self) -> None:
        """Run all experiments of the job, one after another.

        If an experiment raises a ``FedstrataError``, write the error to the run folder, and continue with the next
        experiment.
        """
        end = JobEnd(collab.fl_ctx.get_run_abort_signal())
        calls = {site.name: _caller(site, end) for site in collab.clients}
        root, job = Path(collab.workspace.get_root_dir()), collab.fl_ctx.get_job_id()
        self._transport = transport = CollabTransport(calls, RunAborted, end, struck=Members(root).struck)
        settings = _settings(root)
        specs, results = Path(collab.workspace.get_app_config_dir(job)), Path(collab.workspace.get_run_dir(job))
        try:
            for table in self.plans:
                plan = JobSpec.from_table(table)
                if Path(plan.spec).name != plan.spec:
                    raise SpecError("spec", "is outside the job's folders. Use a file inside these folders.", plan.spec)
                text = (specs / plan.spec).read_text(encoding="utf-8")
                folder = folder_of(plan, text, root, settings)
                (folder / ERROR).unlink(missing_ok=True)
                try:
                    with only_from(settings.packages):
                        self._run(plan, text, folder, transport, settings)
                except (RunAborted, SiteLostError):
                    raise  # the run is resumed when the job is submitted again
                except Exception as error:
                    folder.mkdir(parents=True, exist_ok=True)
                    write_json(folder / ERROR, described(error))
                    if not isinstance(error, FedstrataError):
                        raise
                finally:
                    if plan.sites and folder.is_dir():
                        # Copy the run folder to NVFlare's result folder, because the administrator fetches only the
                        # result folder.
                        without = shutil.ignore_patterns("checkpoint")
                        shutil.copytree(folder, results / RESULT, ignore=without, dirs_exist_ok=True)
        finally:
            end.reached = True

    def _run(self, plan: JobSpec, text: str, folder: Path, transport: CollabTransport, settings: SiteSettings) -> None:
        table = tomllib.loads(text)
        if not settings.simulated:
            refuse_files(table, settings.catalog, data=not plan.own_data)
        spec = Experiment.from_table(table)
        # In a deployment, remove the job's tracking settings, because a job must not decide where this server writes.
        if not settings.simulated:
            spec = spec.model_copy(update={"tracking": Tracking()})
            refuse_attack(spec)
        resume = (folder / SPEC).exists()
        if resume and is_over(folder, spec.training.rounds):
            return  # The run is already complete, and this job only lets the administrator fetch the result.
        site_of_client = plan.site_of_client(sorted(transport.sites))
        prepared = prepare_server(spec, settings.data, len(site_of_client)) if plan.own_data else prepare(spec)
        self._sums = Sums(plan.patience)
        messenger = Messenger(transport, site_of_client, patience=plan.patience, least=plan.least, fewer=plan.fewer)
        heads, direct = folder / HEADS, plan.direct
        trust = _trust(spec, settings)
        engine = NVFlareEngine(
            prepared.config,
            messenger,
            self._sums,
            spec=text,
            run=run_of(text),
            direct=direct,
            log_heads=heads,
            trust=trust,
        )
        engine.secret = not settings.simulated
        before = read_jsonl(folder / METRICS) if resume and (folder / METRICS).exists() else []
        history = History(before, **about(spec))
        path = None if settings.simulated else Path(collab.workspace.get_root_dir()) / STATUS

        def status(site: str) -> tuple[str, str]:
            return ("revoked", STRUCK) if transport.struck(site) else engine.directory.status(site)

        words = about_run(history, folder, text)
        progress = Progress(spec.training.rounds, site_of_client, status, history, path, words)
        self._progress = progress
        try:
            with progress.writing():
                if plan.own_data:
                    prepared = surveyed(prepared, engine, folder, resume=resume)
                run_prepared(prepared, folder, engine, [engine.write_log_heads, progress], resume=resume)
        except (RunAborted, SiteLostError):
            raise  # the run is resumed when the job is submitted again
        except Exception as error:
            progress.end(f"{type(error).__name__}: {error}")
            raise
        progress.end()


def folder_of(plan: JobSpec, spec: str, root: Path, settings: SiteSettings) -> Path:
    """Return the run folder. In a deployment, the name is a hash of the spec, so each job has its own folder."""
    return Path(plan.folder) if settings.simulated else root / "fedstrata" / run_of(spec)


def _trust(spec: Experiment, settings: SiteSettings) -> Trust | None:
    """Return the certificates that the server accepts in secure sums; None without certificates, as in a simulation."""
    if spec.privacy.sums == "plain" or settings.simulated:
        return None
    from fedstrata.sites.secure_site import trust_of

    return trust_of(Path(collab.workspace.get_root_dir()))


def _credentials(root: Path) -> Credentials:
    from fedstrata.sites.secure_site import Credentials

    return Credentials.of_kit(root)


def _caller(site: Any, end: JobEnd) -> Call:
    end.ends_calls_to(site)
    return lambda data, patience: site(timeout=patience).call(data)


def _settings(root: Path) -> SiteSettings:
    """Read the settings of the server or a site from its folder, and adapt ``sys.path``.

    In a deployment, NVFlare unpacks jobs in a folder that is in ``sys.path``. This function removes the folder from
    ``sys.path``, so that code in jobs is not imported.
    """
    settings = SiteSettings.read(root)
    if not settings.simulated:
        sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != root.resolve()]
    elif "" not in sys.path:
        sys.path.insert(0, "")  # A simulation must find the user's modules in the working directory.
    return settings


class Site:
    """The component at a site, which answers the server's messages. The site's folder contains its settings."""

    def __init__(self) -> None:
        bound_growth()
        self._site_server: SiteServer | None = None
        self._problem = "it is not ready"

    @collab.init  # type: ignore[untyped-decorator]
    def init(self) -> None:
        """Read the site's settings.

        If the settings are wrong, this site refuses all requests. Other sites still take part.
        """
        root, cache = Path(collab.workspace.get_root_dir()), RequestCache()
        self._progress = SiteProgress(root / STATUS)
        try:
            self._site_server = self._made(root)
            cache = self._site_server.request_cache
        except Exception as error:
            # The exception is caught, because it would otherwise make NVFlare end the job at all sites.
            LOG.exception("this site does not take part")
            self._progress.answer(0, f"{error}")
            self._problem = f"its settings cannot be used ({type(error).__name__}). Read the log of the site."
        server = collab.server
        heartbeat(cache, lambda number, size: server(expect_result=False).heartbeat(number, size), RunAborted)
        # A second thread writes the progress, so that a slow disk does not delay heartbeats.
        heartbeat(cache, lambda number, size: self._progress.write(), RunAborted)

    def _made(self, root: Path) -> SiteServer:
        settings = _settings(root)
        if not settings.simulated:
            survive_kill(Path(collab.workspace.get_run_dir(collab.fl_ctx.get_job_id())))
        keys = KeyRing(settings.keys, create=settings.simulated) if settings.keys else None
        others = {site.name: site for site in collab.clients}
        server = collab.server

        def send(target: str, data: bytes) -> object:
            if target == "server":
                return retry(lambda data, left: server(timeout=left).add_up(data), data, settings.patience)

            def fetch(data: bytes, left: float) -> object:
                return others[target](timeout=min(FETCH, left), secure=settings.secure).call(data)

            # While a call still waits for data, do not begin a second call, because it would transfer a large model
            # twice.
            return retry(fetch, data, settings.patience, beside=False)

        policy = None if settings.simulated else Policy.read(root)
        site_server = SiteServer(
            collab.site_name,
            (settings.states or root / "fedstrata") / collab.site_name,
            send,
            settings,
            keys=keys,
            policy=policy,
            ledger=None if settings.simulated else Ledger(root / PLACE),
            credentials=None if settings.simulated else partial(_credentials, root),
        )
        if policy is not None:
            site_server.budget = PrivacyBudget(root / PLACE, policy, federation_of(root))
        return site_server

    @collab.publish  # type: ignore[untyped-decorator]
    def call(self, data: bytes) -> bytes:
        """Return the encoded reply to a message from the server or another site; see ``fedstrata.sites.wire``."""
        if self._site_server is None:
            return records.encode(Refused(self._problem))
        self._progress.question(len(data))
        answer = self._site_server.call(collab.caller, data)
        self._progress.answer(len(answer), self._site_server.problem)
        return answer
