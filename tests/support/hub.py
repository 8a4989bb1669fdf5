"""A real JupyterHub with configurable-http-proxy, in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import requests

from tests.support import parts, processes
from tests.support.http_client import new_session
from tests.support.kernel import Kernel, terminal_run
from tests.support.preloaded import PRELOADED, PYTHONPATH, Forked, start_plainly
from tests.support.processes import (
    BIN,
    LIVE,
    PATIENCE,
    alive,
    environment_of,
    free_port,
    wait_for,
)

if TYPE_CHECKING:
    from typing_extensions import Self

HUB = """
import sys
if "jupyterhub.app" in sys.modules:  # forked
    from tests.support.preloaded import fork_service
    fork_service()
from jupyterhub.app import main
main()
"""
"""``python -m jupyterhub``; one that was forked forks its accounting service too."""

USER_PASSWORD = "a password for tests"
ADMIN_PASSWORD = "a longer password, for the admin of the tests"
ADMIN = "admin"

RUNS = b"JupyterHub is now running"
"""What a hub's log says when its start is over, if its level lets it."""

SAYS_INFO = re.compile(rb"^\[I [^]]* JupyterHub ", re.MULTILINE)
"""A line of a hub whose log has that; the first comes before the hub listens."""

POLLED = re.compile(r"gpu/static/gpu.css|_xsrf_utils|200 GET /hub/api/users|200 GET /hub/health")
"""Lines of a hub's log that say only that somebody waits for something."""

DEFAULTS = """
c = get_config()
service_constants = {{}}
c.JupyterHub.bind_url = {base!r}
c.JupyterHub.hub_bind_url = "http://{hub_ip}:{hub_port}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_port}"
c.ConfigurableHTTPProxy.auth_token = {proxy_token!r}
c.ConfigurableHTTPProxy.should_start = {starts_proxy}
c.JupyterHub.cookie_secret = bytes.fromhex({cookie_secret!r})
c.JupyterHub.db_url = "sqlite:///jupyterhub.sqlite"
c.JupyterHub.authenticator_class = "shared-password"
c.SharedPasswordAuthenticator.user_password = {user_password!r}
c.SharedPasswordAuthenticator.admin_password = {admin_password!r}
c.Authenticator.allow_all = True
c.Authenticator.admin_users = {{{admin!r}}}
c.JupyterHub.spawner_class = "simple"
c.Spawner.default_url = "/lab"
c.Spawner.start_timeout = 240
c.Spawner.http_timeout = 120
"""
"""What the hub is unless the test's own snippet, which follows, says otherwise. A snippet sets what
is no setting by ``service_constants["gpuspawner.service.app.NAME"] = 1``."""

TESTS_SERVICE = """
c.JupyterHub.services.extend([{{"name": "tests", "api_token": {token!r}}}])
c.JupyterHub.load_roles.extend([{{"name": "tests", "services": ["tests"], "scopes": [
    "admin:users", "admin:servers", "admin:groups", "admin:server_state", "admin:auth_state",
    "access:servers", "access:services", "list:services", "read:services", "tokens",
    "read:hub", "read:metrics", "proxy", "shutdown",
]}}])
if service_constants:
    import json
    from gpuspawner.config import _entries
    for entry in _entries(c.JupyterHub.services):
        if entry.get("command", [])[1:] == ["-m", "gpuspawner.service"]:
            told = json.dumps(service_constants)
            entry["command"][1:] = ["-m", "tests.support.service_constants", told]
"""
"""Added last, so that a snippet may set services and roles of its own."""


class HubProcess:
    """``with HubProcess(folder, "c.JupyterHub.spawner_class = ...") as hub``.

    ``hub_ip`` is where the hub's own API listens: an engine's ``gateway`` when servers run in
    containers. With ``external_proxy`` the proxy is a process beside the hub, as in production,
    and running servers stay reachable while the hub is down.
    """

    def __init__(
        self,
        folder: Path,
        config: str = "",
        *,
        hub_ip: str = "127.0.0.1",
        external_proxy: bool = False,
        environment: Mapping[str, str] | None = None,
        name: str = "hub",
    ) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.config = config
        self.hub_ip = hub_ip
        self.external_proxy = external_proxy
        self.environment = dict(environment or {})
        self.port, self.proxy_port, self.hub_port = free_port(), free_port(), free_port()
        self.token = uuid.uuid4().hex
        """Of a service that may do everything."""
        self._proxy_token = uuid.uuid4().hex
        self._cookie_secret = os.urandom(32).hex()
        self._hub: subprocess.Popen[bytes] | Forked | None = None
        self._browsers: dict[str, requests.Session] = {}
        self._proxy: subprocess.Popen[bytes] | None = None
        self._orphans: list[psutil.Process] = []
        """Accounting services of killed hubs, which end when they notice it."""
        self._log_before = 0
        """Bytes of the log that are of earlier starts."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is not None:
            # With the failure, which is shown when it has ended; the complaints again before all
            # else, for whoever keeps only the beginning of a long report.
            lines = [line for line in self.log_text().splitlines() if not POLLED.search(line)]
            print(*[line for line in lines if line[:2] in ("[W", "[E", "[C")][-20:], sep="\n")
            print("---", *lines[-150:], sep="\n")
        self.stop()

    @property
    def url(self) -> str:
        """The hub as a browser sees it, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The hub's process."""
        if self._hub is None:
            raise RuntimeError("the hub does not run")
        return self._hub.pid

    # Starting and ending.

    def start(self, timeout: float = 60.0) -> None:
        """Start the hub (and the proxy beside it) and wait until it answers."""
        self.launch()
        self.wait_ready(timeout)
        self._wait_for_service()

    def launch(self) -> None:
        """Start the hub without waiting for it."""
        parts.require("hub")
        if self not in LIVE:
            LIVE.append(self)
        (self.folder / "jupyterhub_config.py").write_text(self._config_text(), encoding="utf-8")
        if self.external_proxy and (self._proxy is None or self._proxy.poll() is not None):
            self._proxy = self._start_proxy()
        log = str(self.folder / "hub.log")
        Path(log).touch()
        self._log_before = os.path.getsize(log)
        streams = (os.devnull, log, log)
        # A benchmark measures a hub as members have it.
        start = PRELOADED.start if parts.in_test() else start_plainly
        self._hub = start(["-c", HUB], self.folder, self._environment(), streams)

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Wait until the hub answers through the proxy."""
        wait_for(self._answers, "the hub to answer", timeout=timeout)

    def stop(self) -> None:
        """End the hub as Ctrl-C would, and then everything that it left running."""
        if self in LIVE:
            LIVE.remove(self)
        self._end_hub()
        if self._proxy:
            processes.end_process(self._proxy.pid)
            self._proxy.wait()
            self._proxy = None
        processes.kill_all(self.children_left())

    def kill9(self, *, services: bool = False) -> None:
        """Kill the hub's process on the spot, and nothing else.

        Its proxy, its servers and its managed services live on. ``services`` kills the latter
        too, as systemd does with what it finds in the hub's unit.
        """
        if self._hub is None:
            return
        managed = self._managed()
        self._hub.kill()
        self._hub.wait()
        self._hub = None
        if services:
            processes.kill_all(managed)
        else:
            name = "JUPYTERHUB_SERVICE_NAME"
            self._orphans += [each for each in managed if environment_of(each).get(name) == "gpu"]

    def kill_services(self) -> None:
        """Kill the managed services on the spot; the hub starts them again."""
        processes.kill_all(self._managed())

    def kill_proxy(self) -> None:
        """Kill the proxy beside the hub on the spot, and start it again as systemd would."""
        if self._proxy is None:
            raise RuntimeError("the hub starts its proxy itself")
        self._proxy.kill()
        self._proxy.wait()
        self._proxy = self._start_proxy()

    def shut_down(self) -> None:
        """End the hub as systemd would, and wait until it has ended. Its proxy lives on."""
        self._end_hub()

    def restart(self, timeout: float = 60.0) -> None:
        """Stop the hub if it runs, and start it again on the same ports and database.

        Servers survive when the config says ``c.JupyterHub.cleanup_servers = False``.
        """
        self._end_hub()
        self.start(timeout)

    def children_left(self) -> Iterator[psutil.Process]:
        """Processes of this machine that this hub started: proxy, services, local servers."""
        own_namespace = os.readlink("/proc/self/ns/pid")
        for process in psutil.process_iter():
            environment = environment_of(process)
            mine = environment.get("CONFIGPROXY_AUTH_TOKEN") == self._proxy_token
            if mine or f":{self.hub_port}/" in environment.get("JUPYTERHUB_API_URL", ""):
                with contextlib.suppress(OSError):  # ended meanwhile; a container is not ours
                    if os.readlink(f"/proc/{process.pid}/ns/pid") == own_namespace:
                        yield process

    # What tests do with it.

    def api(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """Call the hub's REST API as an admin service; ``path`` starts after ``/hub/api``."""
        headers = {"Authorization": f"token {self.token}", **kwargs.pop("headers", {})}
        kwargs.setdefault("timeout", 60 * PATIENCE)
        url = f"{self.url}/hub/api/{path.lstrip('/')}"
        return requests.request(method, url, headers=headers, **kwargs)

    def login(self, user: str, password: str | None = None) -> requests.Session:
        """Sign in by the form as a browser does; the session then holds the cookies."""
        if password is None:
            password = ADMIN_PASSWORD if user == ADMIN else USER_PASSWORD
        session = new_session()
        data = {"username": user, "password": password}
        answer = self.post_form(session, "/hub/login?next=/hub/home", data, page="/hub/login")
        if "/hub/login" in answer.url or answer.status_code >= 400:
            raise PermissionError(f"{user} was not signed in: {answer.status_code} {answer.text}")
        return session

    def browser_of(self, user: str) -> requests.Session:
        """The session of a member who signed in by the form; one for each member."""
        if user not in self._browsers:
            self._browsers[user] = self.login(user)
        return self._browsers[user]

    def open_page(self, user: str, path: str, **query: Any) -> requests.Response:
        """Go to a page as this member, as by a link."""
        url = f"{self.url}/{path.lstrip('/')}"
        return self.browser_of(user).get(url, params=query, headers=NAVIGATION, timeout=60)

    def post_form(
        self, session: requests.Session, path: str, data: Mapping[str, Any], page: str = ""
    ) -> requests.Response:
        """Open a page with a form and send it, with the form's XSRF token."""
        shown = session.get(self.url + (page or path), headers=NAVIGATION, timeout=60)
        found = re.search(r'name="_xsrf"\s+value="([^"]+)"', shown.text)
        token = found[1] if found else session.cookies.get("_xsrf", "", path="/hub/")
        form = {**data, "_xsrf": token}
        return session.post(self.url + path, data=form, headers=NAVIGATION, timeout=120)

    def spawn(
        self, user: str, options: Mapping[str, Any] | None = None, server: str = ""
    ) -> requests.Response:
        """Ask for a server; the member is created when new. 201 or 202 when it is on its way."""
        self.api("POST", f"users/{user}")
        return self.api("POST", f"{self._path(user, server)}", json=dict(options or {}))

    def spawn_and_wait(
        self, user: str, options: Mapping[str, Any] | None = None, server: str = ""
    ) -> None:
        """Ask for a server and wait until it is up."""
        answer = self.spawn(user, options, server)
        assert answer.status_code in (201, 202), answer.text
        self.wait_server(user, server)

    def server(self, user: str, server: str = "") -> dict[str, Any] | None:
        """What the hub says of one server; None when it does not run."""
        answer = self.api("GET", f"users/{user}?include_stopped_servers=false")
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        found: dict[str, Any] | None = answer.json()["servers"].get(server)
        return found

    def wait_server(self, user: str, server: str = "", timeout: float = 60.0) -> dict[str, Any]:
        """Wait until a server that was asked for is ready; a failed one raises at once."""

        def look() -> dict[str, Any] | None:
            found = self.server(user, server)
            if found is None:
                raise RuntimeError(f"{user}'s server did not start: {self.failure(user, server)}")
            return found if found["ready"] else None

        return wait_for(look, f"{user}'s server", timeout=timeout)

    def failure(self, user: str, server: str = "") -> str:
        """Why the last spawn failed, as its progress page says."""

        def told() -> list[dict[str, Any]] | None:
            try:
                return self.progress(user, server, timeout=15 * PATIENCE)
            except requests.HTTPError as error:
                if error.response.status_code != 400:
                    raise
                return None  # it has failed, and is still being cleared away: "is not starting"

        try:
            events = wait_for(told, "the words", timeout=10)
        except (requests.RequestException, TimeoutError) as e:
            return str(e)
        return str(events[-1].get("message", "")) or "no event"

    def progress(self, user: str, server: str = "", timeout: float = 60.0) -> list[dict[str, Any]]:
        """The events of a spawn, up to the one that says ready or failed."""
        events = []
        end = time.monotonic() + timeout
        for event in self.events(user, server, timeout):
            events.append(event)
            if event.get("ready") or event.get("failed"):
                break
            if time.monotonic() > end:
                raise TimeoutError(f"the spawn went on for {timeout:.0f} s: {events}")
        return events

    def events(
        self, user: str, server: str = "", timeout: float = 60.0
    ) -> Iterator[dict[str, Any]]:
        """What the page of a pending spawn is told, as it comes."""
        path = f"{self._path(user, server)}/progress"
        with self.api("GET", path, stream=True, timeout=timeout) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

    def ask_and_go(
        self, method: str, user: str, options: Mapping[str, Any] | None = None
    ) -> threading.Thread:
        """Ask for the start ("POST") or the end ("DELETE") of a member's server without waiting
        for the answer: the hub may die first."""
        self.api("POST", f"users/{user}")

        def ask() -> None:
            with contextlib.suppress(requests.RequestException):
                self.api(method, f"users/{user}/server", json=options)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        return thread

    def stop_server(self, user: str, server: str = "", timeout: float = 60.0) -> None:
        """Stop a server and wait until the hub has let go of it."""

        def checked() -> bool:
            found = self.server(user, server)
            return found is None or found["pending"] != "check"

        # A hub that has just started answers 500 to who stops a server that it looks after.
        wait_for(checked, f"the hub's look at {user}'s server", timeout=timeout)
        self.api("DELETE", self._path(user, server)).raise_for_status()
        wait_for(lambda: self.server(user, server) is None, f"{user}'s stop", timeout=timeout)

    def get(self, user: str, path: str, server: str = "", **kwargs: Any) -> requests.Response:
        """GET from a running server through the proxy, as its member by token."""
        token = self.user_token(user)
        url = f"{self.server_url(user, server)}/{path.lstrip('/')}"
        headers = {"Authorization": f"token {token}"}
        return requests.get(url, headers=headers, **{"timeout": 30 * PATIENCE, **kwargs})

    def call(self, user: str, method: str, path: str, **kwargs: Any) -> requests.Response:
        """Call the API of our service as a script with this member's token does."""
        headers = {"Authorization": f"token {self.user_token(user)}"}
        url = f"{self.url}/services/gpu/api/{path}"
        return requests.request(method, url, headers=headers, **{"timeout": 120, **kwargs})

    def server_url(self, user: str, server: str = "") -> str:
        """Where a server is reached through the proxy, without a slash at the end."""
        return f"{self.url}/user/{user}/{server}".rstrip("/")

    def user_token(self, user: str) -> str:
        """A new API token of this member."""
        answer = self.api("POST", f"users/{user}/tokens", json={"note": "tests"})
        answer.raise_for_status()
        return str(answer.json()["token"])

    def kernel_run(self, user: str, code: str) -> str:
        """Run code in a new kernel of the member's server, through the proxy; what it printed."""
        with Kernel(self.server_url(user), self.user_token(user), 60) as kernel:
            return kernel.run(code)

    def terminal_run(self, user: str, command: str) -> str:
        """Type a command into a new terminal of the member's server; what was on its screen."""
        return terminal_run(self.server_url(user), self.user_token(user), command)

    def log_text(self) -> str:
        """What hub, proxy and managed services printed."""
        log = self.folder / "hub.log"
        return log.read_text(errors="replace") if log.exists() else ""

    # Below here: how.

    def _managed(self) -> list[psutil.Process]:
        """The processes of the services that the hub starts."""
        below = psutil.Process(self.pid).children(recursive=True)
        return [p for p in below if environment_of(p).get("JUPYTERHUB_SERVICE_NAME")]

    def _path(self, user: str, server: str) -> str:
        return f"users/{user}/servers/{server}" if server else f"users/{user}/server"

    def _config_text(self) -> str:
        defaults = DEFAULTS.format(
            base=f"{self.url}/",
            hub_ip=self.hub_ip,
            hub_port=self.hub_port,
            proxy_port=self.proxy_port,
            proxy_token=self._proxy_token,
            starts_proxy=not self.external_proxy,
            cookie_secret=self._cookie_secret,
            user_password=USER_PASSWORD,
            admin_password=ADMIN_PASSWORD,
            admin=ADMIN,
        )
        return defaults + self.config + TESTS_SERVICE.format(token=self.token)

    def _start_proxy(self) -> subprocess.Popen[bytes]:
        hub = f"http://{self.hub_ip}:{self.hub_port}"
        command = [
            str(BIN / "configurable-http-proxy"),
            *("--ip", "127.0.0.1", "--port", str(self.port)),
            *("--api-ip", "127.0.0.1", "--api-port", str(self.proxy_port)),
            *("--default-target", hub, "--error-target", f"{hub}/hub/error"),
        ]
        with open(self.folder / "hub.log", "ab") as log:
            return subprocess.Popen(
                processes.die_with_us(command),
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        found = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTERHUB_")}
        found["PATH"] = processes.system_path(BIN)
        found["PYTHONPATH"] = PYTHONPATH
        found["CONFIGPROXY_AUTH_TOKEN"] = self._proxy_token
        return found | self.environment

    def _answers(self) -> bool:
        if self._hub is not None and (code := self._hub.poll()) is not None:
            raise RuntimeError(f"the hub ended with {code}:\n{self.log_text()[-4000:]}")
        # Asked before, the proxy would have the hub draw a page that says why it does not answer.
        with open(self.folder / "hub.log", "rb") as log:
            log.seek(self._log_before)
            said = log.read()
        try:
            if RUNS not in said:
                if SAYS_INFO.search(said):
                    return False
                # Its log level hides that: it has no port before it can answer itself.
                own = f"http://{self.hub_ip}:{self.hub_port}/hub/api/"
                requests.get(own, timeout=5).raise_for_status()
            return self.api("GET", "/", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def _wait_for_service(self) -> None:
        """Wait until the service of a killed hub, if any, has ended and ours has its address.

        The hub takes the answer of the one for that of the other.
        """
        orphans, self._orphans = self._orphans, []
        if not orphans:
            return
        wait_for(
            lambda: not any(alive(each.pid) for each in orphans),
            "the service of the killed hub to end",
        )
        url = f"{self.url}/services/gpu/static/gpu.css"
        wait_for(lambda: requests.get(url, timeout=60).ok, "the service's pages", timeout=45)

    def _end_hub(self) -> None:
        if self._hub is None:
            return
        self._hub.send_signal(signal.SIGINT)
        try:
            self._hub.wait(timeout=40 * PATIENCE)
        except subprocess.TimeoutExpired:
            self._hub.kill()
            self._hub.wait()
        self._hub = None


NAVIGATION = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Site": "same-origin"}
"""What a browser says when a person follows a link; JupyterHub sets its XSRF cookie then."""


class DirectHub(HubProcess):
    """A hub that is spoken to without a proxy: its own, if any, keeps routes and forwards nothing
    (:class:`tests.support.memory_proxy.MemoryProxy`)."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.hub_port}"

    def ask_server(self, user: str, path: str = "") -> requests.Response:
        """GET from a member's running server itself."""
        route = self.api("GET", "proxy").json()[f"/user/{user}/"]
        return requests.get(f"{route['target']}/user/{user}/{path}", timeout=60)
