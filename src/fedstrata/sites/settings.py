"""Read the settings of the server and of each site, and describe the experiments of a job."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import PositiveFloat

from fedstrata.base.config import Setting, build
from fedstrata.base.errors import SpecError
from fedstrata.sites.directory import Fewer
from fedstrata.spec.experiment import read_toml, with_location

LOCAL = Path("local") / "fedstrata.toml"
"""The file with the settings of the server or a site, in the party's own folder. The file is never part of a job."""

USER = "admin@fedstrata.local"
"""The user name of the administrator, whose only rights are to submit jobs, watch them and fetch their results."""

PATIENCE = 600.0
"""The default number of seconds within which a site must reply."""


def run_of(spec: str) -> str:
    """Return the name of a run: a hash of its spec's text.

    Args:
        spec: The experiment as TOML.
    """
    return hashlib.sha256(spec.encode()).hexdigest()[:16]


S = TypeVar("S", bound=Setting)


def read_setting(kind: type[S], path: Path, key: str) -> S:
    """Read a TOML file, and return its settings as an instance of ``kind``.

    Args:
        kind: The settings class.
        path: The TOML file.
        key: The name of the file in error messages, such as ``--sites``.

    Raises:
        SpecError: The file is missing or not TOML, or has an unknown key or a wrong value. The message gives the line.
    """
    table = read_toml(path, key)
    try:
        return build(kind, table)
    except SpecError as error:
        raise with_location(error, path) from None


@dataclass(frozen=True)
class JobSpec:
    """One experiment of a job, with everything that the job's server needs to run it.

    Args:
        spec: The name of the file with the spec, in the job's configuration folder.
        folder: The path of the run folder in a simulation. In a deployment, the server computes the path with
            ``run_of``. If the folder already contains a run, the server resumes the run.
        clients: The number of clients.
        sites: The name of each client's site in a deployment. If ``sites`` is empty, clients are divided among the
            connected sites.
        own_data: Whether sites have their own data. Otherwise, the spec's partition divides the spec's data set.
        patience: The number of seconds within which a site must reply.
        direct: For a model that clients train one after another: True if the model goes directly to the next site;
            False if the server passes the model on.
        least: The minimum number of sites that must reply.
        fewer: The server's action if fewer than ``least`` sites reply.
    """

    spec: str
    folder: str
    clients: int
    sites: tuple[str, ...] = ()
    own_data: bool = False
    patience: float = PATIENCE
    direct: bool = True
    least: int = 1
    fewer: Fewer = "go-on"

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> JobSpec:
        """Create a ``JobSpec`` from the dict of its fields in a job's configuration."""
        return cls(**{**table, "sites": tuple(table["sites"])})

    def site_of_client(self, connected: Sequence[str]) -> list[str]:
        """Return the name of each client's site. With fewer sites than clients, consecutive clients share a site.

        >>> JobSpec("run-0.toml", "", 5).site_of_client(["a", "b"])
        ['a', 'a', 'a', 'b', 'b']
        """
        if self.sites:
            return list(self.sites)
        return [connected[client * len(connected) // self.clients] for client in range(self.clients)]


class SiteSettings(Setting):
    """The settings of a party (a site or the server), which are read from ``local/fedstrata.toml`` in its folder.

    Args:
        data: The data file of the site or the server; None if the spec names the data.
        keys: The folder with the keys for masking labels. All sites have the same keys. The server does not use
            this setting.
        patience: The number of seconds for which the site waits for the server or another site.
        secure: Whether messages to other sites are encrypted from end to end, so that the server cannot read them. This
            setting requires certificates.
        states: The folder of the clients' states. Default: a folder inside the site's own folder.
        allow: Top-level packages on this machine. A spec may name code of these packages, as ``module:Class``.
        catalog: Data sets and files of this machine that a spec may name, in addition to scikit-learn's data sets.
        tells: Whether the server may see the metrics on this site's own samples (``evaluation.client_test``). The
            server always sees sums over the samples.
        simulated: Whether this is a simulation on one machine. In a simulation, the job may name folders, and specs may
            name any code. Missing keys for masking are created. The server sees the full text of errors.
    """

    data: Path | None = None
    keys: Path | None = None
    patience: PositiveFloat = PATIENCE
    secure: bool = False
    states: Path | None = None
    allow: list[str] = []
    catalog: list[str] = []
    tells: bool = False
    simulated: bool = False

    @property
    def packages(self) -> list[str] | None:
        """The packages whose code a spec may name; None if a spec may name any code, as in a simulation."""
        return None if self.simulated else self.allow

    def table(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as a dict that TOML can represent."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def read(cls, root: Path) -> SiteSettings:
        """Read the settings from the folder of the server or a site. Without a settings file, return the defaults.

        Raises:
            SpecError: The file is not TOML, or has an unknown key or a wrong value. The message gives the line.
        """
        settings = read_setting(cls, root / LOCAL, "settings") if (root / LOCAL).exists() else cls()
        paths = {key: getattr(settings, key) for key in ("data", "keys", "states")}
        return settings.model_copy(update={key: root / path.expanduser() for key, path in paths.items() if path})
