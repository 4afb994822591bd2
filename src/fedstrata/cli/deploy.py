"""``fedstrata deploy``, ``submit`` and ``keys``: real sites."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.cli.common import add_command, add_output, add_overrides, experiment, located, print_json, show_run

if TYPE_CHECKING:
    from fedstrata.cli.common import Commands


def add_deploy(commands: Commands) -> None:
    """``fedstrata deploy``."""
    examples = """
        fedstrata deploy spec.toml --sites sites.toml --out kits
        fedstrata deploy spec.toml --sites sites.toml --out trial --try
    """
    parser = add_command(
        commands, "deploy", "certificates, start-up kits and the job for real sites (NVFlare)", examples
    )
    parser.add_argument("spec", help="a TOML file")
    add_overrides(parser)
    parser.add_argument("--sites", type=Path, required=True, metavar="TOML", help="the server and the sites")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the folder; one inside it for everybody"
    )
    parser.add_argument(
        "--try",
        action="store_true",
        dest="trial",
        help="start all of it on this machine, run the experiment, fetch the result to DIR/result and shut down",
    )
    add_output(parser, progress=False)
    parser.set_defaults(work=_deploy)


def _deploy(options: argparse.Namespace) -> int:
    from fedstrata.deploy.federation import Sites
    from fedstrata.deploy.local_deployment import try_out
    from fedstrata.deploy.provision import provision
    from fedstrata.history import History

    spec = experiment(options)
    sites = Sites.read(options.sites)
    if not options.trial:
        located(options, lambda: provision(spec, sites, options.out))
        if options.json:
            print_json({"folder": str(options.out)})
            return 0
        print(f"{options.out}: give everybody the folder of their name; its README.md says what to do there")
        return 0
    folder = located(
        options, lambda: try_out(spec, sites, options.out, base_dir=options.sites.parent, tell=_tell(options))
    )
    return show_run(History.load(folder), options.json)


def add_submit(commands: Commands) -> None:
    """``fedstrata submit``."""
    examples = """
        fedstrata submit kits/admin --out result
        fedstrata submit kits/admin --out result --wait 600
    """
    parser = add_command(commands, "submit", "bring a deployment's job to its server and fetch the result", examples)
    parser.add_argument("admin", type=Path, metavar="ADMIN", help="the administrator's folder that deploy wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the run folder goes")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for sites to join (default: 60)")
    add_output(parser, progress=False)
    parser.set_defaults(work=_submit)


def _submit(options: argparse.Namespace) -> int:
    from fedstrata.deploy.submit import submit
    from fedstrata.history import History

    folder = submit(options.admin, options.out, wait=options.wait, tell=_tell(options))
    return show_run(History.load(folder), options.json)


def _tell(options: argparse.Namespace) -> Callable[[str], None]:
    """Where to say what happens: beside the result, where that is JSON."""
    return (lambda text: print(text, file=sys.stderr)) if options.json else print


def add_keys(commands: Commands) -> None:
    """``fedstrata keys``."""
    examples = """
        fedstrata keys
        fedstrata keys --out /secure/keys
    """
    parser = add_command(commands, "keys", "make the clients' keys for masked labels", examples)
    parser.add_argument("--out", type=Path, default=Path("keys"), metavar="DIR", help="the folder (default: keys)")
    parser.set_defaults(work=_keys)


def _keys(options: argparse.Namespace) -> int:
    from fedstrata.stratify.masking.key_store import VARIABLE, Keys

    path = Keys.make().write(options.out)
    print(f"{path}: copy it to every client's site and set {VARIABLE} to its folder there; never give it to the server")
    return 0


COMMANDS = (add_deploy, add_submit, add_keys)
