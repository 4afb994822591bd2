"""Measure how often 95 % bootstrap intervals of a mean contain the true mean, for several numbers of values.

    python benchmarks/bootstrap_coverage.py [--trials 600]

The values are normal with mean 0. The intervals are percentile intervals, as in tables of runs, and bias-corrected
accelerated (BCa) intervals.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
from scipy.stats import bootstrap

from fedstrata.reporting.statistics import LEVEL, RESAMPLES


def covered(method: str, values: np.ndarray) -> float:
    """Return the share of the rows of ``values`` whose interval contains 0."""
    inside = 0
    for row in values:
        found = bootstrap(
            (row,),
            np.mean,
            confidence_level=LEVEL,
            n_resamples=RESAMPLES,
            method=method,
            rng=np.random.default_rng(0),
        ).confidence_interval
        inside += bool(found.low <= 0 <= found.high)
    return inside / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=600)
    trials = parser.parse_args().trials
    print("| values | percentile, % | BCa, % |\n|---|---|---|")
    for n in (2, 3, 5, 10):
        values = np.random.default_rng(n).normal(size=(trials, n))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # BCa is not defined for two values
            shares = [covered(method, values) for method in ("percentile", "BCa")]
        print(f"| {n} | {shares[0]:.0%} | {shares[1]:.0%} |", flush=True)


if __name__ == "__main__":
    main()
