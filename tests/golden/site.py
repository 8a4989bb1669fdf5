"""A site at a moment that stands still: its commands, its service's pages, its Hub's pages."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from datetime import datetime, timezone
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jinja2
import requests
from jupyterhub.app import JupyterHub
from jupyterhub.services.auth import HubOAuth
from tornado import web as tornado_web
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from gpuspawner.cli.app import main as run_command
from gpuspawner.core.clock import Reading
from gpuspawner.db.clock import SteadyClock
from gpuspawner.db.engine import Store
from gpuspawner.notifications.channels import read as read_channels
from gpuspawner.services import Services
from gpuspawner.web import app as web_app
from gpuspawner.web.base import Context
from tests.support.brokers import Clock, make_services
from tests.support.http_client import new_session
from tests.support.hub import NAVIGATION
from tests.support.processes import PATIENCE
from tests.support.service_process import SCOPE, StandInHub, token_of

START = datetime(2025, 3, 3, 9, tzinfo=timezone.utc)
"""A Monday."""
SERVICE = "/services/gpu/"
ADMIN = "admin"
GROUPS = {"ada": ["ml"], "bob": ["ml"]}
LOGGERS = (
    *("tornado", "tornado.access", "tornado.application", "tornado.general"),
    *("tornado.curl_httpclient", "oauthlib"),
)
FLEET = "simulated:2xA100-80GB,2xT4"

CONFIG = """
c = get_config()
c.GPUDatabase.url = {database_url!r}
c.GPUDevices.source = {fleet!r}
c.GPURates.by_model = {{"*": 1, "A100": "3.6"}}
c.GPUFolders.source = "/srv/folders/{{id}}"
c.GPUIdle.policy = {{"*": {{"mode": "enforce"}}}}
c.JupyterHub.spawner_class = "gpu-local"
c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.db_url = "sqlite:///jupyterhub.sqlite"
c.JupyterHub.cookie_secret = bytes(32)
c.JupyterHub.cookie_secret_file = {secret_file!r}
c.JupyterHub.load_groups = {{"ml": {{"users": ["ada", "bob"]}}}}
c.JupyterHub.log_level = "ERROR"
c.Authenticator.allow_all = True
c.Authenticator.admin_users = {{"admin"}}
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.auth_token = "of-the-proxy"
c.GPULocalSpawner.catalog = {catalog!r}
c.GPULocalSpawner.workspace = {workspace!r}
import gpuspawner
gpuspawner.add_services(c, url="http://127.0.0.1:10190")
"""

CATALOG = """\
environments:
  - slug: torch
    display_name: PyTorch
    summary: Deep learning with CUDA.
    description: |
      For the course. *Save* your work in `work`.

      See [the manual](https://pytorch.example/docs).
    image: registry.lab.example/torch:2.5
    default: true
    devices: {default: 1, max: 2}
    hours: {default: 4, max: 12}
    models: [A100, T4]
    mem_limit: 32G
    shm_size: 8G
    datasets: [flowers]
    frameworks: {PyTorch: "2.5"}
    links: {The course: "https://course.lab.example"}
    maintainer: Kim
    packages: packages.txt
    changes: changes.md
  - slug: files
    display_name: Files
    description: Without a GPU.
    image: registry.lab.example/files:1
    devices: {max: 0}
  - slug: ml
    display_name: Only for ml
    image: registry.lab.example/ml:1
    devices: {default: 1, max: 1}
    allowed_groups: [ml]
datasets:
  flowers: {source: /srv/flowers}
"""


CHANNELS = {
    "mail": "mailtos://smtp.lab.example?from=gpu@lab.example&to={address}",
    "chat": {"url": "mmosts://chat.lab.example/{env:CHAT_TOKEN}", "label": "The lab's chat"},
}


class GoldenHub(StandInHub):
    """The service's Hub; it knows who is in which group."""

    groups = GROUPS


def cut(html: str, tag: str) -> str:
    """The first element of a page with this tag."""
    found = re.search(rf"<{tag}[ >].*?</{tag}>", html, re.DOTALL)
    return found[0] if found else ""


class Site:
    """``with Site(folder, migrated_file) as site``: its time is UTC, and its clock stands."""

    def __init__(
        self, folder: Path, migrated_file: Path, fleet: str = FLEET, **settings: Any
    ) -> None:
        self.folder, self.fleet, self.settings = folder, fleet, settings
        self.database = Path(shutil.copy(migrated_file, folder / "gpuspawner.sqlite"))
        self.database_url = f"sqlite:///{self.database}"
        self.clock = Clock(START)
        catalog = folder / "catalog.yaml"
        catalog.write_text(CATALOG, encoding="utf-8")
        (folder / "packages.txt").write_text("torch==2.5.1\nnumpy==2.1.0\n", encoding="utf-8")
        (folder / "changes.md").write_text("- 2.5: faster.\n", encoding="utf-8")
        text = CONFIG.format(
            database_url=self.database_url,
            secret_file=str(folder / "jupyterhub_cookie_secret"),
            fleet=fleet,
            catalog=str(catalog),
            workspace=f"{folder}/workspaces/{{username}}",
        )
        (folder / "jupyterhub_config.py").write_text(text, encoding="utf-8")
        self._loop = asyncio.new_event_loop()
        self._sessions: dict[tuple[str, str], requests.Session] = {}
        self._urls: dict[str, str] = {}
        self._ending = contextlib.ExitStack()

    def __enter__(self) -> Site:
        self._ending.enter_context(_logging())
        self._ending.enter_context(_environment({"TZ": "UTC", "COLUMNS": "100", "USER": "root"}))
        store = Store.open(self.database_url)
        fix_clock(store, self.clock)
        self._ending.callback(store.close)
        self.services = make_services(
            database_url=self.database_url,
            device_source=self.fleet,
            gpu_rates={"*": 1, "A100": "3.6"},
            folder_source="/srv/folders/{id}",
            gpu_injection="process",
            when_idle={"*": {"mode": "enforce"}},
            **self.settings,
        )
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        self._ending.callback(thread.join)
        self._ending.callback(self._loop.call_soon_threadsafe, self._loop.stop)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60 * PATIENCE)

    # Commands.

    def command(self, *arguments: str) -> str:
        """What a command prints, with its exit code when that is not 0; not which hub it found."""
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            _in_folder(self.folder),
        ):
            code = run_command(list(arguments))
        text = re.sub(r"^hub: .*\n", "", printed.getvalue())
        return self.plain(text + (f"(exit code {code})\n" if code else ""))

    # The service's pages.

    def service(self, user: str, path: str, form: Mapping[str, str] | None = None) -> str:
        """A page or an answer of the service, as a member sees it in a browser.

        With ``form`` that is sent, by a page's own form.
        """
        answer = self.answer(user, path, form, allow_redirects=False)
        moved = f"-> {answer.headers['Location']}\n" if answer.is_redirect else ""
        text = answer.text
        if main := re.search(r"<main.*</main>", text, re.DOTALL):
            text = f"{cut(text, 'title')}\n{main[0]}"
        return self.plain(f"{answer.status_code}\n{moved}{text}")

    def answer(
        self, user: str, path: str, form: Mapping[str, str] | None = None, **options: Any
    ) -> requests.Response:
        """The response itself. ``options`` go to requests, such as ``json`` for a script's body."""
        session = self.session(user)
        if form is not None:
            options["data"] = {**form, "_xsrf": session.cookies.get("_xsrf", path=SERVICE)}
        return self._ask(session, path, {"headers": NAVIGATION, **options})

    def call(self, user: str, path: str, **options: Any) -> requests.Response:
        """What a script with a member's token gets from the API."""
        headers = {"Authorization": f"token {token_of(user)}"}
        return self._ask(new_session(), f"api/{path}", {"headers": headers, **options})

    def _ask(self, session: requests.Session, path: str, options: Any) -> requests.Response:
        method = "POST" if {"data", "json"} & options.keys() else "GET"
        return session.request(method, self.service_url() + path, timeout=60, **options)

    def read(self, user: str, path: str) -> str:
        """A page or an answer of the service as it is, with the real ids."""
        answer = self._ask(self.session(user), path, {})
        assert answer.status_code == 200, answer.text
        return answer.text

    def navigation(self, user: str) -> str:
        """The navigation bar that is on every page of the service."""
        return self.plain(cut(self.read(user, ""), "nav"))

    def service_url(self) -> str:
        """The address of the service, with a slash at the end."""
        if "service" not in self._urls:
            hub = ThreadingHTTPServer(("127.0.0.1", 0), GoldenHub)
            threading.Thread(target=hub.serve_forever, daemon=True).start()
            self._ending.callback(hub.server_close)
            self._ending.callback(hub.shutdown)
            self.hub_auth = auth = HubOAuth(
                api_url=f"http://127.0.0.1:{hub.server_port}/hub/api",
                api_token="of-the-service",
                base_url=SERVICE,
                oauth_client_id="service-gpu",
                oauth_redirect_uri=f"{SERVICE}oauth_callback",
                access_scopes={SCOPE},
            )

            async def make() -> Any:
                return service_app(self.services, auth)

            self._urls["service"] = self._serve(make()) + SERVICE
        return self._urls["service"]

    def session(self, user: str) -> requests.Session:
        """The service's cookies of a member who has signed in."""
        if ("service", user) in self._sessions:
            return self._sessions["service", user]
        session = new_session()
        options: dict[str, Any] = {"headers": NAVIGATION, "allow_redirects": False, "timeout": 60}
        sent = session.get(self.service_url(), **options)
        [state] = parse_qs(urlsplit(sent.headers["Location"]).query)["state"]
        back = {"code": user, "state": state}
        session.get(f"{self.service_url()}oauth_callback", params=back, **options)
        self._sessions["service", user] = session
        return session

    # The Hub's pages.

    def hub(self, user: str, path: str) -> str:
        """The main part of a page of JupyterHub, which a member sees; nobody when empty."""
        answer = self.hub_page(user, path)
        ours = r"<main.*</main>|<div class=.gpuspawner-form.*?</form>"
        main = re.search(ours, answer.text, re.DOTALL)
        return self.plain(f"{answer.status_code}\n{main[0] if main else answer.text}")

    def hub_session(self, user: str) -> requests.Session:
        """The Hub's cookies of a member who has signed in; nobody's when empty."""
        return self._sessions.get(("hub", user)) or self._sign_in_at_hub(user)

    def hub_page(
        self, user: str, path: str, form: Mapping[str, str] | None = None
    ) -> requests.Response:
        """A page of JupyterHub; with ``form``, the answer to a form on it."""
        session = self.hub_session(user)
        url = f"{self.hub_url()}/hub/{path}"
        answer = session.get(url, headers=NAVIGATION, timeout=60)
        if form is not None:
            proof = {"_xsrf": session.cookies.get("_xsrf", path="/hub/")}
            answer = session.post(url, data=form, params=proof, headers=NAVIGATION, timeout=60)
        answer.encoding = "utf-8"  # as the page itself says
        return answer

    def hub_url(self) -> str:
        """The address of the Hub, without a slash at the end."""
        if "hub" not in self._urls:

            async def make() -> Any:
                self._app = JupyterHub()
                await self._app.initialize([])
                return self._app.tornado_application

            with _in_folder(self.folder):
                self._urls["hub"] = self._serve(make())
        return self._urls["hub"]

    def hub_parts(self, template: str, **values: Any) -> str:
        """What a template of ours adds to JupyterHub's own of the same name, block by block."""
        self.hub_url()
        folders = [path for path in self._app.template_paths if "gpuspawner" in Path(path).parts]
        texts = [path.read_text(encoding="utf-8") for path in Path(folders[0]).rglob("*.html")]
        blocks = sorted(set(re.findall(r"{% block (\w+) %}", "".join(texts))))
        frame = "".join(f"[{name}]\n{{% block {name} %}}{{% endblock %}}\n" for name in blocks)
        theirs = jinja2.FunctionLoader(lambda name: frame)
        loader = jinja2.ChoiceLoader([jinja2.FileSystemLoader(folders), theirs])
        made = jinja2.Environment(loader=loader, autoescape=True).get_template(template)
        text = made.render(base_url="/hub/", **values)
        return re.sub(r"\[\w+\]\s*(?=\[|\Z)", "", text)  # without the empty blocks

    def _sign_in_at_hub(self, user: str) -> requests.Session:
        session = self._sessions["hub", user] = new_session()
        if user:
            url = f"{self.hub_url()}/hub/login"
            session.get(url, headers=NAVIGATION, timeout=60)
            proof = session.cookies.get("_xsrf", path="/hub/")
            form = {"username": user, "password": "any", "_xsrf": proof}
            session.post(url, data=form, headers=NAVIGATION, allow_redirects=False, timeout=60)
        return session

    def _serve(self, made: Coroutine[Any, Any, Any]) -> str:
        listening, port = bind_unused_port()

        async def listen() -> HTTPServer:
            server = HTTPServer(await made)
            server.add_socket(listening)
            return server

        server = self._run(listen())
        self._ending.callback(self._loop.call_soon_threadsafe, server.stop)
        return f"http://127.0.0.1:{port}"

    # What differs from run to run.

    def plain(self, text: str) -> str:
        """The text without what differs from run to run: ids, paths, ports, proofs of forms."""
        text = text.replace(str(self.folder), "SITE")
        text = re.sub(r'(name="_xsrf" value=")[^"]*', r"\1XSRF", text)
        text = re.sub(r'(name="key" value=")[^"]*', r"\1KEY", text)
        text = re.sub(r"_xsrf=[\w%=-]+", "_xsrf=XSRF", text)
        text = re.sub(r"(\d+\.\d+\.)[0-9a-f]{64}\b", r"\1HEAD", text)
        text = re.sub(r"127\.0\.0\.1:(?!10190)\d+", "HOST", text)
        return number_ids(text, self._ids())

    def _ids(self) -> set[str]:
        """Every id in the database."""
        with contextlib.closing(sqlite3.connect(self.database)) as connection:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = [name for (name,) in names]
            rows = [row for name in tables for row in connection.execute(f'SELECT * FROM "{name}"')]
        values = {value for row in rows for value in row if isinstance(value, str)}
        return {value for value in values if re.fullmatch(r"[0-9a-f]{8,64}", value)}


def number_ids(text: str, ids: set[str]) -> str:
    """The text with numbers in the place of ids and their first letters, as long as these."""
    known = {each[:8]: each for each in ids} | {each: each for each in ids}
    numbers: dict[str, int] = {}

    def numbered(found: re.Match[str]) -> str:
        if (name := known.get(found[0])) is None:
            return found[0]
        number = numbers.setdefault(name, len(numbers) + 1)
        return f"{number:0{len(found[0])}d}"

    return re.sub(r"(?<![0-9a-zA-Z])[0-9a-f]{8,64}(?![0-9a-zA-Z])", numbered, text)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """The process with these variables, and in the zone of ``TZ``."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    time.tzset()
    yield
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    time.tzset()


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Take back what JupyterHub changes of other packages' loggers."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(some, some.name, some.parent, some.propagate, some.level) for some in loggers]
    yield
    for logger, name, parent, propagate, level in before:
        logger.name, logger.parent, logger.propagate = name, parent, propagate
        logger.setLevel(level)


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def fix_clock(store: Store, now: Callable[[], datetime]) -> None:
    """Have everybody who opens this store here read the machine's clocks from ``now``."""

    def read() -> Reading:
        microseconds = round(now().timestamp() * 1_000_000)
        return Reading(wall=microseconds, since_boot=microseconds, boot_id="a boot")

    store.clock = SteadyClock(store, read)


def service_app(services: Services, hub_auth: HubOAuth) -> tornado_web.Application:
    """The pages and the REST API of the accounting service, as it serves them."""
    duty = type("Running", (), {"is_running": True, "failures": 0})()
    context = Context(
        services=services,
        hub_auth=hub_auth,
        warn_minutes=[30, 10],
        session_warn_minutes=[10],
        channels=read_channels(CHANNELS, {}),
        rounds={"charges": 3},
        duties={"charges": duty},
    )
    return web_app.make_app(context)
