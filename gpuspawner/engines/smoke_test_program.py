"""The program of a smoke test, which runs in a container and needs nothing installed.

``python3 -c SOURCE JSON``, in any image with Python 3.8 or later. Prints a JSON object per line:
``{"name", "ok", "text"}``.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PREFIX = "/user/smoke/"
SCOPES = ["access:servers!server=smoke/", "access:servers"]


def main(told: dict[str, Any]) -> None:
    """Run all checks."""
    check("user", user)
    for module in told["imports"]:
        check(f"import {module}", partial(version_of, module))
    for program in told["programs"]:
        check(program, partial(program_of, program))
    check("devices", lambda: devices(told["devices"], told["counts"]))
    check("workspace", lambda: writes(told["workspace"]))
    check("dataset", lambda: cannot_write(told["dataset"]))
    check("server", lambda: Server(told["command"], told["patience"]).answers(told["pages"]))


def check(name: str, look: Callable[[], str]) -> None:
    """Print one line: the result of ``look``, or why it failed."""
    try:
        ok, text = True, look()
    except BaseException as error:  # a broken extension module may raise anything
        ok, text = False, str(error).strip() or type(error).__name__
        if isinstance(error, KeyboardInterrupt):
            raise
    print(json.dumps({"name": name, "ok": ok, "text": text[:500]}), flush=True)


def user() -> str:
    """Check that the image does not run as root."""
    if os.getuid() == 0:
        raise RuntimeError("the image runs as root: say USER in its Dockerfile")
    return f"runs with the user id {os.getuid()}"


def version_of(module: str) -> str:
    """Import a module, and return its version and the time it took."""
    began = time.monotonic()
    found = importlib.import_module(module)
    took = time.monotonic() - began
    return f"{getattr(found, '__version__', 'imported')} in {took:.1f} s"


def program_of(name: str) -> str:
    """Run a program with ``--version``, and return its answer."""
    path = shutil.which(name)
    if not path:
        raise RuntimeError(f"{name} is not on the PATH")
    words = [path, "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} --version: {(done.stderr or done.stdout)[-300:]}")
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[-1] if lines else "runs"


# Devices.


def devices(expected: int, frameworks: list[str]) -> str:
    """Check the number of devices, also as frameworks count them."""
    nodes = glob.glob("/dev/nvidia[0-9]*")
    if len(nodes) != expected:
        raise RuntimeError(f"{len(nodes)} device nodes instead of {expected}")
    if expected and not has_driver():
        return f"{expected}; no driver library here, so no framework was asked"
    for name in frameworks:
        seen = COUNTS[name]()
        if seen != expected:
            raise RuntimeError(f"{name} sees {seen} devices instead of {expected}")
    if not frameworks:
        return str(expected)
    verb = "do" if len(frameworks) > 1 else "does"
    return f"{expected}, and so {verb} {', '.join(frameworks)}"


def has_driver() -> bool:
    """Return True if CUDA's driver library is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _torch() -> int:
    return int(importlib.import_module("torch").cuda.device_count())


def _jax() -> int:
    found = importlib.import_module("jax").devices()
    return sum(device.platform in ("gpu", "cuda") for device in found)


def _tensorflow() -> int:
    return len(importlib.import_module("tensorflow").config.list_physical_devices("GPU"))


COUNTS: dict[str, Callable[[], int]] = {"torch": _torch, "jax": _jax, "tensorflow": _tensorflow}


# Files.


def writes(folder: str) -> str:
    """Check that a folder can be written."""
    path = os.path.join(folder, f".smoke-{secrets.token_hex(4)}")
    with open(path, "w", encoding="utf-8") as file:
        file.write("written")
    with open(path, encoding="utf-8") as file:
        if file.read() != "written":
            raise RuntimeError(f"what was written into {folder} is not there")
    os.unlink(path)
    return f"{folder} can be written"


def cannot_write(folder: str) -> str:
    """Check that a folder cannot be written."""
    try:
        with open(os.path.join(folder, ".smoke"), "w", encoding="utf-8"):
            pass
    except OSError:
        return f"{folder} cannot be written"
    raise RuntimeError(f"{folder} can be written, though it is mounted read-only")


# A server, started like by the hub.


class StandInHub(BaseHTTPRequestHandler):
    """The answers of a hub that a server requests."""

    version = ""

    def do_GET(self) -> None:
        """Answer with a user, or with the hub's version."""
        model = {"name": "smoke", "kind": "user", "admin": False, "groups": [], "scopes": SCOPES}
        self._answer(model if self.path.startswith("/hub/api/user") else {"version": self.version})

    def do_POST(self) -> None:
        """Accept anything."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer({})

    def _answer(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("X-JupyterHub-Version", self.version)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class Server:
    """The image's own command, with the variables that the hub would set."""

    def __init__(self, command: list[str], patience: float) -> None:
        self.command = command
        self.patience = patience
        self.token = secrets.token_hex(16)
        self.port = free_port()

    def answers(self, pages: list[str]) -> str:
        """Start the server, and wait until each page answers."""
        StandInHub.version = hub_version()
        hub = ThreadingHTTPServer(("127.0.0.1", 0), StandInHub)
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environment = {**os.environ, **self._variables(hub.server_address[1])}
        with tempfile.TemporaryFile() as log:
            began = time.monotonic()
            server = subprocess.Popen(self.command, env=environment, stdout=log, stderr=log)
            try:
                self._wait(server, "api")
                took = time.monotonic() - began
                for page in pages:
                    self._wait(server, page)
            except Exception as error:
                log.seek(0)
                words = log.read().decode(errors="replace")[-300:]
                raise RuntimeError(f"{error}; its last words: {words}") from None
            finally:
                server.kill()
                server.wait()
        shown = f"; also {', '.join(pages)}" if pages else ""
        return f"answers after {took:.1f} s{shown}"

    def _wait(self, server: subprocess.Popen[bytes], page: str) -> None:
        end = time.monotonic() + self.patience
        while True:
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode}")
            try:
                self._get(page)
                return
            except urllib.error.HTTPError as error:
                problem = f"{PREFIX}{page} answers {error.code}"
            except OSError as error:
                problem = f"{PREFIX}{page} is not responding: {error}"
            if time.monotonic() > end:
                raise RuntimeError(f"{problem} within {self.patience:.0f} s")
            time.sleep(0.1)

    def _get(self, page: str) -> None:
        url = f"http://127.0.0.1:{self.port}{PREFIX}{page}"
        asked = urllib.request.Request(url, headers={"Authorization": f"token {self.token}"})
        without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with without_proxy.open(asked, timeout=self.patience) as answer:
            answer.read()

    def _variables(self, port: int) -> dict[str, str]:
        scopes = json.dumps(SCOPES[:1])
        return {
            "JUPYTERHUB_API_TOKEN": self.token,
            "JUPYTERHUB_API_URL": f"http://127.0.0.1:{port}/hub/api",
            "JUPYTERHUB_ACTIVITY_URL": f"http://127.0.0.1:{port}/hub/api/users/smoke/activity",
            "JUPYTERHUB_BASE_URL": "/",
            "JUPYTERHUB_CLIENT_ID": "jupyterhub-user-smoke",
            "JUPYTERHUB_HOST": "",
            "JUPYTERHUB_OAUTH_ACCESS_SCOPES": scopes,
            "JUPYTERHUB_OAUTH_CALLBACK_URL": f"{PREFIX}oauth_callback",
            "JUPYTERHUB_OAUTH_SCOPES": scopes,
            "JUPYTERHUB_SERVER_NAME": "",
            "JUPYTERHUB_SERVICE_PREFIX": PREFIX,
            "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{self.port}{PREFIX}",
            "JUPYTERHUB_USER": "smoke",
        }


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def hub_version() -> str:
    """Return JupyterHub's version in the image, so that the server does not warn of another one."""
    words = ["jupyterhub-singleuser", "--version"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
