"""Create a federation's job, and a folder for the server, for each site and for the administrator.

Each folder contains a certificate, settings and start scripts. NVFlare calls such a folder a start-up kit.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import tomli_w

from fedstrata.base.errors import FedstrataError, SpecError
from fedstrata.base.jsonl import write_json
from fedstrata.base.loading import only_from
from fedstrata.runs.preparation import refuse_attack
from fedstrata.sites.certificates import KEY, ROOT_DAYS, key_pair, renew, requested_keys
from fedstrata.sites.check import PART, SPEC
from fedstrata.sites.configuration import CLASSES, write_job
from fedstrata.sites.data_schema import prepare_server
from fedstrata.sites.federation import Sites, path_of, policy_of
from fedstrata.sites.guard import declared, refuse_files
from fedstrata.sites.kits import RECORDS, close, finish
from fedstrata.sites.members import write_members
from fedstrata.sites.nvflare_workarounds import SCHEDULER
from fedstrata.sites.policy import FILE as POLICY
from fedstrata.sites.policy import RuleError
from fedstrata.sites.settings import LOCAL, USER, JobSpec, SiteSettings, run_of
from fedstrata.sites.simulator import require_nvflare
from fedstrata.spec.experiment import Experiment

SERVER, ADMIN, JOB = "server", "admin", "job"
"""The names of the server's folder, the administrator's folder, and the job's folder in the administrator's folder."""

GATE = "fedstrata.sites.gate.Gate"

_RIGHTS = {
    "format_version": "1.0",
    "permissions": {
        "lead": dict.fromkeys(("submit_job", "manage_job", "download_job", "view"), "any")
        | dict.fromkeys(("operate", "shell_commands", "clone_job", "byoc", "server-predeployed-flwr"), "none")
    },
}


def provision(
    spec: Experiment, sites: Sites, out: Path, *, base_dir: Path | None = None, requests: Path | None = None
) -> None:
    """Write the folders ``out/server``, ``out/admin`` (with the job) and one folder per site, each with a README.

    Args:
        spec: The experiment.
        sites: The federation.
        out: A folder that is empty or does not exist.
        base_dir: In a trial on this machine, the folder to which paths of data files are relative. Otherwise, None.
        requests: The folder with the certificate requests of all sites. The private key of each site then stays at the
            site, and is not in the folder that this function writes for the site. Default: this function creates the
            private keys of all sites.

    Raises:
        ExtraMissingError: NVFlare is not installed.
        SpecError: A setting is wrong, or ``out`` is not empty.
        DataError: The server's test samples are missing or do not fit the spec.
        FedstrataError: NVFlare cannot create the certificates.
    """
    require_nvflare()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SpecError(
            "--out", "already exists, and certificates are never overwritten. Give another folder.", str(out)
        )
    if spec.tracking.callbacks:
        problem = "cannot be set in the job of a deployment. Remove this section, and read the run folder instead."
        raise SpecError("tracking", problem)
    refuse_attack(spec)
    keys = {} if requests is None else requested_keys(requests, sites.site)
    site_of_client = sites.site_of_client(spec)
    if spec.privacy.sums == "secure":
        from fedstrata.sites.secure_site import require_own_sites

        require_own_sites(site_of_client)
    test = path_of(sites.server.data, base_dir)
    # In a real deployment, the server's data file may exist only on the server's machine, and is then not checked.
    if sites.own_data and (test is None or base_dir is not None or test.exists()):
        prepare_server(spec, test, len(site_of_client))
    policy = policy_of(spec, sites)
    settings = {name: sites.settings_of(name, base_dir) for name in sites.site}
    allow, catalog = sites.server.allow, sites.server.catalog
    of_server = SiteSettings(data=test, patience=sites.patience, allow=allow, catalog=catalog)
    for name, own in settings.items():
        try:
            with only_from(own.packages):
                policy.check(declared(spec.to_toml(), own, clients=len(site_of_client), own_data=sites.own_data))
        except (RuleError, SpecError) as error:
            problem = f"this site would refuse the job. {error}"
            if isinstance(error, RuleError):
                problem = f"the rule {error.rule!r} of this site refuses the job, because {error.reason}"
            problem = f"{problem.rstrip('.')}. Change the job, or [policy] in sites.toml."
            raise SpecError(f"site.{name}", problem) from None
    try:
        refuse_files(spec.to_spec(), catalog, data=not sites.own_data)
        with only_from(of_server.packages):
            Experiment.from_table(spec.to_spec())
    except RuleError as error:
        raise SpecError("server.catalog", f"the server would refuse the job: {error}", catalog) from None
    except SpecError as error:
        raise SpecError("server.allow", f"the server would refuse the job: {error}", allow) from None
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    _certify(sites, out)
    run = run_of(spec.to_toml())
    waits = sites.patience, sites.relay == "direct", sites.least, sites.fewer
    plan = JobSpec("run.toml", run, len(site_of_client), site_of_client, sites.own_data, *waits)
    write_job(out / ADMIN / JOB, [plan], [spec.to_toml()])
    _write_settings(out / SERVER, of_server)
    for name, own in settings.items():
        _write_settings(out / name, own)
        (out / name / POLICY).write_text(policy.to_toml(), encoding="utf-8")
    _write_readmes(spec, sites, out, run, own_keys=bool(keys))
    write_members(out / SERVER, sites.site)
    if sites.own_data:
        for client, name in enumerate(site_of_client):
            (out / name / SPEC).write_text(spec.to_toml(), encoding="utf-8")
            part = {"client": client, "clients": len(site_of_client), "tests": test is None}
            write_json(out / name / PART, part)
    for name in (SERVER, ADMIN, *sites.site):
        finish(out / name)
        certificate, private_key = key_pair(out / name)
        renew(out / "authority", certificate, sites.days, keys.get(name))
        if name in keys:
            private_key.unlink()
    close(out / "authority")


def _certify(sites: Sites, out: Path) -> None:
    """Let NVFlare make a folder with certificates and start scripts for each party (server, site, administrator).

    NVFlare runs in a separate process, because NVFlare changes global state.
    """
    clients = [{"name": name, "type": "client", "org": "fedstrata"} for name in sites.site]
    server = {"name": sites.server.host, "type": "server", "org": "fedstrata", "fed_learn_port": sites.server.port}
    admin = {"name": USER, "type": "admin", "org": "fedstrata", "role": "lead"}
    parts: list[tuple[str, dict[str, Any]]] = [
        ("workspace.WorkspaceBuilder", {"template_file": ["master_template.yml"]}),
        ("static_file.StaticFileBuilder", {"config_folder": "config"}),
        ("cert.CertBuilder", {"root_valid_days": max(ROOT_DAYS, sites.days)}),
        ("signature.SignatureBuilder", {}),
    ]
    project = {
        "api_version": 3,
        "name": sites.federation,
        "description": "made by fedstrata deploy",
        "participants": [server, *clients, admin],
        "builders": [{"path": f"nvflare.lighter.impl.{path}", "args": args} for path, args in parts],
    }
    with tempfile.TemporaryDirectory(prefix="fedstrata-provision-") as place:
        root = Path(place)
        # NVFlare reads YAML, and every JSON text is valid YAML.
        (root / "project.yml").write_text(json.dumps(project), encoding="utf-8")
        command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.yml", "-w", "kits", "--force"]
        done = subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        kits = root / "kits" / sites.federation / "prod_00"
        if done.returncode or not kits.is_dir():
            raise FedstrataError(f"NVFlare cannot create the start-up kits: {(done.stdout + done.stderr).strip()}")
        for kit, name in [(sites.server.host, SERVER), (USER, ADMIN), *((name, name) for name in sites.site)]:
            shutil.move(kits / kit, out / name)
        # The private key of the root certificate is stored, because it is needed to renew certificates. All other
        # private keys are only in the folders of their owners.
        state = json.loads((root / "kits" / sites.federation / "state" / "cert.json").read_text(encoding="utf-8"))
        (out / "authority").mkdir()
        write_json(out / "authority" / "cert.json", {key: state[key] for key in ("root_cert", "root_pri_key")})


def _write_settings(folder: Path, settings: SiteSettings) -> None:
    """Write the settings of the server or a site, and NVFlare's settings, such as the classes that jobs may name."""
    (folder / LOCAL).write_text(tomli_w.dumps(settings.table()), encoding="utf-8")
    local = folder / LOCAL.parent
    text = (local / "resources.json.default").read_text(encoding="utf-8")
    resources = json.loads(text.replace("/tmp/nvflare", f"/{RECORDS}"))
    resources["class_allow_list"] = list(CLASSES)
    resources["allow_log_streaming"] = False
    for server in resources.get("servers", []):
        server["heart_beat_timeout"] = 120  # seconds, so that NVFlare keeps a site that pauses for a minute
    if "snapshot_persistor" in resources:  # only the server's file has this entry
        resources["components"].append({"id": "gate", "path": GATE, "args": {"records": f"/{RECORDS}/"}})
    for component in resources.get("components", []):
        if component["id"] == "job_scheduler":
            component["args"] |= SCHEDULER
    write_json(local / "resources.json", resources)
    write_json(local / "authorization.json", _RIGHTS)


def _write_readmes(spec: Experiment, sites: Sites, out: Path, run: str, *, own_keys: bool) -> None:
    data = key = peers = ""
    if sites.own_data:
        data = 'Write the path of your data file into `local/fedstrata.toml`: `data = "/path/to/file.csv"`. '
        data += f"The file is {_described(spec)}. It is read on this machine and never sent. "
    if own_keys:
        key = f" Copy the private key that you made with your request (`{KEY}`) to `startup/`."
    if spec.privacy.sums == "secure":
        peers = " Set `peers` there to the fingerprints of the other sites, and get each fingerprint by telephone. "
        peers += "`fedstrata check .` prints the fingerprint of this site."
    private = spec.privacy.dp is not None or spec.privacy.clients is not None
    extras = {"secure": spec.privacy.sums == "secure", "dp": private}
    values = {
        "federation": sites.federation,
        "host": sites.server.host,
        "port": sites.server.port,
        "sites": ", ".join(sites.site),
        "run": run,
        "extras": ",".join(["nvflare", *(name for name, needed in extras.items() if needed)]),
        "key": key,
        "spec": str(SPEC) if sites.own_data else "SPEC",
        "peers": peers,
        "data": data,
    }
    kinds = {SERVER: SERVER, ADMIN: ADMIN} | dict.fromkeys(sites.site, "site")
    for name, kind in kinds.items():
        template = Template(files(__package__).joinpath("kit", f"README-{kind}.md").read_text(encoding="utf-8"))
        (out / name / "README.md").write_text(template.substitute(values, name=name), encoding="utf-8")


def _described(spec: Experiment) -> str:
    """Return a description of the data file that a site must have, for the site's README."""
    schema, data = spec.data.schema, spec.data
    if schema is None:
        shape, last = list(data.shape or ()), (data.classes or 1) - 1
        return f"a .npz file: `x_train` (samples of shape {shape}) and `y_train` (labels 0 … {last})"
    columns = [f"`{name}` ({column.accepted})" for name, column in schema.inputs.items()]
    accepted = f"one of {', '.join(map(repr, schema.classes))}" if schema.classes else schema.target.accepted
    label = f"`{schema.label}` ({accepted})"
    return (
        f"a CSV or Parquet file with one row per sample and these columns, in any order: {'; '.join([*columns, label])}"
    )
