"""Describe the meaning and the limits of ε in a run with sample-level differential privacy (``privacy.dp``)."""

from __future__ import annotations

from typing import Any

from fedstrata.spec.experiment import Experiment

OUTSIDE = {
    "sizes": "the number of training samples of each client",
    "normalization": "the statistics by which features are normalised",
    "imputation": "the statistics by which missing values are imputed",
    "labels": "the statistics of the labels",
    "evaluation": "the results of evaluations on the clients' samples",
}
"""The values that a run computes from clients' samples without adding noise. The keys are names in
``policy.outside_dp``."""

SEEDED = "no privacy: seeded, so anyone who knows the seed can remove the noise"
AT_SITES = "protects against everyone outside the site, including the server"
"""Descriptions of the protection by noise: in a simulation (``SEEDED``), and in a deployment (``AT_SITES``)."""


def outside_epsilon(spec: Experiment, *, evaluates: bool) -> tuple[str, ...]:
    """Return the names of the values that a run computes from clients' samples without adding noise; see ``OUTSIDE``.

    Args:
        spec: The experiment.
        evaluates: Whether clients evaluate models on their own samples.
    """
    data = spec.data
    columns = [] if data.schema is None else data.schema.inputs.values()
    holds = {
        "sizes": True,
        "normalization": data.normalize in ("standard", "unit") and data.shift is None,
        "imputation": any(column.learnt for column in columns),
        "labels": spec.task is not None and spec.task.fits,
        "evaluation": evaluates,
    }
    return tuple(name for name in OUTSIDE if holds[name])


def privacy_record(spec: Experiment, *, secret: bool, evaluates: bool) -> dict[str, Any]:
    """Return the description of a run's privacy for the run folder. Without ``privacy.dp``, the description is empty.

    Args:
        spec: The experiment.
        secret: Whether the sites' operating systems generate the noise.
        evaluates: Whether clients evaluate models on their own samples.
    """
    dp = spec.privacy.dp
    if dp is None:
        return {}
    return {
        "unit": "one sample of one client",
        "neighbours": "data sets that differ by one additional sample",
        "delta": dp.delta,
        "accountant": "Rényi differential privacy (dp-accounting)",
        "noise": "the operating system of each site" if secret else "the seed of the spec",
        "protection": AT_SITES if secret else SEEDED,
        "outside": {name: OUTSIDE[name] for name in outside_epsilon(spec, evaluates=evaluates)},
    }
