"""Devices that are reserved for groups, in the queue. Real: services, SQLite and PostgreSQL,
processes. Simulated: devices and clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuspawner.catalog.models import Environment
from gpuspawner.core.errors import NoDeviceFree, TooManyTickets, TooMuchAsked
from gpuspawner.hub_pages.cards import said, usual_request
from gpuspawner.leases.models import YIELD_SECONDS, Lease, Request, ServerRef, Sharing, Terms
from gpuspawner.queue.kinds import parts_of
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from tests.support import racers
from tests.support.brokers import Clock, Make, broken_invariants, open_services, problems
from tests.support.parts import each_database
from tests.support.tier import examples

LAB = frozenset({"vision-lab", "students"})
NOBODY = frozenset[str]()
KEPT = {"A100": ["vision-lab"]}
LENT = {"A100": {"groups": ["vision-lab"], "others": "preemptible"}}
BOTH = {"device_source": "simulated:1xA100-80GB,1xT4"}
"""One device that is reserved, and one that is not."""


def ask(
    services: Services, user: str, groups: frozenset[str] = NOBODY, server: str = "", **asked: Any
) -> Lease | Ticket:
    """What a member gets who asks for a device."""
    terms = Terms(
        groups=groups,
        seconds=3600,
        preemptible=asked.pop("preemptible", False),
        wait=asked.pop("wait", True),
    )
    request = Request(**{"devices": 1, **asked})
    Clock.of(services).forward(seconds=1)  # in this order
    return services.queue.ask(ServerRef(user, server), request, engine="docker", terms=terms)


def leased(services: Services, user: str, groups: frozenset[str] = NOBODY, **asked: Any) -> Lease:
    lease = ask(services, user, groups, **asked)
    assert isinstance(lease, Lease)
    return services.leases.confirm(lease.id, started_at=services.clock())


def waits(services: Services, user: str, groups: frozenset[str] = NOBODY, **asked: Any) -> Ticket:
    ticket = ask(services, user, groups, **asked)
    assert isinstance(ticket, Ticket)
    return ticket


def turns(services: Services) -> list[str]:
    return services.queue.turns(frozenset(ticket.id for ticket in services.queue.waiting()))


def start_all(services: Services) -> list[Lease]:
    started = [services.queue.start_ticket(ticket_id) for ticket_id in turns(services)]
    return [services.leases.confirm(x.id, started_at=services.clock()) for x in started]


def release(services: Services, lease: Lease) -> None:
    services.leases.release(lease.id, stopped_at=services.clock(), reason="stopped")


def models(*leases: Lease) -> list[str]:
    return [device.model.partition("-")[0] for lease in leases for device in lease.devices]


def test_others_never_get_a_reserved_device(make: Make) -> None:
    services = make(**BOTH, reserved=KEPT)
    assert models(leased(services, "out")) == ["T4"]
    with pytest.raises(NoDeviceFree, match=r"The only GPU is in use\. 1 more is reserved for vis"):
        ask(services, "two", wait=False)
    with pytest.raises(NoDeviceFree):
        ask(services, "run", preemptible=True)
    with pytest.raises(TooMuchAsked, match="The only A100 GPU here is reserved for vision-lab"):
        ask(services, "two", model="A100")
    ticket = waits(services, "two")
    assert turns(services) == []
    standing = services.positions.standings()[ticket.id]
    assert standing.why == "a GPU; none is free"
    mine = waits(services, "ada", LAB)
    assert [(x.ticket_id, models(x)) for x in start_all(services)] == [(mine.id, ["A100"])]


@pytest.mark.parametrize("sharing", ["whole", "slot"])
def test_card_says_what_a_refused_start_says(make: Make, sharing: str) -> None:
    services = make(**BOTH, shared_devices={"A100": 2}, reserved=KEPT)
    a100 = Environment(image="lab", slug="a100", models=("A100",), sharing=sharing)
    request = usual_request(a100)
    now = services.clock()
    with pytest.raises(TooMuchAsked) as refused:
        services.positions.require_fit(request, frozenset())
    outlook = services.positions.outlooks({"it": request})["it"]
    assert said(outlook, now) == refused.value.message
    assert "reserved for vision-lab" in said(outlook, now)
    mine = services.positions.outlooks({"it": request}, "ada", LAB)["it"]
    assert (mine.reserved, mine.total > 0) == ("", True)
    missing = usual_request(a100.model_copy(update={"models": ("H100",)}))
    gone = services.positions.outlooks({"it": missing})["it"]
    assert said(gone, now) == "No suitable GPU in service"


def test_member_of_the_group_waits_for_both(make: Make) -> None:
    services = make(**BOTH, reserved=KEPT)
    mine, other = leased(services, "ada", LAB, model="A100"), leased(services, "out")
    first, second = waits(services, "bob", LAB), waits(services, "two")
    assert len(services.line.waiting(first).kinds) == 2
    assert len(services.line.waiting(second).kinds) == 1
    release(services, mine)
    assert [lease.ticket_id for lease in start_all(services)] == [first.id]
    release(services, other)
    assert [lease.ticket_id for lease in start_all(services)] == [second.id]


def test_reserved_device_is_lent_to_preemptible_runs_and_yielded(make: Make) -> None:
    services = make(**BOTH, reserved=LENT)
    open_one = leased(services, "out", server="1", preemptible=True)
    lent = leased(services, "out", server="2", preemptible=True)
    assert models(open_one, lent) == ["T4", "A100"], "an open device first"
    ticket = waits(services, "two")
    assert turns(services) == []
    yields = [lease.id for lease in services.leases.open_leases() if lease.yields_at]
    assert yields == [open_one.id], "the A100 is nothing to others"
    mine = waits(services, "ada", LAB, model="A100")
    assert turns(services) == []
    latest = services.positions.standings()[mine.id].latest
    assert latest is not None
    assert (latest - services.clock()).total_seconds() <= YIELD_SECONDS
    for lease in (open_one, lent):
        assert services.leases.get(lease.id).yields_at
        release(services, lease)
    started = start_all(services)
    assert {lease.ticket_id: models(lease) for lease in started} == {
        ticket.id: ["T4"],
        mine.id: ["A100"],
    }


def test_group_request_preempts_even_if_it_does_not_wait(make: Make) -> None:
    services = make(device_source="simulated:1xA100-80GB", reserved=LENT)
    leased(services, "out", preemptible=True)
    outlook = services.positions.outlooks({"": Request(devices=1)}, "ada", LAB)[""]
    assert (outlook.total, outlook.at_once, outlook.latest is None) == (1, False, False)
    assert isinstance(ask(services, "ada", LAB, wait=False), Ticket), "it starts in two minutes"


def test_outlook_counts_what_the_member_may_use(make: Make) -> None:
    services = make(**BOTH, reserved=KEPT)
    request = {"": Request(devices=1)}
    assert services.positions.outlooks(request, "ada", LAB)[""].free == 2
    assert services.positions.outlooks(request, "out")[""].total == 1
    a100 = {"": Request(devices=1, model="A100")}
    assert services.positions.outlooks(a100, "out")[""].total == 0
    assert services.queue.has_spare(Request(devices=1), "ada", LAB)
    lent = make(**BOTH, reserved=LENT)
    assert lent.queue.has_spare(a100[""], "out") and not services.queue.has_spare(a100[""], "out")


def test_ticket_follows_the_groups_of_its_member(make: Make) -> None:
    services = make(**BOTH, reserved=KEPT)
    leased(services, "ada", LAB)
    leased(services, "out")
    ticket = waits(services, "two", frozenset({"students"}))
    assert ticket.request.groups == (), "other groups do not matter"
    assert "request" not in services.queue.regrouped(ticket, frozenset({"students", "x"}))
    changes = services.queue.regrouped(ticket, LAB)
    ticket = services.queue.regroup(ticket.id, changes)
    assert ticket.request.groups == ("vision-lab",)
    services.positions.sync()
    assert len(services.line.waiting(ticket).kinds) == 2
    again = waits(services, "two", LAB)
    assert again.id == ticket.id and waits(services, "two").id == ticket.id, "one place in line"
    [ticket] = services.queue.waiting()
    assert ticket.request.groups == ()


def test_ticket_for_what_is_no_longer_theirs_is_refused(make: Make) -> None:
    services = make(**BOTH, reserved=KEPT)
    leased(services, "ada", LAB)
    ticket = waits(services, "bob", LAB, model="A100")
    changes = services.queue.regrouped(ticket, NOBODY)
    with pytest.raises(TooMuchAsked, match="The only A100 GPU here is reserved for vision-lab"):
        services.queue.regroup(ticket.id, changes)


def test_new_reservation_applies_to_what_starts_next(make: Make, clock: Clock) -> None:
    before = make(**BOTH)
    held = leased(before, "out", model="A100")
    ticket = waits(before, "ada", LAB, model="A100")
    services = make(**BOTH, reserved=LENT)  # the hub restarts
    service = make(**BOTH, reserved={})  # reads the table
    service.watch.changes_slots = False
    services.positions.sync()
    assert {parts_of(kind).groups for kind in services.line.supply.usable} == {
        ("vision-lab",),
        (),
    }
    assert services.leases.get(held.id).ended_at is None, "what runs is left alone"
    assert turns(services) == []
    services.queue.regroup(ticket.id, services.queue.regrouped(ticket, LAB))
    release(services, held)
    assert [lease.ticket_id for lease in start_all(services)] == [ticket.id]
    clock.forward(minutes=2)
    seen = service.devices.look(fresh=True).devices
    assert [(d.reserved_for, d.lent) for d in seen] == [(("vision-lab",), True), ((), False)]
    before.watch.changes_slots = False
    clock.forward(minutes=2)
    before.positions.sync()
    assert [x.held for x in before.line.scheduler.running.values()] == [
        {f"A100-80GB/{seen[0].memory_bytes}#vision-lab+": 1}
    ]


def test_slots_of_reserved_devices_are_a_kind_of_their_own(make: Make) -> None:
    services = make(
        device_source="simulated:2xT4", shared_devices={"T4": 2}, reserved={"T4": ["vision-lab"]}
    )
    with pytest.raises(TooMuchAsked, match="All shared GPUs here are reserved for vision-lab"):
        ask(services, "out", sharing=Sharing.SLOT)
    first = leased(services, "ada", LAB, sharing=Sharing.SLOT)
    second = leased(services, "bob", LAB, sharing=Sharing.SLOT)
    assert first.uuids == second.uuids and first.devices[0].is_shared
    whole = leased(services, "cyd", LAB)
    ticket = waits(services, "dan", LAB)
    release(services, whole)
    assert [lease.ticket_id for lease in start_all(services)] == [ticket.id]


# Whatever is asked for in whatever order.

FOUR = {
    "device_source": "simulated:2xA100-80GB,1xH100-80GB,2xT4",
    "shared_devices": {"T4": 2},
    "reserved": {**LENT, "H100": ["vision-lab"]},
    "refresh_seconds": 0,
}

steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "run", "end"]),
        st.sampled_from(["ada", "bob", "out", "two"]),
        st.integers(0, 3),
        st.sampled_from([None, None, "A100", "T4"]),
    ),
    max_size=25,
)


def groups_of(user: str) -> frozenset[str]:
    return LAB if user in ("ada", "bob") else NOBODY


def check_devices(services: Services) -> None:
    """Nobody has a device that is not theirs."""
    for lease in services.leases.open_leases():
        if not groups_of(lease.server.user):
            assert "H100" not in models(lease)
            assert "A100" not in models(lease) or lease.preemptible


def settle(services: Services) -> None:
    """Start whose turn it is, and end the runs that yield, until nothing changes."""
    while True:
        started = start_all(services)
        yields = [lease for lease in services.leases.open_leases() if lease.yields_at]
        for lease in yields:
            Clock.of(services).forward(seconds=YIELD_SECONDS)
            release(services, lease)
        check_devices(services)
        if not started and not yields:
            return


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps)
def test_groups_never_wait_for_devices_that_they_lent(
    fresh: Callable[..., Services], todo: list[tuple[str, str, int, str | None]]
) -> None:
    services = fresh(**FOUR)
    for number, (what, user, other, model) in enumerate(todo):
        if what == "end":
            if leases := services.leases.open_leases():
                release(services, leases[other % len(leases)])
        else:
            sharing = Sharing.SLOT if other == 0 and model == "T4" else Sharing.WHOLE
            asked = {"model": model, "sharing": sharing, "preemptible": what == "run"}
            try:
                ask(services, user, groups_of(user), server=f"{number}", **asked)
            except TooManyTickets:
                assert len([x for x in services.queue.waiting() if x.server.user == user]) == 3
            except (NoDeviceFree, TooMuchAsked) as error:
                may_not = model == "A100" and not groups_of(user)
                assert what == "run" or (isinstance(error, TooMuchAsked) and may_not)
        check_devices(services)
        if other:
            settle(services)
    settle(services)
    kept = [x for x in services.leases.open_leases() if not x.preemptible]
    for ticket in services.queue.waiting():
        mine = groups_of(ticket.server.user)
        wanted = {"A100": 2, "H100": 1, "T4": 2} if mine else {"T4": 2}
        held = Counter(models(*kept))
        for model, count in wanted.items():
            if ticket.request.model in (None, model) and ticket.request.sharing is Sharing.WHOLE:
                uuids = {u for x in kept for u in x.uuids if model in models(x)}
                assert len(uuids) == count, f"a {model} is free for {ticket.server}: {held}"


# A race.


@pytest.fixture
def services(database_url: str) -> Iterator[Services]:
    """Services of this process on the database that the others race for."""
    services = open_services(database_url, **RACE)
    yield services
    services.store.close()


RACE: dict[str, Any] = {"device_source": "simulated:2xA100-80GB,2xT4", "reserved": LENT}


@each_database
@pytest.mark.usefixtures("processes")
def test_racing_members_and_others_get_only_what_is_theirs(
    services: Services, database_url: str
) -> None:
    services.monitoring.overview()
    racing = [(racers.members_and_others, database_url, seed, 100, RACE) for seed in range(2)]
    answers, wrong = zip(*racers.together(*racing), strict=True)
    assert list(chain(*wrong)) == []
    found = Counter(chain(*answers))
    assert found.keys() == {"A100 lab", "T4 lab", "T4", "A100 preemptible", "NoDeviceFree"} | (
        found.keys() & {"T4 preemptible", "A100 lab preemptible", "T4 lab preemptible"}
    )
    assert found.total() == 200
    for lease in services.leases.open_leases():
        release_now(services, lease)
    assert problems(services.store) == [] and broken_invariants(services) == {}


def release_now(services: Services, lease: Lease) -> None:
    services.leases.release(lease.id, reason="the end")
