"""Devices that fall sick, and what a service does about them, also in a process that is killed."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection

from gpuspawner.monitoring import health_service
from gpuspawner.monitoring.health import Symptom
from gpuspawner.monitoring.health_service import FoundSymptoms
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.services import Services
from tests.support.brokers import Clock, acquire, open_services

RATE = {"gpu_rates": {"*": 60}, "opening_grant": 1000, "device_source": "simulated:2xT4"}
"""A credit a minute."""


def clock(services: Services) -> Clock:
    assert isinstance(services.clock, Clock)
    return services.clock


def uuids(services: Services) -> list[str]:
    return [device.uuid for device in services.devices.look().devices]


def find(services: Services, uuid: str, *causes: str, lasting: bool = False, ago: float = 0) -> str:
    """Find these of a device, which began so many seconds ago; what became of it."""
    at = clock(services)() - timedelta(seconds=ago)
    symptoms = tuple(Symptom(cause, f"it is {cause}", at, lasting) for cause in causes)
    going_on = frozenset(causes if lasting else ())
    return " ".join(
        each.event
        for each in services.health.judge_health({uuid: FoundSymptoms(symptoms, going_on)})
    )


def told(services: Services, user: str) -> list[str]:
    return [
        n.body
        for n in services.notifications.notices_of(user, 10_000)
        if n.kind is NoticeKind.GPU_SICK
    ]


def trail(services: Services) -> list[tuple[str, str, str]]:
    return [(each.actor, each.action, each.detail) for each in reversed(services.audit.trail())]


def fall_sick_and_recover(ready: Connection, url: str, clock: Clock) -> None:
    """For ever: somebody gets a device, it falls sick, they stop, it is probed and given out."""
    health_service.MOST_RELAPSES = 1_000_000_000  # in a process of its own
    services = open_services(url, clock, **RATE)
    uuid = services.devices.look().devices[0].uuid
    ready.send("ready")
    while True:
        for lease in services.leases.open_leases():  # of a process before this one
            services.leases.release(lease.id, reason="stopped")
        if uuid in services.devices.closures():
            clock.forward(days=2)
            services.health.settle_sick()
            services.health.probed(uuid)
            continue
        lease = services.leases.confirm(acquire(services, "ada").id)
        clock.forward(minutes=10)
        seen = Symptom("ecc", "it is sick", clock())
        services.health.judge_health({uuid: FoundSymptoms((seen,))})
        clock.forward(minutes=5)
        services.leases.release(lease.id, ended_at=clock(), reason="stopped")
        services.health.settle_sick()
