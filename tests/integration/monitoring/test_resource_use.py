"""What leases used of CPU, memory, disk and network, and notices about memory. Real: both
databases."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from gpuspawner.engines.resource_use import MemoryKill, ResourceUse
from gpuspawner.leases.models import Lease
from gpuspawner.monitoring.resource_service import ContainerSample
from gpuspawner.monitoring.resource_totals import COUNTERS, EnvironmentUse, ResourceTotals
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, Make, running
from tests.support.parts import each_database

GB = 2**30
SECOND = 1_000_000_000


@pytest.fixture
def services(make: Make) -> Services:
    return make(opening_grant=1000, gpu_rates={"*": 1})


def kill(lease: Lease, second: int) -> MemoryKill:
    return MemoryKill(lease.id, "container", 1_700_000_000 * SECOND + second * SECOND)


@each_database
def test_samples_are_added_up_and_stay_after_the_end(services: Services) -> None:
    clock = Clock.of(services)
    ada, bob = running(services, "ada"), running(services, "bob")
    full = ResourceUse(
        cpu_seconds=1.5,
        memory_bytes=3 * GB,
        memory_highest_bytes=5 * GB,
        memory_limit_bytes=32 * GB,
        disk_read_bytes=2**50,
        disk_written_bytes=7,
        network_received_bytes=11,
        network_sent_bytes=13,
    )
    services.resources.record(
        [ContainerSample(ada.id, "a", full), ContainerSample(bob.id, "b", ResourceUse())]
    )
    clock.forward(seconds=30)
    later = ResourceUse(cpu_seconds=2.0, memory_bytes=GB, disk_read_bytes=2**50 + 1)
    services.resources.record([ContainerSample(ada.id, "a", later)])
    clock.forward(seconds=30)
    restarted = ResourceUse(cpu_seconds=0.25, memory_bytes=2 * GB, network_sent_bytes=2)
    services.resources.record([ContainerSample(ada.id, "a", restarted)])
    services.leases.release(ada.id, ended_at=clock.now, reason="stopped")
    assert services.resources.totals_of([ada.id, bob.id, "none"]) == {
        ada.id: ResourceTotals(
            cpu_seconds=2.25,
            memory_bytes=2 * GB,
            memory_peak_bytes=3 * GB,
            memory_limit_bytes=32 * GB,
            disk_read_bytes=2**50 + 1,
            disk_written_bytes=7,
            network_received_bytes=11,
            network_sent_bytes=15,
            sampled_at=clock.now,
        ),
        bob.id: ResourceTotals(sampled_at=T0),
    }


@each_database
def test_member_is_told_once_in_a_while_with_figure_and_limit(services: Services) -> None:
    clock, note = Clock.of(services), services.resources.note_kills
    ada = running(services, "ada")
    services.resources.record(
        [
            ContainerSample(
                ada.id, "a", ResourceUse(memory_bytes=20 * GB, memory_limit_bytes=32 * GB)
            )
        ]
    )
    first = kill(ada, 1)
    assert note(ada.id, [first], used_bytes=32 * GB - 1, limit_bytes=32 * GB)
    assert not note(ada.id, [first], limit_bytes=32 * GB), "it was counted"
    clock.forward(minutes=4)
    assert not note(ada.id, [first, kill(ada, 2), kill(ada, 3)], limit_bytes=32 * GB)
    clock.forward(minutes=1)
    assert note(ada.id, [kill(ada, 4)])
    newest, oldest = services.notifications.notices_of("ada")
    assert newest.kind is oldest.kind is NoticeKind.OUT_OF_MEMORY
    assert oldest.title == "Your server ran out of memory"
    advice = (
        "Use smaller batches or fewer processes at once, load less data at a time, or choose an "
        "environment with more memory."
    )
    assert oldest.body == (
        "It used 32.0 GB of its 32.0 GB of memory, and the system ended a program in it, such as "
        f"the kernel of a notebook. {advice}"
    )
    assert newest.body == (
        "The system ended a program in it, such as the kernel of a notebook, because its 32.0 GB "
        f"of memory were used up; 20.0 GB were in use when it was last measured. {advice}"
    )
    assert services.resources.totals_of([ada.id])[ada.id].memory_kills == 4


@each_database
def test_server_that_ended_by_it_is_told_for_a_few_minutes(services: Services) -> None:
    clock, note = Clock.of(services), services.resources.note_kills
    ada, bob = running(services, "ada", server="training"), running(services, "bob")
    for lease in (ada, bob):
        services.leases.release(lease.id, ended_at=clock.now, reason="exit code 137")
    clock.forward(minutes=1)
    assert note(ada.id, [kill(ada, 1)])
    [told] = services.notifications.notices_of("ada")
    assert told.title == "Your server training ran out of memory"
    assert "because its memory was used up. The server has stopped; you can start it" in told.body
    clock.forward(minutes=5)
    assert not note(bob.id, [kill(bob, 1)])
    assert services.resources.totals_of([bob.id])[bob.id].memory_kills == 1
    assert not note("of-another-hub", [kill(bob, 1)])


@each_database
def test_end_of_a_run_counts_its_kill_once(services: Services) -> None:
    run = running(services, "ada", server="run:1")
    ended_at = T0.fromtimestamp(1_700_000_010, T0.tzinfo)
    services.resources.note_end(run.id, ended_at, 2 * GB)
    assert not services.resources.note_kills(run.id, [kill(run, 9)]), "it was seen"
    totals = services.resources.totals_of([run.id])[run.id]
    assert (totals.memory_kills, totals.memory_limit_bytes) == (1, 2 * GB)
    assert services.notifications.notices_of("ada") == []


@each_database
def test_kill_that_many_see_at_once_is_counted_and_told_once(services: Services) -> None:
    ada = running(services, "ada")
    with ThreadPoolExecutor(8) as threads:
        told = list(
            threads.map(lambda _: services.resources.note_kills(ada.id, [kill(ada, 1)]), range(8))
        )
    assert sorted(told) == [False] * 7 + [True]
    assert services.resources.totals_of([ada.id])[ada.id].memory_kills == 1
    assert len(services.notifications.notices_of("ada")) == 1


@each_database
def test_sums_are_by_every_name_of_a_lease_and_by_its_start(services: Services) -> None:
    clock = Clock.of(services)
    sampled: list[tuple[Lease, int]] = []
    for number, (user, devices) in enumerate((("ada", 2), ("bob", 0), ("ada", 1)), 1):
        lease = running(services, user, devices, f"s{number}")
        sampled.append((lease, number))
        clock.forward(hours=1)
        services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    services.resources.record(
        [
            ContainerSample(it.id, "c", ResourceUse(cpu_seconds=10.0**n, memory_bytes=n * GB))
            for it, n in sampled
        ]
    )
    bounds = [T0, T0 + timedelta(hours=1), T0 + timedelta(hours=9)]

    def sums(by: str) -> list[dict[str, tuple[float | None, int | None]]]:
        found = services.resources.sums_between(bounds, by)
        return [{name: tuple(it) for name, it in each.items()} for each in found]

    first, bobs, second = (10.0, GB), (100.0, 2 * GB), (1000.0, 3 * GB)
    assert sums("user") == [{"ada": first}, {"bob": bobs, "ada": second}]
    assert sums("account") == [
        {"member:ada": first},
        {"member:bob": bobs, "member:ada": second},
    ]
    model = sampled[2][0].devices[0].model
    assert sums("model") == [{model: first}, {"": bobs, model: second}]
    assert sums("group") == [{"": first}, {"": (1100.0, 3 * GB)}]
    assert sums("environment") == [{"pytorch": first}, {"pytorch": (1100.0, 3 * GB)}]
    late = [T0 + timedelta(hours=9), T0 + timedelta(hours=10)]
    assert services.resources.sums_between(late, "user") == [{}]


@each_database
def test_last_sample_is_counted_once_however_it_races_with_others(services: Services) -> None:
    """The hub reads before it stops a server, the accounting service in every round."""
    leases = [running(services, "ada", server="one"), running(services, "bob", 0, "two")]
    samples = [
        ContainerSample(
            lease.id,
            "container",
            ResourceUse(
                read_at=T0 + timedelta(seconds=number),
                memory_bytes=number * GB,
                **dict.fromkeys(COUNTERS, number),
            ),
        )
        for lease in leases
        for number in range(1, 31)
    ]
    random.Random(1).shuffle(samples)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda each: services.resources.record([each]), samples))
    for totals in services.resources.totals_of([lease.id for lease in leases]).values():
        assert [getattr(totals, name) for name in COUNTERS] == [30] * len(COUNTERS)
        assert totals.sampled_at == T0 + timedelta(seconds=30)
    counted = EnvironmentUse(**dict.fromkeys(COUNTERS, 60))
    assert services.resources.use_of_environments() == {"pytorch": counted}
    assert services.resources.memory_in_use() == {"pytorch": 60 * GB}
    services.leases.release(leases[0].id, ended_at=T0, reason="stopped")
    assert services.resources.memory_in_use() == {"pytorch": 30 * GB}
    assert services.resources.use_of_environments() == {"pytorch": counted}
