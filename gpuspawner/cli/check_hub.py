"""Checks of what the hub needs: database, proxy, services, and servers that can reach it."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import docker
import requests
import sqlalchemy as sa
from jupyterhub.scopes import expand_scopes
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from traitlets import TraitError

from ..config import INSTALL_CULLER, why_culler_cannot_ask
from ..core.errors import GPUSpawnerError
from ..core.scopes import ACCOUNTING_SCOPES, CULLER_SCOPES
from ..db.engine import Store, newest, unknown_version, upgrade, versions
from ..db.engine import revision as schema_revision
from ..db.schema import accounts, lease_places, leases, postings, tickets, transfers
from ..engines.preflight import CheckFinding, Status, check_hub_reachable
from .config import passwords, redact, shown_url, sqlite_path
from .hub import HubSettings
from .output import user_name

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
        remedy = "Start the hub and check again. If that is not an address of this machine, set "
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
        text = f"The proxy, which the hub does not start itself, is not responding at {api_url}."
        return CheckFinding("proxy", Status.FAIL, text, remedy)
    if answer.status_code == 403:
        text = f"The proxy at {api_url} does not take the hub's token."
        return CheckFinding(
            "proxy", Status.FAIL, text, "Give both the same CONFIGPROXY_AUTH_TOKEN."
        )
    if answer.status_code != 200:
        text = f"What answers at {api_url} is not a configurable-http-proxy ({answer.status_code})."
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
            text, advice = f"The service {service['name']!r} is configured with its scopes", ""
            if "idle_culler" in str(service.get("command")) and (why := why_culler_cannot_ask()):
                text, advice = f"{text}, but {why}.", f"{INSTALL_CULLER}."
            yield CheckFinding(name, Status.OK, text, advice)


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


NAME = "database"
NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs"}
    | {"gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs"}
)


def check_database(url: str) -> tuple[CheckFinding, bool]:
    """Return the finding, and True if the checks that follow can read the database."""
    path = sqlite_path(url)
    try:
        if path is None:
            return _check(url, shown_url(url))
        if kind := network_file_system(path):
            return _on_network(path, kind), False
        if path.exists():
            return _check(url, f"SQLite at {path}")
        return _check_place(path), False
    except GPUSpawnerError as error:
        return CheckFinding(NAME, Status.FAIL, redact(error.message, passwords(url))), False


def network_file_system(path: Path, mounts: str | None = None) -> str:
    """Return the kind of the network file system with ``path``; empty for a local one."""
    if mounts is None:
        table = Path("/proc/self/mounts")
        mounts = table.read_text(encoding="utf-8", errors="replace") if table.exists() else ""
    kind, longest = "", -1
    for line in mounts.splitlines():
        fields = line.split()
        point = fields[1].replace("\\040", " ") if len(fields) > 2 else ""
        if point and path.is_relative_to(point) and len(point) >= longest:
            kind, longest = fields[2], len(point)  # a later mount hides an earlier one
    return kind if kind in NETWORK_FILE_SYSTEMS else ""


def _on_network(path: Path, kind: str) -> CheckFinding:
    text = f"{path} lies on a network file system ({kind}): SQLite's locks do not hold there."
    remedy = "Put the file on a disk of this machine, or use PostgreSQL (c.GPUDatabase.url)."
    return CheckFinding(NAME, Status.FAIL, text, remedy)


def _check_place(path: Path) -> CheckFinding:
    """Create a trial file beside the missing database, as the hub will, and remove it."""
    trial = path.with_name(f".gpuspawner-check-{secrets.token_hex(6)}.sqlite")
    try:
        trial.touch(mode=0o600, exist_ok=False)
        finding, _ = _check(f"sqlite:///{trial}", f"SQLite at {path}")
    except OSError as error:
        text = f"SQLite at {path} cannot be made by {user_name()}: {error.strerror}."
        return CheckFinding(NAME, Status.FAIL, text, _remedy(f"sqlite:///{path}"))
    finally:
        for ending in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                Path(f"{trial}{ending}").unlink()
    if finding.status is not Status.OK:
        return finding
    text = f"SQLite at {path}: not there yet, the hub can make it (tried as {user_name()})"
    return CheckFinding(NAME, Status.OK, text)


def _check(url: str, where: str) -> tuple[CheckFinding, bool]:
    store = Store(url)
    try:
        with store.write_engine.connect() as connection:
            transaction = connection.begin()
            try:
                return _check_schema(connection, where)
            finally:
                transaction.rollback()
    except (SQLAlchemyError, OSError) as error:
        why = redact(str(getattr(error, "orig", None) or error).strip(), passwords(url))
        text = f"{where} cannot be used by {user_name()}: {' '.join(why.split())}."
        return CheckFinding(NAME, Status.FAIL, text, _remedy(url)), False
    finally:
        store.close()


def _check_schema(connection: sa.Connection, where: str) -> tuple[CheckFinding, bool]:
    now = schema_revision(connection)
    if now is None:
        upgrade(connection)
    elif now not in versions():
        text = f"{where} {unknown_version(now)}."
        return CheckFinding(NAME, Status.FAIL, text, "Install the newer gpuspawner again."), False
    elif now != newest():
        text = f"{where} has version {now}, this gpuspawner needs {newest()}."
        remedy = "Make a backup and restart the hub: it brings the database up to date."
        return CheckFinding(NAME, Status.FAIL, text, remedy), False
    if allowed := _what_it_allows(connection):
        text = f"{where} does not forbid {', '.join(allowed)}: constraints are missing."
        remedy = "Restore a backup, or start with an empty database. Grant nothing until then."
        return CheckFinding(NAME, Status.FAIL, text, remedy), False
    state = "empty, the hub fills it at its start" if now is None else f"version {now}"
    text = f"{where}: {state}, writable, refuses double leases and changes to the ledger"
    return CheckFinding(NAME, Status.OK, f"{text} (tried as {user_name()})"), now is not None


def _what_it_allows(connection: sa.Connection) -> list[str]:
    """Try the impossible, rolled back each time. Returns what succeeded."""
    mark = f"check-{secrets.token_hex(6)}"
    now = datetime.now(timezone.utc)
    account = f"member:{mark}"
    lease = {"user": mark, "account": account, "rate": 0, "hold": 0, "state": "granted"}
    lease |= {"granted_at": now}
    place = {"uuid": mark, "slot": 0, "index": 0, "model": "", "memory_bytes": 0, "open": True}
    slot = place | {"uuid": f"{mark}-shared", "slots": 2, "sharer": mark}
    ticket = {"user": mark, "request": "{}", "state": "waiting", "created_at": now}
    transfer = {"key": mark, "kind": "grant", "at": now, "actor": mark, "reason": mark}
    connection.execute(sa.insert(accounts).values(name=account, balance=0, opened_at=now))
    connection.execute(sa.insert(leases).values(id=f"{mark}-1", **lease))
    connection.execute(
        sa.insert(leases).values(id=f"{mark}-2", **{**lease, "server_name": "other"})
    )
    for some in (place, slot):
        connection.execute(sa.insert(lease_places).values(lease_id=f"{mark}-1", **some))
    connection.execute(sa.insert(tickets).values(id=f"{mark}-1", **ticket))
    connection.execute(sa.insert(transfers).values(id=f"{mark}-1", **transfer))
    posting = {"transfer_id": f"{mark}-1", "account": account, "amount": 0}
    connection.execute(sa.insert(postings).values(posting))
    mine, ours = transfers.c.key == mark, postings.c.transfer_id == f"{mark}-1"
    impossible = {
        "two leases of one server": sa.insert(leases).values(id=f"{mark}-3", **lease),
        "two leases of one device": sa.insert(lease_places).values(lease_id=f"{mark}-2", **place),
        "two shares of one device with one member": sa.insert(lease_places).values(
            lease_id=f"{mark}-2", **{**slot, "slot": 1}
        ),
        "two tickets of one server": sa.insert(tickets).values(id=f"{mark}-2", **ticket),
        "one transfer twice": sa.insert(transfers).values(id=f"{mark}-2", **transfer),
        "a changed transfer": sa.update(transfers).where(mine).values(reason="changed"),
        "a changed posting": sa.update(postings).where(ours).values(amount=1),
        "a deleted posting": sa.delete(postings).where(ours),
    }
    return [what for what, statement in impossible.items() if _succeeds(connection, statement)]


def _succeeds(connection: sa.Connection, statement: sa.Executable) -> bool:
    try:
        with connection.begin_nested():
            connection.execute(statement)
    except DBAPIError:
        return False
    return True


def _remedy(url: str) -> str:
    path = sqlite_path(url)
    if path is None:
        return (
            "See whether PostgreSQL runs and lets this user in: psql with the same host, name "
            "and user. The user must own the database."
        )
    return f"The hub's user must be able to write {path.parent} and the files in it."
