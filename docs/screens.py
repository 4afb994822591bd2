"""What the pages show of the first comparison: its report, pictures of it, and what its commands print.

python docs/screens.py    writes the pictures and the outputs again; it needs Chromium

Building the site makes the report alone.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "start" / "first-comparison.md"
STATIC = ROOT / "docs" / "_static"
COLUMNS = 100
WIDTH, HEIGHT = 1100, 720
"""The size of the report's first screen in pixels."""
CONSOLE = re.compile(r"^```console\n(?P<text>\$ .*?)^```", re.MULTILINE | re.DOTALL)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\]8;[^\x1b]*\x1b\\|\r")


def compare(folder: Path) -> Path:
    """Run the comparison of the page in a folder, where finished runs are kept.

    Returns:
        The report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    commands = [line for block in CONSOLE.finditer(PAGE.read_text(encoding="utf-8")) for line in typed(block["text"])]
    new, compare = (next(each for each in commands if f"fedstrata {name} " in each) for name in ("new", "compare"))
    if not (folder / "spec.toml").exists():
        printed(new, folder)
    printed(compare, folder)
    return folder / compare.partition("--out ")[2] / "report.html"


def typed(text: str) -> list[str]:
    """Return the commands in a block of a terminal."""
    return [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]


def printed(command: str, folder: Path) -> str:
    """Run a command in a folder, and return what it prints to a terminal, without colours and progress."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    words = [sys.executable, "-m", *command.split()]
    with subprocess.Popen(words, cwd=folder, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        text = b""
        # On Linux, reading fails when the program has closed its end.
        while more := _read(ours):
            text += more
        problem = process.communicate()[1].decode()
    os.close(ours)
    if process.returncode:
        raise RuntimeError(f"{command}: {problem}")
    return ESCAPES.sub("", text.decode())


def _read(file: int) -> bytes:
    try:
        return os.read(file, 1 << 16)
    except OSError:
        return b""


def main() -> None:
    """Write the outputs into the page, and the pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        PAGE.write_text(CONSOLE.sub(lambda block: run(block["text"], folder), PAGE.read_text(encoding="utf-8")))
        shutil.copy(folder / "partition.png", STATIC / "partition.png")
        photograph(compare(folder), folder / "profile")


def run(block: str, folder: Path) -> str:
    """Return a block of a terminal with what its commands print today."""
    lines = []
    for command in typed(block):
        output = [line.rstrip() for line in printed(command, folder).replace(str(folder), "/home/you").splitlines()]
        lines += [f"$ {command}", *output]
    return "\n".join(["```console", *lines, "```"])


def photograph(report: Path, profile: Path) -> None:
    """Write the first screen of a report in both themes as small PNG files."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from browser import browser

    with browser(profile) as page:
        for theme in ("light", "dark"):
            page.open(report, WIDTH, theme, HEIGHT)
            size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 2, "mobile": False}
            page.send("Emulation.setDeviceMetricsOverride", **size)
            path = page.picture(STATIC / f"report-{theme}.png", whole=False)
            with Image.open(path) as picture:
                picture.convert("RGB").quantize(96).save(path, optimize=True)


if __name__ == "__main__":
    main()
