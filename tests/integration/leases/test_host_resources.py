"""Leases within the host's budget of memory and CPU. Real: processes, SQLite, PostgreSQL; devices
simulated."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, chain
from typing import Any

import pytest

from gpuspawner.core.errors import ConfigError, HostFull, TooMuchAsked
from gpuspawner.leases.host_resources import NOTHING, HostAmount
from gpuspawner.leases.models import Lease, ServerRef, Sharing
from gpuspawner.monitoring.cluster_views import look
from gpuspawner.services import Services
from tests.support import racers
from tests.support.brokers import Make, acquire, open_services, problems, running
from tests.support.gpu_hub import simulated_uuids
from tests.support.parts import each_database

GB = 2**30
BUDGET = {"host_memory": "36G", "host_cpus": 9, "system_memory": "4G"}
"""32 GB and 8 CPU cores for servers, for the system keeps one."""


def reserved(services: Services) -> HostAmount:
    """What the open leases have reserved, added up here."""
    return sum((lease.host for lease in services.leases.open_leases()), NOTHING)


def test_start_is_refused_if_too_little_memory_is_left(make: Make) -> None:
    services = make(**BUDGET)
    acquire(services, "ada", 0, host_memory_bytes=20 * GB)
    with pytest.raises(HostFull) as refused:
        acquire(services, "bob", 0, host_memory_bytes=16 * GB)
    assert refused.value.message == (
        "This server needs 16.0 GB of memory (12.0 GB free). Wait in the queue, or try again when "
        "others have stopped theirs."
    )
    acquire(services, "bob", 1, host_memory_bytes=12 * GB)
    assert reserved(services) == HostAmount(32 * GB)


def test_start_is_refused_if_too_few_cpu_cores_are_left(make: Make) -> None:
    services = make(**BUDGET)
    lease = acquire(services, "ada", 1, host_milli_cpus=7500)
    with pytest.raises(HostFull, match=r"1 CPU core \(0.5 free\)"):
        acquire(services, "bob", 1, host_milli_cpus=1000)
    services.leases.release(lease.id, reason="stopped")
    acquire(services, "bob", 1, host_milli_cpus=1000)
    assert reserved(services) == HostAmount(0, 1000)


def test_server_without_a_guarantee_starts_on_a_full_host(make: Make) -> None:
    """Nobody is locked out of their files."""
    services = make(**BUDGET)
    acquire(services, "ada", 0, host_memory_bytes=32 * GB, host_milli_cpus=8000)
    acquire(services, "bob", 0)
    acquire(services, "cyd", 1)


def test_more_than_the_budget_is_refused_for_good(make: Make) -> None:
    with pytest.raises(TooMuchAsked) as refused:
        acquire(make(**BUDGET), "ada", 1, host_memory_bytes=33 * GB, host_milli_cpus=8000)
    assert refused.value.message == (
        "This environment guarantees its server 33.0 GB of memory and 8 CPU cores, but this "
        "machine has 32.0 GB of memory for all servers together. Choose less or another "
        "environment, or tell your admin."
    )


def test_servers_without_a_gpu_leave_memory_for_free_gpus(make: Make) -> None:
    services = make(**BUDGET, memory_per_free_gpu="6G", cpus_per_free_gpu=1)
    with pytest.raises(HostFull, match=r"9.0 GB of memory \(8.0 GB free\)"):
        acquire(services, "ada", 0, host_memory_bytes=9 * GB)  # 4 x 6 GB are kept
    acquire(services, "ada", 0, host_memory_bytes=8 * GB, host_milli_cpus=4000)
    for user in ("bob", "cyd", "dee", "eve"):
        acquire(services, user, 1, host_memory_bytes=5 * GB, host_milli_cpus=500)
    acquire(services, "fay", 0, host_memory_bytes=4 * GB, host_milli_cpus=2000)
    assert reserved(services) == HostAmount(32 * GB, 8000)


def test_drained_gpu_reserves_no_memory(make: Make) -> None:
    services = make(**BUDGET, memory_per_free_gpu="8G")
    with pytest.raises(HostFull):
        acquire(services, "ada", 0, host_memory_bytes=8 * GB)
    uuid = services.devices.look().devices[0].uuid
    services.devices.drain(uuid, actor="root", reason="a fan")
    acquire(services, "ada", 0, host_memory_bytes=8 * GB)


def test_free_slots_count_as_parts_of_a_gpu(make: Make) -> None:
    services = make(
        **BUDGET,
        device_source="simulated:1xA100-80GB",
        shared_devices={"A100": 4},
        memory_per_free_gpu="16G",
    )
    acquire(services, "ada", 1, sharing=Sharing.SLOT)
    acquire(services, "bob", 0, host_memory_bytes=20 * GB)  # 12 GB for 3/4 are kept
    with pytest.raises(HostFull):
        acquire(services, "cyd", 0, host_memory_bytes=1 * GB)


def stopped_for_a_restart(services: Services, **host: int) -> Lease:
    """A server of ada's with one GPU that was stopped to start again with it."""
    lease = running(services, "ada", 1, **host)
    services.restarts.tell_lost(lease.id)
    services.restarts.restart(lease.id, actor="ada")
    return services.leases.release(lease.id, reason="stopped")


@each_database
def test_restarting_server_keeps_its_memory_and_cpu(make: Make) -> None:
    services = make(**BUDGET)
    host = {"host_memory_bytes": 20 * GB, "host_milli_cpus": 6000}
    before = stopped_for_a_restart(services, **host)
    assert reserved(services) == NOTHING
    assert services.leases.host_reserved() == HostAmount(20 * GB, 6000)
    with pytest.raises(HostFull, match=r"16.0 GB of memory \(12.0 GB free\)"):
        acquire(services, "bob", 0, host_memory_bytes=16 * GB)
    with pytest.raises(HostFull, match=r"3 CPU cores \(2 free\)"):
        acquire(services, "bob", 1, host_milli_cpus=3000)
    acquire(services, "bob", 1, host_memory_bytes=12 * GB, host_milli_cpus=2000)
    again = acquire(services, "ada", 1, **host)
    assert again.uuids == before.uuids
    assert services.leases.host_reserved() == reserved(services) == HostAmount(32 * GB, 8000)
    services.leases.release(again.id, reason="stopped")
    acquire(services, "cyd", 0, **host)  # an ordinary end keeps nothing


def test_kept_memory_is_free_when_the_gpu_is(make: Make) -> None:
    services = make(**BUDGET)
    stopped_for_a_restart(services, host_memory_bytes=20 * GB)
    services.restarts.end_restart(ServerRef("ada"), "its start failed 3 times")
    bobs = acquire(services, "bob", 0, host_memory_bytes=32 * GB)
    services.leases.release(bobs.id, reason="stopped")
    before = stopped_for_a_restart(services, host_memory_bytes=20 * GB)
    services.devices.undrain(before.uuids[0], actor="root")
    acquire(services, "bob", 0, host_memory_bytes=32 * GB)


def test_restarting_server_may_ask_for_other_amounts(make: Make) -> None:
    """What is kept for it is not in its own way, and what it does not take is free."""
    services = make(**BUDGET)
    stopped_for_a_restart(services, host_memory_bytes=20 * GB)
    more = acquire(services, "ada", 1, host_memory_bytes=32 * GB)
    services.leases.release(more.id, reason="stopped")
    stopped_for_a_restart(services, host_memory_bytes=20 * GB)
    acquire(services, "ada", 0, host_memory_bytes=2 * GB)
    acquire(services, "bob", 0, host_memory_bytes=30 * GB)


@pytest.mark.parametrize("has_devices", [True, False])
def test_cluster_says_what_exactly_is_left_for_a_start(make: Make, has_devices: bool) -> None:
    services = make(
        **BUDGET,
        device_source="simulated:3xA100-80GB",
        shared_devices={simulated_uuids("3xA100-80GB")[0]: 4},
        memory_per_free_gpu="4G",
    )
    acquire(services, "ada", 1, sharing=Sharing.SLOT, host_memory_bytes=3 * GB)
    acquire(services, "bob", 1, host_memory_bytes=2 * GB)
    services.devices.drain(acquire(services, "cyd", 1).uuids[0], actor="root", reason="a fan")
    host = look(services, dict).host
    assert host is not None and host.reserved == HostAmount(5 * GB)
    left = host.left(has_devices=has_devices)
    assert left == HostAmount((27 if has_devices else 24) * GB, 8000), "3/4 of a GPU are free"
    asked = {"devices": int(has_devices), "sharing": Sharing.SLOT}
    with pytest.raises(HostFull):
        acquire(services, "eve", **asked, host_memory_bytes=left.memory_bytes + 1)
    acquire(services, "eve", **asked, host_memory_bytes=left.memory_bytes)
    host = look(services, dict).host
    assert host is not None and host.left(has_devices=has_devices).memory_bytes == 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"host_memory": "lots"}, "c.GPUHost.memory is 'lots', not a size."),
        ({"host_cpus": "all"}, "c.GPUHost.cpus is 'all'; write a number of CPU cores, such as 28"),
        ({"host_cpus": -1.0}, "c.GPUHost.cpus is -1.0; write a number"),
        ({"host_memory": "4G"}, "keeps all of the budget for the system"),
        ({"memory_per_free_gpu": "8G"}, "there is no budget to keep them from"),
        ({**BUDGET, "cluster": "/srv/cluster.yaml"}, "where Slurm gives them out"),
    ],
)
def test_invalid_budget_is_told(new_file: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_services(new_file(), **settings)
    assert sentence in refused.value.message


def test_all_of_the_machine_is_shared(make: Make) -> None:
    budget = make(host_memory="auto", host_cpus="auto", system_cpus=0.5).leases.budget
    assert budget is not None
    assert budget.total.memory_bytes > 0 and budget.total.milli_cpus % 1000 == 500


@each_database
def test_racing_starts_never_exceed_the_budget(database_url: str) -> None:
    services = open_services(database_url, **BUDGET)
    hubs = [(racers.many_reserve, database_url, f"hub{n}", 24, BUDGET) for n in range(4)]
    answers = Counter(chain(*racers.together(*hubs)))
    assert answers["lease"] and answers["HostFull"]
    steps = []
    for lease in services.leases.of_account(None, limit=1000):
        steps.append((lease.granted_at, 1, lease.host))
        if lease.ended_at:
            steps.append((lease.ended_at, 0, NOTHING - lease.host))
    held = accumulate(sorted(steps, key=lambda step: step[:2]), lambda x, y: (*y[:2], x[2] + y[2]))
    assert services.leases.budget is not None
    assert all(amount.fits(services.leases.budget.total) for *_, amount in held)
    assert reserved(services).fits(services.leases.budget.total)
    assert problems(services.store) == []
    services.store.close()


@each_database
def test_restarting_server_gets_its_memory_back_in_a_race(database_url: str) -> None:
    """Others ask for everything all the time, also between its stop and its start."""
    services = open_services(database_url, **BUDGET)
    asked, done = racers.FORKSERVER.Semaphore(0), racers.FORKSERVER.Event()
    others = [
        (racers.some_always_ask, database_url, f"hub{n}", asked, done, BUDGET) for n in range(3)
    ]
    restarts = (racers.one_restarts, database_url, "ada", 8, asked, done, BUDGET)
    again, *wrong = racers.together(restarts, *others)
    assert again == ["lease"] * 8
    assert list(chain(*wrong)) == []
    assert problems(services.store) == []
    services.store.close()
