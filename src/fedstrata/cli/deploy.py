"""``fedstrata deploy``, ``submit`` and ``keys``: real sites."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.cli.common import add_overrides, add_spec, experiment, located, show_run

if TYPE_CHECKING:
    from fedstrata.cli.common import Commands


def add_deploy(commands: Commands) -> None:
    """``fedstrata deploy``."""
    parser = commands.add_parser("deploy", help="certificates, start-up kits and the job for real sites (NVFlare)")
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
        print(f"{options.out}: give everybody the folder of their name; its README.md says what to do there")
        return 0
    folder = located(options, lambda: try_out(spec, sites, options.out, base_dir=options.sites.parent))
    return show_run(History.load(folder))


def add_submit(commands: Commands) -> None:
    """``fedstrata submit``."""
    parser = commands.add_parser("submit", help="bring a deployment's job to its server and fetch the result")
    parser.add_argument("admin", type=Path, metavar="ADMIN", help="the administrator's folder that deploy wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the run folder goes")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for sites to join (default: 60)")
    parser.set_defaults(work=_submit)


def _submit(options: argparse.Namespace) -> int:
    from fedstrata.deploy.submit import submit
    from fedstrata.history import History

    return show_run(History.load(submit(options.admin, options.out, wait=options.wait)))


def add_keys(commands: Commands) -> None:
    """``fedstrata keys``."""
    parser = commands.add_parser("keys", help="make the clients' keys for masked labels")
    parser.add_argument("--out", type=Path, default=Path("keys"), metavar="DIR", help="the folder (default: keys)")
    parser.set_defaults(work=_keys)


def _keys(options: argparse.Namespace) -> int:
    from fedstrata.stratify.masking.key_store import VARIABLE, Keys

    path = Keys.make().write(options.out)
    print(f"{path}: copy it to every client's site and set {VARIABLE} to its folder there; never give it to the server")
    return 0


def add_asks(commands: Commands) -> None:
    """``fedstrata asks``."""
    parser = commands.add_parser("asks", help="what a job asks of each site, in plain English")
    add_spec(parser)
    parser.add_argument("--json", action="store_true", help="as a table for programs")
    parser.add_argument(
        "--policy", type=Path, metavar="KIT", help="say whether a site with this folder would accept it"
    )
    parser.set_defaults(work=_asks)


def _asks(options: argparse.Namespace) -> int:
    import json

    from fedstrata.asks import declaration_of

    asked = declaration_of(experiment(options))
    if options.json:
        print(json.dumps(asked.table(), indent=2, ensure_ascii=False))
    else:
        print("\n".join(asked.lines()))
    if options.policy is not None:
        from fedstrata.deploy.policy import Policy

        Policy.read(options.policy).check(asked)
    return 0


def add_approve(commands: Commands) -> None:
    """``fedstrata approve``."""
    parser = commands.add_parser("approve", help="let a site accept a job, by the hash of its spec")
    parser.add_argument("job", metavar="HASH|SPEC", help="the hash that 'fedstrata asks' prints, or the spec itself")
    parser.add_argument("--kit", type=Path, required=True, metavar="DIR", help="the site's folder that deploy wrote")
    parser.set_defaults(work=_approve)


def _approve(options: argparse.Namespace) -> int:
    from fedstrata.asks import hash_of
    from fedstrata.deploy.policy import FILE, approve, require_hash
    from fedstrata.spec import Experiment

    file = Path(options.job)
    job = hash_of(Experiment.from_toml(file)) if file.is_file() else require_hash(options.job)
    new = approve(options.kit, job)
    print(f"{options.kit / FILE}: job {job} is {'now' if new else 'already'} approved; it is read when a job begins")
    return 0


COMMANDS = (add_deploy, add_submit, add_keys, add_asks, add_approve)
