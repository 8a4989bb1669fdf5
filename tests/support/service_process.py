"""The accounting service as a process, and a stand-in for its Hub that says who asks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.support import parts
from tests.support.http_client import new_session
from tests.support.hub import ADMIN, NAVIGATION
from tests.support.preloaded import ENVIRONMENT, PRELOADED, READ_BY_SERVICE, Forked
from tests.support.processes import LIVE, PATIENCE, alive, end_process, free_port, wait_for

PREFIX = "/services/gpu/"
SCOPE = "access:services!service=gpu"
PREAMBLE = f"""
from functools import partial
from jupyterhub.services.auth import HubOAuth
from gpuspawner.service.app import main
HubOAuth.instance = partial(HubOAuth.instance, base_url={PREFIX!r})  # else read when imported
"""
"""What a test's own lines follow, when the service is to start with some."""


def token_of(user: str) -> str:
    """The token that the stand-in for the Hub knows a member by."""
    return f"token-of-{user}"


class StandInHub(BaseHTTPRequestHandler):
    """Who a token belongs to, a token for each code, and no servers at all."""

    groups: Mapping[str, Sequence[str]] = {}
    """The groups of each member; who is missing is in none."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        word = self.headers.get("Authorization", "").rpartition(" ")[2]
        if path.endswith("/user"):
            known = re.fullmatch(r"token-of-(\w+)", word)
            self._answer(200 if known else 403, self._user(known[1]) if known else {})
        elif path.endswith("/users"):
            self._answer(200, {"items": [], "_pagination": {"next": None}})
        else:
            self._answer(404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        path = urlsplit(self.path).path
        if path.endswith("/oauth2/token"):
            self._answer(200, {"access_token": token_of(parse_qs(body)["code"][0])})
        elif path.endswith("/launcher/environments"):
            self._answer(200, {"environments": []})
        else:
            self._answer(404, {})

    def _answer(self, status: int, content: Mapping[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the service is what is looked at."""

    def _user(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "kind": "user",
            "admin": name == ADMIN,
            "groups": list(self.groups.get(name, ())),
            "scopes": [SCOPE],
        }


class ServiceProcess:
    """``with ServiceProcess(folder) as service``; the test declares ``processes``.

    ``settings``: sections of the configuration beside those here. ``before``: lines of Python that
    run in the service's process before it starts.
    """

    name = "the accounting service"

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        before: str = "",
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}{PREFIX}"
        self.database_url = f"sqlite:///{folder}/gpuspawner.sqlite"
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self._hub = ThreadingHTTPServer(("127.0.0.1", 0), StandInHub)
        self._before = before
        self._settings: dict[str, dict[str, Any]] = {
            "GPUDevices": {"source": "simulated:1xT4"},
            "GPUCredits": {"charge_seconds": 0.2},
            "GPUMonitoring": {"sample_seconds": 0},
        }
        for section, values in (settings or {}).items():
            self._settings.setdefault(section, {}).update(values)

    def __enter__(self) -> ServiceProcess:
        parts.require("process")
        threading.Thread(target=self._hub.serve_forever, daemon=True).start()
        LIVE.append(self)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        LIVE.remove(self)
        self._hub.shutdown()
        self._hub.server_close()

    def start(self) -> None:
        """Start the process, and wait until its pages answer."""
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("JUPYTERHUB_")},
            **ENVIRONMENT,
            "JUPYTERHUB_API_URL": f"http://127.0.0.1:{self._hub.server_port}/hub/api",
            "JUPYTERHUB_API_TOKEN": "of-the-service",
            "JUPYTERHUB_SERVICE_NAME": "gpu",
            "JUPYTERHUB_SERVICE_PREFIX": PREFIX,
            "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{self.port}",
            "JUPYTERHUB_CLIENT_ID": "service-gpu",
            "JUPYTERHUB_OAUTH_CALLBACK_URL": f"{PREFIX}oauth_callback",
            "JUPYTERHUB_OAUTH_ACCESS_SCOPES": json.dumps([SCOPE]),
            "JUPYTERHUB_BASE_URL": "/",
            "GPUSPAWNER_DATABASE_URL": self.database_url,
            "GPUSPAWNER_CONFIG": json.dumps(self._settings),
        }
        code = f"{PREAMBLE}{self._before}\nmain()"
        log = str(self.folder / "service.log")
        streams = [os.devnull, log, log]
        self.process = PRELOADED.start(
            ["-c", code], self.folder, environment, streams, early=READ_BY_SERVICE
        )
        wait_for(self.answers, "the service's pages", timeout=30)

    def stop(self) -> None:
        """End the process, as its Hub does."""
        if self.process is not None and alive(self.process.pid):
            end_process(self.process.pid)
        if self.process is not None:
            self.process.wait()

    def answers(self) -> bool:
        assert self.process is not None
        if (code := self.process.poll()) is not None:
            raise RuntimeError(f"the service ended with {code}:\n{self.log_text()[-4000:]}")
        try:
            return requests.get(f"{self.url}static/gpu.css", timeout=5).ok
        except requests.RequestException:
            return False

    @property
    def rss(self) -> int:
        """Bytes of memory that the process has."""
        assert self.process is not None
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def log_text(self) -> str:
        """What the service printed."""
        log = self.folder / "service.log"
        return log.read_text(errors="replace") if log.exists() else ""

    # Asking it.

    def ask(self, method: str, path: str, user: str = "", **kwargs: Any) -> requests.Response:
        """Ask with a member's token, or as nobody; a service that hangs raises after a while."""
        headers = {"Authorization": f"token {token_of(user)}"} if user else {}
        headers |= kwargs.pop("headers", {})
        kwargs = {"timeout": 15 * PATIENCE, "allow_redirects": False, **kwargs}
        return requests.request(method, self.url + path, headers=headers, **kwargs)

    def sign_in(self, user: str) -> requests.Session:
        """A browser with the service's cookies of a member, got as browsers get them."""
        session = new_session()
        options: dict[str, Any] = {"headers": NAVIGATION, "allow_redirects": False, "timeout": 60}
        sent = session.get(self.url, **options)
        [state] = parse_qs(urlsplit(sent.headers["Location"]).query)["state"]
        back = {"code": user, "state": state}
        signed_in = session.get(f"{self.url}oauth_callback", params=back, **options)
        assert signed_in.status_code == 302, signed_in.text
        assert session.cookies.get("_xsrf", path=PREFIX)
        return session

    def rounds(self, duty: str = "charges") -> int:
        """How many rounds of a duty the service has finished since it started."""
        return int(self.metric("gpuspawner_duty_rounds_total", duty=duty))

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the metrics; 0 when there is none."""
        answer = self.ask("GET", "metrics", ADMIN)
        answer.raise_for_status()
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name == name and sample.labels.items() >= labels.items():
                    return float(sample.value)
        return 0.0

    def wait_rounds(self, count: int, duty: str = "charges") -> None:
        """Wait until a duty has begun and ended so many rounds."""
        before = self.rounds(duty)
        wait_for(lambda: self.rounds(duty) > before + count, f"{count} rounds of {duty}")
