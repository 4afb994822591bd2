"""Limit a site's privacy loss: the ε of DP-SGD (``privacy.dp``) over all rounds and jobs.

The site adds up Rényi divergences of one order. The site chooses this order at its first step under a budget, and never
changes the order. The total is therefore an upper bound of ε even if jobs depend on earlier replies (Feldman and Zrnic
2021, Theorem 4.1). Before the first step of a round, the site records the round's steps on the disk. An interrupted job
has therefore spent the budget of all rounds that it began.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from fedstrata.base.errors import DataError
from fedstrata.base.jsonl import replace_file, sync_folder
from fedstrata.base.locking import LOCK
from fedstrata.federation.messages import ClientId
from fedstrata.runs.accountant import ORDERS, divergences, dp_accounting
from fedstrata.sites.policy import Policy, RuleError

FILE = "privacy.json"

Steps = tuple[str, ClientId, float, float]
"""The key under which steps are counted: the job, the client, the noise, and the sampling probability.

The job is a string: the hash of the job, a slash, and the federation. The clients of a job have different samples. If a
site copies its file into another federation's kit, the same spec is another job there, because the site's client may
have another id.
"""


@dataclass
class Spending:
    """The privacy loss that a site's file records.

    Args:
        order: The order of the Rényi divergences that are added up; None until the first step under a budget.
        steps: The number of steps for each key; see ``Steps``.
    """

    order: int | None = None
    steps: dict[Steps, int] = field(default_factory=dict)

    def by_job(self) -> dict[str, NDArray[np.float64]]:
        """Return each job's Rényi divergences: for each of ``ORDERS``, the maximum over the job's clients."""
        clients: dict[tuple[str, ClientId], NDArray[np.float64]] = defaultdict(lambda: np.zeros(len(ORDERS)))
        for (job, client, noise, rate), count in self.steps.items():
            clients[job, client] += count * divergences(noise, rate)
        jobs: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(len(ORDERS)))
        for (job, _), divergence in clients.items():
            jobs[job] = np.maximum(jobs[job], divergence)
        return jobs

    def total(self) -> NDArray[np.float64]:
        """Return, for each of ``ORDERS``, the sum of the Rényi divergences of all jobs."""
        total: NDArray[np.float64] = sum(self.by_job().values(), np.zeros(len(ORDERS)))
        return total


class PrivacyBudget:
    """The privacy budget of one site. Several processes may use the budget at the same time.

    Args:
        folder: The folder that contains the budget's file.
        policy: The site's policy, which sets the maximum ε (``budget``) and δ (``delta``).
        federation: A string without slashes that identifies the federation; see ``certificates.federation_of``.
    """

    def __init__(self, folder: Path, policy: Policy, federation: str = "") -> None:
        self._path, self._most, self._delta, self._federation = folder / FILE, policy.budget, policy.delta, federation

    def spend(self, job: str, client: ClientId, *, noise: float, rate: float, steps: int) -> None:
        """Record on disk how many steps a client takes in a round, before the client takes these steps.

        Args:
            job: The hash of the job.
            client: The client.
            noise: The standard deviation of the noise, as a multiple of the maximum norm of a gradient
                (``privacy.dp.clip``).
            rate: The probability that a sample is used in a step.
            steps: The number of steps.

        Raises:
            RuleError: The round would exceed the budget. Nothing is written.
            DataError: The file is damaged.
            ExtraMissingError: The extra ``dp`` is not installed.
        """
        with self._changing() as spending:
            self._add(spending, (f"{job}/{self._federation}", client, noise, rate), steps)
            if self._most is not None and self._epsilon(spending) > self._most:
                problem = "another round would exceed the site's privacy budget for all jobs together"
                accepted = f"ε = {self._most:g} at δ = {self._delta:g}. Only the site can raise policy.budget"
                raise RuleError("policy.budget", f"{problem}, {accepted}")

    def total_after(self, job: str, client: ClientId, *, noise: float, rate: float, steps: int) -> float:
        """Return the total ε of all jobs after further steps of a client; see ``spend``. Nothing is written.

        Raises:
            DataError: The file is damaged.
            ExtraMissingError: The extra ``dp`` is not installed.
        """
        spending = self._read()
        self._add(spending, (f"{job}/{self._federation}", client, noise, rate), steps)
        return self._epsilon(spending)

    def epsilon_of(self, *, noise: float, rate: float, steps: int) -> float:
        """Return the ε of a job in which a client takes a number of steps; see ``spend``.

        Raises:
            ExtraMissingError: The extra ``dp`` is not installed.
        """
        return self._epsilon_of_job(Spending(steps={("", 0, noise, rate): steps}), "")

    def _add(self, spending: Spending, key: Steps, steps: int) -> None:
        """Add steps. If these are the first steps with a budget, also choose the order."""
        if spending.order is None and self._most is not None:
            *_, noise, rate = key
            spending.order = self._order(spending, divergences(noise, rate), self._most)
        spending.steps[key] = spending.steps.get(key, 0) + steps

    def report(self) -> dict[str, Any]:
        """Compute the total ε of all jobs, and the ε of each job, with privacy loss distributions (PLD).

        The result is empty if the site has not recorded steps with ``privacy.dp``.

        Raises:
            DataError: The file is damaged.
            ExtraMissingError: The extra ``dp`` is not installed.
        """
        spending = self._read()
        if not spending.steps:
            return {}
        jobs = [
            {
                "job": job.partition("/")[0],
                "steps": sum(count for key, count in spending.steps.items() if key[0] == job),
                "epsilon": self._epsilon_of_job(spending, job),
            }
            for job in spending.by_job()
        ]
        return {
            "epsilon": self._epsilon(spending),
            "budget": self._most,
            "delta": self._delta,
            "order": spending.order,
            "jobs": jobs,
        }

    @contextmanager
    def _changing(self) -> Iterator[Spending]:
        """Read the file before the ``with`` block and, if the block succeeds, replace the file afterwards."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._path.with_suffix(LOCK)):
            spending = self._read()
            yield spending
            rows = [[*key, count] for key, count in spending.steps.items()]
            replace_file(self._path, json.dumps({"order": spending.order, "steps": rows}).encode(), mode=0o600)
            sync_folder(self._path.parent)

    def _read(self) -> Spending:
        if not self._path.exists():
            return Spending()
        try:
            table = json.loads(self._path.read_text(encoding="utf-8"))
            return Spending(
                table["order"], {(job, client, *kind): count for job, client, *kind, count in table["steps"]}
            )
        except (ValueError, KeyError, TypeError):
            problem = "the file is damaged, so the site's privacy loss is unknown. Restore the file from a copy."
            raise DataError(f"{self._path}: {problem}") from None

    def _order(self, spending: Spending, step: NDArray[np.float64], most: float) -> int:
        """Return the order of the Rényi divergence that allows the most steps within the budget.

        Args:
            spending: The steps that clients took before the site had a budget.
            step: The divergence of one step for each of ``ORDERS``.
            most: The maximum ε.
        """
        orders = np.array(ORDERS)
        # A Rényi divergence d of order α corresponds to ε = d + log(1 − 1/α) − (log δ + log α) / (α − 1) (Canonne et
        # al. 2020).
        added = np.log1p(-1 / orders) - (math.log(self._delta) + np.log(orders)) / (orders - 1)
        return int(orders[np.argmax((most - added - spending.total()) / step)])

    def _epsilon(self, spending: Spending) -> float:
        """Return the total ε of all jobs, with the fixed order. Without a budget, use the order with the smallest ε."""
        orders = ORDERS if spending.order is None else [spending.order]
        divergence = spending.total()[[ORDERS.index(order) for order in orders]]
        epsilon, _ = dp_accounting().rdp.compute_epsilon(orders, divergence, self._delta)
        return float(epsilon)

    def _epsilon_of_job(self, spending: Spending, job: str) -> float:
        """Return the maximum ε over a job's clients, computed with privacy loss distributions."""
        library, clients = dp_accounting(), defaultdict[ClientId, list[Any]](list)
        for (name, client, noise, rate), count in spending.steps.items():
            if name == job:
                step = library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise))
                clients[client].append(library.SelfComposedDpEvent(step, count))
        epsilons = []
        for events in clients.values():
            accountant = library.pld.PLDAccountant()
            for event in events:
                accountant.compose(event)
            epsilons.append(float(accountant.get_epsilon(self._delta)))
        return max(epsilons)
