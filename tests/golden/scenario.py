"""What happened at the site before it is looked at, and what makes somebody tell members something.

The clock moves on between any two events, so that no order depends on a random id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from tests.golden.support import (
    MICRO,
    Broker,
    DeviceUse,
    Found,
    Lease,
    Request,
    ServerRef,
    Symptom,
    Terms,
    Ticket,
)
from tests.support.brokers import Clock

HOUR = 3600
ML = frozenset({"ml"})
ROSTER = "name,groups,course,starts,ends,mail\nada,ml,ml,2025-03-01,2025-06-30,ada@lab.example\n"


def fill(site: Any) -> None:
    """Give the site members, credits, files, servers that run or are sick, and a queue."""
    broker: Broker = site.broker
    clock: Clock = site.clock
    for user in ("ada", "bob", "cleo", "dan", "eve", "admin"):  # the Hub opens none later
        clock.forward(seconds=1)
        broker.members.membership_returned(user, actor="sign-in")
        broker.ledger.open_account(user)
    _give_credits(broker, clock)
    clock.forward(minutes=1)
    broker.roster.import_roster(ROSTER.encode(), actor="kim")
    clock.forward(minutes=1)
    folder = broker.shared_folders.make_folder("results", actor="ada")
    clock.forward(minutes=1)
    broker.shared_folders.invite(folder.id, "bob", write=True, actor="ada")
    clock.forward(minutes=1)
    broker.shared_folders.accept(folder.id, actor="bob")

    past = start(broker, clock, "ada", "short", model="T4", environment="torch")
    clock.forward(minutes=90)
    broker.ledger.charge_all()
    broker.release(past.id, ended_at=clock(), reason="stopped")
    clock.forward(minutes=1)
    broker.ledger.refund(past.id, MICRO // 4, actor="kim", reason="A slow disk")
    clock.forward(minutes=1)
    wrong = broker.ledger.grant("member:bob", 50 * MICRO, actor="kim", reason="For the wrong Bob")
    assert wrong
    clock.forward(minutes=1)
    line = broker.ledger.statement("member:bob")[0]
    broker.ledger.reverse(line.transfer_id, actor="kim", reason="The wrong Bob")

    adas = start(broker, clock, "ada", model="A100", seconds=4 * HOUR, environment="torch")
    bobs = start(broker, clock, "bob", model="A100", account="group:ml", environment="torch")
    cleos = start(broker, clock, "cleo", "night", model="T4", seconds=12 * HOUR)
    first = wait(broker, clock, "dan", model="A100", seconds=2 * HOUR, environment="torch")
    clock.forward(minutes=1)
    second = wait(broker, clock, "eve", "train", devices=2, model="A100", environment="torch")
    clock.forward(minutes=1)
    broker.boost(second.id, 5, actor="kim", reason="A deadline")
    assert first.id != second.id
    free = next(view for view in broker.overview().devices if view.state == "free")
    clock.forward(minutes=1)
    broker.devices.drain(free.device.uuid, actor="kim", reason="A new fan")

    for _ in range(35):  # Ada works, Bob's GPU rests
        minute(broker, clock, adas, 80)
        minute(broker, clock, bobs, 0)
        clock.forward(minutes=1)
    broker.idle.judge_idle({lease.server: None for lease in (adas, bobs)})
    broker.restarts.tell_lost(adas.id)
    find_sick(broker, clock, cleos)
    broker.ledger.charge_all()
    clock.forward(minutes=1)


def _give_credits(broker: Broker, clock: Clock) -> None:
    clock.forward(minutes=1)
    broker.ledger.grant("member:ada", 25 * MICRO, actor="kim", reason="Homework 3")
    clock.forward(minutes=1)
    broker.ledger.open_group_account("ml", actor="kim")
    clock.forward(minutes=1)
    until = clock() + timedelta(days=60)
    broker.ledger.grant(
        "group:ml", 500 * MICRO, actor="kim", reason="The course's budget", until=until
    )
    clock.forward(minutes=1)
    broker.prices.set_rate("0.5", model="T4", actor="kim", reason="Old cards")
    clock.forward(minutes=1)
    rule = "FREQ=WEEKLY;BYDAY=MO;BYHOUR=6"
    plan = broker.refills.plan_refill(
        rule, amount=10 * MICRO, audience=["members:ml"], actor="kim", reason="Each week"
    )
    broker.refills.add_refill(plan)


def start(
    broker: Broker,
    clock: Clock,
    user: str,
    server: str = "",
    *,
    seconds: int | None = None,
    account: str = "",
    groups: frozenset[str] = ML,
    devices: int = 1,
    **wants: Any,
) -> Lease:
    """A server that runs."""
    clock.forward(seconds=1)
    terms = Terms(groups=groups, seconds=seconds, account=account)
    request = Request(devices=devices, **wants)
    lease = broker.ask(ServerRef(user, server), request, engine="local", terms=terms)
    assert isinstance(lease, Lease)
    clock.forward(seconds=9)
    return broker.confirm(lease.id)


def wait(
    broker: Broker,
    clock: Clock,
    user: str,
    server: str = "",
    *,
    seconds: int | None = None,
    devices: int = 1,
    **wants: Any,
) -> Ticket:
    """A place in line."""
    clock.forward(seconds=1)
    terms = Terms(seconds=seconds, wait=True)
    request = Request(devices=devices, **wants)
    ticket = broker.ask(ServerRef(user, server), request, engine="local", terms=terms)
    assert isinstance(ticket, Ticket)
    return ticket


def minute(broker: Broker, clock: Clock, lease: Lease, use: int) -> None:
    """The devices of a lease work so much, in percent, for the minute that begins now."""
    since = clock().replace(second=0, microsecond=0)
    counts = {"samples": 60, "known": 60, "measured": 60, "use_sum": 60 * use}
    counts |= {"use_max": use, "busy": 60 if use else 0, "memory_max": use * 2**28}
    counts |= {"powered": 60, "milliwatts_sum": 60 * 250_000, "celsius_max": 65, "xids": (31,)}
    uses = [DeviceUse(uuid=uuid, since=since, seconds=60, **counts) for uuid in lease.uuids]
    broker.monitoring.remember_use(uses)


def find_sick(broker: Broker, clock: Clock, lease: Lease) -> None:
    """A device of a lease falls sick."""
    symptom = Symptom("ecc", "2 new memory errors that ECC could not correct", clock())
    broker.health.judge_health({lease.uuids[0]: Found((symptom,))})


# What members are told.

Open = Callable[..., tuple[Broker, Clock]]


def situations(fresh: Open) -> Iterator[tuple[str, Broker]]:
    """Each situation in which members are told something, and the broker that told it."""
    yield from _credits(fresh)
    yield from _sessions(fresh)
    yield from _queue(fresh)
    yield from _idle(fresh)
    yield from _lost(fresh)
    yield from _disk(fresh)
    yield from _sick(fresh)
    yield from _membership(fresh)


def _credits(fresh: Open) -> Iterator[tuple[str, Broker]]:
    policies = {"ml": {"overdraft": 2}, "course": "session", "*": "stop"}
    for name, group in (("stop", ""), ("overdraft", "ml"), ("session", "course")):
        broker, clock = fresh(when_dry=policies, opening_grant=4, gpu_rates={"*": 4})
        start(broker, clock, "ada", seconds=6 * HOUR, groups=frozenset({group} - {""}))
        clock.forward(minutes=40)
        broker.ledger.charge_all()
        broker.exhaustion.see_to("member:ada", [30])
        yield f"credits low, then {name}", broker
        clock.forward(minutes=25)
        broker.ledger.charge_all()
        broker.exhaustion.see_to("member:ada", [30])
        yield f"no credits left, {name}", broker
        clock.forward(hours=1)
        broker.ledger.charge_all()
        broker.exhaustion.see_to("member:ada", [30])
        yield f"stopped without credits, {name}", broker
    broker, clock = fresh(gpu_rates={"*": 4})
    broker.ledger.open_group_account("ml", actor="kim")
    broker.ledger.grant("group:ml", 8 * MICRO, actor="kim", reason="Budget")
    for server in ("", "night"):
        start(broker, clock, "ada", server, account="group:ml")
    clock.forward(minutes=45)
    broker.ledger.charge_all()
    broker.exhaustion.see_to("group:ml", [30])
    yield "a group's credits low, two servers", broker


def _sessions(fresh: Open) -> Iterator[tuple[str, Broker]]:
    broker, clock = fresh()
    lease = start(broker, clock, "ada", "night", seconds=HOUR)
    clock.forward(minutes=50)
    broker.warn_session(lease.id, [10])
    yield "a session ends soon", broker
    clock.forward(minutes=10)
    broker.end_session(lease.id)
    yield "a session is over", broker
    broker, clock = fresh()
    lease = start(broker, clock, "ada")
    broker.stop(lease.id, actor="kim", reason="the machine gets a new fan")
    yield "an admin stopped it", broker


def _queue(fresh: Open) -> Iterator[tuple[str, Broker]]:
    broker, clock = fresh()
    for times in ("once", "twice"):
        others = [start(broker, clock, "bob", f"{times}-{number}") for number in range(2)]
        ticket = wait(broker, clock, "ada")
        for other in others:
            broker.release(other.id, ended_at=clock(), reason="stopped")
        clock.forward(seconds=5)
        assert broker.turns(frozenset({ticket.id})) == [ticket.id]
        lease = broker.start_ticket(ticket.id)
        broker.confirm(lease.id)
        yield f"it is your turn, {times}", broker
        clock.forward(hours=1)
        broker.no_show(lease.id)
        yield f"nobody came, {times}", broker
        broker.release(lease.id, ended_at=clock(), reason="stopped")
    for number in range(2):
        start(broker, clock, "bob", f"{number}")
    ticket = wait(broker, clock, "cleo")
    broker.cancel(ticket.id, actor="kim", reason="the course is over")
    yield "a place in line is gone", broker


def _idle(fresh: Open) -> Iterator[tuple[str, Broker]]:
    for mode in ("advise", "enforce"):
        broker, clock = fresh(when_idle={"*": {"mode": mode}})
        lease = start(broker, clock, "ada", devices=2)

        def rest(minutes: int, use: int = 0) -> None:
            for _ in range(minutes):
                minute(broker, clock, lease, use)  # noqa: B023  # called before the next one
                clock.forward(minutes=1)  # noqa: B023
            broker.idle.judge_idle({lease.server: None})  # noqa: B023

        rest(35)
        yield f"GPUs rest, {mode}", broker
        rest(2, use=90)
        yield f"GPUs work again, {mode}", broker
        if mode == "enforce":
            rest(200)
            rest(15)
            yield "stopped, for GPUs rest", broker


def _lost(fresh: Open) -> Iterator[tuple[str, Broker]]:
    broker, clock = fresh()
    lease = start(broker, clock, "ada", "night")
    broker.restarts.tell_lost(lease.id)
    yield "a GPU is lost", broker
    broker.restarts.restart(lease.id, actor="ada")
    yield "it starts again", broker
    broker.release(lease.id, ended_at=clock(), reason="stopped")
    broker.restarts.end_restart(lease.server, "its start failed 3 times")
    yield "it did not start again", broker


def _disk(fresh: Open) -> Iterator[tuple[str, Broker]]:
    broker, clock = fresh()
    lease = start(broker, clock, "ada")
    sizes = {"written_bytes": 9 * 10**9, "limit_bytes": 10**10}
    broker.disk_limits.warn_of_disk(lease.id, **sizes, is_enforced=False)
    yield "its container is nearly full", broker
    broker.disk_limits.stop_for_disk(lease.id, written_bytes=11 * 10**9, limit_bytes=10**10)
    yield "its container was too full", broker
    lease = start(broker, clock, "bob", "night")
    folders = ["/home/jovyan/work", "/srv/results"]
    broker.disk_limits.warn_of_disk(lease.id, **sizes, is_enforced=True, folders=folders)
    yield "its container is nearly full, with a limit and folders", broker
    broker.disk_limits.stop_for_disk(
        lease.id, written_bytes=11 * 10**9, limit_bytes=10**10, folders=folders[:1]
    )
    yield "its container was too full, with a folder", broker


def _sick(fresh: Open) -> Iterator[tuple[str, Broker]]:
    for refund in ("since_fault", "session", "none"):
        broker, clock = fresh(sick_refund=refund)
        find_sick(broker, clock, start(broker, clock, "ada"))
        yield f"a GPU is sick, refund {refund}", broker


def _membership(fresh: Open) -> Iterator[tuple[str, Broker]]:
    broker, clock = fresh()
    broker.members.membership_returned("ada", actor="sign-in")
    start(broker, clock, "ada", devices=2)
    wait(broker, clock, "ada", "night")
    broker.members.membership_ended("ada", "the course is over", actor="kim")
    yield "a membership ended", broker
    clock.forward(seconds=5)
    broker.members.membership_returned("ada", actor="sign-in")
    yield "a member came back", broker
    clock.forward(seconds=5)
    broker.members.membership_ended("ada", "the course is over", actor="kim")
    clock.forward(days=2)
    broker.members.see_to_former("ada")
    yield "stopped, for a membership ended", broker
