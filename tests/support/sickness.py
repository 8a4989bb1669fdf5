"""Devices that fall sick, and what a service does about them, also in a process that is killed."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection

from gpuspawner.monitoring.health import Symptom
from gpuspawner.monitoring.health_service import FoundSymptoms
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.services import Broker
from tests.support.brokers import Clock, acquire, open_broker

RATE = {"gpu_rates": {"*": 60}, "opening_grant": 1000, "device_source": "simulated:2xT4"}
"""A credit a minute."""


def clock(broker: Broker) -> Clock:
    assert isinstance(broker.clock, Clock)
    return broker.clock


def uuids(broker: Broker) -> list[str]:
    return [device.uuid for device in broker.look().devices]


def find(broker: Broker, uuid: str, *causes: str, lasting: bool = False, ago: float = 0) -> str:
    """Find these of a device, which began so many seconds ago; what became of it."""
    at = clock(broker)() - timedelta(seconds=ago)
    symptoms = tuple(Symptom(cause, f"it is {cause}", at, lasting) for cause in causes)
    going_on = frozenset(causes if lasting else ())
    return " ".join(
        each.event for each in broker.health.judge_health({uuid: FoundSymptoms(symptoms, going_on)})
    )


def told(broker: Broker, user: str) -> list[str]:
    return [
        n.body
        for n in broker.notifications.notices_of(user, 10_000)
        if n.kind is NoticeKind.GPU_SICK
    ]


def trail(broker: Broker) -> list[tuple[str, str, str]]:
    return [(each.actor, each.action, each.detail) for each in reversed(broker.trail())]


def fall_sick_and_recover(ready: Connection, url: str, clock: Clock) -> None:
    """For ever: somebody gets a device, it falls sick, they stop, it is probed and given out."""
    broker = open_broker(url, clock, sick_most=1_000_000_000, **RATE)
    uuid = broker.look().devices[0].uuid
    ready.send("ready")
    while True:
        for lease in broker.open_leases():  # of a process before this one
            broker.release(lease.id, reason="stopped")
        if uuid in broker.closures():
            clock.forward(days=2)
            broker.health.settle_sick()
            broker.health.probed(uuid)
            continue
        lease = broker.confirm(acquire(broker, "ada").id)
        clock.forward(minutes=10)
        seen = Symptom("ecc", "it is sick", clock())
        broker.health.judge_health({uuid: FoundSymptoms((seen,))})
        clock.forward(minutes=5)
        broker.release(lease.id, ended_at=clock(), reason="stopped")
        broker.health.settle_sick()
