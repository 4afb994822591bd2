"""The description of a job for its server, and each party's own settings."""

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
"""The file of a party's settings in its folder; it is never part of a job."""

USER = "admin@fedstrata.local"
"""The administrator, who may only submit jobs and fetch their results."""

PATIENCE = 600.0
"""Default seconds that a site has for an answer."""


def run_of(spec: str) -> str:
    """Return the name of a run, which is a hash of its spec.

    Args:
        spec: The experiment as TOML.
    """
    return hashlib.sha256(spec.encode()).hexdigest()[:16]


S = TypeVar("S", bound=Setting)


def read_setting(kind: type[S], path: Path, key: str) -> S:
    """Read a setting from a TOML file.

    Args:
        kind: The class of the setting.
        path: The file.
        key: The name of the file in errors.

    Raises:
        SpecError: The file is missing or not TOML, a key is unknown or a value is wrong; the message names the line.
    """
    table = read_toml(path, key)
    try:
        return build(kind, table)
    except SpecError as error:
        raise with_location(error, path) from None


@dataclass(frozen=True)
class JobSpec:
    """One experiment for the server of a job.

    Args:
        spec: The file with the experiment, in the server's part of the job.
        folder: The path of the run folder in a simulation; a server uses ``run_of``. A run in the folder is resumed.
        clients: N.
        sites: The site of every client in a deployment; otherwise clients are distributed over the connected sites.
        own_data: Whether sites have their own data; otherwise the data are those of the spec, by its partition.
        patience: Seconds that a site has for an answer.
        direct: Whether the model of a relay goes from site to site.
        least: Fewest sites that must answer.
        fewer: What to do when fewer sites answer.
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
        """Read a job from its fields, as a job's configuration has them."""
        return cls(**{**table, "sites": tuple(table["sites"])})

    def site_of_client(self, connected: Sequence[str]) -> list[str]:
        """Return the site of every client; consecutive clients share one if there are fewer sites than clients.

        >>> JobSpec("run-0.toml", "", 5).site_of_client(["a", "b"])
        ['a', 'a', 'a', 'b', 'b']
        """
        if self.sites:
            return list(self.sites)
        return [connected[client * len(connected) // self.clients] for client in range(self.clients)]


class SiteSettings(Setting):
    """The settings of a site or the server, in ``local/fedstrata.toml`` of its folder.

    Args:
        data: Its data file; None if the data are those of the spec.
        keys: The folder of the keys that the sites share, for masked labels; never at the server.
        patience: Seconds that it waits for another site.
        secure: Whether messages to other sites are encrypted from end to end, so that the server cannot read them; this
            needs certificates.
        states: The folder of its clients' states. Default: inside its folder.
        allow: Top-level packages, installed at the site, from which a spec may name ``module:Class``.
        catalog: Data sets and files that a spec may name here, beside the data sets of scikit-learn.
        tells: Whether the server may see metrics on this site's own samples (``evaluation.client_test``). It sees sums
            over all sites in any case.
        simulated: Whether this is a simulation on one machine. Then the job may name folders, clients may make the
            keys, specs may name any code, and the server sees the full text of errors.
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
        """The packages from which a spec may name code; None for any, in a simulation."""
        return None if self.simulated else self.allow

    def table(self) -> dict[str, Any]:
        """Return the values that differ from the defaults, for TOML."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @classmethod
    def read(cls, root: Path) -> SiteSettings:
        """Read the settings of a party's folder; the defaults if it has no file.

        Raises:
            SpecError: The file is not TOML, a key is unknown or a value is wrong; the message names the line.
        """
        settings = read_setting(cls, root / LOCAL, "settings") if (root / LOCAL).exists() else cls()
        paths = {key: getattr(settings, key) for key in ("data", "keys", "states")}
        return settings.model_copy(update={key: root / path.expanduser() for key, path in paths.items() if path})
