"""Write the configuration files of a job for NVFlare, and convert errors to JSON and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedstrata.base import errors
from fedstrata.base.errors import FedstrataError
from fedstrata.base.jsonl import write_json
from fedstrata.sites.settings import JobSpec

CLASSES = (
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    "fedstrata.sites.job.Server",
    "fedstrata.sites.job.Site",
)
"""The only classes that a job's configuration may name."""

ERROR = "error.json"
"""The file in the run folder for the error that ended the run."""


RESULT = "fedstrata"
"""The name of the run folder in the result folder of a deployment's job."""


def write_job(folder: Path, plans: Sequence[JobSpec], specs: Sequence[str]) -> None:
    """Write the files of a job for NVFlare.

    The files contain the names of installed classes as JSON, but not source code.

    Args:
        folder: The folder of the job.
        plans: The experiments of the job. The server runs the experiments one after another.
        specs: The spec of each plan as TOML. Each spec is written to a separate file, so that a site can review it. If
            the specs were in the JSON file, NVFlare would treat their braces as placeholders.
    """
    config = folder / "app" / "config"
    config.mkdir(parents=True, exist_ok=True)
    for plan, spec in zip(plans, specs, strict=True):
        (config / plan.spec).write_text(spec, encoding="utf-8")
    common: dict[str, Any] = {"format_version": 2, "task_data_filters": [], "task_result_filters": []}
    controller, executor, server, client = CLASSES
    arguments: dict[str, Any] = {"collab_obj_ids": [], "props": {}}
    # NVFlare creates components before workflows. Our server is a component, so that its constructor can prepare the
    # thread pools of the workflow (the controller).
    components = [{"id": "server_", "path": server, "args": {"plans": [*map(asdict, plans)]}}]
    workflow = {"id": "controller", "path": controller, "args": {"server_obj_id": "server_", **arguments}}
    write_json(config / "config_fed_server.json", {**common, "components": components, "workflows": [workflow]})
    components = [{"id": "site_", "path": client, "args": {}}]
    runner = {"path": executor, "args": {"client_obj_id": "site_", **arguments}}
    executors = [{"tasks": ["*"], "executor": runner}]
    write_json(config / "config_fed_client.json", {**common, "components": components, "executors": executors})
    # The job is sent only to the sites that its plans name, even if other sites of the federation are connected.
    named = sorted({site for plan in plans for site in plan.sites})
    places = ["server", *named] if named else ["@ALL"]
    # NVFlare begins a job when ``least`` sites are connected. If ``fewer`` is not "wait", one connected site is enough
    # to begin, because the run itself decides whether it continues with few sites.
    least = min(plan.least if plan.fewer == "wait" else 1 for plan in plans)
    meta = {"name": _name_of(plans, specs), "resource_spec": {}, "min_clients": least, "deploy_map": {"app": places}}
    write_json(folder / "meta.json", meta)


def _name_of(plans: Sequence[JobSpec], specs: Sequence[str]) -> str:
    """Return the name of a job: a hash of its plans and specs.

    From this name, 'submit' recognises a job that is already running.
    """
    content = json.dumps([[asdict(plan), spec] for plan, spec in zip(plans, specs, strict=True)], sort_keys=True)
    return f"fedstrata-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def described(error: Exception) -> dict[str, Any]:
    """Convert an error to a dict that JSON can represent. The function ``raised`` restores the error."""
    arguments = error.__reduce__()[1] if isinstance(error, FedstrataError) else ()
    packed = [each if isinstance(each, str) else {} if each is ... else {"shown": repr(each)} for each in arguments]
    return {"kind": type(error).__name__, "arguments": packed, "message": str(error)}


def raised(path: Path) -> FedstrataError:
    """Return the error that a server wrote to a file. An error of another library becomes a ``FedstrataError``."""
    table = json.loads(path.read_text(encoding="utf-8"))
    kind = getattr(errors, str(table["kind"]), None)
    if isinstance(kind, type) and issubclass(kind, FedstrataError):
        return kind(*(_unpacked(one) for one in table["arguments"]))
    return FedstrataError(f"{table['kind']}: {table['message']}")


class _Shown(str):
    """A replacement for a value that JSON cannot represent.

    The replacement has the same ``repr``, so error messages do not change.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _unpacked(packed: str | Mapping[str, str]) -> object:
    """Restore an argument of an error from JSON. An empty table becomes ``...``, which marks a missing value."""
    if isinstance(packed, str):
        return packed
    return _Shown(packed["shown"]) if packed else ...
