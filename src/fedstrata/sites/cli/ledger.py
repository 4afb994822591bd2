"""The command ``fedstrata ledger``, which shows and verifies the ledger of a site's replies."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedstrata.base.printable import csv_cell, print_lines
from fedstrata.cli import common
from fedstrata.cli.layout import say

OUTCOME = ("refused", "failed", "to")
SUMS = ("exchange", "roster", "members", "noise")
COLUMNS = ("n", "at", "run", "client", "kind", "phase", "round", "samples", "bytes", "epsilon", *OUTCOME, *SUMS)


def add_ledger(commands: common.Commands) -> None:
    """Add the command ``fedstrata ledger``."""
    examples = """
        fedstrata ledger kits/hospital-a
        fedstrata ledger kits/hospital-a --verify --told result
        fedstrata ledger kits/hospital-a --csv
    """
    help = "show what a site sent according to its ledger (log of replies), and check that the ledger is intact"
    parser = common.add_command(commands, "ledger", help, examples, work=_ledger)
    parser.add_argument("kit", type=Path, metavar="KIT", help="folder of the site, created by 'fedstrata deploy'")
    help = "verify all checksums and, with --told, that the ledger was not cut off; the exit code is 1 on failure"
    parser.add_argument("--verify", action="store_true", help=help)
    help = "server's run folder, or the file ledgers.jsonl in this folder, to compare the ledger with; needs --verify"
    parser.add_argument("--told", type=Path, metavar="RUN", help=help)
    parser.add_argument(
        "--site", metavar="NAME", help="name under which the server knows the site (default: name of the folder)"
    )
    parser.add_argument("--csv", action="store_true", help="print every entry as a line of CSV")
    common.add_output(parser, progress=False)


def _ledger(options: argparse.Namespace) -> int:
    from fedstrata.sites.ledger import PLACE, check, heads_of, totals
    from fedstrata.sites.policy import Policy
    from fedstrata.sites.privacy_budget import PrivacyBudget

    log_heads = heads_of(options.told, options.site or options.kit.resolve().name) if options.told else []
    checked = check(options.kit / PLACE, log_heads)
    privacy = PrivacyBudget(options.kit / PLACE, Policy.read(options.kit)).report()
    if options.json:
        whole: dict[str, Any] = {"whole": not checked.problems, "problems": checked.problems, "notes": checked.notes}
        whole |= {"privacy": privacy} if privacy else {}
        common.print_json({"questions": totals(checked.entries), "entries": len(checked.entries), **whole})
        return int(bool(checked.problems))
    if options.csv:
        writer = csv.DictWriter(sys.stdout, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: csv_cell(value) for key, value in entry.items()} for entry in checked.entries)
    elif not options.verify:
        for row in totals(checked.entries):
            replies = "1 reply" if row["answers"] == 1 else f"{row['answers']} replies"
            parts = [f"{row['run']}  {row['question']}: {replies}"]
            parts += [f"{row[key]} {key}" for key in ("refused", "failed") if row[key]]
            fewest, epsilon, noise = row["fewest_samples"], row["epsilon"], row["least_noise"]
            parts += [f"{'each ' * (row['answers'] != 1)}from at least {fewest} samples"] if fewest is not None else []
            parts += [f"{row['bytes']} bytes", *([f"ε = {epsilon:g} in all"] if epsilon else [])]
            parts += [f"with noise of at least {noise:.3g} × privacy.clients.clip"] if noise is not None else []
            print_lines(", ".join(parts))
        for line in _privacy(privacy) if privacy else ():
            print_lines(line)
    for note in checked.notes:
        say(f"note: {note}")
    for problem in checked.problems:
        say(f"fedstrata: {problem}")
    if options.verify and not checked.problems:
        print(
            f"intact: {len(checked.entries)} entries" + (", which agree with the server's record" if log_heads else "")
        )
    return int(bool(checked.problems))


def _privacy(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the ε that jobs with ``privacy.dp`` have spent."""
    limit = "" if report["budget"] is None else f" of {report['budget']:g}"
    order = "" if report["order"] is None else f", by the Rényi order {report['order']}"
    yield f"privacy of samples: all jobs spent ε = {report['epsilon']:.3f}{limit} (δ = {report['delta']:g}{order})"
    for job in report["jobs"]:
        yield f"{job['job']}  privacy of samples: ε = {job['epsilon']:.3f} in {job['steps']} steps (PLD)"


COMMANDS = (add_ledger,)
