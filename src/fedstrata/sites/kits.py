"""What a start-up kit is besides NVFlare's own: closed to others, quiet, and complete wherever it is unpacked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedstrata.sites.nvflare_workarounds import adapt_script

RESOURCES = Path("local") / "resources.json"
LOGGING = Path("local") / "log_config.json"
RECORDS = "records"
"""Where a server keeps NVFlare's own records of jobs, inside its kit."""

_SAMPLES = ("local/privacy.json.sample", "startup/system_info.ipynb", "startup/readme.txt", "readme.txt")
"""What NVFlare adds. Its filters of privacy see NVFlare's own messages: of ours they would see nothing."""


def finish(kit: Path) -> None:
    """Make NVFlare's kit one of ours, closed to others.

    Args:
        kit: A party's folder.
    """
    for sample in _SAMPLES:
        (kit / sample).unlink(missing_ok=True)
    for script in (kit / "startup").glob("*.sh"):
        script.write_text(adapt_script(script.name, script.read_text(encoding="utf-8")), encoding="utf-8")
    close(kit)


def close(folder: Path) -> None:
    """Let nobody but its owner read a folder and all that is in it."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() or path.suffix == ".sh" else 0o600)


def placed(kit: Path) -> None:
    """Tell a kit where it lies: NVFlare wants whole paths."""
    path = kit / RESOURCES
    text = path.read_text(encoding="utf-8")
    resources = json.loads(text)
    _point(resources, kit.absolute())
    if (new := json.dumps(resources, indent=2) + "\n") != text:
        path.write_text(new, encoding="utf-8")


def _point(node: Any, kit: Path) -> None:
    """Folders of records are those of this kit, wherever it was before."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in children:
        if isinstance(value, str) and f"/{RECORDS}/" in value:
            node[key] = str(kit / RECORDS / value.rpartition(f"/{RECORDS}/")[2])
        else:
            _point(value, kit)


def logged(kit: Path, *, verbose: bool) -> None:
    """Say what is logged: what fedstrata has to say, and of NVFlare what goes wrong, or all.

    Args:
        kit: A party's folder.
        verbose: All.
    """
    config = json.loads((kit / LOGGING).with_suffix(".json.default").read_text(encoding="utf-8"))
    kept = ["consoleHandler", "logFileHandler"]
    config["handlers"] = {name: config["handlers"][name] for name in kept}
    quiet: dict[str, Any] = {} if verbose else {"nvflare": {"level": "ERROR"}, "websockets": {"level": "ERROR"}}
    config["loggers"] = {"root": {"level": "INFO", "handlers": kept}, **quiet}
    (kit / LOGGING).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
