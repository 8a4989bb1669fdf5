"""What a service does about sick devices, in a process that is killed in the middle."""

from __future__ import annotations

from multiprocessing.connection import Connection

from gpuspawner.broker.health import Found
from gpuspawner.telemetry.symptoms import Symptom
from tests.support.brokers import Clock, acquire, open_broker

SETTINGS = {"gpu_rates": {"*": 60}, "opening_grant": 100_000, "device_source": "simulated:2xT4"}
"""A credit a minute."""


def fall_sick_and_recover(ready: Connection, url: str, clock: Clock) -> None:
    """For ever: somebody gets a device, it falls sick, they stop, it is probed and given out."""
    broker = open_broker(url, clock, sick_most=1_000_000_000, **SETTINGS)
    uuid = broker.look().devices[0].uuid
    ready.send("ready")
    while True:
        for lease in broker.open_leases():  # of a process before this one
            broker.release(lease.id, reason="stopped")
        if uuid in broker.closures():
            clock.forward(days=2)
            broker.settle_sick()
            broker.probed(uuid)
            continue
        lease = broker.confirm(acquire(broker, "ada").id)
        clock.forward(minutes=10)
        seen = Symptom("ecc", "it is sick", clock())
        broker.judge_health({uuid: Found((seen,))})
        clock.forward(minutes=5)
        broker.release(lease.id, ended_at=clock(), reason="stopped")
        broker.settle_sick()
