"""Real: the GPU, its driver, and programs that take its memory; the guard ends the right one. The
time passes faster: each look is told when it takes place.

Not run on hardware yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timezone

import pytest

from gpuspawner.devices.discovery import open_source
from gpuspawner.devices.source import SamplingSource
from gpuspawner.engines.local import LEASE_VARIABLE
from gpuspawner.leases.models import Lease, Request, ServerRef, Sharing
from gpuspawner.monitoring.models import Sample
from gpuspawner.service.memory_guard import MemoryGuard
from gpuspawner.services import Services
from gpuspawner.sharing.memory_rules import END_SECONDS
from tests.support.brokers import make_services
from tests.support.cuda import Program
from tests.support.rounds import ScriptedHub, make_tick

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("processes")]

GIB = 2**30


@pytest.fixture
def services(new_file: Callable[[], str]) -> Iterator[Services]:
    """Every GPU of this machine has four slots."""
    models = {d.model: 4 for d in open_source("nvml").observe(datetime.now(timezone.utc)).devices}
    services = make_services(
        database_url=new_file(), device_source="nvml", shared_devices=models, opening_grant=1000
    )
    yield services
    services.store.close()


def share(services: Services, user: str) -> Lease:
    request = Request(devices=1, sharing=Sharing.SLOT)
    lease = services.leases.grant(ServerRef(user), request, engine="local")
    return services.leases.confirm(lease.id)


async def test_guard_ends_the_program_over_its_share_and_no_other(services: Services) -> None:
    source = services.watch.source
    assert isinstance(source, SamplingSource)
    sampler = source.sampler()
    newest: dict[str, list[Sample]] = {}
    guard = MemoryGuard(make_tick(services, ScriptedHub()), sampler, lambda: newest)
    ada, bob = share(services, "ada"), share(services, "bob")
    assert ada.uuids == bob.uuids, "devices in use fill first"
    mine = ada.devices[0].share_bytes
    with ExitStack() as programs:
        of_ada, of_bob = (
            programs.enter_context(
                Program({"CUDA_VISIBLE_DEVICES": lease.uuids[0], LEASE_VARIABLE: lease.id})
            )
            for lease in (ada, bob)
        )
        for program, size in ((of_ada, mine + GIB), (of_bob, mine // 2)):
            program.tell("open")
            program.tell("hold", size)
        guard.follow(services.leases.open_leases())
        for monotonic in (1.0, 1.0 + END_SECONDS):
            found = sampler.sample(datetime.now(timezone.utc), monotonic)
            newest = {sample.uuid: [sample] for sample in found}
            await guard.round()
        assert of_ada.process.wait(timeout=60) == -15
        of_bob.tell("spin", 0.01)
    told = services.notifications.notices_of("ada")
    assert told[0].title == "A program of your server was ended: it used too much GPU memory"
    assert not services.notifications.notices_of("bob")
