"""The description of a federation (its server and its sites), which is read from ``sites.toml``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from fedstrata.base.config import Setting
from fedstrata.base.errors import SpecError
from fedstrata.runs.preparation import prepare
from fedstrata.sites.directory import Fewer
from fedstrata.sites.disclosure import hash_of
from fedstrata.sites.policy import Policy
from fedstrata.sites.settings import PATIENCE, SiteSettings, read_setting
from fedstrata.spec.experiment import Experiment

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
LONGEST_NAME = 64
"""The maximum number of characters of a name in a certificate."""
RESERVED = ("server", "admin", "authority", "result")
"""Names that no site may have, because ``fedstrata deploy`` uses these names for other folders."""


def check_name(key: str, name: str) -> None:
    """Check the name of a federation or a site. Certificates contain these names.

    Args:
        key: The name of the setting, for the error message.
        name: The name.

    Raises:
        SpecError: The name is too long or reserved, or contains a character that is not allowed.
    """
    if len(name) > LONGEST_NAME:
        raise SpecError(key, f"has {len(name)} characters. Use at most {LONGEST_NAME}.", name)
    if not _NAME.fullmatch(name) or name in RESERVED:
        accepted = f"Use letters, digits and hyphens, but not the names {', '.join(RESERVED)}."
        raise SpecError(key, f"is not a valid name. {accepted}", name)


class SiteEntry(Setting):
    """The entry of a site in ``sites.toml``.

    Args:
        data: The path of the site's data file, on the site's machine. Instead of this entry, the site's own settings
            can name the file.
        keys: The folder on the site's machine with the keys for masking labels. All sites have the same keys.
        allow: Top-level packages at the site. A spec may name code of these packages, as ``module:Class``.
        catalog: Data sets and files on the site's machine. In a trial without the sites' own data, a spec may name
            these data sets and files.
        tells: Whether the site also sends metrics on its own samples. In any case, the site sends sums, from which the
            server computes the metrics over all sites.
    """

    data: str | None = None
    keys: str | None = None
    allow: list[str] = []
    catalog: list[str] = []
    tells: bool = False


class ServerEntry(Setting):
    """The entry of the server in ``sites.toml``.

    Args:
        host: The server's host name, to which sites connect.
        port: The port to which sites and administrators connect. The port must be open.
        data: The server's file of test samples, if the sites have their own data. Without this file, each site
            evaluates the model on a part of its own data (``evaluation.client_test``).
        allow: Top-level packages at the server. A spec may name code of these packages, as ``module:Class``.
        catalog: Data sets and files at the server that a spec may name.
    """

    host: str = "localhost"
    port: int = Field(default=8002, ge=1, le=65535)
    data: str | None = None
    allow: list[str] = []
    catalog: list[str] = []


class Sites(Setting):
    """The content of ``sites.toml``, which describes a federation.

    Args:
        federation: The name of the federation. All certificates of the federation contain this name.
        patience: The number of seconds within which a site must answer.
        least: The minimum number of sites that must answer, both before the first round and in every round.
        fewer: What the server does if fewer than ``least`` sites answer: ``wait`` until enough sites answer again,
            ``abort`` the run, or ``go-on`` with fewer sites.
        relay: The route of a model that clients train one after another. ``direct``: the model goes from site to site,
            encrypted from end to end. ``server``: the model returns to the server after every client.
        days: The number of days for which the certificates are valid.
        server: The server.
        own_data: Whether each site is one client with its own data, which the spec's ``[data]`` describes. Otherwise,
            the spec's partition divides the spec's data set among the sites, for a trial.
        policy: Settings that replace the defaults in the sites' initial policies. Each site may change its own policy
            later.
        site: A mapping from the name of each site (letters, digits and hyphens) to its entry. If the sites
            have their own data, the first site is client 0, the second site is client 1, and so on.
    """

    federation: str = "fedstrata"
    patience: PositiveFloat = PATIENCE
    least: PositiveInt = 1
    fewer: Fewer = "wait"
    relay: Literal["direct", "server"] = "direct"
    days: PositiveInt = 365
    server: ServerEntry = ServerEntry()
    own_data: bool = False
    policy: Policy = Policy()
    site: dict[str, SiteEntry] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> Sites:
        for key, name in (("federation", self.federation), *(("site", name) for name in self.site)):
            check_name(key, name)
        host = self.server.host
        if ":" in host:
            problem = (
                "is an IPv6 address or has a port. Give a host name or an IPv4 address, and set the port with "
                "the key 'port'."
            )
            raise SpecError("server.host", problem, host)
        if len(host) > LONGEST_NAME:
            raise SpecError("server.host", f"has {len(host)} characters. Use at most {LONGEST_NAME}.", host)
        if self.least > len(self.site):
            raise SpecError("least", f"is above the number of sites. Use at most {len(self.site)}.", self.least)
        files = {"server": self.server.data, **{f"site.{name}": entry.data for name, entry in self.site.items()}}
        for party, file in files.items():
            if file and not self.own_data:
                problem = "requires own_data = true. Set own_data = true, or remove this key."
                raise SpecError(f"{party}.data", problem, file)
        return self

    @classmethod
    def read(cls, path: Path) -> Sites:
        """Read the description of a federation from a TOML file.

        Raises:
            SpecError: The file is missing or is not TOML, or a setting is wrong. The message gives the line.
        """
        return read_setting(cls, path, "--sites")

    def settings_of(self, name: str, base_dir: Path | None) -> SiteSettings:
        """Return the initial settings of a site.

        Args:
            name: The name of the site.
            base_dir: The folder to which relative paths refer in a trial on this machine. If None, paths refer to the
                site's own machine, and stay as they are.
        """
        entry = self.site[name]
        given: dict[str, Any] = {key: path_of(getattr(entry, key), base_dir) for key in ("data", "keys")}
        given |= {key: getattr(entry, key) for key in ("allow", "catalog", "tells")}
        return SiteSettings(patience=self.patience, secure=True, **given)

    def site_of_client(self, spec: Experiment) -> tuple[str, ...]:
        """Return the name of each client's site, in the order of the clients.

        Raises:
            SpecError: There are fewer clients than sites.
        """
        names = list(self.site)
        if self.own_data:
            return tuple(names)
        clients = prepare(spec).config.clients
        if clients < len(names):
            raise SpecError(
                "partition.clients",
                f"there are {len(names)} sites, each with at least one client. Use at least {len(names)}.",
                clients,
            )
        return tuple(names[client * len(names) // clients] for client in range(clients))


def path_of(given: str | None, base_dir: Path | None) -> Path | None:
    """Convert a string from ``sites.toml`` to a path. If ``base_dir`` is not None, the path is absolute."""
    if given is None:
        return None
    path = Path(given).expanduser()
    return path if base_dir is None else (base_dir / path).absolute()


def policy_of(spec: Experiment, sites: Sites) -> Policy:
    """Return the policy with which all sites begin. This policy allows only this job.

    The values in ``sites.policy`` replace the policy's default values.
    """
    defaults: dict[str, Any] = {"jobs": "approved", "approved": [hash_of(spec)], "methods": [spec.method.name]}
    defaults |= {"rounds": spec.training.rounds, "relay": sites.relay}
    if spec.privacy.sums == "secure":
        defaults |= {"sums": "secure", "parties": spec.privacy.parties}
        if (dp := spec.privacy.clients) is not None:
            defaults |= {"client_noise": dp.noise, "colluding": dp.colluding}
    given = {key: getattr(sites.policy, key) for key in sites.policy.model_fields_set}
    return Policy(**defaults | given)
