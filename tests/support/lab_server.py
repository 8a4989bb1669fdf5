"""A JupyterLab of this environment with our parts, and who answers it in the hub's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests

from tests.support.lab import LAB
from tests.support.processes import BIN, die_with_us, end_process, free_port, wait_for

TOKEN = "t0ken"

PATHS = {
    "JUPYTER_PATH": str(LAB / "share" / "jupyter"),
    "JUPYTER_CONFIG_PATH": str(LAB / "etc" / "jupyter"),
    "PYTHONPATH": str(LAB),
}
"""By which a JupyterLab that is installed here finds what the images have in their own."""


@dataclass
class StandInHub:
    """Answers what a test says, by the path's last part, and remembers what it was asked."""

    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    asked: list[tuple[str, str, str, Any]] = field(default_factory=list)
    url: str = ""

    def sent(self, last: str) -> list[Any]:
        """The bodies of the requests whose path ends so."""
        return [body for _, path, _, body in self.asked if path.rpartition("/")[2] == last]

    def environment(self, **more: str) -> dict[str, str]:
        """The variables of a server that has a lease of this hub."""
        return {
            "JUPYTERHUB_API_URL": self.url,
            "JUPYTERHUB_API_TOKEN": TOKEN,
            "GPUSPAWNER_LEASE_ID": "0a",
            **more,
        }


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    hub = StandInHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = self.headers.get("Authorization", "")
            sent = json.loads(body) if body else None
            hub.asked.append((self.command, self.path, token, sent))
            status, told = hub.answers.get(self.path.rpartition("/")[2], (404, {}))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}/hub/api"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def lab_server(
    folder: Path, environment: Mapping[str, str], *arguments: str, program: str = "jupyterlab"
) -> Iterator[str]:
    """A server whose files are in a folder; its URL. It needs no token."""
    port = free_port()
    command = [
        *(sys.executable, "-m", program, "--no-browser", f"--port={port}", "--allow-root"),
        *("--ServerApp.token=", "--ServerApp.password=", "--ServerApp.disable_check_xsrf=True"),
        *(f"--ServerApp.root_dir={folder}", *arguments),
    ]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")}
    path = {"HOME": str(folder.parent), "PATH": f"{BIN}:{kept['PATH']}"}
    with open(folder.parent / "lab.log", "wb") as log:
        process = subprocess.Popen(
            die_with_us(command),
            env={**kept, **PATHS, **path, **environment},
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: _answers(url), "JupyterLab", timeout=60)
        yield url
        for session in requests.get(f"{url}/api/sessions", timeout=120).json():
            requests.delete(f"{url}/api/sessions/{session['id']}", timeout=120)
    finally:
        end_process(process.pid)
        process.wait(timeout=60)


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/api", timeout=120).ok
    except requests.RequestException:
        return False
