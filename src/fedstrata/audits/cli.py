"""``fedstrata audit``: attacks on what a run gave away."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.cli.common import add_command, add_output, add_trust, print_json

if TYPE_CHECKING:
    from fedstrata.cli.common import Commands


def add_audit(commands: Commands) -> None:
    """``fedstrata audit prototypes`` and ``gradients``."""
    audits = add_command(
        commands,
        "audit",
        "what a run gives away: attacks on what clients sent",
        "fedstrata audit prototypes runs/rebafl",
    )
    kinds = audits.add_subparsers(required=True, metavar="WHAT")
    _add_audit_gradients(kinds)
    examples = """
        fedstrata audit prototypes runs/rebafl
        fedstrata audit prototypes runs/rebafl --clients 5 --out audit
    """
    parser = add_command(kinds, "prototypes", "draw clients' images from the prototypes that they sent", examples)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: RUN/audit)")
    parser.add_argument("--clients", type=int, default=3, help="clients to attack, at most (default: 3)")
    parser.add_argument("--steps", type=int, default=300, help="optimisation steps of each attack (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the attacks (default: 0)")
    parser.add_argument(
        "--held-out",
        choices=("test", "spare"),
        default="test",
        help="the attacker's own images: the test set (the default), or training samples that no client holds",
    )
    add_trust(parser)
    add_output(parser)
    parser.set_defaults(work=_audit_prototypes)


def _add_audit_gradients(kinds: Commands) -> None:
    examples = """
        fedstrata audit gradients runs/stratify
        fedstrata audit gradients runs/stratify --sizes 1 4 16
    """
    parser = add_command(
        kinds, "gradients", "labels and images from the parts of Stratify's batches, by their size", examples
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: RUN/audit)")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="samples in a part (default: 1 2 4 8)")
    parser.add_argument("--parts", type=int, default=12, help="parts of each size, at most (default: 12)")
    parser.add_argument("--steps", type=int, default=300, help="optimisation steps of each inversion (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the attacks (default: 0)")
    add_trust(parser)
    add_output(parser)
    parser.set_defaults(work=_audit_gradients)


def _audit_gradients(options: argparse.Namespace) -> int:
    from fedstrata.audits.gradients import SIZES, audit_gradients, to_json, to_markdown, write
    from fedstrata.reporting.progress import Progress

    with Progress(options.quiet) as progress:
        audit = audit_gradients(
            options.run,
            sizes=options.sizes or SIZES,
            parts=options.parts,
            steps=options.steps,
            seed=options.seed,
            watch=lambda done, total, text: progress.show("audit", done, total, text),
        )
    out = options.out or options.run / "audit"
    write(audit, out)
    if options.json:
        print_json({"folder": str(out), **to_json(audit)})
        return 0
    print(to_markdown(audit), end="")
    print(f"written to {out}: gradients.md, gradients.json")
    return 0


def _audit_prototypes(options: argparse.Namespace) -> int:
    import rich
    from rich.text import Text

    from fedstrata.audits.outcome import caption, to_json, to_rich, write
    from fedstrata.audits.prototypes import audit_prototypes
    from fedstrata.reporting.progress import Progress

    with Progress(options.quiet) as progress:
        audit = audit_prototypes(
            options.run,
            clients=options.clients,
            steps=options.steps,
            seed=options.seed,
            held_out=options.held_out,
            watch=lambda done, total, text: progress.show("audit", done, total, text),
        )
    out = options.out or options.run / "audit"
    write(audit, out)
    if options.json:
        print_json({"folder": str(out), **to_json(audit)})
        return 0
    rich.print(Text(caption(audit)))
    rich.print(to_rich(audit))
    print(f"written to {out}: prototypes.png, prototypes.md, prototypes.json")
    return 0


COMMANDS = (add_audit,)
