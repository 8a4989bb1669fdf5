"""A server that answers with the devices that CUDA shows it, in place of Jupyter's.

Run as ``c.Spawner.cmd``. A process of its own looks each time, as a kernel of the server would.
"""

from __future__ import annotations

import contextlib
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.support.cuda import Program


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        uuids: list[str] = []
        if self.path.endswith("/devices"):
            with Program() as program:
                uuids = program.tell("uuids")
        body = json.dumps(uuids).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    url = urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"])
    server = ThreadingHTTPServer((url.hostname or "127.0.0.1", url.port or 80), Answer)
    with contextlib.suppress(KeyboardInterrupt):  # how the hub stops a local process
        server.serve_forever()
