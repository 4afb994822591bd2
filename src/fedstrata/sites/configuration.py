"""Jobs as NVFlare reads them, and the errors that come back from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.base import errors
from fedstrata.base.errors import FedstrataError
from fedstrata.sites.settings import JobSpec

CLASSES = (
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    "fedstrata.sites.job.Server",
    "fedstrata.sites.job.Site",
)
"""All that a job of ours may name; a site that allows nothing else runs nothing else."""

ERROR = "error.json"
"""Beside a run folder's records: why the run ended early."""


def write_job(folder: Path, plans: Sequence[JobSpec], specs: Sequence[str]) -> None:
    """Write a job as NVFlare reads it: a few lines of JSON that name installed classes, and no source.

    Args:
        folder: Where to.
        plans: What its server runs.
        specs: The experiment of each plan as TOML. Files of their own, where a site's reviewer can read them, and
            where NVFlare does not take braces for its variables.
    """
    config = folder / "app" / "config"
    config.mkdir(parents=True, exist_ok=True)
    for plan, spec in zip(plans, specs, strict=True):
        (config / plan.spec).write_text(spec, encoding="utf-8")
    common: dict[str, Any] = {"format_version": 2, "task_data_filters": [], "task_result_filters": []}
    controller, executor, server, client = CLASSES
    arguments: dict[str, Any] = {"collab_obj_ids": [], "props": {}}
    _write(
        config / "config_fed_server.json",
        common
        | {
            # Made in this order: ours first, which sees to the threads of the other's pools.
            "components": [{"id": "server_", "path": server, "args": {"plans": [plan.table() for plan in plans]}}],
            "workflows": [{"id": "controller", "path": controller, "args": {"server_obj_id": "server_", **arguments}}],
        },
    )
    runner = {"path": executor, "args": {"client_obj_id": "site_", **arguments}}
    _write(
        config / "config_fed_client.json",
        common
        | {
            "components": [{"id": "site_", "path": client, "args": {}}],
            "executors": [{"tasks": ["*"], "executor": runner}],
        },
    )
    # Only those that a plan names get the job: whoever else has a certificate is told nothing.
    named = sorted({site for plan in plans for site in plan.sites})
    places = ["server", *named] if named else ["@ALL"]
    # NVFlare begins a job when so many are connected. Where fewer may do the run itself decides.
    least = min(plan.least if plan.fewer == "wait" else 1 for plan in plans)
    meta = {"name": _name_of(plans, specs), "resource_spec": {}, "min_clients": least, "deploy_map": {"app": places}}
    _write(folder / "meta.json", meta)


def _name_of(plans: Sequence[JobSpec], specs: Sequence[str]) -> str:
    """A job's name, which tells whether a job at work is this one: another spec or plan, another name."""
    content = json.dumps([[plan.table(), spec] for plan, spec in zip(plans, specs, strict=True)], sort_keys=True)
    return f"fedstrata-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def described(error: Exception) -> dict[str, Any]:
    """An error as JSON, from which ``raised`` makes it again."""
    arguments = error.__reduce__()[1] if isinstance(error, FedstrataError) else ()
    return {"kind": type(error).__name__, "arguments": [_packed(one) for one in arguments], "message": str(error)}


def raised(path: Path) -> FedstrataError:
    """The error that a server wrote."""
    table = json.loads(path.read_text(encoding="utf-8"))
    kind = getattr(errors, str(table["kind"]), None)
    if isinstance(kind, type) and issubclass(kind, FedstrataError):
        return kind(*(_unpacked(one) for one in table["arguments"]))
    return FedstrataError(f"{table['kind']}: {table['message']}")


class _Shown(str):
    """A value that JSON cannot hold, of which a message needs no more than how it is shown."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _packed(value: object) -> dict[str, Any]:
    """A value as JSON; nothing stands for ``...``, by which an error knows that there is no value."""
    if value is ...:
        return {}
    try:
        if repr(json.loads(json.dumps(value))) == repr(value):
            return {"value": value}
    except (TypeError, ValueError):
        pass
    return {"shown": repr(value)}


def _unpacked(packed: Mapping[str, Any]) -> object:
    return _Shown(packed["shown"]) if "shown" in packed else packed.get("value", ...)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
