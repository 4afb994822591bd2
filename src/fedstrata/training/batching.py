"""Which clients are trained side by side: batches of a group are padded to one length, and padding is wasted work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WASTE = 0.2
"""Largest share of padding among a group's samples."""


def grouped(
    profiles: Sequence[NDArray[np.int64]],
    costs: Sequence[float],
    *,
    budget: float,
    most: int | None = None,
    waste: float = WASTE,
) -> list[list[int]]:
    """Groups of clients, first fit.

    A group takes as many steps as its longest client. A client that is done takes no part in the steps that are left,
    so that unequal numbers of steps waste nothing: only batches of unequal size do.

    Args:
        profiles: The batch sizes of every client's steps, shape (K_i,) with K_i ≥ 1 each.
        costs: The memory that each takes, in bytes.
        budget: The memory for one group; a client that takes more is alone.
        most: Most clients in a group; any number unless given.
        waste: Largest share of padding in a group.

    Returns:
        Places among ``profiles``; in each group those with more steps come first.

    >>> grouped([np.array([4]), np.array([1]), np.array([4])], [1.0] * 3, budget=10.0)
    [[0, 2], [1]]
    """
    order = sorted(range(len(profiles)), key=lambda k: (-len(profiles[k]), -int(profiles[k].sum()), k))
    groups: list[_Group] = []
    for place in order:
        profile, cost = profiles[place], costs[place]
        for group in groups:
            fits = group.cost + cost <= budget and (most is None or len(group.members) < most)
            if fits and group.waste_with(profile) <= waste:
                group.add(place, profile, cost)
                break
        else:
            groups.append(_Group(place, profile, cost))
    return [group.members for group in groups]


class _Group:
    def __init__(self, first: int, profile: NDArray[np.int64], cost: float) -> None:
        self.members, self.cost = [first], cost
        self.widths, self.active = profile.copy(), np.ones_like(profile)
        self.real = int(profile.sum())

    def waste_with(self, profile: NDArray[np.int64]) -> float:
        """The share of padding if a client of no more steps joined."""
        widths, active = self.widths.copy(), self.active.copy()
        np.maximum(widths[: len(profile)], profile, out=widths[: len(profile)])
        active[: len(profile)] += 1
        return 1 - (self.real + int(profile.sum())) / int(widths @ active)

    def add(self, place: int, profile: NDArray[np.int64], cost: float) -> None:
        self.members.append(place)
        self.cost += cost
        np.maximum(self.widths[: len(profile)], profile, out=self.widths[: len(profile)])
        self.active[: len(profile)] += 1
        self.real += int(profile.sum())
