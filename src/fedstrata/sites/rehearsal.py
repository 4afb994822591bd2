"""Run an experiment with simulated sites in one process, to test the experiment before a deployment.

As in a deployment, the run reads the sites' data files and encodes all messages. The result is the same as in the
deployment.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from fedstrata.evaluation.history import History
from fedstrata.runs.preparation import prepare
from fedstrata.runs.simulation import Watcher, run_prepared
from fedstrata.sites.data_schema import prepare_server, surveyed
from fedstrata.sites.engine import NVFlareEngine
from fedstrata.sites.federation import Sites, path_of, policy_of
from fedstrata.sites.messenger import Messenger, Transport
from fedstrata.sites.privacy_budget import PrivacyBudget
from fedstrata.sites.site_server import SERVER, SiteServer
from fedstrata.sites.sums import Sums
from fedstrata.spec.callbacks import Callback
from fedstrata.spec.experiment import Experiment
from fedstrata.stratify.masking.key_store import KeyRing

if TYPE_CHECKING:
    from fedstrata.sites.secure_site import Credentials

STATES = "sites"
"""The folder of the clients' states in the run folder, with one folder per site."""


class _Transport(Transport):
    """A connection to simulated sites in this process. Messages are encoded as in a deployment."""

    def __init__(self, site_servers: dict[str, SiteServer]) -> None:
        self.site_servers = site_servers

    @override
    def is_reachable(self, site: str) -> bool:
        return True

    @override
    def send(self, site: str, data: bytes, patience: float, number: int) -> object:
        return self.site_servers[site].call(SERVER, data)


def rehearse_file(
    spec: Experiment, file: Path, out: Path, *, resume: bool = False, callbacks: Sequence[Callback | Watcher] = ()
) -> History:
    """Run a deployment's experiment in this process. The data files and the result are the same as in the deployment.

    Args:
        spec: The experiment.
        file: The description of the federation (``sites.toml``), with the paths of the server's and the sites' data and
            keys. Relative paths refer to the folder of this file.
        out: The run folder.
        resume: Whether to resume the run in the folder.
        callbacks: Callbacks of the run.

    Raises:
        SpecError: A setting is wrong, or the description does not name the data file of a site.
        FedstrataError: Too few sites have data that fit the spec.
    """
    sites, base_dir = Sites.read(file), file.parent
    site_of_client, sums = sites.site_of_client(spec), Sums(sites.patience)
    transport, shared = _Transport({}), KeyRing.of_site()
    for name in sites.site:

        def carry(target: str, data: bytes, name: str = name) -> object:
            return sums.add_up(name, data) if target == SERVER else transport.site_servers[target].call(name, data)

        settings = sites.settings_of(name, base_dir)
        keys = KeyRing(settings.keys) if settings.keys else shared
        # The setting ``peers`` lists certificates of the other sites. It is not checked, because the sites of a
        # rehearsal have new keys instead of certificates.
        policy = policy_of(spec, sites).model_copy(update={"peers": None})
        transport.site_servers[name] = SiteServer(
            name,
            out / STATES / name,
            carry,
            settings,
            keys=keys,
            policy=policy,
            credentials=partial(_credentials, name),
        )
        transport.site_servers[name].budget = PrivacyBudget(out / STATES / name, policy)
    test = path_of(sites.server.data, base_dir)
    prepared = prepare_server(spec, test, len(site_of_client)) if sites.own_data else prepare(spec)
    # A rehearsal does not wait for sites, because a site that failed in a rehearsal cannot recover.
    fewer = "abort" if sites.fewer == "wait" else sites.fewer
    messenger = Messenger(transport, site_of_client, patience=sites.patience, least=sites.least, fewer=fewer)
    direct = sites.relay == "direct"
    trust = None if spec.privacy.sums == "plain" else _credentials("server").trust
    # The sites store states under the name of the run. The constant "run" suffices, because each rehearsal has its own
    # folders.
    engine = NVFlareEngine(prepared.config, messenger, sums, spec=spec.to_toml(), run="run", direct=direct, trust=trust)
    if sites.own_data:
        prepared = surveyed(prepared, engine, out, resume=resume)
    return run_prepared(prepared, out, engine, callbacks, resume=resume)


def _credentials(name: str) -> Credentials:
    from fedstrata.sites.secure_site import Credentials

    return Credentials.of_rehearsal(name)
