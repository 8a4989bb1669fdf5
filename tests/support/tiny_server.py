"""A server that answers at once, in place of Jupyter's: what tests of the hub itself start.

Run as ``c.Spawner.cmd``; it answers everything with its own environment's lease.
"""

from __future__ import annotations

import contextlib
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Answer(BaseHTTPRequestHandler):
    def body(self) -> bytes:
        """What is sent for ``self.path``."""
        return os.environ.get("GPUSPAWNER_LEASE_ID", "none").encode()

    def do_GET(self) -> None:
        body = self.body()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def serve(answer: type[Answer]) -> None:
    """Answer at the address that the hub gave, until it stops us."""
    url = urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"])
    server = ThreadingHTTPServer((url.hostname or "127.0.0.1", url.port or 80), answer)
    with contextlib.suppress(KeyboardInterrupt):  # how the hub stops a local process
        server.serve_forever()


if __name__ == "__main__":
    serve(Answer)
