"""Define rules that recommend which methods to compare. A rule applies if a measured property reaches a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fedstrata.papers.recommend.properties import Properties


class Claim(NamedTuple):
    """A claim about a method, with its source.

    Args:
        text: One or more sentences that state the claim.
        source: A paper, or a page of this documentation with our own result.
    """

    text: str
    source: str


class Rule(NamedTuple):
    """A rule that recommends methods to compare if a measured property is ``least`` or more.

    Args:
        key: Name of the property in ``Properties``.
        least: Minimum value of the property (the rule's limit). Limits are conventions: we have not measured at which
            value a method begins to help. If a rule cites one of our results, the setting of this result satisfies the
            rule.
        methods: A mapping from each method to a claim about the method.
    """

    key: str
    least: float
    methods: Mapping[str, Claim]

    def holds(self, measured: Properties) -> bool:
        """Return True if the property is known and reaches the limit."""
        value = getattr(measured, self.key)
        return value is not None and value >= self.least


RULES = (
    Rule(
        "label_skew",
        0.5,
        {
            "stratify": Claim(
                "On MNIST with Dirichlet 0.01, Stratify reaches 98.2 ± 0.1 % and FedAvg 59.8 ± 18.7 % (5 seeds), but "
                "Stratify sends 2,300 times as many bytes.",
                "docs/methods/index.md",
            ),
            "fedntd": Claim(
                "With distillation, clients keep the global model's knowledge of classes that they do not have.",
                "arXiv:2106.03097",
            ),
        },
    ),
    Rule(
        "absent_replies",
        0.03,
        {
            "rebafl": Claim(
                "ReBaFL generates features of classes that a client does not have. On Fashion-MNIST with dropouts, "
                "ReBaFL is 2.3 points [1.4, 3.2] more accurate than FedAvg (5 seeds). With absences of 20 rounds, "
                "ReBaFL was 2.0 points less accurate than FedAvg in one run, and 7.2 to 9.1 points more accurate on "
                "the board (5 seeds, not significant).",
                "docs/methods/class-imbalance.md",
            ),
            "feddyn": Claim(
                "On Fashion-MNIST with dropouts, FedDyn is 4.1 points [1.8, 6.5] more accurate than FedAvg (5 seeds).",
                "docs/results/rebafl.md",
            ),
        },
    ),
    Rule(
        "absent_uninvited",
        0.05,
        {
            "fedgs": Claim(
                "FedGS invites clients with different labels. On the data set digits without dropouts, FedGS is 3.2 "
                "points [0.2, 6.1] more accurate than FedAvg (5 seeds). With dropouts, the difference is not "
                "significant.",
                "docs/methods/samplers-labels.md",
            ),
        },
    ),
    Rule(
        "online_skew",
        0.1,
        {
            "fedau": Claim("FedAU multiplies an update by the client's mean time between replies.", "arXiv:2306.03401"),
            "fedawe": Claim(
                "FedAWE multiplies an update by the number of rounds since the client's last reply.", "arXiv:2409.17446"
            ),
        },
    ),
    Rule(
        "offline_rounds",
        10,
        {
            "mifa": Claim(
                "MIFA replaces an absent client's update by the client's latest update, which the server stores.",
                "arXiv:2106.04159",
            ),
        },
    ),
    Rule(
        "step_imbalance",
        0.2,
        {"fednova": Claim("FedNova divides each update by the client's number of steps.", "arXiv:2007.07481")},
    ),
)
"""All rules. Their order is not a ranking, but decides which methods are left out if too many are recommended."""
