"""What happened at the site before it is looked at, and what makes somebody tell members something.

The clock moves on between any two events, so that no order depends on a random id.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

from gpuspawner.core.units import MICRO
from gpuspawner.engines.resource_use import MemoryKill, ResourceUse
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.monitoring.health import Symptom
from gpuspawner.monitoring.health_service import FoundSymptoms
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.monitoring.resource_service import ContainerSample
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from gpuspawner.sharing.memory_rules import Excess, LeasedProcess
from gpuspawner.storage.repository import ARCHIVED
from tests.support.brokers import Clock
from tests.support.processes import wait_for

HOUR = 3600
ML = frozenset({"ml"})
ROSTER = "name,groups,course,starts,ends,mail\nada,ml,ml,2025-03-01,2025-06-30,ada@lab.example\n"


def fill(site: Any) -> None:
    """Give the site members, credits, files, servers that run or are sick, and a queue."""
    services: Services = site.services
    clock: Clock = site.clock
    for user in ("ada", "bob", "cleo", "dan", "eve", "admin"):  # the Hub opens none later
        clock.forward(seconds=1)
        services.members.membership_returned(user, actor="sign-in")
        services.ledger.open_account(user)
    _give_credits(services, clock)
    clock.forward(minutes=1)
    services.roster.import_roster(ROSTER.encode(), actor="kim")
    clock.forward(minutes=1)
    folder = services.shared_folders.make_folder("results", actor="ada")
    clock.forward(minutes=1)
    services.shared_folders.invite(folder.id, "bob", write=True, actor="ada")
    clock.forward(minutes=1)
    services.shared_folders.accept(folder.id, actor="bob")

    past = start(services, clock, "ada", "short", model="T4", environment="torch")
    clock.forward(minutes=90)
    services.ledger.charge_all()
    services.leases.release(past.id, ended_at=clock(), reason="stopped")
    clock.forward(minutes=1)
    services.ledger.refund(past.id, MICRO // 4, actor="kim", reason="A slow disk")
    clock.forward(minutes=1)
    wrong = services.ledger.grant("member:bob", 50 * MICRO, actor="kim", reason="For the wrong Bob")
    assert wrong
    clock.forward(minutes=1)
    line = services.ledger.statement("member:bob")[0]
    services.ledger.reverse(line.transfer, actor="kim", reason="The wrong Bob")

    adas = start(services, clock, "ada", model="A100", seconds=4 * HOUR, environment="torch")
    bobs = start(services, clock, "bob", model="A100", account="group:ml", environment="torch")
    cleos = start(services, clock, "cleo", "night", model="T4", seconds=12 * HOUR)
    first = wait(services, clock, "dan", model="A100", seconds=2 * HOUR, environment="torch")
    clock.forward(minutes=1)
    second = wait(services, clock, "eve", "train", devices=2, model="A100", environment="torch")
    clock.forward(minutes=1)
    services.queue.boost(second.id, 5, actor="kim", reason="A deadline")
    assert first.id != second.id
    free = next(view for view in services.monitoring.overview().devices if view.state == "free")
    clock.forward(minutes=1)
    services.devices.drain(free.device.uuid, actor="kim", reason="A new fan")

    for _ in range(35):  # Ada works, Bob's GPU rests
        minute(services, clock, adas, 80)
        minute(services, clock, bobs, 0)
        clock.forward(minutes=1)
    services.idle.judge_idle({lease.server: None for lease in (adas, bobs)})
    services.restarts.tell_lost(adas.id)
    find_sick(services, clock, cleos)
    services.ledger.charge_all()
    clock.forward(minutes=1)
    _keep_files(services)


def _keep_files(services: Services) -> None:
    """Ada's workspace is full, Bob's has an archive, Dan's is being restored, Zoe's is gone."""
    storage = services.storage
    storage.use_workspace("work-ada", "ada", 50 * 2**30)
    storage.use_workspace("work-bob", "bob", None)
    storage.use_workspace("work-dan", "dan", None)
    storage.note_workspace("work-bob", ARCHIVED, actor="kim", detail="/srv/archives/bob.tar.gz")
    storage.claim_workspace("work-dan", "an admin puts them back")
    jobs = services.workspace_jobs
    jobs.folder.mkdir()
    archive = jobs.folder / "zoe-2025-02-01-120000.tar.gz"
    archive.write_bytes(bytes(2000))
    os.utime(archive, (1738411200, 1738411200))
    storage.note_workspace("/srv/w/zoe", ARCHIVED, actor="kim", detail=str(archive))
    storage.use_workspace("/srv/w/zoe", "zoe", None)
    failed = jobs.start_archive("/srv/w/zoe", actor="kim")
    wait_for(lambda: failed.id not in {job.id for job in jobs.jobs() if job.is_open}, "its end")
    storage.keep_size("work-ada", 50 * 2**30 - 1000)
    storage.keep_size("work-bob", 3 * 2**30)


def _give_credits(services: Services, clock: Clock) -> None:
    clock.forward(minutes=1)
    services.ledger.grant("member:ada", 25 * MICRO, actor="kim", reason="Homework 3")
    clock.forward(minutes=1)
    services.ledger.open_group_account("ml", actor="kim")
    clock.forward(minutes=1)
    until = clock() + timedelta(days=60)
    services.ledger.grant(
        "group:ml", 500 * MICRO, actor="kim", reason="The course's budget", until=until
    )
    clock.forward(minutes=1)
    services.prices.set_rate("0.5", model="T4", actor="kim", reason="Old cards")
    clock.forward(minutes=1)
    rule = "FREQ=WEEKLY;BYDAY=MO;BYHOUR=6"
    plan = services.refills.plan_refill(
        rule, amount=10 * MICRO, audience=["members:ml"], actor="kim", reason="Each week"
    )
    services.refills.add_refill(plan)


def start(
    services: Services,
    clock: Clock,
    user: str,
    server: str = "",
    *,
    seconds: int | None = None,
    account: str = "",
    groups: frozenset[str] = ML,
    devices: int = 1,
    engine_ref: str = "",
    **wants: Any,
) -> Lease:
    """A server that runs."""
    clock.forward(seconds=1)
    terms = Terms(groups=groups, seconds=seconds, account=account)
    request = Request(devices=devices, **wants)
    lease = services.queue.ask(ServerRef(user, server), request, engine="local", terms=terms)
    assert isinstance(lease, Lease)
    clock.forward(seconds=9)
    return services.leases.confirm(lease.id, engine_ref)


def wait(
    services: Services,
    clock: Clock,
    user: str,
    server: str = "",
    *,
    seconds: int | None = None,
    devices: int = 1,
    **wants: Any,
) -> Ticket:
    """A place in the queue."""
    clock.forward(seconds=1)
    terms = Terms(seconds=seconds, wait=True)
    request = Request(devices=devices, **wants)
    ticket = services.queue.ask(ServerRef(user, server), request, engine="local", terms=terms)
    assert isinstance(ticket, Ticket)
    return ticket


def minute(services: Services, clock: Clock, lease: Lease, use: int) -> None:
    """The devices of a lease work so much, in percent, for the minute that begins now."""
    since = clock().replace(second=0, microsecond=0)
    counts = {"samples": 60, "known": 60, "measured": 60, "use_sum": 60 * use}
    counts |= {"use_max": use, "busy": 60 if use else 0, "memory_max": use * 2**28}
    counts |= {"powered": 60, "milliwatts_sum": 60 * 250_000, "celsius_max": 65, "xids": (31,)}
    uses = [DeviceUse(uuid=uuid, since=since, seconds=60, **counts) for uuid in lease.uuids]
    services.monitoring.remember_use(uses)


def find_sick(services: Services, clock: Clock, lease: Lease) -> None:
    """A device of a lease falls sick."""
    symptom = Symptom("ecc", "2 new memory errors that ECC could not correct", clock())
    services.health.judge_health({lease.uuids[0]: FoundSymptoms((symptom,))})


# What members are told.

Open = Callable[..., tuple[Services, Clock]]


def situations(fresh: Open) -> Iterator[tuple[str, Services]]:
    """Each situation in which members are told something, and the services that told it."""
    yield from _credits(fresh)
    yield from _sessions(fresh)
    yield from _queue(fresh)
    yield from _idle(fresh)
    yield from _lost(fresh)
    yield from _disk(fresh)
    yield from _gpu_memory(fresh)
    yield from _memory(fresh)
    yield from _sick(fresh)
    yield from _membership(fresh)


def _credits(fresh: Open) -> Iterator[tuple[str, Services]]:
    policies = {"ml": {"overdraft": 2}, "course": "session", "*": "stop"}
    for name, group in (("stop", ""), ("overdraft", "ml"), ("session", "course")):
        services, clock = fresh(when_dry=policies, opening_grant=4, gpu_rates={"*": 4})
        start(services, clock, "ada", seconds=6 * HOUR, groups=frozenset({group} - {""}))
        clock.forward(minutes=40)
        services.ledger.charge_all()
        services.exhaustion.see_to("member:ada", [30])
        yield f"credits low, then {name}", services
        clock.forward(minutes=25)
        services.ledger.charge_all()
        services.exhaustion.see_to("member:ada", [30])
        yield f"no credits left, {name}", services
        clock.forward(hours=1)
        services.ledger.charge_all()
        services.exhaustion.see_to("member:ada", [30])
        yield f"stopped without credits, {name}", services
    services, clock = fresh(gpu_rates={"*": 4})
    services.ledger.open_group_account("ml", actor="kim")
    services.ledger.grant("group:ml", 8 * MICRO, actor="kim", reason="Budget")
    for server in ("", "night"):
        start(services, clock, "ada", server, account="group:ml")
    clock.forward(minutes=45)
    services.ledger.charge_all()
    services.exhaustion.see_to("group:ml", [30])
    yield "a group's credits low, two servers", services


def _sessions(fresh: Open) -> Iterator[tuple[str, Services]]:
    services, clock = fresh()
    lease = start(services, clock, "ada", "night", seconds=HOUR)
    clock.forward(minutes=50)
    services.sessions.warn_session(lease.id, [10])
    yield "a session ends soon", services
    clock.forward(minutes=10)
    services.sessions.end_session(lease.id)
    yield "a session is over", services
    services, clock = fresh()
    lease = start(services, clock, "ada")
    services.sessions.stop(lease.id, actor="kim", reason="the machine gets a new fan")
    yield "an admin stopped it", services


def _queue(fresh: Open) -> Iterator[tuple[str, Services]]:
    services, clock = fresh()
    for times in ("once", "twice"):
        others = [start(services, clock, "bob", f"{times}-{number}") for number in range(2)]
        ticket = wait(services, clock, "ada")
        for other in others:
            services.leases.release(other.id, ended_at=clock(), reason="stopped")
        clock.forward(seconds=5)
        assert services.queue.turns(frozenset({ticket.id})) == [ticket.id]
        lease = services.queue.start_ticket(ticket.id)
        services.leases.confirm(lease.id)
        yield f"it is your turn, {times}", services
        clock.forward(hours=1)
        services.sessions.no_show(lease.id)
        yield f"nobody came, {times}", services
        services.leases.release(lease.id, ended_at=clock(), reason="stopped")
    for number in range(2):
        start(services, clock, "bob", f"{number}")
    ticket = wait(services, clock, "cleo")
    services.queue.cancel(ticket.id, actor="kim", reason="the course is over")
    yield "a place in the queue is gone", services


def _idle(fresh: Open) -> Iterator[tuple[str, Services]]:
    for mode in ("advise", "enforce"):
        services, clock = fresh(when_idle={"*": {"mode": mode}})
        lease = start(services, clock, "ada", devices=2)

        def rest(minutes: int, use: int = 0) -> None:
            for _ in range(minutes):
                minute(services, clock, lease, use)  # noqa: B023  # called before the next one
                clock.forward(minutes=1)  # noqa: B023
            services.idle.judge_idle({lease.server: None})  # noqa: B023

        rest(35)
        yield f"GPUs rest, {mode}", services
        rest(2, use=90)
        yield f"GPUs work again, {mode}", services
        if mode == "enforce":
            rest(200)
            rest(15)
            yield "stopped, for GPUs rest", services


def _lost(fresh: Open) -> Iterator[tuple[str, Services]]:
    services, clock = fresh()
    lease = start(services, clock, "ada", "night")
    services.restarts.tell_lost(lease.id)
    yield "a GPU is lost", services
    services.restarts.restart(lease.id, actor="ada")
    yield "it starts again", services
    services.leases.release(lease.id, ended_at=clock(), reason="stopped")
    services.restarts.end_restart(lease.server, "its start failed 3 times")
    yield "it did not start again", services


def _disk(fresh: Open) -> Iterator[tuple[str, Services]]:
    services, clock = fresh()
    lease = start(services, clock, "ada")
    sizes = {"written_bytes": 9 * 10**9, "limit_bytes": 10**10}
    services.disk_limits.warn_of_disk(lease.id, **sizes, is_enforced=False)
    yield "its container is nearly full", services
    services.disk_limits.stop_for_disk(lease.id, written_bytes=11 * 10**9, limit_bytes=10**10)
    yield "its container was too full", services
    lease = start(services, clock, "bob", "night")
    folders = ["/home/jovyan/work", "/srv/results"]
    services.disk_limits.warn_of_disk(lease.id, **sizes, is_enforced=True, folders=folders)
    yield "its container is nearly full, with a limit and folders", services
    services.disk_limits.stop_for_disk(
        lease.id, written_bytes=11 * 10**9, limit_bytes=10**10, folders=folders[:1]
    )
    yield "its container was too full, with a folder", services


def _gpu_memory(fresh: Open) -> Iterator[tuple[str, Services]]:
    services, clock = fresh()
    lease = start(services, clock, "ada")
    process = LeasedProcess(lease.id, 4711, 30 * 2**30, "python")
    excess = Excess(
        lease_id=lease.id,
        uuid=lease.uuids[0],
        used_bytes=31 * 2**30,
        share_bytes=20 * 2**30,
        others=1,
        process=process,
    )
    services.memory_guard.tell_of_excess(excess)
    yield "its programs use more than its share of a GPU", services
    clock.forward(minutes=1)
    services.memory_guard.record_end(excess)
    yield "a program that used more than its share was ended", services
    clock.forward(minutes=1)
    services.memory_guard.record_end(replace(excess, others=3, device_is_full=True))
    yield "a program was ended because the GPU was nearly full", services


def _memory(fresh: Open) -> Iterator[tuple[str, Services]]:
    services, clock = fresh()
    lease, limit = start(services, clock, "ada"), 32 * 2**30
    use = ResourceUse(memory_bytes=20 * 2**30, memory_limit_bytes=limit)
    services.resources.record([ContainerSample(lease.id, "container", use)])
    kills = [MemoryKill(lease.id, "container", number) for number in (1, 2)]
    services.resources.note_kills(lease.id, kills[:1], used_bytes=limit, limit_bytes=limit)
    yield "its memory is used up", services
    clock.forward(minutes=10)
    services.resources.note_kills(lease.id, kills[1:], limit_bytes=limit)
    yield "its memory is used up, and was not measured just before", services
    lease = start(services, clock, "bob", "night")
    services.leases.release(lease.id, ended_at=clock(), reason="exit code 137, out of memory")
    services.resources.note_kills(lease.id, [MemoryKill(lease.id, "container", 1)])
    yield "it ended because its memory was used up", services


def _sick(fresh: Open) -> Iterator[tuple[str, Services]]:
    for refund in ("since_fault", "session", "none"):
        services, clock = fresh(sick_refund=refund)
        find_sick(services, clock, start(services, clock, "ada"))
        yield f"a GPU is sick, refund {refund}", services


def _membership(fresh: Open) -> Iterator[tuple[str, Services]]:
    services, clock = fresh()
    services.members.membership_returned("ada", actor="sign-in")
    start(services, clock, "ada", devices=2)
    wait(services, clock, "ada", "night")
    services.members.membership_ended("ada", "the course is over", actor="kim")
    yield "a membership ended", services
    clock.forward(seconds=5)
    services.members.membership_returned("ada", actor="sign-in")
    yield "a member came back", services
    clock.forward(seconds=5)
    services.members.membership_ended("ada", "the course is over", actor="kim")
    clock.forward(days=2)
    services.members.see_to_former("ada")
    yield "stopped, for a membership ended", services
