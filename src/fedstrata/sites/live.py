"""Show the progress of a run on a web page that only browsers on this machine can open."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedstrata.base.errors import DataError, SpecError
from fedstrata.base.jsonl import jsonable
from fedstrata.base.printable import print_lines
from fedstrata.reporting.html import assets, render, template
from fedstrata.reporting.runs import load_runs
from fedstrata.sites.status import Source, source_of
from fedstrata.sites.submit import POLL, Report

LOOPBACK = "127.0.0.1"

SCRIPTS = ("uPlot.iife.min.js", "base.js", "live.js")

_HTML, _JSON, _TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"


def serve(folder: Path, port: int, report: Report = print_lines) -> None:
    """Serve the web page until the process is interrupted.

    Args:
        folder: The folder of the administrator, the server or a site, or a run folder; see
            ``fedstrata.sites.status.source_of``.
        port: The port; 0 for a free port.
        report: A function that is called once with a text that contains the page's address.

    Raises:
        SpecError: ``folder`` is neither a run folder nor the folder of a party, or the port cannot be used.
        DataError: A file of the run is damaged.
        FedstrataError: The server of the run refuses a request.
    """
    with closing(source_of(folder, report)) as source, serving(source, port) as (address, update):
        report(f"{address} shows the run, only on this machine; press Ctrl-C to stop")
        while True:
            update()
            time.sleep(POLL)


@contextmanager
def serving(source: Source, port: int = 0) -> Iterator[tuple[str, Callable[[], None]]]:
    """Serve the web page during the ``with`` block, and yield the page's address and a function that updates the page.

    All users of this machine, and all web pages in their browsers, can connect to the port. The server therefore sends
    the page only if the address contains the page's random key and a host name of this machine.

    Args:
        source: The source from which the progress of the run is read.
        port: The port; 0 for a free port.

    Raises:
        SpecError: The port cannot be used.
    """
    page, key = _Page(source), secrets.token_urlsafe(16)
    try:
        server = ThreadingHTTPServer((LOOPBACK, port), _handler(page, key))
    except (OSError, OverflowError) as error:
        raise SpecError("--serve", f"the port cannot be opened: {error}. Use another port.", port) from None
    thread = threading.Thread(target=server.serve_forever, name="page", daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_port}/{key}/", page.update
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Page:
    """The files of the web page. One thread updates the files, and other threads send the files.

    Args:
        source: The source from which the progress of the run is read.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._status, self._report, self._over = b"null", b"", ""
        self._page = template("live.html.j2").render(**assets(SCRIPTS)).encode()

    def update(self) -> None:
        """Read the progress, and update the files of the page."""
        table = self._source.table()
        over = "" if table is None else str(table.get("over") or "")
        if over != self._over:
            self._over, self._report = over, self._render_report() if over else b""
        if table is not None:
            table = {**table, "report": bool(self._report), "now": time.time()}
        self._status = json.dumps(jsonable(table), allow_nan=False).encode()

    def _render_report(self) -> bytes:
        folder = self._source.result()
        try:
            return b"" if folder is None else render(load_runs(folder)).encode()
        except DataError:
            return b""  # a run without a complete round does not have a report

    def content(self, path: str) -> tuple[str, bytes] | None:
        """Return the content type and the bytes of the file at a path; None if the page has no such file."""
        pages = {"": (_HTML, self._page), "status.json": (_JSON, self._status)}
        if self._report:
            pages["report.html"] = _HTML, self._report
        return pages.get(path)


def hosts(port: int) -> set[str]:
    """Return the ``Host`` headers that browsers on this machine may send. Browsers may omit the default port 80."""
    names = {LOOPBACK, "localhost"}
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())


def _handler(page: _Page, key: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version, timeout = "fedstrata", "", 30

        def do_GET(self) -> None:  # the name is fixed, because http.server calls this method
            if self.headers.get("Host", "") not in hosts(self.connection.getsockname()[1]):
                self._answer(403, _TEXT, b"this page is only for browsers on its own machine\n")
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

        def log_message(self, format: str, *args: object) -> None:
            """Do not log requests, because the address of the page must not be in a log."""

    return Handler
