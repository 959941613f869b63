"""`fly report --watch DIR`: the page of a run that goes on, served on loopback."""

from __future__ import annotations

import http.server
import socketserver
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from fly.errors import FlyError

SECONDS = 10  # after which the browser asks again
_HOST = "127.0.0.1"


def server(
    folder: Path, page: Callable[[], tuple[bytes, bool]], port: int
) -> socketserver.TCPServer:
    """Serves one page to this machine only; nothing is written. page: the bytes, and whether the
    run has ended, so that the browser need not ask again."""
    if not folder.is_dir():
        raise FlyError(f"--watch {folder}: no such folder: give the --output_path of a run")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            own = self.connection.getsockname()[1]
            # another name for this machine is another site's, which must not read the page
            if self.headers.get("Host") not in (f"{_HOST}:{own}", f"localhost:{own}"):
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            if self.path.partition("?")[0] != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            try:
                content, is_finished = page()
                kind = "text/html; charset=utf-8"
            except FlyError as error:  # a line that is half written, or nothing as yet
                content, is_finished, kind = str(error).encode(), False, "text/plain; charset=utf-8"
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if not is_finished:
                self.send_header("Refresh", str(SECONDS))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """The terminal is the user's."""

    try:
        return http.server.HTTPServer((_HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise FlyError(
            f"--port {port}: cannot be used: {getattr(error, 'strerror', error)}"
        ) from None
