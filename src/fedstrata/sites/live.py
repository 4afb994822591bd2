"""A page about a run while it goes on, for the browsers of this machine alone."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedstrata.base.errors import DataError, SpecError
from fedstrata.base.jsonl import jsonable
from fedstrata.reporting.html import assets, render, template
from fedstrata.reporting.runs import load_runs
from fedstrata.sites.status import Source, source_of
from fedstrata.sites.submit import POLL, Report

LOOPBACK = "127.0.0.1"

SCRIPTS = ("uPlot.iife.min.js", "base.js", "live.js")

_HTML, _JSON, _TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"


def serve(folder: Path, port: int, report: Report = print) -> None:
    """Serve the page until the process is told to end.

    Args:
        folder: See ``fedstrata.sites.status.source_of``.
        port: 0 for one that is free.
        report: Is called with the address of the page.

    Raises:
        SpecError: It is no such folder, or the port cannot be had.
        DataError: What the run wrote down is damaged.
        FedstrataError: The server refuses.
    """
    source = source_of(folder, report)
    try:
        with serving(source, port) as (address, look):
            report(f"{address} shows the run, on this machine alone; Ctrl-C ends it")
            while True:
                look()
                time.sleep(POLL)
    finally:
        source.close()


@contextmanager
def serving(source: Source, port: int = 0) -> Iterator[tuple[str, Callable[[], None]]]:
    """The page's address, and what looks at the run for it; it is served for the time of the block.

    Everybody on this machine can connect, and so can what a browser here has open: who does not have the address,
    which cannot be guessed, is shown nothing, and neither is a page of another name that points here.

    Args:
        source: Where to look.
        port: 0 for one that is free.

    Raises:
        SpecError: The port cannot be had.
    """
    page, key = _Page(source), secrets.token_urlsafe(16)
    try:
        server = ThreadingHTTPServer((LOOPBACK, port), _handler(page, key))
    except (OSError, OverflowError) as error:
        raise SpecError("--serve", f"the port cannot be had: {error}", port) from None
    thread = threading.Thread(target=server.serve_forever, name="page", daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_port}/{key}/", page.look
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Page:
    """What there is to be shown; one thread looks, others show.

    Args:
        source: Where to look.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._status, self._report, self._over = b"null", b"", ""
        self._page = template("live.html.j2").render(**assets(SCRIPTS)).encode()

    def look(self) -> None:
        """Look once."""
        table = self._source.table()
        over = "" if table is None else str(table.get("over") or "")
        if over != self._over:
            self._over, self._report = over, self._reported() if over else b""
        more: dict[str, Any] = {"report": bool(self._report), "now": time.time()}
        shown = None if table is None else {**table, **more}
        self._status = json.dumps(jsonable(shown), allow_nan=False).encode()

    def _reported(self) -> bytes:
        folder = self._source.result()
        try:
            return b"" if folder is None else render(load_runs(folder)).encode()
        except DataError:
            return b""  # no round was over

    def content(self, path: str) -> tuple[str, bytes] | None:
        """What is at a path: its kind and the bytes."""
        pages = {"": (_HTML, self._page), "status.json": (_JSON, self._status)}
        if self._report:
            pages["report.html"] = _HTML, self._report
        return pages.get(path)


def hosts(port: int) -> set[str]:
    """What a browser of this machine may call it; the port that is usual for pages is left out."""
    names = {LOOPBACK, "localhost"}
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())


def _handler(page: _Page, key: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version, timeout = "fedstrata", "", 30

        def do_GET(self) -> None:  # http.server's name for it
            if self.headers.get("Host", "") not in hosts(self.connection.getsockname()[1]):
                self._answer(403, _TEXT, b"this page is for its own machine alone\n")
                return
            _, given, path = [*self.path.partition("?")[0].split("/", 2), "", ""][:3]
            right = secrets.compare_digest(given.encode(), key.encode())
            content = page.content(path) if right and self.path.startswith(f"/{key}/") else None
            self._answer(*((404, _TEXT, b"not found\n") if content is None else (200, *content)))

        def _answer(self, code: int, kind: str, data: bytes) -> None:
            self.send_response(code)
            for name, value in {
                "Content-Type": kind,
                "Content-Length": str(len(data)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
                "Referrer-Policy": "no-referrer",
                "Cross-Origin-Resource-Policy": "same-origin",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: who looks at the page is no news, and its address is not for a log."""

    return Handler
