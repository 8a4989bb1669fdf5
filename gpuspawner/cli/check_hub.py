"""Checks of what the hub needs: its proxy, its services, and servers that can reach it."""

from __future__ import annotations

import json
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import docker
import requests
from jupyterhub.scopes import expand_scopes
from traitlets import TraitError

from ..core.scopes import ACCOUNTING_SCOPES, CULLER_SCOPES
from ..engines.preflight import CheckFinding, Status, check_hub_reachable
from .hub import HubSettings

SERVICES = {
    "accounting": (
        ("gpuspawner.service", "gpuspawner-accounting"),
        frozenset(ACCOUNTING_SCOPES),
        "Nobody is charged, and leases of servers that die unseen are not settled.",
        "Put this last in jupyterhub_config.py: import gpuspawner; gpuspawner.add_services(c)",
    ),
    "idle culler": (
        ("jupyterhub_idle_culler", "jupyterhub-idle-culler", "cull_idle_servers"),
        frozenset(CULLER_SCOPES),
        "Servers that nobody uses keep their GPUs.",
        "Say after how many seconds: gpuspawner.add_services(c, cull_idle_after=3600)",
    ),
}
"""By name: how its command is recognised, its scopes, what its absence means, and what to do."""


# The way from servers to the Hub.

HERE = {"": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}
HERE["0.0.0.0"] = "127.0.0.1"  # it is only compared  # nosec B104
"""The address to try if the Hub listens at every address."""


def check_reachable(client: docker.APIClient, image: str, hub: HubSettings) -> CheckFinding:
    """Check that a container reaches the Hub's API, or this process if no Hub runs."""
    name, url = "hub API", hub.api_url
    network = hub.spawner.network_name
    hosts = dict((hub.spawner.extra_host_config or {}).get("extra_hosts") or {})
    if hub.app.internal_ssl:
        text = f"{url} wants certificates (internal_ssl), which this check does not have."
        return CheckFinding(name, Status.UNCHECKED, text)
    if not url.startswith("http://") or listens(*hub.bind_address):
        return check_hub_reachable(client, image, network, url, hosts)
    try:
        with in_place_of_hub(*hub.bind_address):
            finding = check_hub_reachable(client, image, network, url, hosts)
    except OSError as error:
        ip, port = hub.bind_address
        text = (
            f"The hub does not run, and this check cannot listen in its place at "
            f"{ip or 'every address'}:{port}: {error.strerror or error}."
        )
        remedy = "Start the hub and check again. If that is no address of this machine, set "
        return CheckFinding(name, Status.UNCHECKED, text, remedy + "c.JupyterHub.hub_ip.")
    text = f"{finding.text.rstrip('.')} (the hub does not run: this check listened in its place)"
    return CheckFinding(name, finding.status, text, finding.remedy)


def listens(ip: str, port: int) -> bool:
    """Return True if somebody listens at an address of this machine."""
    try:
        with socket.create_connection((HERE.get(ip, ip), port), timeout=2):
            return True
    except OSError:
        return False


@contextmanager
def in_place_of_hub(ip: str, port: int) -> Iterator[None]:
    """Answer like the Hub's API while the block runs. Raises OSError."""

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in ip else socket.AF_INET

    with Server((ip if ip != "*" else "", port), _ReachableHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


class _ReachableHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"version": "gpuspawner check"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the only client is the check itself."""


# Proxy.


def check_proxy(hub: HubSettings) -> Iterator[CheckFinding]:
    """Check that the proxy can be started, or answers if it is started elsewhere."""
    name, cls = "proxy", hub.app.proxy_class
    if "ConfigurableHTTPProxy" not in {c.__name__ for c in cls.__mro__}:
        text = f"{cls.__name__} is not configurable-http-proxy: this check does not know it."
        yield CheckFinding(name, Status.UNCHECKED, text)
        return
    try:
        proxy = cls(app=hub.app, config=hub.app.config)
    except (TraitError, ValueError) as error:
        text = f"The proxy's settings are not valid: {error}."
        yield CheckFinding(name, Status.FAIL, text, "Correct c.ConfigurableHTTPProxy.")
        return
    if proxy.should_start:
        yield _check_proxy_program(list(proxy.command))
    else:
        yield _check_running_proxy(proxy.api_url, proxy.auth_token)


def _check_proxy_program(command: list[str]) -> CheckFinding:
    program = shutil.which(command[0])
    beside = shutil.which(command[0], path=str(Path(sys.executable).parent))
    remedy = "Install Node.js, then: npm install -g configurable-http-proxy"
    if not (program or beside):
        text = f"The proxy's program {command[0]} is not on the PATH."
        return CheckFinding("proxy", Status.FAIL, text, remedy)
    try:
        done = subprocess.run(
            [program or str(beside), *command[1:], "--version"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return CheckFinding("proxy", Status.FAIL, f"{command[0]} does not run: {error}.", remedy)
    said = (done.stdout + done.stderr).strip().splitlines() or [""]
    if done.returncode:
        return CheckFinding("proxy", Status.FAIL, f"{command[0]} does not run: {said[-1]}.", remedy)
    text = f"{command[0]} {said[-1]}"
    if not program:
        text += f" (only in {Path(str(beside)).parent}: have that on the hub's PATH too)"
    return CheckFinding("proxy", Status.OK, text)


def _check_running_proxy(api_url: str, token: str) -> CheckFinding:
    url = f"{api_url.rstrip('/')}/api/routes"
    remedy = "Start the proxy, or let the hub start it (c.ConfigurableHTTPProxy.should_start)."
    try:
        with requests.Session() as session:
            session.trust_env = False  # no HTTP proxy between a hub and its own proxy
            answer = session.get(url, headers={"Authorization": f"token {token}"}, timeout=5)
    except requests.RequestException:
        text = f"The proxy, which the hub does not start itself, does not answer at {api_url}."
        return CheckFinding("proxy", Status.FAIL, text, remedy)
    if answer.status_code == 403:
        text = f"The proxy at {api_url} does not take the hub's token."
        return CheckFinding(
            "proxy", Status.FAIL, text, "Give both the same CONFIGPROXY_AUTH_TOKEN."
        )
    if answer.status_code != 200:
        text = f"What answers at {api_url} is no configurable-http-proxy ({answer.status_code})."
        return CheckFinding("proxy", Status.FAIL, text, remedy)
    return CheckFinding("proxy", Status.OK, f"The proxy answers at {api_url}")


# Services.


def check_services(hub: HubSettings) -> Iterator[CheckFinding]:
    """Check that the services that settle leases are configured, with the scopes they need."""
    for name, (commands, scopes, absence, remedy) in SERVICES.items():
        service = next((s for s in hub.app.services if _runs(s, commands)), None)
        if service is None:
            text = f"No such service is in c.JupyterHub.services. {absence}"
            yield CheckFinding(name, Status.FAIL, text, remedy)
        elif missing := scopes - _scopes_of(hub, service):
            text = f"The service {service['name']!r} lacks {', '.join(sorted(missing))}."
            advice = f"Add a role to c.JupyterHub.load_roles with services=[{service['name']!r}] "
            yield CheckFinding(name, Status.FAIL, text, advice + "and these scopes.")
        else:
            text = f"The service {service['name']!r} is configured with its scopes"
            yield CheckFinding(name, Status.OK, text)


def _runs(service: dict[str, Any], commands: tuple[str, ...]) -> bool:
    words = service.get("command") or []
    text = words if isinstance(words, str) else " ".join(map(str, words))
    # A service that is started elsewhere has no command here: use its name.
    return any(command in (text or str(service.get("name", ""))) for command in commands)


def _scopes_of(hub: HubSettings, service: dict[str, Any]) -> set[str]:
    roles = [r for r in hub.app.load_roles if service["name"] in r.get("services", ())]
    if service.get("admin") or any(r["name"] == "admin" for r in roles):
        return set().union(*(scopes for _, scopes, _, _ in SERVICES.values()))
    named = {scope for role in roles for scope in role.get("scopes", ())}
    plain = {scope for scope in named if "!" not in scope}
    return set(expand_scopes(plain)) | named
