"""Hubs that serve several files of tests, one after the other, each as if it were new.

Starting a hub with its services costs six seconds of processor time. What a file leaves is
cleared away in seconds: its servers are stopped, its members and groups removed, and the
database is given back what it held when the hub had just started.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from textwrap import dedent
from typing import Any, TypeVar, cast

import requests

from tests.support.brokers import make_tables
from tests.support.engine import PrivateEngine
from tests.support.gate import Gate
from tests.support.gpu_hub import CATALOG as CONTAINERS
from tests.support.gpu_hub import GPUHub
from tests.support.hub import ADMIN, HubProcess
from tests.support.lines import COUNTED
from tests.support.paying_hub import PayingHub
from tests.support.polls import COUNTED as POLLS
from tests.support.processes import free_port, wait_for

CATALOG = """
environments:
  - slug: default
    display_name: Default environment
    image: none
    default: true
    devices: {default: 1, max: 8}
"""
"""The catalog's file as each file of tests finds it: what a hub without a catalog has."""

LASTING = """
c.Broker.gpu_rates = {"*": 1, "A100": 4}
c.Broker.hold_minutes = 1
c.Broker.grace_seconds = 3600
c.Broker.rate_zone = "Europe/Vienna"
c.Broker.credits_help = "Ask Kim <kim@lab.example> for more."
c.Broker.folder_source = "/nowhere/{id}"
c.Broker.group_weights = {"research": 2}
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 1}
for name, scopes in {
    "bot": ["custom:gpuspawner:grant!group=ml101"],
    "reporter": ["custom:gpuspawner:read:usage"],
    "nobody": [],
    "ada": [],
}.items():
    scopes = ["access:services!service=gpu", *scopes]
    c.JupyterHub.services.append({"name": name, "api_token": f"token-of-{name}"})
    c.JupyterHub.load_roles.append({"name": name, "services": [name], "scopes": scopes})
"""
"""The credits of a new account last for a day: who starts a server keeps it. The service ``ada``
bears a member's name."""

SPENDING = """
c.Broker.grace_seconds = 5
c.Notifier.channels = {
    "mail": {
        "url": f"mailto://127.0.0.1:{mail_port}?from=gpu@lab.example&to={{address}}",
        "label": "Mail",
    },
    "team": {"url": f"json://127.0.0.1:{nobody_port}/T0KEN", "label": "The lab's chat"},
    "push": {
        "url": f"ntfy://127.0.0.1:{nobody_port}/{{address}}",
        "label": "Push to a phone",
        "pattern": "[a-z-]{4,40}",
        "example": "my-own-topic",
    },
}
c.Notifier.retry_seconds = [0.2] * 2000
"""
"""A credit a second. Mails go to :attr:`SharedHub.mail_port`, and at the other two channels nobody
listens."""

ONE_DEVICE = (
    POLLS
    + """
c.Broker.gpu_rates = {"*": 3600}  # a credit a second: what is charged by mistake shows
c.Broker.opening_grant = 100_000
c.Spawner.poll_interval = 1

class Tidied(Counted):
    looks = 0

    async def poll(self):
        self.looks += 1
        return await super().poll()

async def tidy(spawner):
    import asyncio
    seen = spawner.looks
    while spawner.user.name == "tidy" and spawner.looks == seen:
        await asyncio.sleep(0.1)  # until the Hub has given up looking on, and asks

c.JupyterHub.spawner_class = Tidied
c.Spawner.post_stop_hook = tidy
"""
)
"""Whatever one server keeps, the next one misses. Looks at servers are counted; what is left of a
server of ``tidy`` is tidied up when the Hub has asked after it once more."""

TWO_DEVICES = """
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 100}  # whoever asks hears how it ended
c.Broker.gpu_rates = {"*": 3600}  # a credit a second
c.Broker.opening_grant = 100_000

async def wait_for_slow_members(spawner):
    import asyncio
    import os
    while spawner.user.name.startswith("slow") and not os.path.exists("go-on"):
        await asyncio.sleep(0.02)

c.Spawner.pre_spawn_hook = wait_for_slow_members

import gpuspawner.store.store
gpuspawner.store.store.BUSY_SECONDS = 3.0  # of patience with a lock, to save time here
"""
"""A server of ``slow...`` starts when there is a file ``go-on``."""

GPU_CONFIGS = {
    "one_device": (ONE_DEVICE, "1xT4"),
    "two_devices": (TWO_DEVICES, "2xT4"),
}
"""The configuration and the devices of each group of files whose servers are containers."""

CONFIGS = {
    "credits": LASTING,
    "rest": LASTING,
    "spending": SPENDING,
    "line": LASTING + COUNTED,
}
"""The configuration of each group of files; see :mod:`tests.support.hub_groups`."""


THE_HUBS_OWN = ("gpuspawner.sqlite", "jupyterhub")
"""How the names of files begin which a running hub needs."""
OF_THE_HUB = ("owner", "clock_offsets")
"""Tables that say of the running hub what it knows of itself."""

H = TypeVar("H", bound="Cleared")


class Cleared(HubProcess):
    """What makes a hub with a store of ours as good as new, for the next file of tests."""

    database_url: str
    catalog: str
    """What the catalog's file holds before a file of tests."""

    @property
    def catalog_file(self) -> Path:
        return self.folder / "catalog.yaml"

    def start(self, timeout: float = 60.0) -> None:
        fresh = self.folder / "fresh.sqlite"
        if not fresh.exists():
            make_tables(self.database_url)
        super().start(timeout)
        if not fresh.exists():
            with closing(self._connect()) as ours, closing(sqlite3.connect(fresh)) as copy:
                ours.backup(copy)
            self._files = set(self.folder.iterdir())

    def clear(self) -> None:
        """Be as the hub was when it had just started; raises if a file's servers do not end.

        What the queue has learned of past sessions stays in the memory of hub and service: a file
        where the order in line matters lets members wait whose names no other file has.
        """
        self.stop_everything()
        for user in self.api("GET", "users?limit=10000").json():
            if user["name"] != ADMIN:
                self.api("DELETE", f"users/{user['name']}").raise_for_status()
        for group in self.api("GET", "groups").json():
            self.api("DELETE", f"groups/{group['name']}").raise_for_status()
        with closing(self._connect()) as connection:
            _copy_rows(connection, self.folder / "fresh.sqlite")
        for path in set(self.folder.iterdir()) - self._files:
            if not path.name.startswith(THE_HUBS_OWN):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.write_catalog(self.catalog)
        self.forget_log()

    def stop_everything(self) -> None:
        """Stop all servers and all waits for one, and wait until nothing of them is left."""
        for user in self.api("GET", "users?state=active&limit=10000").json():
            for name in user["servers"]:
                self.api("DELETE", self._path(user["name"], name)).raise_for_status()
        wait_for(lambda: not self._left(), "the end of every server and wait", timeout=60)

    def write_catalog(self, text: str) -> None:
        """Save the catalog as an editor does."""
        new = self.catalog_file.with_suffix(".new")
        new.write_text(dedent(text), encoding="utf-8")
        new.replace(self.catalog_file)

    def make_groups(self, **groups: list[str]) -> None:
        """Make groups of the Hub with these members."""
        for name, users in groups.items():
            self.api("POST", f"groups/{name}").raise_for_status()
            for user in users:
                self.api("POST", f"users/{user}")
            self.api("POST", f"groups/{name}/users", json={"users": users}).raise_for_status()

    def _left(self) -> bool:
        """Return True while a server runs, starts or stops."""
        return bool(self.api("GET", "users?state=active").json())

    def _connect(self) -> sqlite3.Connection:
        file = self.database_url.removeprefix("sqlite:///")
        return sqlite3.connect(file, timeout=60, isolation_level=None)


class SharedHub(Cleared, PayingHub):
    """A hub with a catalog and a script of its GPUs that tests write, for a group of files."""

    catalog = CATALOG

    def __init__(self, folder: Path, config: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.script_file = folder / "script.json"
        self.mail_port = free_port()
        """Where a test may start a mail server."""
        self.opening_credits: int | None = None
        """What accounts of this file's members open with, when not with what the hub gives."""
        ours = f"mail_port, nobody_port = {self.mail_port}, {free_port()}\n"
        ours += f"c.GPUSpawnerMixin.catalog = {str(folder / 'catalog.yaml')!r}\n"
        environment = {"GPUSPAWNER_SIMULATION": str(self.script_file)}
        super().__init__(folder, ours + config, external_proxy=True, environment=environment)
        self.write_catalog(CATALOG)
        self.script_file.write_text("{}", encoding="utf-8")

    def login(self, user: str, password: str | None = None) -> requests.Session:
        self._open_account(user)
        return super().login(user, password)

    def spawn(
        self, user: str, options: Mapping[str, Any] | None = None, server: str = ""
    ) -> requests.Response:
        self._open_account(user)
        return super().spawn(user, options, server)

    def clear(self) -> None:
        super().clear()
        self.renew_broker()
        self.script_file.write_text("{}", encoding="utf-8")
        self.opening_credits = None

    def _open_account(self, user: str) -> None:
        """Give a new member the credits that this file of tests gives."""
        if self.opening_credits is not None:
            self.broker.opening_grant = self.opening_credits
            self.broker.open_account(user)

    def _left(self) -> bool:
        return bool(super()._left() or self.broker.open_leases() or self.broker.waiting())


class SharedGPUHub(Cleared, GPUHub):
    """A hub whose servers are containers, behind a gate before the engine."""

    catalog = CONTAINERS

    def __init__(self, folder: Path, engine: PrivateEngine, config: str, fleet: str) -> None:
        self.gate = Gate(engine.url)
        super().__init__(folder, engine, config, fleet=fleet, docker_host=self.gate.url)

    def start(self, timeout: float = 60.0) -> None:
        if not self.gate.is_open:
            self.gate.open()
        super().start(timeout)

    def stop(self) -> None:
        super().stop()
        self.engine.clean()
        self.gate.__exit__()

    def clear(self) -> None:
        super().clear()
        self._sessions.clear()
        self.engine.set_devices(self.devices)
        assert not self.containers(), "a container without a server"

    def _left(self) -> bool:
        return bool(super()._left() or self.open_leases())


class SharedHubs:
    """The hubs that run now, by group."""

    def __init__(self) -> None:
        self._hubs: dict[str, Cleared] = {}

    def take(self, group: str, make: Callable[[], H]) -> H:
        """Return the hub of a group, which is made and started for the first of its files."""
        if group not in self._hubs:
            hub = self._hubs[group] = make()
            hub.start()
        return cast("H", self._hubs[group])

    def give_back(self, group: str, *, last: bool) -> None:
        """Clear the hub for the group's next file, or stop it after the last one."""
        if last:
            self._hubs.pop(group).stop()
            return
        try:
            self._hubs[group].clear()
        except BaseException:
            self._hubs.pop(group).stop()  # the next file gets a new one
            raise

    def stop(self) -> None:
        """Stop those that still run."""
        while self._hubs:
            self._hubs.popitem()[1].stop()


def _copy_rows(connection: sqlite3.Connection, source: Path) -> None:
    """Let every table hold the rows of another database, in one transaction."""
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute("ATTACH ? AS source", [str(source)])
    connection.execute("BEGIN IMMEDIATE")
    triggers = _schema(connection, "trigger")
    for name, _ in triggers:
        connection.execute(f'DROP TRIGGER "{name}"')
    for name, _ in _schema(connection, "table"):
        if name in OF_THE_HUB:
            continue
        columns = connection.execute(f"PRAGMA source.table_info('{name}')").fetchall()
        names = ", ".join(f'"{column[1]}"' for column in columns)
        connection.execute(f'DELETE FROM "{name}"')
        connection.execute(f'INSERT INTO "{name}" ({names}) SELECT {names} FROM source."{name}"')
    for _, sql in triggers:
        connection.execute(sql)
    connection.execute("COMMIT")


def _schema(connection: sqlite3.Connection, kind: str) -> list[tuple[str, str]]:
    query = "SELECT name, sql FROM main.sqlite_master WHERE type = ? AND name NOT LIKE 'sqlite_%'"
    return connection.execute(query, [kind]).fetchall()
