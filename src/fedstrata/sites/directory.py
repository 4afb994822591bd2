"""The server's list of sites: the clients of each site, and whether the site takes part in the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from fedstrata.base.errors import FedstrataError
from fedstrata.federation.messages import ClientId
from fedstrata.sites.wire import SiteLostError, SiteRefusedError

LOG = logging.getLogger(__name__)

WAIT = 0.5
"""The number of seconds between two checks whether enough sites can be reached."""

Fewer = Literal["wait", "abort", "go-on"]
"""What the server does if it reaches too few sites: wait for more, end the run, or continue with fewer."""


class SiteDirectory:
    """A directory of the sites of a run: the clients of each site, and whether the site takes part.

    Args:
        site_of_client: The name of each client's site. The index in this list is the client's id.
        is_reachable: A function that returns True if a site can probably be reached now, and raises an error if the job
            is over.
        least: The minimum number of sites that must reply, before the first round and in every round.
        fewer: The server's action if fewer than ``least`` sites reply.
    """

    def __init__(
        self, site_of_client: Sequence[str], is_reachable: Callable[[str], bool], least: int, fewer: Fewer
    ) -> None:
        self.site_of_client, self.is_reachable = list(site_of_client), is_reachable
        self.least, self.fewer = least, fewer
        self.sites = sorted(set(site_of_client))
        self.excluded: dict[str, str] = {}
        """The sites that are left out of the run, each with the reason."""
        self._warned: dict[str, str] = {}
        self._lost: set[str] = set()
        """Sites that did not reply to the last message in time."""
        self._refusing: dict[str, str] = {}
        """The sites whose policy refuses all requests until this job ends, each with the reason."""

    def clients_of(self, site: str) -> list[ClientId]:
        """Return the ids of a site's clients, in ascending order."""
        return [client for client, its_site in enumerate(self.site_of_client) if its_site == site]

    def participants(self) -> list[str]:
        """Return the sites that are not excluded."""
        return [site for site in self.sites if site not in self.excluded]

    def present(self) -> set[str]:
        """Return the participants that can be reached."""
        return {site for site in self.participants() if self.is_reachable(site)}

    def exclude(self, site: str, error: FedstrataError) -> None:
        """Exclude a site from the run, and log the reason if the reason is new."""
        reason = f"site {site} does not take part: {str(error).removeprefix(f'site {site}: ')}"
        if self._warned.get(site) != reason:
            LOG.warning("%s", reason)
        self.excluded[site] = self._warned[site] = reason

    def record(self, site: str, error: FedstrataError | None) -> None:
        """Record whether a site replied to a message.

        Args:
            site: The site.
            error: The reason why the site's reply is missing or cannot be used; None if the reply can be used.
        """
        if error is None:
            self._lost.discard(site)
            self._refusing.pop(site, None)
        elif isinstance(error, SiteLostError):
            self._lost.add(site)
        elif isinstance(error, SiteRefusedError) and error.for_good:
            self._refusing[site] = f"site {site}: {error}"

    def status(self, site: str) -> tuple[str, str]:
        """Return a site's state and the reason for this state.

        The states are ``in`` (the site takes part), ``refused``, ``gone`` (the site cannot be reached) and ``late``
        (the site's last reply did not come in time). If the state is ``in``, the reason is empty.
        """
        if site in self.excluded:
            return "refused", self.excluded[site]
        if not self.is_reachable(site):
            return "gone", "it has not joined, or cannot be reached"
        if site in self._refusing:
            return "refused", self._refusing[site]
        return ("late", "its last reply did not come in time") if site in self._lost else ("in", "")

    def require_begun(self, count: int) -> None:
        """Check that enough sites can begin the run.

        Args:
            count: The number of sites that can begin.

        Raises:
            SiteLostError: All sites are unreachable.
            FedstrataError: No site can begin, or ``fewer`` is ``abort`` and too few sites can begin.
        """
        if not count:
            reasons = _listed(self.excluded.values())
            if self._lost >= set(self.sites):
                raise SiteLostError(f"none of the sites can be reached: {reasons}")
            raise FedstrataError(f"none of the sites takes part: {reasons}")
        self._refuse_fewer(count)

    def gather(self) -> None:
        """Before the server sends requests to sites, check whether enough sites can be reached.

        If too few sites can be reached, ``fewer`` decides whether to wait, continue or end the run.

        Raises:
            FedstrataError: Too few sites can be reached, and ``fewer`` is ``abort``.
        """
        if self.fewer == "wait" and len(self.participants()) >= self.least:
            self.wait(lambda: len(self.present()) >= self.least)
        self._refuse_fewer(len(self.present()))

    def require_enough(self, outcomes: Iterable[object]) -> None:
        """End the run if too few sites replied to the server's requests.

        Without this check, the run would finish its remaining rounds without clients. An ended run can be resumed when
        its sites can be reached again.

        Args:
            outcomes: The sites' replies and errors. If all sites are unreachable, ``SiteLostError`` quotes their
                errors.

        Raises:
            SiteLostError: All sites are unreachable.
            FedstrataError: Too many sites refuse all requests, or ``fewer`` is ``abort`` and too few sites can be
                reached.
        """
        self.require_willing(self.excluded)
        out = self._lost | self.excluded.keys()
        if self.fewer == "wait" and len(self.present()) < self.least:
            return  # before the next exchange, ``gather`` waits for sites
        if out >= set(self.sites):
            raise SiteLostError(f"none of the sites can be reached: {'; '.join(map(str, outcomes))}")
        self._refuse_fewer(len(self.sites) - len(out))

    def require_willing(self, excluded: Collection[str]) -> None:
        """End the run if too many sites refuse all further requests of the job. Waiting cannot help in this case.

        Args:
            excluded: The sites that are excluded until the run ends.

        Raises:
            FedstrataError: Fewer sites than required are left, and ``fewer`` is not ``go-on``.
        """
        willing = len(self.sites) - len(self._refusing.keys() | set(excluded))
        if self._refusing and willing < self.least and self.fewer != "go-on":
            reasons = _listed(self._refusing.values())
            raise FedstrataError(
                f"only {willing} sites can take part, but the setting 'least' requires {self.least}: {reasons}"
            )

    def _refuse_fewer(self, count: int) -> None:
        if self.fewer == "abort" and count < self.least:
            present = self.present()
            away = [site for site in self.sites if site not in present]
            reasons = _listed(self.excluded.get(site, f"site {site} cannot be reached") for site in away)
            raise FedstrataError(
                f"only {count} sites answered, but the setting 'least' requires {self.least}: {reasons}"
            )

    def wait_for_any(self, sites: Sequence[str]) -> None:
        """Wait until at least one of these sites can be reached."""
        self.wait(lambda: any(map(self.is_reachable, sites)))

    def wait(self, ready: Callable[[], bool], seconds: float = float("inf")) -> None:
        """Wait until ``ready`` returns True or the time limit ``seconds`` is over. Log once which sites are missing."""
        end, warned = time.monotonic() + seconds, False
        while not ready() and time.monotonic() < end:
            if not warned:
                present = self.present()
                away = ", ".join(site for site in self.sites if site not in present)
                LOG.warning("fewer than %d sites answer. The run waits for %s", self.least, away)
            warned = True
            time.sleep(WAIT)


def _listed(reasons: Iterable[str]) -> str:
    """Join reasons into one string, and remove the full stop at the end of each reason."""
    return "; ".join(reason.rstrip(".") for reason in reasons)
