"""Add up tensors of clients at several sites, for example for BatchNorm over a batch with samples of all clients.

For each sum, a site sends the terms of all its clients in one call, and receives the total.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from fedstrata.base import records
from fedstrata.base.errors import WireError
from fedstrata.models.batchnorm import GroupBrokenError, LocalGroup
from fedstrata.sites.idempotency import RequestCache
from fedstrata.sites.wire import Part, Refused, SiteRefusedError, Total, read

SHARE = 0.4
"""The time that clients may wait for each other in each sum, as a fraction of the time for a whole reply."""


class Sums:
    """An object at the server that adds up tensors. For each sum, the server waits for the terms of all sites.

    Terms are added in the order of the clients, not in the order of arrival. Totals are therefore the same as if all
    clients were in one process (``LocalGroup``).

    The server's time limit for the terms of a sum is shorter than its limit for a site's whole reply. Therefore, a site
    that hangs does not delay the replies of the other sites.

    Args:
        patience: The number of seconds that a site has for its whole reply.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience * SHARE
        self._lock = threading.Lock()
        self._groups: dict[str, tuple[LocalGroup, dict[str, set[int]]]] = {}
        self._caches: dict[tuple[str, str], RequestCache] = {}

    def open(self, group: str, places: dict[str, set[int]]) -> None:
        """Begin to accept and add up the tensors of a new group of clients.

        Args:
            group: The name of the group.
            places: A mapping from each site to the indices of its clients within the group.
        """
        with self._lock:
            self._groups[group] = LocalGroup(sum(map(len, places.values())), self.patience), places

    def abort(self, group: str, reason: str) -> None:
        """Make the current sum and all further sums of a group of clients fail."""
        with self._lock:
            entry = self._groups.get(group)
        if entry is not None:
            entry[0].abort(reason)

    def leave(self, group: str, site: str) -> None:
        """Record that a site has sent its clients' replies, and will not send terms for further sums."""
        with self._lock:
            members, places = self._groups.get(group, (None, {}))
        if members is not None:
            members.leave(*places[site])

    def close(self, group: str) -> None:
        """Remove the data of a group of clients after all sums of the group are computed."""
        self.abort(group, "the group of clients no longer exists")
        with self._lock:
            _, places = self._groups.pop(group, (None, {}))
            for site in places:
                self._caches.pop((group, site), None)

    def add_up(self, site: str, data: object) -> bytes:
        """Return the reply to a site's ``Part`` (its terms of a sum): ``Total``, or ``Refused`` after ``abort``."""
        try:
            part: Part = read(data, Part)
            with self._lock:
                group, places = self._groups.get(part.group, (None, {}))
            if group is None:
                raise GroupBrokenError("the group of clients no longer exists")
            if set(part.places) != places.get(site) or len(part.tensors) != len(part.places):
                raise WireError(
                    f"site {site} must send one term for each of its own clients, but sent terms for {part.places}"
                )
            with self._lock:
                cache = self._caches.setdefault((part.group, site), RequestCache())
            added = dict(zip(part.places, part.tensors, strict=True))
            return cache.answer(part.step, lambda: records.encode(Total(group.add(added))))
        except (GroupBrokenError, WireError, SiteRefusedError) as error:
            return records.encode(Refused(str(error)))


class SiteGroup(LocalGroup):
    """The clients of one site. They run in threads, and add up tensors with clients at other sites.

    Args:
        group: The name of the group.
        places: The indices of the site's clients within the group.
        send: A function that sends an encoded ``Part`` to the server, and returns the reply.
        patience: The number of seconds within which the site must reply. A client waits at most this time
            × ``SHARE`` for the other clients.
    """

    def __init__(self, group: str, places: Sequence[int], send: Callable[[bytes], object], patience: float) -> None:
        super().__init__(len(places), patience * SHARE)
        self._group, self._places, self._send = group, list(places), send
        self._steps = itertools.count(1)

    def _add_up(self, parts: list[Tensor]) -> Tensor:
        try:
            part = Part(self._group, self._places, parts, next(self._steps))
            total: Total = read(self._send(records.encode(part)), Total)
        except Exception as error:
            raise GroupBrokenError(f"a client of the group failed: {error}") from error
        return total.tensor
