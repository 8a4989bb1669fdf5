"""All that the recordings need of gpuspawner: the one file here that imports from it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from datetime import datetime

from jupyterhub.services.auth import HubOAuth
from tornado import web as tornado_web
from traitlets.config import Configurable

import gpuspawner
from gpuspawner.cli.app import main as run_command
from gpuspawner.core.clock import Reading
from gpuspawner.core.units import MICRO
from gpuspawner.db.clock import SteadyClock
from gpuspawner.db.engine import Store
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.monitoring.health import Symptom
from gpuspawner.monitoring.health_service import FoundSymptoms as Found
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.notifications.channels import read as read_channels
from gpuspawner.notifications.models import Notice
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from gpuspawner.storage.repository import ARCHIVED
from gpuspawner.web import app as web_app
from gpuspawner.web.base import Context

__all__ = [
    "ARCHIVED",
    "MICRO",
    "DeviceUse",
    "Found",
    "Lease",
    "Notice",
    "Request",
    "ServerRef",
    "Services",
    "Store",
    "Symptom",
    "Terms",
    "Ticket",
    "configurables",
    "fix_clock",
    "gpuspawner",
    "run_command",
    "service_app",
]

CHANNELS = {
    "mail": "mailtos://smtp.lab.example?from=gpu@lab.example&to={address}",
    "chat": {"url": "mmosts://chat.lab.example/{env:CHAT_TOKEN}", "label": "The lab's chat"},
}


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


def configurables() -> Iterator[type[Configurable]]:
    """Every Configurable of ours that none of ours inherits from, by name."""
    _import_all()
    ours = {cls for cls in _below(Configurable) if cls.__module__.startswith("gpuspawner.")}
    parents = {parent for cls in ours for parent in cls.__mro__[1:]}
    yield from sorted(ours - parents, key=lambda cls: cls.__name__)


def _below(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from _below(each)


def _import_all() -> None:
    """Import every module but migrations and what is only read by another program."""
    for module in pkgutil.walk_packages(gpuspawner.__path__, "gpuspawner."):
        last = module.name.rpartition(".")[2]
        if last in ("__main__", "env") or ".versions" in module.name or last.endswith("_config"):
            continue
        importlib.import_module(module.name)
