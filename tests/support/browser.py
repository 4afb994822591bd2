"""Control a headless Chromium by its DevTools protocol through pipes, without a library or a network port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DRAWN = "document.documentElement?.dataset.drawn"
"""True in a page with charts, as JavaScript, once they are drawn."""
PAPER = 965, 702
"""The width of Letter and the height of A4 in landscape, in pixels and within margins of 12 mm: the lesser ones."""
LOST_ON_PAPER = """
[...document.querySelectorAll("main *, header *")].filter(each => {
  const place = each.getBoundingClientRect(), look = getComputedStyle(each), drawn = each.closest("svg");
  if (!place.width || each.closest(".hidden") || (drawn && drawn !== each)) return false;
  const isBeyond = place.right > innerWidth + 0.5 || place.left < -0.5;
  const isLarger = each.scrollWidth > each.clientWidth + 1 || each.scrollHeight > each.clientHeight + 1;
  const isClipped = !drawn && look.overflow !== "visible" && isLarger;
  const isTall = each.matches("svg, canvas, img") && place.height > innerHeight;
  return isBeyond || isClipped || isTall || (each.matches("figure, tr") && look.breakInside !== "avoid");
}).map(each => `${each.tagName}.${each.getAttribute("class") ?? ""} ${each.textContent.slice(0, 40)}`)
"""
"""The elements that print would cut, as JavaScript: beyond the paper, clipped, or maybe split between two pages."""
SPY = """
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
  if (this.textAlign === "right") (this.canvas.ticks ??= []).push(text);
  fillText.call(this, text, ...place);
};
"""
"""A script that keeps the numbers at the vertical axes of charts for ``PERCENT_TICKS``."""
PERCENT_TICKS = """
[...document.querySelectorAll(".plot[aria-label*='%'] canvas")].map(canvas =>
  canvas.ticks.map(tick => Number(tick.replace("\u2212", "-"))))
"""
PATIENCE = 60.0
"""The seconds to wait for an answer; many, because the machine may be busy."""


class Browser:
    """One page of a browser.

    Args:
        write: The file descriptor for commands to the browser.
        read: The file descriptor for its answers.
    """

    def __init__(self, write: int, read: int) -> None:
        self.write, self.read = write, read
        self.problems: list[str] = []
        """Exceptions, errors on the console, and violations of the page's security policy."""
        self._last, self._rest, self._events, self._session = 0, b"", list[dict[str, Any]](), ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setScrollbarsHidden", hidden=True)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command to the browser, and return its answer."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            if not select.select([self.read], [], [], max(until - time.monotonic(), 0))[0]:
                raise TimeoutError("the browser does not answer")
            if not (more := os.read(self.read, 1 << 20)):
                raise EOFError("the browser has ended")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        if event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"])[:500])
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    def open(self, page: Path, width: int, scheme: str = "light", height: int = 900, ready: str = DRAWN) -> None:
        """Load a file in a window of a given size in pixels, with a colour scheme, and wait until ``ready`` is true."""
        self.visit(page.resolve().as_uri(), width, scheme, height, ready)

    def visit(self, address: str, width: int, scheme: str = "light", height: int = 900, ready: str = DRAWN) -> None:
        """Load an address as ``open`` loads a file."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && {ready}")

    @contextmanager
    def spying(self) -> Iterator[None]:
        """Run ``SPY`` in all pages that are opened during the ``with`` block."""
        script = self.send("Page.addScriptToEvaluateOnNewDocument", source=SPY)
        yield
        self.send("Page.removeScriptToEvaluateOnNewDocument", **script)

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page, and return its value or the result of its promise."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:500])
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + PATIENCE
        while not self.value(expression):
            if time.monotonic() > until:
                raise TimeoutError(expression)
            time.sleep(0.02)

    def press(self, key: str, code: int = 0) -> None:
        """Press a key, such as ``Tab`` (9), ``Enter`` (13) or a space (32)."""
        text = {"text": "\r" if key == "Enter" else key} if key in ("Enter", " ") else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def picture(self, path: Path, *, whole: bool = True) -> Path:
        """Write a screenshot of the page as PNG."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=whole, **(self._whole() if whole else {}))
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def _whole(self) -> dict[str, Any]:
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def lay_out_for_print(self) -> None:
        """Lay out the page as on paper; ``visit`` undoes it."""
        self.value("dispatchEvent(new Event('beforeprint')), 0")
        self.send(
            "Emulation.setDeviceMetricsOverride", width=PAPER[0], height=PAPER[1], deviceScaleFactor=1, mobile=False
        )
        self.send("Emulation.setEmulatedMedia", media="print")
        self.value("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")

    def pdf(self, path: Path) -> Path:
        """Print the page as PDF."""
        path.write_bytes(base64.b64decode(self.send("Page.printToPDF", preferCSSPageSize=True)["data"]))
        return path


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Run a browser with its own profile during the ``with`` block.

    Args:
        profile: An empty folder for the profile.
    """
    assert PROGRAM is not None
    ours_read, theirs_write = os.pipe()
    theirs_read, ours_write = os.pipe()
    options = [
        "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
        f"--user-data-dir={profile}",
    ]  # fmt: skip
    # The browser reads from descriptor 3 and writes to 4. The ends of the pipes may have these numbers, so they are
    # first moved to numbers from 10.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_read, theirs_write)]
    actions = [(os.POSIX_SPAWN_OPEN, file, os.devnull, os.O_RDWR, 0) for file in range(3)]
    actions += [(os.POSIX_SPAWN_DUP2, end, place) for end, place in zip(ends, (3, 4), strict=True)]
    process = os.posix_spawn(PROGRAM, [PROGRAM, *options], os.environ, file_actions=actions)
    for end in (theirs_read, theirs_write, *ends):
        os.close(end)
    try:
        yield Browser(ours_write, ours_read)
    finally:
        os.close(ours_write)  # the browser ends when its pipe is closed
        os.close(ours_read)
        until = time.monotonic() + 10
        while os.waitpid(process, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(process, signal.SIGKILL)
            time.sleep(0.02)
