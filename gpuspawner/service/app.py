"""The accounting service as an application: configuration, regular rounds, web server."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from jupyterhub.services.auth import HubOAuth
from jupyterhub.utils import make_ssl_context
from traitlets import Float, default
from traitlets.config import Application

from .. import __version__
from ..core.aio import side_by_side
from ..core.errors import ConfigError, GPUSpawnerError, Unavailable
from ..core.processes import process_ref
from ..db.leader import hub_name, make_identity
from ..engines.base import Engine
from ..engines.docker import DockerEngine
from ..engines.local import LocalEngine
from ..monitoring import views as monitoring_views
from ..monitoring.service import GPUMonitoring
from ..runs.files import RunFiles
from ..services import Services
from ..settings import CLASSES, config_from_environment
from ..web import app as web_app
from ..web import frame, pages
from ..web.base import Context
from ..web.frame import Frame
from .device_monitor import GPUSampler
from .disk_monitor import disk_rounds, workspace_rounds
from .duties import (
    FORMER_MEMBERS_SECONDS,
    CreditDuty,
    FolderOwnerDuty,
    GPUSessions,
    Members,
    RefillDuty,
    RunDuty,
    SessionDuty,
    cluster_rounds,
)
from .hub_client import HubClient
from .image_prefetch import ImagePrefetcher
from .notifier import GPUNotifications, Notifier
from .resource_monitor import resource_rounds
from .schedule_duty import ScheduleDuty
from .worker import Round, Supervisor, Tick, Watchdog

PID = "GPUSPAWNER_HUB_PID"
ID_FILE = "GPUSPAWNER_HUB_ID_FILE"
"""The variable with the process id of the Hub that started the service."""

NOTICES_EVERY = 2.0
"""Seconds between two checks for notices to send."""

TOTALS_EVERY = 60.0
"""Seconds between two checks for ended leases that are not in the totals yet."""

ENGINES: dict[str, Callable[[Services], Engine]] = {
    "docker": lambda services: DockerEngine(stamp_error=lambda: services.time.stamp_error),
    "local": lambda services: LocalEngine(),
}


class Accounting(ImagePrefetcher, GPUSampler, Application):
    """Charges, warns, stops what nobody pays for, reconciles, tells members, serves the pages.

    The Hub runs it as a service; ``gpuspawner.add_services(c)`` says so in its configuration.
    """

    name = "gpuspawner-accounting"
    version = __version__
    description = __doc__ or ""
    classes = [*CLASSES, GPUMonitoring, GPUSessions, GPUNotifications]

    reconcile_seconds = Float(
        60.0,
        min=0.1,
        config=True,
        help="""
        Seconds between two comparisons of the database with the engines and the Hub.

        Example::

            c.Accounting.reconcile_seconds = 30
        """,
    )

    @default("log_level")
    def _default_log_level(self) -> int:
        return logging.INFO

    @default("log_format")
    def _default_log_format(self) -> str:
        return "[%(levelname)1.1s %(asctime)s %(name)s] %(message)s"

    def initialize(self, argv: list[str] | None = None) -> None:
        """Read the settings from the Hub's configuration, then from the command line."""
        self.update_config(config_from_environment())
        super().initialize(argv)
        self.monitoring = GPUMonitoring(parent=self)
        self.sessions = GPUSessions(parent=self)
        for name in ("tornado.access", "tornado.application", "tornado.general"):
            logger = logging.getLogger(name)
            logger.parent = self.log
            logger.setLevel(max(self.log.level, logging.WARNING))  # do not log every request

    def start(self) -> None:
        """Serve until the Hub sends a signal, or is gone."""
        super().start()
        asyncio.run(self.serve())

    async def serve(self) -> None:
        """Run every duty side by side until a signal comes."""
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        tick = self._tick()
        files = RunFiles(tick.services.storage, tick.engines)
        notifier = Notifier(GPUNotifications(parent=self), tick.services, self.log)
        sessions = SessionDuty(tick, warn_minutes=self.sessions.warn_minutes, poke=notifier.poke)
        credits = CreditDuty(
            tick,
            warn_minutes=tick.services.settings.credits.warn_minutes,
            poke=notifier.poke,
            tell_admin=notifier.tell_admin,
        )
        supervisor = Supervisor(tick.log)
        duties = [
            asyncio.ensure_future(supervisor.keep(name, start))
            for name, start in (
                ("Rounds", partial(self._rounds, tick, supervisor, sessions, credits, files)),
                ("Notices", partial(self._notices, tick, notifier)),
                ("Pages", partial(self._pages, tick, supervisor, notifier, files)),
                ("Totals", partial(self._totals, tick)),
                ("Devices", partial(self.watch_devices, tick, supervisor, notifier.poke)),
                ("Hub's end", partial(self._hub_gone, stop)),
            )
        ]
        watchdog = Watchdog(asyncio.get_running_loop(), tick.log)
        watchdog.start()
        try:
            self.pull_ahead(tick.services)
            await stop.wait()
        finally:
            watchdog.stop()
            await asyncio.gather(notifier.close(), sessions.close())
            for duty in duties:
                duty.cancel()
            await asyncio.gather(*duties, return_exceptions=True)
            await files.close()
        self.log.info("Stopped. Charging resumes where it stopped when the service is back.")

    def _tick(self) -> Tick:
        try:
            api_url, token = os.environ["JUPYTERHUB_API_URL"], os.environ["JUPYTERHUB_API_TOKEN"]
        except KeyError as error:
            what = (
                f"{error.args[0]} is not set. This program is a service of the Hub: add "
                "`import gpuspawner; gpuspawner.add_services(c)` to jupyterhub_config.py and "
                "start the Hub"
            )
            raise ConfigError(what=what) from None
        services = Services(self.config)
        if file := os.environ.get(ID_FILE):
            with suppress(OSError):  # the hub reports that
                services.granter.identity = make_identity(Path(file))
        identity = services.granter.identity
        engines = {name: make(services) for name, make in ENGINES.items()}
        if delegated := services.delegation.engine():
            engines[delegated.name] = delegated
        return Tick(
            services=services,
            hub=HubClient(api_url, token, self._ssl(ssl.Purpose.SERVER_AUTH)),
            engines=engines,
            log=self.log,
            charge_seconds=services.settings.credits.charge_seconds,
            hub_name=hub_name(pid, identity) if (pid := os.environ.get(PID)) else "",
        )

    # Duties.

    async def _rounds(
        self,
        tick: Tick,
        supervisor: Supervisor,
        sessions: SessionDuty,
        credits: CreditDuty,
        files: RunFiles,
    ) -> None:
        # What ended while the service was down is settled before anybody is charged, warned or told
        # that a session ended.
        await tick.round("Clock", tick.keep_clock)
        await tick.round("Reconciliation", tick.reconcile)
        await tick.round("Charges", tick.charge)
        runs = RunDuty(tick, sessions.poke)
        rounds: list[Round] = [
            (2.0, "Clock", tick.keep_clock),
            (self.reconcile_seconds, "Reconciliation", tick.reconcile),
            (tick.charge_pause, "Charges", tick.charge),
            (2.0, "Sessions", sessions.round),
            (1.0, "Runs", runs.round),
            (FORMER_MEMBERS_SECONDS, "Runs of former members", runs.end_gone),
            (2.0, "Schedules", ScheduleDuty(tick, sessions.poke).round),
            (15.0, "Files of runs", files.round),
            (2.0, "Credits", credits.round),
            (5.0, "Refills", RefillDuty(tick).round),
            (5.0, "Members", Members(tick, sessions.poke).round),
            (600.0, "Folders", FolderOwnerDuty(tick).round),
            *cluster_rounds(tick),
            *disk_rounds(tick, sessions.poke),
            *workspace_rounds(tick),
            *resource_rounds(tick, sessions.poke),
        ]
        await side_by_side(*(supervisor.keep(x[1], partial(tick.every, *x)) for x in rounds))

    async def _notices(self, tick: Tick, notifier: Notifier) -> None:
        while True:
            await tick.round("Notices", notifier.round)
            await notifier.pause(NOTICES_EVERY)

    async def _pages(
        self, tick: Tick, supervisor: Supervisor, notifier: Notifier, files: RunFiles
    ) -> None:
        """Serve the pages; while the address is in use, everything else continues."""
        address = urlsplit(os.environ.get("JUPYTERHUB_SERVICE_URL", ""))
        if not address.hostname:
            self.log.warning("JUPYTERHUB_SERVICE_URL is not set: there are no pages")
            return
        port = address.port or (443 if address.scheme == "https" else 80)
        context = Context(
            services=tick.services,
            hub_auth=HubOAuth.instance(parent=self, cache_max_age=web_app.BELIEVED),
            warn_minutes=tick.services.settings.credits.warn_minutes,
            session_warn_minutes=self.sessions.warn_minutes,
            channels=notifier.known,
            poke=notifier.poke,
            recent=self.recent_samples,
            recent_of_leases=self.recent_lease_samples,
            members_see_names=self.monitoring.members_see_names,
            hub=tick.hub,
            run_files=files,
            frame=Frame.from_text(os.environ.get(frame.VARIABLE, "")),
            rounds=tick.rounds,
            duties=supervisor.states,
        )
        secret = await asyncio.to_thread(
            web_app.read_cookie_secret, tick.services.settings.database.url, tick.log
        )
        app = web_app.make_app(context, secret)
        # With ``internal_ssl``, JupyterHub gives every service certificates, but checks a service
        # with an http address over plain HTTP.
        is_https = address.scheme == "https"
        server = web_app.make_server(app, self._ssl(ssl.Purpose.CLIENT_AUTH) if is_https else None)
        while True:
            try:
                server.listen(port, address.hostname)
                break
            except OSError as error:
                sentence = (
                    f"{address.geturl()} cannot be used ({error.strerror}). Give another address "
                    "with gpuspawner.add_services(c, url=...); it is tried again"
                )
                tick.trouble("Pages", Unavailable(sentence))
                await asyncio.sleep(2)
        tick.well("Pages")
        self.log.info("Pages at %s", os.environ.get("JUPYTERHUB_SERVICE_PREFIX", "/"))
        await asyncio.to_thread(pages.read_templates, context)
        try:
            await asyncio.Event().wait()
        finally:
            server.stop()

    async def _totals(self, tick: Tick) -> None:
        while True:
            await tick.round("Totals", partial(monitoring_views.remember, tick.services))
            await asyncio.sleep(TOTALS_EVERY)

    async def _hub_gone(self, stop: asyncio.Event) -> None:
        """End when the Hub that started us was killed: the next Hub starts its own service."""
        hub = os.environ.get(PID, "")
        if not hub.isdigit():
            return  # somebody else manages this process
        # It may have been killed earlier, or have started us through another process.
        known = process_ref(int(hub))
        while hub == str(os.getppid()) or (known and process_ref(int(hub)) == known):
            await asyncio.sleep(1)
        self.log.warning("The Hub that started this service is gone")
        stop.set()

    def _ssl(self, purpose: ssl.Purpose) -> ssl.SSLContext | None:
        """Return the certificates of the Hub's ``internal_ssl``, if that is on."""
        names = ("JUPYTERHUB_SSL_KEYFILE", "JUPYTERHUB_SSL_CERTFILE", "JUPYTERHUB_SSL_CLIENT_CA")
        key, certificate, authority = (os.environ.get(name) for name in names)
        return make_ssl_context(key, certificate, cafile=authority, purpose=purpose)


def main() -> None:
    """Run the service; a configuration error is printed as a sentence, with exit status 1."""
    try:
        Accounting.launch_instance()
    except GPUSpawnerError as error:
        sys.exit(f"gpuspawner.service: {error}")
