"""The commands for experiments in a deployment: ``fedstrata deploy``, ``submit``, ``status`` and others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from fedstrata.base.errors import SpecError
from fedstrata.base.printable import print_lines
from fedstrata.base.signals import Terminated
from fedstrata.cli import common


def add_deploy(commands: common.Commands) -> None:
    """Add the command ``fedstrata deploy``."""
    examples = """
        fedstrata deploy spec.toml --sites sites.toml --out kits
        fedstrata deploy spec.toml --sites sites.toml --requests requests --out kits
        fedstrata deploy spec.toml --sites sites.toml --out trial --try
    """
    help = "create a deployment's job and, for each party, a folder (kit) with certificates and scripts"
    parser = common.add_command(commands, "deploy", help, examples, imports=True, work=_deploy)
    parser.add_argument("spec", help="TOML file that describes the experiment")
    common.add_overrides(parser)
    parser.add_argument(
        "--sites", type=Path, required=True, metavar="TOML", help="TOML file that describes the server and the sites"
    )
    help = "folder to create, with a subfolder for each party"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=help)
    help = "folder with a certificate request SITE.csr from each site, so that private keys stay at the sites"
    parser.add_argument("--requests", type=Path, metavar="DIR", help=help)
    help = "try the deployment on this machine: start all parties, run the job, and store the result in DIR/result"
    parser.add_argument("--try", action="store_true", dest="trial", help=help)
    common.add_output(parser, progress=False)


def _deploy(options: argparse.Namespace) -> int:
    from fedstrata.evaluation.history import History
    from fedstrata.sites.federation import Sites
    from fedstrata.sites.local_deployment import try_out
    from fedstrata.sites.provision import provision

    spec = common.experiment(options)
    sites, out, base_dir = Sites.read(options.sites), options.out, options.sites.parent
    if options.trial:
        if options.requests is not None:
            raise SpecError(
                "--requests", "cannot be combined with --try, which needs all private keys. Remove one option."
            )
        folder = common.located(options, lambda: try_out(spec, sites, out, base_dir=base_dir, report=_report(options)))
        return common.show_run(History.load(folder), options.json)
    common.located(options, lambda: provision(spec, sites, out, requests=options.requests))
    text = f"{out}: send each party the folder that has the party's name. The README.md of each folder says what to do"
    return _show(options, {"folder": str(out)}, text)


def _show(options: argparse.Namespace, table: object, *lines: str) -> int:
    """Print a result (as JSON with ``--json``, and otherwise as lines of text), and return the exit code 0."""
    if options.json:
        common.print_json(table)
    else:
        print_lines(*lines)
    return 0


def add_request(commands: common.Commands) -> None:
    """Add the command ``fedstrata request``."""
    help = "create a site's private key, and a certificate request for the administrator to sign"
    examples = "fedstrata request hospital-a --out request"
    parser = common.add_command(commands, "request", help, examples, work=_request)
    parser.add_argument("site", metavar="SITE", help="name of the site in sites.toml")
    help = "folder to store the private key and the request in (default: request)"
    parser.add_argument("--out", type=Path, default=Path("request"), metavar="DIR", help=help)
    common.add_output(parser, progress=False)


def _request(options: argparse.Namespace) -> int:
    from fedstrata.sites.certificates import KEY, request_certificate
    from fedstrata.sites.federation import check_name

    check_name("SITE", options.site)
    path = request_certificate(options.site, options.out)
    key = options.out / KEY
    lines = f"{path}: send this file to the administrator", f"{key}: keep this private key, and put it into your kit"
    return _show(options, {"request": str(path), "key": str(key)}, *lines)


def add_submit(commands: common.Commands) -> None:
    """Add the command ``fedstrata submit``."""
    examples = """
        fedstrata submit kits/admin --out result
        fedstrata submit kits/admin --out result --wait 600
    """
    help = "send a deployment's job to its server, and fetch the result"
    after = "The job continues. To watch the job again, repeat the command."
    parser = common.add_command(commands, "submit", help, examples, work=_submit, after_interrupt=after)
    parser.add_argument(
        "admin", type=Path, metavar="ADMIN", help="folder of the administrator, created by 'fedstrata deploy'"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to store the result in")
    parser.add_argument(
        "--wait", type=float, default=60.0, help="number of seconds to wait for sites to join (default: 60)"
    )
    common.add_output(parser, progress=False)


def _submit(options: argparse.Namespace) -> int:
    from fedstrata.evaluation.history import History
    from fedstrata.sites.submit import submit

    folder = submit(options.admin, options.out, wait=options.wait, report=_report(options))
    return common.show_run(History.load(folder), options.json)


def _report(options: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that prints events to standard output or, if the result is JSON, to standard error."""

    def report(text: str) -> None:
        with suppress(BrokenPipeError):  # The command continues even if the program that reads its output has ended.
            print_lines(text, file=sys.stderr if options.json else sys.stdout)

    return report


def add_status(commands: common.Commands) -> None:
    """Add the command ``fedstrata status``."""
    examples = """
        fedstrata status kits/admin
        fedstrata status kits/hospital-a --watch
        fedstrata status kits/server --serve
        fedstrata status result --serve 8080
    """
    help = "show the progress of a deployment: round, accuracy, sites and remaining time"
    parser = common.add_command(commands, "status", help, examples, work=_status)
    help = "folder of the administrator, the server or a site, or a run folder"
    parser.add_argument("folder", type=Path, metavar="DIR", help=help)
    how = parser.add_mutually_exclusive_group()
    help = "update every two seconds, until the run ends (at a site: until Ctrl-C)"
    how.add_argument("--watch", action="store_true", help=help)
    help = "port of a web page with live curves, only for browsers on this machine (default: a free port)"
    how.add_argument("--serve", type=_port, nargs="?", const=0, metavar="PORT", help=help)
    parser.add_argument(
        "--json", action="store_true", help="print only the result, as JSON; with --watch, one line per update"
    )


def _port(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number. If it is the folder, put it before --serve.")
    return int(text)


def _status(options: argparse.Namespace) -> int:
    if options.serve is not None and options.json:
        raise SpecError("--json", "cannot be combined with --serve. Remove one of the two options.")
    with suppress(KeyboardInterrupt, Terminated):  # users end the command by Ctrl-C or SIGTERM
        if options.serve is not None:
            from fedstrata.sites.live import serve

            serve(options.folder, options.serve)
        else:
            from fedstrata.sites.status import status

            status(options.folder, watch=options.watch, as_json=options.json)
    return 0


def add_check(commands: common.Commands) -> None:
    """Add the command ``fedstrata check``."""
    help = "check the settings, data, certificates, clock and server connection of a site"
    parser = common.add_command(commands, "check", help, "fedstrata check kits/hospital-a", work=_check)
    parser.add_argument("kit", type=Path, metavar="DIR", help="folder of the site, created by 'fedstrata deploy'")
    common.add_output(parser, progress=False)


def _check(options: argparse.Namespace) -> int:
    from fedstrata.sites.check import check

    findings = check(options.kit)
    _show(options, [each._asdict() for each in findings], *map(str, findings))
    return int(any(each.state == "problem" for each in findings))


def add_renew(commands: common.Commands) -> None:
    """Add the command ``fedstrata renew``."""
    examples = "fedstrata renew kits/authority kits/hospital-a/startup/client.crt --days 365"
    help = "issue new certificates for the same keys, to replace certificates that expire soon"
    parser = common.add_command(commands, "renew", help, examples, work=_renew)
    parser.add_argument(
        "authority",
        type=Path,
        metavar="AUTHORITY",
        help="folder with the private key of the root certificate, created by 'fedstrata deploy'",
    )
    parser.add_argument(
        "certificates",
        type=Path,
        nargs="+",
        metavar="CRT",
        help="certificate files to renew, from the startup/ folders of the parties",
    )
    parser.add_argument(
        "--days",
        type=int,
        default=365,
        metavar="N",
        help="number of days for which the new certificates are valid (default: 365)",
    )
    common.add_output(parser, progress=False)


def _renew(options: argparse.Namespace) -> int:
    from fedstrata.sites.certificates import renew

    ends = {path: renew(options.authority, path, options.days) for path in options.certificates}
    then = "copy the file to startup/ in the party's folder, and restart the party"
    lines = [f"{path}: valid until {end:%d %B %Y}; {then}" for path, end in ends.items()]
    return _show(options, {path: end.isoformat() for path, end in ends.items()}, *lines)


def add_revoke(commands: common.Commands) -> None:
    """Add the command ``fedstrata revoke``."""
    help = "remove a site from the server's list of sites that may connect"
    parser = common.add_command(commands, "revoke", help, "fedstrata revoke kits/server hospital-a", work=_revoke)
    parser.add_argument(
        "server", type=Path, metavar="SERVER", help="folder of the server, created by 'fedstrata deploy'"
    )
    parser.add_argument("site", metavar="SITE", help="name of the site to remove")
    parser.add_argument("--undo", action="store_true", help="allow a removed site to connect again")
    common.add_output(parser, progress=False)


def _revoke(options: argparse.Namespace) -> int:
    from fedstrata.sites.members import revoke

    names = revoke(options.server, options.site, undo=options.undo)
    return _show(options, {"members": names}, f"{options.server}: sites that may connect: {', '.join(names) or '-'}")


def add_verify(commands: common.Commands) -> None:
    """Add the command ``fedstrata verify``."""
    help = "check the signature of a result, and show fingerprints of its spec and data"
    parser = common.add_command(commands, "verify", help, "fedstrata verify result --kit kits/hospital-a", work=_verify)
    parser.add_argument("run", type=Path, metavar="RESULT", help="folder in which 'fedstrata submit' stored the result")
    help = "folder of any party, which contains the root certificate of the federation"
    parser.add_argument("--kit", type=Path, required=True, metavar="DIR", help=help)
    common.add_output(parser, progress=False)


def _verify(options: argparse.Namespace) -> int:
    from fedstrata.sites.manifest import verify

    table = verify(options.run, options.kit)
    signed = f"{options.run}: signed by the administrator; unchanged: {', '.join(table['result']) or 'no file'}"
    sites = [f"data of {site} {fingerprint}" for site, fingerprint in table["sites"].items()]
    return _show(options, table, signed, f"spec {table['spec']}", *sites)


def add_asks(commands: common.Commands) -> None:
    """Add the command ``fedstrata asks``."""
    examples = """
        fedstrata asks spec.toml
        fedstrata asks spec.toml --policy kits/hospital-a --json
    """
    help = "explain in plain English what a job requests from each site"
    parser = common.add_command(commands, "asks", help, examples, work=_asks)
    common.add_spec(parser)
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    help = "folder of a site, to check whether the site's policy accepts the job"
    parser.add_argument("--policy", type=Path, metavar="KIT", help=help)
    common.add_trust(parser)


def _asks(options: argparse.Namespace) -> int:
    from fedstrata.sites.disclosure import declaration_of

    with _by_kit(options.policy, options):
        asked = declaration_of(common.experiment(options))
    _show(options, asked.table(), *asked.lines())
    if options.policy is not None:
        from fedstrata.sites.policy import Policy

        Policy.read(options.policy).check(asked)
    return 0


def _by_kit(kit: Path | None, options: argparse.Namespace) -> AbstractContextManager[None]:
    """Return a context manager, in which specs may name only code from the packages that a site allows.

    These packages are listed in the settings in the site's folder ``kit``. With ``--trust``, or if ``kit`` is None, a
    spec may name any code.
    """
    from fedstrata.base.loading import only_from
    from fedstrata.sites.settings import SiteSettings

    return nullcontext() if kit is None or options.imports else only_from(SiteSettings.read(kit).packages)


def add_approve(commands: common.Commands) -> None:
    """Add the command ``fedstrata approve``."""
    examples = """
        fedstrata approve spec.toml --kit kits/hospital-a
        fedstrata approve 0123456789abcdef --kit kits/hospital-a
    """
    help = "approve a job at a site"
    parser = common.add_command(commands, "approve", help, examples, work=_approve)
    parser.add_argument(
        "job", metavar="HASH|SPEC", help="hash of the job, as 'fedstrata asks' prints it, or the job's spec file"
    )
    parser.add_argument(
        "--kit", type=Path, required=True, metavar="DIR", help="folder of the site, created by 'fedstrata deploy'"
    )
    common.add_output(parser, progress=False)


def _approve(options: argparse.Namespace) -> int:
    from fedstrata.sites.disclosure import hash_of
    from fedstrata.sites.policy import FILE, approve, require_hash
    from fedstrata.spec.experiment import Experiment

    spec = Path(options.job)
    with _by_kit(options.kit, options):
        job = hash_of(Experiment.from_toml(spec)) if spec.is_file() else require_hash(options.job)
    new, file = approve(options.kit, job), options.kit / FILE
    text = f"{file}: job {job} is {'now' if new else 'already'} approved; the site reads this file when a job begins"
    return _show(options, {"job": job, "file": file, "new": new}, text)


COMMANDS = (
    *(add_request, add_deploy, add_submit, add_status, add_check),
    *(add_renew, add_revoke, add_verify, add_asks, add_approve),
)
