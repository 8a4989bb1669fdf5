"""Sick devices from symptom to return, and devices that are not empty. Real: databases, services
that race and are killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from gpuspawner.core.errors import ConfigError, NoDeviceFree
from gpuspawner.db import schema as db_schema
from gpuspawner.devices.models import DeviceProcess
from gpuspawner.devices.repository import SickLease
from gpuspawner.devices.service import foreign_use
from gpuspawner.engines.base import ProcessOwners
from gpuspawner.engines.local import LEASE_VARIABLE
from gpuspawner.leases.models import Sharing
from gpuspawner.services import Services
from tests.support import racers, sickness
from tests.support.brokers import (
    Clock,
    Make,
    acquire,
    broken_invariants,
    credits_of,
    open_services,
    running,
    states,
)
from tests.support.parts import each_database
from tests.support.processes import wait_for
from tests.support.sickness import RATE, find, told, trail, uuids
from tests.support.threads import at_once
from tests.support.tier import Rounds


@pytest.fixture
def services(make: Make) -> Iterator[Services]:
    yield (services := make(**RATE))
    assert broken_invariants(services) == {}


@each_database
def test_sick_device_is_drained_refunded_probed_and_returned(
    services: Services, clock: Clock
) -> None:
    lease = running(services, "ada")
    uuid = lease.uuids[0]
    clock.forward(minutes=20)
    services.ledger.charge_all()
    assert find(services, uuid, "lost", lasting=True, ago=60) == "sick"
    assert find(services, uuid, "lost", lasting=True) == ""
    (body,) = told(services, "ada")
    assert "GPU 0 (T4) has been sick since 12:19" in body and "it is lost" in body
    assert "up to 13:19 (UTC), is refunded when it has stopped" in body
    (mine,) = services.health.sick_of("ada")
    assert (mine.lease.id, mine.device.uuid, services.health.sick_of("bob")) == (lease.id, uuid, [])
    assert states(services) == ["draining", "free"]

    clock.forward(minutes=10)  # they go on for a while, and then stop
    assert services.health.settle_sick() == 0
    services.leases.release(lease.id, ended_at=services.clock(), reason="stopped")
    assert credits_of(services, "ada") == 970
    assert (services.health.settle_sick(), services.health.settle_sick()) == (1, 0)
    assert credits_of(services, "ada") == 981
    assert services.leases.get(lease.id).refunded == 11_000_000
    assert states(services) == ["drained", "free"]
    running(services, "bob")
    with pytest.raises(NoDeviceFree):
        acquire(services, "cleo")

    assert find(services, uuid) == "probe"
    assert services.health.probed(uuid, "It computes wrongly.")
    assert find(services, uuid) == ""
    clock.forward(minutes=10)
    assert find(services, uuid) == "probe"
    assert services.health.probed(uuid)
    assert not services.health.probed(uuid)
    assert acquire(services, "cleo").uuids == (uuid,)
    assert trail(services) == [
        ("health", "drain", "it is lost"),
        ("health", "refund", "11.00 credits to member:ada: a GPU was sick: it is lost"),
        ("health", "probe", "failed: It computes wrongly."),
        ("health", "undrain", "the probe passed"),
    ]
    assert services.health.device_states()[uuid].state.verdict == "watch"


def test_leased_device_is_not_probed_and_a_watched_one_stays_available(
    services: Services, clock: Clock
) -> None:
    lease = running(services, "ada")
    sick, watched = uuids(services)
    assert lease.uuids == (sick,)
    find(services, sick, "ecc")
    assert find(services, watched, "slowed", lasting=True) == "watch"
    assert find(services, watched, "xid program") == ""
    assert states(services) == ["draining", "free"]
    clock.forward(hours=5)
    assert find(services, watched) == "fine"
    assert find(services, sick) == ""
    services.leases.release(lease.id, reason="stopped")
    assert find(services, sick) == "probe"
    assert [what for _, what, _ in trail(services)] == ["drain"]


@pytest.mark.parametrize(
    ("rule", "minutes", "back"),
    [("since_fault", 10, 10), ("since_fault", 70, 60), ("session", 70, 80), ("none", 10, 0)],
)
def test_refund_amount_follows_the_sick_refund_rule(
    make: Make, clock: Clock, rule: str, minutes: int, back: int
) -> None:
    """``minutes`` are those that the member goes on; an hour of them is refunded at most."""
    services = make(**RATE, sick_refund=rule)
    lease = running(services, "ada")
    clock.forward(minutes=20)
    find(services, lease.uuids[0], "xid link")
    assert ("is refunded" in told(services, "ada")[0]) is bool(back)
    clock.forward(minutes=minutes)
    services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    services.health.settle_sick()
    assert credits_of(services, "ada") == 980 - minutes + back


def test_sick_refund_never_exceeds_the_remaining_charge(services: Services, clock: Clock) -> None:
    """Also of a fault that is found after the stop, which its member is told of too."""
    first = running(services, "ada")
    second = running(services, "bob")
    clock.forward(minutes=20)
    for lease in (first, second):
        services.leases.release(lease.id, ended_at=services.clock(), reason="stopped")
    clock.forward(seconds=5)
    services.ledger.refund(second.id, 19_500_000, actor="root", reason="sorry")
    for lease in (first, second):
        find(services, lease.uuids[0], "xid link", ago=65)
        assert len(told(services, lease.server.user)) == 1
    services.health.settle_sick()
    assert credits_of(services, "ada") == 981
    assert credits_of(services, "bob") == 1000
    assert services.leases.get(second.id).outcome == "refunded"


def test_health_checks_respect_admin_drain_and_undrain(services: Services, clock: Clock) -> None:
    uuid = uuids(services)[0]
    find(services, uuid, "remap pending", lasting=True)
    assert services.devices.undrain("0", actor="root", reason="it will do")
    assert find(services, uuid, "remap pending", lasting=True) == ""
    assert states(services) == ["free", "free"]
    assert find(services, uuid, "ecc") == "sick"
    assert services.devices.drain("0", actor="root", reason="to be replaced")
    clock.forward(minutes=10)
    assert find(services, uuid) == "probe"
    services.health.probed(uuid)
    assert states(services) == ["drained", "free"]
    assert services.devices.closures()[uuid].actor == "root"


def test_flapping_device_stays_drained_until_an_admin_acts(
    services: Services, clock: Clock
) -> None:
    uuid = uuids(services)[0]
    for minutes in (10, 20, 40):
        assert find(services, uuid, "lost") == "sick"
        clock.forward(minutes=minutes)
        if find(services, uuid) == "probe":
            services.health.probed(uuid)
    reason = "it is lost; it fell sick 3 times within a day"
    assert services.devices.closures()[uuid].reason == reason
    clock.forward(days=30)
    assert find(services, uuid) == ""


def test_invalid_health_action_is_a_config_error(database_url: str) -> None:
    with pytest.raises(ConfigError, match=r"c.GPUHealth.actions: 'hot' is to 'fry'"):
        open_services(database_url, when_sick={"hot": "fry"})


@each_database
def test_concurrent_services_notify_and_refund_once(
    services: Services, clock: Clock, database_url: str
) -> None:
    """As when one is started while the one before still ends."""
    clock.now = (now := services.clock()) - timedelta(minutes=20)
    lease = running(services, "ada")
    clock.now = now
    others = [open_services(database_url, Clock(now), **RATE) for _ in range(4)]
    found = at_once(4, lambda number: find(others[number], lease.uuids[0], "ecc", ago=300))
    assert sorted(found) == ["", "", "", "sick"]
    services.leases.release(lease.id, ended_at=now, reason="stopped")
    assert sum(at_once(4, lambda number: others[number].health.settle_sick())) >= 1
    assert (credits_of(services, "ada"), len(told(services, "ada"))) == (985, 1)
    assert [what for _, what, _ in trail(services)] == ["drain", "refund"]


@each_database
def test_killed_health_check_applies_all_or_nothing(
    services: Services, database_url: str, rounds: Rounds, chance: random.Random
) -> None:
    uuid = uuids(services)[0]
    services.ledger.open_account("ada")
    services.ledger.grant("member:ada", 10**12, actor="root", reason="for many sessions")
    for life in range(1, 1 + rounds(40)):
        began = Clock(services.clock() + timedelta(days=life * 10_000))
        victim = racers.Victim(sickness.fall_sick_and_recover, database_url, began)
        victim.wait_round()
        wait_for(partial(sick_leases, services), "the first that falls sick", interval=0.02)
        time.sleep(chance.uniform(0.0, 0.3))
        victim.kill()
        known = services.health.device_states().get(uuid)
        sick = known is not None and known.state.verdict == "sick"
        assert sick == (uuid in services.devices.closures())
        assert len(told(services, "ada")) == len(sick_leases(services))
    for lease in services.leases.open_leases():
        services.leases.release(lease.id, reason="stopped")
    services.health.settle_sick()
    found = sick_leases(services)
    for each in found:
        assert services.leases.get(each.lease_id).refunded == each.refunded
        assert each.refunded in (0, 5_000_000)  # killed before the end was proved, or after


def sick_leases(services: Services) -> list[SickLease]:
    """All that ever were."""
    with services.store.read() as connection:
        rows = connection.execute(sa.select(db_schema.sick_leases)).mappings()
        return [SickLease(**row) for row in rows]


# Something of nobody's.


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Say in JSON what the simulated devices show."""
    script = tmp_path / "script.json"
    monkeypatch.setenv("GPUSPAWNER_SIMULATION", str(script))
    return script.write_text


def test_leaking_device_is_quarantined_until_it_is_empty(
    services: Services, clock: Clock, show: Callable[[str], object]
) -> None:
    lease = running(services, "ada")
    show('{"0": {"processes": [[4711, "python3"]]}, "1": {"held_bytes": 6442450944}}')
    clock.forward(minutes=1)
    assert states(services) == ["leased", "occupied"]
    services.leases.release(lease.id, ended_at=services.clock(), reason="stopped")
    with pytest.raises(NoDeviceFree, match="2 are used by programs outside the hub"):
        acquire(services, "bob")  # at once: the very look that grants sees it
    assert services.leaks.judge_leaks() == []  # what ran may take a moment to end
    clock.forward(seconds=30)
    first, _ = services.leaks.judge_leaks()
    assert first.reason == "python3 (pid 4711), not from any server of this hub"
    details = [view.detail for view in services.monitoring.overview().devices]
    assert details == [
        "used without a lease by python3 (pid 4711); in quarantine",
        "6.0 GB of its memory are in use, but by no visible process; in quarantine",
    ]
    show('{"1": {"held_bytes": 6442450944}}')
    clock.forward(seconds=30)
    assert states(services)[0] == "drained"  # until it is lifted, whoever looks
    assert services.leaks.judge_leaks() == []
    assert states(services) == ["free", "occupied"]
    quarantine, undrain = ("leak", "quarantine"), ("leak", "undrain")
    assert [line[:2] for line in trail(services)] == [quarantine, quarantine, undrain]


def test_shared_device_with_a_foreign_program_gets_no_more_sessions(
    make: Make, clock: Clock, show: Callable[[str], object]
) -> None:
    site = {"device_source": "simulated:1xA100-80GB", "shared_devices": {"A100": 4}}
    services = make(**site, opening_grant=1000)
    ada = running(services, "ada", sharing=Sharing.SLOT)

    def leaks() -> list[str]:
        clock.forward(seconds=30)
        return [each.reason for each in services.leaks.judge_leaks()]

    with subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"],
        env={LEASE_VARIABLE: ada.id},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as own:
        assert own.stdout and own.stdout.readline() == b"up\n"
        show(f'{{"0": {{"processes": [[{own.pid}, "python3"]]}}}}')
        assert [leaks(), leaks()] == [[], []], "the programs of leases belong there"
        listed = f'[{own.pid}, "python3"], [{os.getpid()}, "miner"]'
        show(f'{{"0": {{"processes": [{listed}]}}}}')
        starting = acquire(services, "bob", sharing=Sharing.SLOT)
        assert [leaks(), leaks()] == [[], []], "whose programs may not be known yet"
        services.leases.confirm(starting.id, "container-bob")
        found = [leaks(), leaks(), leaks()]
        reason = f"miner (pid {os.getpid()}), not from any server of this hub"
        assert found == [[], [reason], []]
        (view,) = services.monitoring.overview().devices
        assert (view.state, view.free_slots) == ("draining", 0)
        assert view.detail.endswith(f"in quarantine: {reason}")
        with pytest.raises(NoDeviceFree):
            acquire(services, "eve", sharing=Sharing.SLOT)
        show(f'{{"0": {{"processes": [[{own.pid}, "python3"], [999999999, "gone"]]}}}}')
        assert leaks() == []
        assert services.monitoring.overview().devices[0].free_slots == 2
        assert acquire(services, "eve", sharing=Sharing.SLOT).devices


def test_foreign_use_of_a_shared_device_is_told_with_its_memory(services: Services) -> None:
    device = replace(
        services.devices.look().devices[0],
        slots=4,
        processes=(
            DeviceProcess(os.getpid(), 12 * 2**30, name="miner"),
            DeviceProcess(os.getppid(), 2**29),
            DeviceProcess(999_999_999, 2**30, name="elsewhere"),
            DeviceProcess(1, 2**30, "graphics", "Xorg"),
        ),
    )
    assert foreign_use(device, ProcessOwners()) == (
        f"miner (pid {os.getpid()}), a process (pid {os.getppid()}), not from any server of this "
        "hub, with 12.5 GB of its memory"
    )


def test_quarantine_does_not_override_an_admin_drain(
    services: Services, clock: Clock, show: Callable[[str], object]
) -> None:
    show('{"0": {"held_bytes": 6442450944}}')
    services.leaks.judge_leaks()
    clock.forward(seconds=30)
    assert len(services.leaks.judge_leaks()) == 1
    assert services.devices.drain("0", actor="root", reason="I look at it")
    show('{"0": {"error": "It fell off the bus."}}')
    clock.forward(seconds=30)
    assert (services.leaks.judge_leaks(), states(services)) == ([], ["unknown", "free"])
    show("{}")
    clock.forward(seconds=30)
    assert (services.leaks.judge_leaks(), states(services)) == ([], ["drained", "free"])
    assert services.devices.closures()[uuids(services)[0]].actor == "root"
