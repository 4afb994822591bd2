"""What a start-up kit is besides NVFlare's own: closed to others, quiet, and complete wherever it is unpacked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESOURCES = Path("local") / "resources.json"
LOGGING = Path("local") / "log_config.json"
RECORDS = "records"
"""Where a server keeps NVFlare's own records of jobs, inside its kit."""

_SAMPLES = ("local/privacy.json.sample", "startup/system_info.ipynb", "startup/readme.txt", "readme.txt")
"""What NVFlare adds. Its filters of privacy see NVFlare's own messages: of ours they would see nothing."""

_PYTHON = """
umask 077
arguments="${*}"
# The Python that has fedstrata: the one that is named, that of the command, or whatever there is. The command's first
# line names it, or a shell where its path is too long for that; then it lies beside the command.
if [[ -z "${FEDSTRATA_PYTHON:-}" ]]; then
  FEDSTRATA_PYTHON=python3
  command="$(command -v fedstrata || true)"
  if [[ -n "$command" ]]; then
    named="$(head -n 1 "$command" | cut -c 3-)"
    beside="$(dirname "$(readlink -f "$command")")/python"
    if [[ -x "$named" && "$named" != */sh ]]; then
      FEDSTRATA_PYTHON="$named"
    elif [[ -x "$beside" ]]; then
      FEDSTRATA_PYTHON="$beside"
    fi
  fi
fi
export FEDSTRATA_PYTHON
# Messages come in many threads. Given an arena each, the C library keeps more and more of what they freed.
export MALLOC_ARENA_MAX="${MALLOC_ARENA_MAX:-2}"
# What each of a hundred threads freed it keeps for itself, a little more for hours: of blocks up to 1 KiB there are
# 240 KB then. Of those up to 256 bytes there are 15, and training is as fast; with none at all it is not.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.tcache_max=256}"
"""
_START = """
# Which process this is stands there before anything that takes long: from now on it can be stopped.
if [[ "$doOnce" == "true" ]]; then
  own="$WORKSPACE/pid.fl"
else
  check_daemon
  own="$WORKSPACE/daemon_pid.fl"
fi
echo $$ > "$own"
"$FEDSTRATA_PYTHON" -m fedstrata.sites.start "$WORKSPACE" $arguments || { code=$?; rm -f "$own"; exit $code; }

SECONDS=0
"""
_WRITTEN_LATE = '\ncheck_daemon\n\necho $BASHPID > "$WORKSPACE/daemon_pid.fl"\n'
_CHECK = """
  kit="$(cd "$DIR/.." && pwd)"
  "$FEDSTRATA_PYTHON" -m fedstrata.sites.start "$kit" --check || exit $?
  "$DIR/sub_start.sh" $arguments --checked &
  # Until it has ended, or written down which process it is: from then on it can be stopped.
  for _ in {1..50}; do
    kill -0 $! 2> /dev/null || break
    grep -qx $! "${NVFL_WORKSPACE:-$kit}/daemon_pid.fl" 2> /dev/null && break
    sleep 0.1
  done"""
_STOP = """
"$FEDSTRATA_PYTHON" -m fedstrata.sites.stop "$WORKSPACE"
"""


def finish(kit: Path) -> None:
    """Make NVFlare's kit one of ours, closed to others.

    Args:
        kit: A party's folder.
    """
    for sample in _SAMPLES:
        (kit / sample).unlink(missing_ok=True)
    for script in (kit / "startup").glob("*.sh"):
        first, _, rest = script.read_text(encoding="utf-8").partition("\n")
        rest = rest.replace("python3 ", '"$FEDSTRATA_PYTHON" ').replace("\nSECONDS=0\n", _START)
        rest = rest.replace("\n  $DIR/sub_start.sh &", _CHECK)
        rest = rest.replace(_WRITTEN_LATE, "")
        # Started once it has no daemon: then the number in this file is its own.
        rest = rest.replace('directly"\n  rm -f "$WORKSPACE/pid.fl"', 'directly"\n  rm -f')
        if script.name == "stop_fl.sh":  # NVFlare's asks a question, and does nothing without a terminal
            rest = rest.partition('echo "Please use FL admin console')[0] + _STOP
        script.write_text(f"{first}\n{_PYTHON}{rest}", encoding="utf-8")
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
