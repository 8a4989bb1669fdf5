"""A real hub with the accounting service, whose members' servers are quick local processes."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, LeaseState, ServerRef
from gpuspawner.ledger.models import member_account
from gpuspawner.notifications.models import NoticeKind
from tests.support.brokers import make_services, migrated_bytes
from tests.support.hub import ADMIN, NAVIGATION, HubProcess
from tests.support.preloaded import PRELOADED
from tests.support.processes import REPO, alive, environment_of, free_port, wait_for

FLEET = "simulated:2xA100-80GB,1xT4"

CONFIG = """
c.JupyterHub.spawner_class = "gpu-local"
c.JupyterHub.allow_named_servers = True
c.JupyterHub.cleanup_servers = False
c.Spawner.cmd = {cmd!r}
c.GPUDatabase.url = {database_url!r}
c.GPUDevices.source = {fleet!r}
c.GPURates.by_model = {{"*": 3600}}
c.GPUCredits.hold_minutes = 0.01
c.GPUCredits.grace_seconds = 2
c.GPUDevices.refresh_seconds = 0.1
c.GPUCredits.charge_seconds = 0.5
c.Accounting.reconcile_seconds = 1.5
{config}
import gpuspawner
from jupyterhub.services import service
class Watched(service._ServiceSpawner):
    poll_interval = 2
service._ServiceSpawner = Watched
gpuspawner.add_services(c, url={url!r}{services})
"""
"""A credit a second, and rounds so quick that a test can wait for them; but the comparison with the
Hub, which keeps a hub busy that does nothing else, is no quicker than it must be. A service that
has died is started anew at the next look of the Hub, which is every 30 seconds otherwise, and no
setting."""


class PayingHub(HubProcess):
    """``with PayingHub(folder, "c.GPUCredits.opening_grant = 3") as hub``.

    ``services`` are further arguments of ``add_services``, from a comma on.
    """

    def __init__(
        self,
        folder: Path,
        config: str = "",
        *,
        services: str = "",
        database_url: str = "",
        **kwargs: Any,
    ) -> None:
        self.database_url = database_url or f"sqlite:///{folder}/gpuspawner.sqlite"
        text = CONFIG.format(
            cmd=[sys.executable, str(REPO / "tests/support/tiny_server.py")],
            database_url=self.database_url,
            fleet=FLEET,
            config=config,
            url=f"http://127.0.0.1:{free_port()}",
            services=services,
        )
        super().__init__(folder, text, **kwargs)
        if not database_url:
            (folder / "gpuspawner.sqlite").write_bytes(migrated_bytes())
        self.has_service = True
        self.services = make_services(
            database_url=self.database_url, device_source=FLEET, refresh_seconds=0.1
        )
        self._metrics_token = ""

    def start(self, timeout: float = 60.0) -> None:
        """Start the hub, and wait for the pages of its service."""
        super().start(timeout)
        if self.has_service:
            self.wait_pages()

    def stop(self) -> None:
        super().stop()
        self.services.store.close()

    def wait_pages(self) -> None:
        """Wait until the service answers through the proxy."""
        url = f"{self.url}/services/gpu/static/gpu.css"
        wait_for(lambda: requests.get(url, timeout=60).ok, "the service's pages", timeout=45)

    def start_server(self, user: str, server: str = "", **options: Any) -> Lease:
        """Start a server with its options, wait until it is up, and return its lease."""
        answer = self.spawn(user, options, server)
        assert answer.ok, answer.text
        self.wait_server(user, server)
        lease = self.lease_of(user, server)
        assert lease is not None
        return lease

    def lease_of(self, user: str, server: str = "") -> Lease | None:
        """The open lease of a server."""
        return self.services.leases.of_server(ServerRef(user, server))

    def start_with(self, credits: int, user: str, **options: Any) -> Lease:
        """The same for a member who has so many credits."""
        self.services.ledger.open_account(user)
        self.set_balance(user, credits)
        return self.start_server(user, **options)

    def set_balance(self, user: str, credits: int) -> None:
        """Give a member credits or take some, so that these are left."""
        account = member_account(user)
        change = credits * MICRO - self.services.ledger.account(account).balance
        self.services.ledger.grant(account, change, actor="kim", reason="a test")

    def wait_end(self, lease: Lease, timeout: float = 60.0) -> Lease:
        """Wait until the lease has ended, and return what it came to."""

        def look() -> Lease | None:
            now = self.services.leases.get(lease.id)
            return now if now.state is LeaseState.ENDED else None

        return wait_for(look, f"the end of {lease.server}'s lease", timeout=timeout)

    def told(self, user: str, *kinds: NoticeKind) -> list[str]:
        """The titles of what a member was told, or of these kinds of it; newest first."""
        notices = self.services.notifications.notices_of(user)
        return [notice.title for notice in notices if notice.kind in kinds or not kinds]

    def page(self, user: str, path: str = "", **kwargs: Any) -> requests.Response:
        """A page of the service, as this member's browser gets it."""
        url = f"{self.url}/services/gpu/{path}"
        kwargs = {"headers": NAVIGATION, "timeout": 120, **kwargs}
        return self.browser_of(user).get(url, **kwargs)

    def send(self, user: str, path: str, **fields: str) -> requests.Response:
        """Send a form of the service's pages as this member's browser does; redirects followed."""
        session, where = self.browser_of(user), "/services/gpu/"
        if not session.cookies.get("_xsrf", path=where):
            # The page's cookie proves that one of our pages was open.
            self.page(user).raise_for_status()
        data = {"_xsrf": session.cookies.get("_xsrf", path=where), **fields}
        url = f"{self.url}/services/gpu/{path}"
        return session.post(url, data=data, headers=NAVIGATION, timeout=120)

    def json(self, user: str, path: str) -> requests.Response:
        """The service's JSON, as a script with this member's token gets it."""
        return self.call(user, "GET", path)

    def service(self, name: str = "gpu") -> psutil.Process | None:
        """The process of a managed service, when it runs."""
        for process in self.children_left():
            if environment_of(process).get("JUPYTERHUB_SERVICE_NAME") == name:
                return process
        return None

    def kill_service(self) -> None:
        """Kill the accounting service on the spot; its Hub starts it again.

        A Hub whose service ends before the Hub was through with its own start ends as well.
        """

        def started() -> bool:
            newest = self.log_text().rpartition("Running JupyterHub version")[2]
            return "JupyterHub is now running" in newest

        wait_for(started, "the end of the Hub's start", timeout=60)
        service = self.service()
        assert service is not None
        service.kill()
        wait_for(lambda: not alive(service.pid), "its end")

    def rounds(self, duty: str) -> int:
        """How many rounds of a duty the service has finished since it started."""
        self._metrics_token = self._metrics_token or self.user_token(ADMIN)
        headers = {"Authorization": f"token {self._metrics_token}"}
        answer = requests.get(f"{self.url}/services/gpu/metrics", headers=headers, timeout=60)
        answer.raise_for_status()
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.labels.get("duty") == duty:
                    return int(sample.value)
        return 0

    def wait_rounds(self, count: int, *duties: str) -> None:
        """Wait until each of these duties of the service has begun and ended ``count`` rounds.

        For what must not happen: after this each had the occasion, on a slow machine too.
        """
        before = {duty: self.rounds(duty) for duty in duties}
        for duty in duties:
            # One more: a round may be under way, and have looked already.
            wait_for(
                partial(self._has_rounds, duty, before[duty] + count + 1),
                f"{count} rounds of {duty}",
                timeout=60,
            )

    def _has_rounds(self, duty: str, count: int) -> bool:
        with contextlib.suppress(requests.RequestException):  # the service may start anew
            return self.rounds(duty) >= count
        return False

    def service_lines(self) -> list[str]:
        """What the accounting service logged, without times."""
        return service_lines(self)


def command(hub: PayingHub, *arguments: str) -> str:
    """``gpuspawner`` in a shell on the hub's machine; what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = PRELOADED.run(arguments, hub.folder, environment, answer="")
    assert done.returncode == 0, done.stderr
    return done.stdout


def service_lines(hub: HubProcess) -> list[str]:
    """What the accounting service of any hub logged, without times."""
    mark = " Accounting] "
    lines = [line.partition(mark)[2] for line in hub.log_text().splitlines() if mark in line]
    return [line for line in lines if line]
