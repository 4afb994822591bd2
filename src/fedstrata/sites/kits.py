"""Adapt NVFlare's start-up kits: let only the owner read a kit, allow moving a kit, and shorten NVFlare's logs.

A kit is the folder of one party (the server, a site or the administrator) with its certificate, settings and scripts.
"""

from __future__ import annotations

import json
import logging
import traceback
from pathlib import Path
from typing import Any

from fedstrata.base.jsonl import write_json
from fedstrata.base.printable import printable
from fedstrata.sites.nvflare_workarounds import adapt_script

RESOURCES = Path("local") / "resources.json"
LOGGING = Path("local") / "log_config.json"
RECORDS = "records"
"""The folder with NVFlare's records of jobs, in the server's folder."""

_SAMPLES = ("local/privacy.json.sample", "startup/system_info.ipynb", "startup/readme.txt", "readme.txt")
"""Files that fedstrata removes from NVFlare's kits. The first file configures NVFlare's privacy filters, which cannot
read fedstrata's messages."""


def finish(kit: Path) -> None:
    """Adapt the scripts in a folder that NVFlare made, remove unused files, and let only the owner read the folder.

    Args:
        kit: The folder of the server, a site or the administrator.
    """
    for sample in _SAMPLES:
        (kit / sample).unlink(missing_ok=True)
    for script in (kit / "startup").glob("*.sh"):
        script.write_text(adapt_script(script.name, script.read_text(encoding="utf-8")), encoding="utf-8")
    close(kit)


def close(folder: Path) -> None:
    """Set the permissions of a folder and its content, so that only the owner has access."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() or path.suffix == ".sh" else 0o600)


def set_paths(kit: Path) -> None:
    """Write the absolute path of the folder ``kit`` to its resources file, because NVFlare needs absolute paths."""
    path = kit / RESOURCES
    text = path.read_text(encoding="utf-8")
    resources = json.loads(text)
    _set_paths(resources, kit.absolute())
    if resources != json.loads(text):
        write_json(path, resources)


def _set_paths(node: Any, kit: Path) -> None:
    """In nested dicts and lists, let each path to NVFlare's records begin with the folder ``kit``."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in children:
        if isinstance(value, str) and f"/{RECORDS}/" in value:
            node[key] = str(kit / RECORDS / value.rpartition(f"/{RECORDS}/")[2])
        else:
            _set_paths(value, kit)


class Printable(logging.Filter):
    """A log filter that replaces unprintable characters, because records can contain texts from other parties."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Make a log record printable, and indent its traceback to distinguish it from other records. Return True."""
        record.msg, record.args = printable(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
            record.exc_text = "\n".join(f"  {printable(line)}" for line in lines)
        return True


def configure_logging(kit: Path, *, verbose: bool) -> None:
    """Log all messages of fedstrata, and the errors of NVFlare (with ``verbose``, all messages of NVFlare)."""
    config = json.loads((kit / LOGGING).with_suffix(".json.default").read_text(encoding="utf-8"))
    handlers = ["consoleHandler", "logFileHandler"]
    config["filters"] = {"printable": {"()": f"{__name__}.{Printable.__name__}"}}
    config["handlers"] = {name: config["handlers"][name] | {"filters": ["printable"]} for name in handlers}
    quiet: dict[str, Any] = {} if verbose else {"nvflare": {"level": "ERROR"}, "websockets": {"level": "ERROR"}}
    config["loggers"] = {"root": {"level": "INFO", "handlers": handlers}, **quiet}
    write_json(kit / LOGGING, config)
