"""The command ``fedstrata audit``, which attacks the messages that clients sent in a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedstrata.cli import common


def add_audit(commands: common.Commands) -> None:
    """Add ``fedstrata audit`` with one subcommand per kind of audit."""
    examples = """
        fedstrata audit updates runs/fedavg
        fedstrata audit canaries runs/private
    """
    audits = common.add_command(
        commands, "audit", "attack the messages of a run, to measure what they reveal about samples", examples
    )
    kinds = audits.add_subparsers(required=True, metavar="WHAT")
    _add_updates(kinds)
    _add_canaries(kinds)
    _add_gradients(kinds)
    _add_prototypes(kinds)


def _add_gradients(kinds: common.Commands) -> None:
    examples = """
        fedstrata audit gradients runs/stratify
        fedstrata audit gradients runs/stratify --sizes 1 4 16
    """
    help = "reconstruct labels and images from Stratify's gradients, for several numbers of samples per gradient"
    parser = _add_kind(kinds, "gradients", help, examples)
    _add_steps(parser)
    parser.add_argument(
        "--sizes", type=int, nargs="+", metavar="N", help="numbers of samples per attacked gradient (default: 1 2 4 8)"
    )
    parser.add_argument(
        "--parts",
        type=int,
        default=12,
        help="maximum number of gradients to attack for each value of --sizes (default: 12)",
    )
    parser.set_defaults(work=_audit_gradients)


def _add_prototypes(kinds: common.Commands) -> None:
    examples = """
        fedstrata audit prototypes runs/rebafl
        fedstrata audit prototypes runs/rebafl --clients 5 --out audit
    """
    parser = _add_kind(kinds, "prototypes", "reconstruct clients' images from the prototypes that they sent", examples)
    _add_steps(parser)
    parser.add_argument("--clients", type=int, default=3, help="maximum number of clients to attack (default: 3)")
    help = "images that the attacker has: the test set (default), or training samples that no client has (spare)"
    parser.add_argument("--held-out", choices=("test", "spare"), default="test", help=help)
    parser.set_defaults(work=_audit_prototypes)


def _add_updates(kinds: common.Commands) -> None:
    examples = """
        fedstrata audit updates runs/fedavg
        fedstrata audit updates runs/secure --parts 40 --json
    """
    help = "reconstruct images from updates and sums of updates, and infer which samples clients trained on"
    more = (
        "The audit attacks the update of each client, and the sum of all updates of a round. The two attacks are "
        "gradient inversion and membership inference. The table says whether the server sees updates or only their sum."
    )
    parser = _add_kind(kinds, "updates", help, examples, more)
    _add_steps(parser)
    help = "maximum number of updates, and of sums of updates, to attack (default: 12)"
    parser.add_argument("--parts", type=int, default=12, help=help)
    parser.set_defaults(work=_audit_updates)


def _add_canaries(kinds: common.Commands) -> None:
    examples = """
        fedstrata audit canaries runs/private --canaries 5000
        fedstrata audit canaries runs/private --divide-noise 10
    """
    help = "compute a lower bound on ε, from artificial samples (canaries) that an attacker must detect"
    more = (
        "The audit repeats the training from the first round. If the bound is above the ε of the accountant, training "
        "reveals more than this ε allows. With --divide-noise 10, the noise is too small on purpose, so the bound "
        "should be above the ε of the accountant."
    )
    parser = _add_kind(kinds, "canaries", help, examples, more)
    help = "number of artificial samples (default: 1000); with more samples, the bound can be larger"
    parser.add_argument("--canaries", type=int, default=1000, metavar="N", help=help)
    parser.add_argument(
        "--client",
        type=int,
        metavar="ID",
        help="client that gets the artificial samples (default: the client with the most samples)",
    )
    parser.add_argument("--confidence", type=float, default=0.95, help="confidence level of the bound (default: 0.95)")
    help = "number by which to divide the noise, to check the audit itself (default: 1)"
    parser.add_argument("--divide-noise", type=float, default=1.0, metavar="X", help=help)
    parser.set_defaults(work=_audit_canaries)


def _add_kind(kinds: common.Commands, name: str, help: str, examples: str, more: str = "") -> argparse.ArgumentParser:
    parser = common.add_command(kinds, name, help, examples, more)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run to attack")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to store the result in (default: RUN/audit)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the attacks' random numbers (default: 0)")
    common.add_trust(parser)
    common.add_output(parser)
    return parser


def _add_steps(parser: argparse.ArgumentParser) -> None:
    help = "number of optimisation steps of each attack (default: 300)"
    parser.add_argument("--steps", type=int, default=300, help=help)


def _audit_updates(options: argparse.Namespace) -> int:
    from fedstrata.audits import updates

    audit = _run(options, updates.audit_updates, parts=options.parts, steps=options.steps)
    return _show(options, updates, audit, ("md", "json"))


def _audit_canaries(options: argparse.Namespace) -> int:
    from fedstrata.audits import canaries

    settings = {key: getattr(options, key) for key in ("canaries", "client", "confidence", "divide_noise")}
    audit = _run(options, canaries.audit_canaries, **settings)
    return _show(options, canaries, audit, ("md", "json"))


def _audit_gradients(options: argparse.Namespace) -> int:
    from fedstrata.audits import gradients

    sizes = options.sizes or gradients.SIZES
    audit = _run(options, gradients.audit_gradients, sizes=sizes, parts=options.parts, steps=options.steps)
    return _show(options, gradients, audit, ("md", "json"))


def _audit_prototypes(options: argparse.Namespace) -> int:
    from fedstrata.audits import outcome
    from fedstrata.audits.prototypes import audit_prototypes

    audit = _run(options, audit_prototypes, clients=options.clients, held_out=options.held_out, steps=options.steps)
    return _show(options, outcome, audit, ("png", "md", "json"))


def _run(options: argparse.Namespace, audit: Any, **settings: Any) -> Any:
    """Run an audit, show its progress, and return the results."""
    from fedstrata.reporting.progress import Progress

    with Progress(options.quiet) as progress:

        def watch(done: int, total: int, text: str) -> None:
            progress.show("audit", done, total, text)

        return audit(options.run, seed=options.seed, watch=watch, **settings)


def _show(options: argparse.Namespace, kind: Any, audit: Any, suffixes: tuple[str, ...]) -> int:
    """Write the results of an audit to a folder, print them, and return the exit code.

    Args:
        options: The parsed options.
        kind: The module with the functions that write and print the results.
        audit: The results.
        suffixes: The suffixes of the files that ``kind`` writes.
    """
    out = options.out or options.run / "audit"
    kind.write(audit, out)
    if options.json:
        common.print_json({"folder": str(out), **kind.to_json(audit)})
        return 0
    kind.print_table(audit)
    print(f"written to {out}: {', '.join(f'{kind.NAME}.{suffix}' for suffix in suffixes)}")
    return 0


COMMANDS = (add_audit,)
