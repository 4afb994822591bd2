"""Compare methods for absent clients over more rounds, and with larger learning rates, than on the board.

    python benchmarks/more_rounds.py run
    python benchmarks/more_rounds.py table

The settings are those of five columns of the board. The columns ``fedau-…`` have the setting of FedAU's paper:
250 clients are online with a mean probability of 0.1. Each method tries four learning rates on validation samples with
one seed, and then runs with five other seeds. Several processes of this program share the runs. Finished runs are not
repeated.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedstrata.papers.board.judging import judged
from fedstrata.papers.board.protocol import BASELINE, Protocol, read
from fedstrata.papers.board.running import Board
from fedstrata.papers.comparing import difference_text
from fedstrata.reporting.statistics import Estimate
from fedstrata.reporting.tables import markdown_table
from fedstrata.spec.experiment import deep_merge

OUT = Path(__file__).parent / "results"
RUNS = Path("runs") / "more-rounds"
COLUMNS = ("fedau-bernoulli", "fedau-markov", "fedau-cyclic", "dirichlet-label", "two-classes-label")
METHODS = (BASELINE, "fedau", "mifa", "fedvarp", "fedawe")
RATES = (0.1, 0.2, 0.4, 0.8)
ROUNDS = 200


def protocol() -> Protocol:
    """Return the board's protocol with more rounds and larger learning rates. Methods tune only the learning rate."""
    board = read()
    evaluation = {"evaluation": {"every": 20}}
    return replace(
        board,
        name="more-rounds",
        rates=RATES,
        rates_with_setting=RATES,
        grid={},
        spec=deep_merge(board.spec, {"training": {"rounds": ROUNDS}, **evaluation}),
        tuning=deep_merge(board.tuning, evaluation),
    )


def run() -> None:
    plan = protocol()
    board = Board(plan, OUT, RUNS, None, partial(print, flush=True))
    for column in COLUMNS:
        board.run(plan.columns([column]), plan.entries(METHODS))
    for name, why in board.failed.items():
        print(f"{name}: {why}")


def table() -> None:
    plan = protocol()
    rows = []
    for column in plan.columns(COLUMNS):
        verdicts = judged(plan, column, plan.entries(METHODS), OUT)
        for name, outcome in verdicts.outcomes.items():
            accuracy = Estimate.over(verdicts.values(name, "accuracy"), (0.0, 100.0))
            compared = name in verdicts.corrected
            difference = difference_text(verdicts.difference(name)) if compared else ""
            p = f"{verdicts.corrected[name]:.3f}" if compared else ""
            rate = str(outcome.settings["training"]["lr"])
            rows.append([column.label, name, rate, f"{accuracy.mean:.1f} ± {accuracy.sd:.1f}", difference, p])
    headings = ["column", "method", "learning rate", "accuracy, %", "− FedAvg", "p (Holm)"]
    print(markdown_table(headings, rows, left=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table"))
    {"run": run, "table": table}[parser.parse_args().action]()
