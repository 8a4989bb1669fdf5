"""A hub with somebody to rob, and somebody who tries: Victoria works, Mallory has a container."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import requests
import sqlalchemy as sa
from jupyterhub.services.auth import HubOAuth
from tornado import web
from tornado.routing import PathMatches

from gpuspawner.db import schema as db_schema
from gpuspawner.members.repository import RosterEntry, put_roster
from gpuspawner.services import Services
from gpuspawner.storage.repository import Workspace, put_workspace
from gpuspawner.web.app import make_app
from gpuspawner.web.base import Context
from tests.support import images
from tests.support.brokers import services_on
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub
from tests.support.hub import NAVIGATION
from tests.support.processes import PATIENCE, free_port, wait_for

VICTIM, THIEF, OWNER = "victoria", "mallory", "olga"
HOSTILE = '"><img src=x onerror=window.hacked=1>'
"""What a page must never have in it as it is."""

MEMORY = "512M"
PIDS = 256

CATALOG = f"""
environments:
  - slug: small
    display_name: {HOSTILE!r}
    summary: {HOSTILE!r}
    description: "<script>window.hacked=1</script> [x](javascript:window.hacked=1)"
    image: {images.INSTANT}
    default: true
    devices: {{default: 0, max: 1}}
  - slug: lab
    display_name: JupyterLab
    image: {images.BASE}
  - slug: staff
    display_name: For the staff
    image: {images.INSTANT}
    allowed_groups: [staff]
datasets:
  flowers: {{source: attacks-flowers, target: /datasets/flowers}}
  exams: {{source: attacks-exams, target: /datasets/exams, allowed_groups: [staff]}}
"""

CONFIG = """
c.Spawner.http_timeout = 120
c.Spawner.start_timeout = 120
c.GPUDockerSpawner.workspace = "attacks-{{username}}"
c.GPUDockerSpawner.shm_size = "64M"
c.GPUDockerSpawner.pids_limit = {pids}
c.DockerSpawner.mem_limit = {memory!r}
c.GPUFolders.source = "attacks-folder-{{id}}"
c.GPUFolders.archives = {archives!r}
c.GPURates.by_model = {{"*": 1}}
c.GPUCredits.charge_seconds = 36000
c.Accounting.reconcile_seconds = 36000
c.GPUNotifications.channels = {{"team": {{"label": "Chat", "url": "{{env:CHAT_URL}}"}}}}
c.JupyterHub.load_groups = {{"staff": {{"users": ["{victim}"]}}, "ml101": {{"users": ["bob"]}}}}
for name, scopes in {{
    "bot": ["custom:gpuspawner:grant!group=ml101"],
    "reporter": ["custom:gpuspawner:read:usage"],
    "stranger": [],
}}.items():
    c.JupyterHub.services.append({{"name": name, "api_token": f"token-of-{{name}}-{secret}"}})
    scopes = ["access:services!service=gpu", *scopes]
    c.JupyterHub.load_roles.append({{"name": name, "services": [name], "scopes": scopes}})
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:{port}")
"""

KEPT = (
    *(
        db_schema.leases,
        db_schema.lease_places,
        db_schema.accounts,
        db_schema.transfers,
        db_schema.postings,
    ),
    *(
        db_schema.tickets,
        db_schema.closures,
        db_schema.audit,
        db_schema.notice_choices,
        db_schema.roster,
        db_schema.payers,
        db_schema.workspaces,
        db_schema.runs,
    ),
    *(
        db_schema.lots,
        db_schema.refills,
        db_schema.rates,
        db_schema.folders,
        db_schema.folder_members,
    ),
)
"""The tables that a refused attempt leaves as they are: the audit log among them."""


def _columns(table: sa.Table) -> list[sa.Column[Any]]:
    """Return the columns that are compared.

    Two are written at any moment without an attempt: the days of a lease, when the service counts
    ended ones for the reports, and the estimate of a waiting ticket, in the Hub's round.
    """
    days = {db_schema.leases.c.days}
    return [c for c in table.c if c not in days and not c.name.startswith("estimate")]


@dataclass(frozen=True, slots=True)
class Door:
    """One method of one handler of ours, at a path that it answers."""

    method: str
    path: str
    handler: type[web.RequestHandler]

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class AttackHub(GPUHub):
    """One device, which Victoria's server has; her second server waits for it."""

    secret = "0f5b1f3c9d2e4a6b"
    lease = ticket = plans = transfer = run = ""
    """Ids of what is hers."""
    over = ""
    """The id of a session of Olga's that is over, and cost something."""

    def __init__(self, folder: Path, engine: PrivateEngine) -> None:
        self.service_port = free_port()
        self._tokens: dict[str, str] = {}
        config = CONFIG.format(
            port=self.service_port,
            pids=PIDS,
            memory=MEMORY,
            victim=VICTIM,
            secret=self.secret,
            archives=str(folder / "archives"),
        )
        environment = {"CHAT_URL": f"json://127.0.0.1:9/{self.secret}-of-the-chat"}
        super().__init__(
            folder, engine, config, fleet="1xT4", catalog=CATALOG, environment=environment
        )

    def furnish(self) -> None:
        """Give Victoria what could be stolen, and Mallory a container of his own."""
        for user in (VICTIM, THIEF, OWNER, "bob"):
            self.browser_of(user)
        self.spawn_and_wait(OWNER, {"environment": "small", "gpus": 1})
        self.stop_server(OWNER)
        [self.over] = [lease.id for lease in self.leases(OWNER)]
        asked = self.spawn(VICTIM, {"environment": "lab", "gpus": 1})
        assert asked.ok, asked.text
        assert self.spawn(THIEF, {"environment": "small", "gpus": 0}).ok
        made = self.service("POST", "api/folders", VICTIM, json={"name": "plans"})
        assert made.ok, made.text
        self.plans = made.json()["id"]
        self.wait_server(THIEF)
        self.wait_server(VICTIM)
        assert self.spawn(VICTIM, {"environment": "small", "gpus": 1}, "second").ok
        with services_on(self.database_url) as services:
            [lease] = services.leases.of_account(f"member:{VICTIM}")
            self.lease = lease.id
            self.transfer = services.reports.statement_page(f"member:{VICTIM}").entries[0].transfer

        def waiting() -> list[dict[str, Any]]:
            found: list[dict[str, Any]]
            found = self.service("GET", "api/queue", VICTIM).json()["tickets"]
            return found

        [ticket] = wait_for(waiting, "her ticket")
        self.ticket = ticket["id"]
        self.run = self.ended_run(VICTIM, title=HOSTILE)
        self.sweep = self.ended_sweep(VICTIM, title=HOSTILE)
        self.schedule = self.new_schedule(VICTIM, title=HOSTILE)

    # Calling the service.

    def service(
        self, method: str, path: str, user: str = "", token: str = "", **kwargs: Any
    ) -> requests.Response:
        """Our service, with a member's token or with this one; with none of both, as nobody."""
        if user:
            token = self._tokens.get(user) or self._tokens.setdefault(user, self.user_token(user))
        headers = {"Authorization": f"token {token}"} if token else {}
        headers |= kwargs.pop("headers", {})
        url = f"{self.url}/services/gpu/{path}"
        kwargs = {"timeout": 60, "allow_redirects": False, **kwargs}
        return requests.request(method, url, headers=headers, **kwargs)

    def browse(self, user: str, method: str, path: str, **kwargs: Any) -> requests.Response:
        """Our service, with a member's cookies."""
        url = f"{self.url}/services/gpu/{path}"
        kwargs = {"timeout": 60, "headers": NAVIGATION, "allow_redirects": False, **kwargs}
        return self.browser_of(user).request(method, url, **kwargs)

    def doors(self) -> list[Door]:
        """Every method of every handler of the service, where there is something of Victoria's."""
        hers = {
            "accounts": f"member:{VICTIM}",
            "catalog": "small",
            "devices": self.devices[0],
            "files": "run.log",
            "folders": self.plans,
            "leases": self.lease,
            "members": VICTIM,
            "queue": self.ticket,
            "rates": "1",
            "refills": "1",
            "runs": self.run,
            "schedules": self.schedule,
            "sweeps": self.sweep,
            "tickets": self.ticket,
            "transfers": self.transfer,
        }
        return list(doors(hers))

    def kept(self) -> Mapping[str, list[str]]:
        """Every row that no refused attempt may touch."""
        with self._database.connect() as connection:
            return {
                table.name: sorted(map(repr, connection.execute(sa.select(*_columns(table)))))
                for table in KEPT
            }

    def ended_run(self, user: str, title: str) -> str:
        """The id of a run of this member's, which fails: its image has no Python."""
        options = {"environment": "small", "gpus": 0}
        sent = {"command": ["true"], "title": title, "key": "one", "options": options}
        made = self.service("POST", "api/runs", user, json=sent)
        assert made.ok, made.text
        run = str(made.json()["id"])
        path = f"api/runs/{run}"
        wait_for(lambda: self.service("GET", path, user).json()["ended_at"], "the end of the run")
        return run

    def ended_sweep(self, user: str, title: str) -> str:
        """The id of a sweep of one run of this member's, which fails."""
        options = {"environment": "small", "gpus": 0}
        sent = {"command": ["true"], "sets": [{}], "title": title, "options": options}
        made = self.service("POST", "api/sweeps", user, json=sent)
        assert made.ok, made.text
        path = f"api/sweeps/{made.json()['id']}"
        ended = {"failed": 1}
        wait_for(lambda: self.service("GET", path, user).json()["states"] == ended, "its end")
        return str(made.json()["id"])

    def new_schedule(self, user: str, title: str) -> str:
        """The id of a schedule of this member's, whose times do not come while tests run."""
        sent = {"command": ["true"], "title": title, "cron": "0 0 29 2 *", "paused": True}
        options = {"environment": "small", "gpus": 0}
        made = self.service("POST", "api/runs/-/schedules", user, json={**sent, "options": options})
        assert made.ok, made.text
        return str(made.json()["id"])

    def put_on_roster(self, name: str) -> None:
        """Give a name an entry on the roster, which no authenticator here asks for."""
        with self._database.begin() as connection:
            put_roster(connection, [RosterEntry(name)], datetime.now(timezone.utc))

    def workspace(self, source: str, user: str, busy: str = "") -> str:
        """Make a workspace, locked for what makes it busy, and return its directory."""
        with self._database.begin() as connection:
            at = datetime.now(timezone.utc)
            put_workspace(connection, Workspace(source, user, at, busy=busy))
        return source

    def archive(self, name: str) -> str:
        """Put a file into the folder of archives, which is damaged, and return its name."""
        folder = self.folder / "archives"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"damaged")
        return name

    # Inside a container.

    def container(self, user: str) -> dict[str, Any]:
        """The container of a member's running server, as the engine describes it."""
        inspected: dict[str, Any] = self.engine.client.inspect_container(self.container_of(user))
        return inspected

    def inside(self, command: str, user: str = THIEF) -> tuple[int, str]:
        """A command typed into a terminal of a member's container: its code and what it says."""
        return self.shell(user, command, "bash")

    def reaches(self, address: str, port: int, seconds: int = 5 * PATIENCE) -> bool:
        """Whether Mallory's container opens a connection within this time."""
        command = f"timeout {seconds} bash -c 'exec 3<>/dev/tcp/{address}/{port}'"
        return self.inside(command)[0] == 0

    def listening(self) -> set[int]:
        """The TCP ports on which hub, proxy and services listen."""
        found = set()
        for process in [psutil.Process(self.pid), *self.children_left()]:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
                connections = process.net_connections("tcp")
                found |= {x.laddr.port for x in connections if x.status == psutil.CONN_LISTEN}
        return found


def doors(things: Mapping[str, str]) -> Iterator[Door]:
    """Yield every method of every handler of the service.

    ``things``: the id of something by the word that is before it in a path.
    """
    auth = cast(HubOAuth, SimpleNamespace(base_url="/services/gpu/"))
    for rule in make_app(Context(cast(Services, None), auth)).wildcard_router.rules:
        assert isinstance(rule.matcher, PathMatches)
        pattern = rule.matcher.regex
        handler = rule.target
        if not issubclass(handler, web.RequestHandler) or handler is web.StaticFileHandler:
            continue
        for path in _filled(pattern, things):
            for method in handler.SUPPORTED_METHODS:
                mine = getattr(handler, method.lower())
                if mine is not web.RequestHandler._unimplemented_method:
                    path = path.removeprefix("/services/gpu/")
                    path += "?pictures=1" if path == "cluster/live" else ""  # else it goes on
                    yield Door(method, path, handler)


def _filled(pattern: re.Pattern[str], hers: Mapping[str, str]) -> list[str]:
    """The paths that a handler's pattern takes: ids of hers after their plural, and every action.

    A handler of something new has to be added to ``hers``: else this raises KeyError.
    """
    paths = [pattern.pattern.removesuffix("$").replace("\\", "")]
    while place := re.search(r"(\w+)/(\((?:[^()]*)\))|/(\([a-z|-]+\))", paths[0]):
        named, spot = place[1], place[2] or place[3]
        actions = re.fullmatch(r"\(([a-z-]+(?:\|[a-z-]+)*)\)", spot)
        words = actions[1].split("|") if actions else [hers[named]]
        paths = [path.replace(spot, word, 1) for path in paths for word in words]
    assert all(pattern.fullmatch(path) for path in paths), (pattern.pattern, paths)
    return paths
