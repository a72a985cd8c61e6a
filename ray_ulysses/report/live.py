"""Serves the report of a run that goes on: drawn again when a page is asked for and the run has gone on or ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ray_ulysses.errors import UlyssesError, UserError
from ray_ulysses.report.page import render_report
from ray_ulysses.storage import LockOwner, current_owner
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.journal_files import file_size, journal_files

REFRESH_S = 15
_LOCAL = ("127.0.0.1", "localhost")


class LiveReport:
    """The newest page of a run, drawn by one thread at a time."""

    def __init__(
        self, run_dir: Place, beside: Place | None = None, *, render: Callable[..., str] = render_report
    ) -> None:
        """Draw nothing yet; ``render`` is called as `render_report`."""
        self._run_dir, self._beside, self._render = run_dir, beside, render
        self._runs = [run_dir] if beside is None else [run_dir, beside]
        self._lock, self._page = threading.Lock(), ""
        self._drawn_of: list[tuple[str, int]] | None = None
        self._holders: list[LockOwner | None] = []

    def page(self) -> str:
        """Return the page, drawn again if a journal has grown or the command of a run has ended since.

        Raises:
            OSError: A journal can't be read.
            UlyssesError: The storage does not answer.
        """
        with self._lock:
            # Looked at before the page is drawn: what is added meanwhile is drawn next time.
            sizes = self._journal_sizes()
            # A command that was killed writes nothing. Of a run that nobody holds, only the journal is looked at.
            if any(self._holders) and self._find_holders() != self._holders:
                self._drawn_of = None
            if sizes != self._drawn_of:
                self._holders = self._find_holders()
                self._page = self._render(self._run_dir, self._beside, refresh_s=REFRESH_S)
                self._drawn_of = sizes
            return self._page

    def _journal_sizes(self) -> list[tuple[str, int]]:
        return [(f"{run}/{file.name}", file_size(file)) for run in self._runs for _, file in journal_files(run)]

    def _find_holders(self) -> list[LockOwner | None]:
        return [current_owner(run) for run in self._runs]


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that did not wait for its page."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def open_server(report: LiveReport, host: str, port: int) -> ThreadingHTTPServer:
    """Return a server of the report's page, and of nothing else; port 0 takes a free one.

    Raises:
        UserError: The address can't be taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.headers.get("Host", host).partition(":")[0]
            if host in _LOCAL and name not in _LOCAL:
                # A page of another site whose name was made to mean this machine could read the report.
                self.send_error(
                    403, explain=f"served on {host} alone, not as {name}; give --host to serve it elsewhere"
                )
                return
            if self.path != "/":
                self.send_error(404)
                return
            try:
                page = report.page().encode()
            except (OSError, UlyssesError) as error:
                # The run's storage may be away for a while; the browser's next request tries again.
                self.send_error(503, explain=str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing about a request."""

    try:
        return _Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--host={host!r} --port={port}: can't be listened on ({error}); give another --port, or 0 for a free one"
        ) from error
