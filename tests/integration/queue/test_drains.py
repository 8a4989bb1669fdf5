"""Drains by admins, and the latest starts that members who wait were shown. Real: line, SQLite."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuspawner.core.errors import CannotDrain, CannotExtend, InvalidRequest
from gpuspawner.devices.closures import HEALTH, Closure, close
from gpuspawner.leases.models import Lease
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, Make
from tests.support.sessions import ask, line_up
from tests.support.tier import examples

HOUR = timedelta(hours=1)
KIM = "kim"


def start(services: Services, user: str, hours: float) -> Lease:
    lease = ask(services, user, seconds=int(3600 * hours))
    assert isinstance(lease, Lease)
    return services.leases.confirm(lease.id, "container")


def latest(services: Services) -> dict[str, datetime]:
    """The latest starts that members are shown, by member."""
    standings = services.positions.standings()
    shown = {each.server.user: standings[each.id].latest for each in services.queue.waiting()}
    return {user: at for user, at in shown.items() if at is not None}


def refused(services: Services, uuid: str) -> str:
    """The sentence of a refused drain, which changed nothing."""
    before = latest(services), services.devices.closures(), services.audit.trail()
    with pytest.raises(CannotDrain) as caught:
        services.drains.drain(uuid, actor=KIM, reason="a fan")
    assert (latest(services), services.devices.closures(), services.audit.trail()) == before
    return caught.value.message


def test_drain_that_breaks_a_latest_start_is_refused(make: Make, clock: Clock) -> None:
    services = make(device_source="simulated:3xT4")
    first, second = start(services, "ada", 1), start(services, "bob", 2)
    third = start(services, "cyd", 9)
    line_up(services, "dan", seconds=10 * 3600)
    assert latest(services) == {"dan": T0 + HOUR}
    index = first.devices[0].index
    assert refused(services, first.uuids[0]) == (
        f"GPU {index} is not drained: without it, 1 waiting member could start later than they "
        "were told (by 13:00 UTC at the latest). Wait until they have started, or drain it anyway."
    )
    for server in ("", "other"):
        clock.forward(minutes=1)
        line_up(services, "eve", seconds=10 * 3600, server=server)
    assert (
        "2 waiting members could start later than they were told (1 by 13:00 UTC, 1 by 14:00 UTC, "
        "1 by 21:00 UTC at the latest)"
    ) in refused(services, str(index))
    assert "1 waiting member could start" in refused(services, third.uuids[0]), "eve's second"
    services.queue.end_ticket(
        next(t.id for t in services.queue.tickets_of("eve") if t.server.name), "cancelled", "gone"
    )
    assert services.drains.drain(third.uuids[0], actor=KIM), "nobody was told that it comes back"
    assert services.drains.drain(second.uuids[0], actor=KIM, reason="a fan", anyway=True)
    assert latest(services) == {"dan": T0 + HOUR, "eve": T0 + 11 * HOUR}
    assert not services.drains.drain(second.uuids[0], actor=KIM), "it is drained already"


def test_free_device_is_not_drained_before_a_member_who_is_next(make: Make, clock: Clock) -> None:
    services = make(device_source="simulated:1xT4")
    lease = start(services, "ada", 1)
    line_up(services, "bob")
    services.leases.release(lease.id, reason="stopped")
    assert "1 waiting member could start later" in refused(services, lease.uuids[0])
    services.devices.pause(actor=KIM)
    assert services.drains.drain(lease.uuids[0], actor=KIM), "no time is shown during a pause"


def test_quarantined_device_is_drained_without_a_question(make: Make, clock: Clock) -> None:
    services = make(device_source="simulated:1xT4")
    lease = start(services, "ada", 1)
    line_up(services, "bob")
    with services.store.write() as connection:
        close(connection, Closure(lease.uuids[0], clock.now, HEALTH, "it is lost"))
    assert services.drains.drain(lease.uuids[0], actor=KIM, reason="to be replaced")
    with pytest.raises(InvalidRequest, match="No device has the UUID or index"):
        services.drains.drain("7", actor=KIM)


def test_extension_does_not_count_on_a_drained_device(make: Make, clock: Clock) -> None:
    """The session on a drained device ends first, and nobody who waits gets that device."""
    services = make(device_source="simulated:2xT4")
    first, second = start(services, "ada", 1), start(services, "bob", 2)
    services.drains.drain(first.uuids[0], actor=KIM)
    line_up(services, "cyd")
    assert latest(services) == {"cyd": clock.now + 2 * HOUR}
    clock.forward(minutes=30)
    with pytest.raises(CannotExtend, match="1 member waits for this GPU"):
        services.extensions.extend(second.id, actor="bob")


@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    asked=st.lists(
        st.tuples(st.integers(1, 2), st.sampled_from([None, 1800, 3600, 4 * 3600])), max_size=9
    ),
    drains=st.lists(st.integers(0, 3), max_size=4),
)
def test_accepted_drain_keeps_every_latest_start(
    fresh: Callable[..., Services],
    asked: list[tuple[int, int | None]],
    drains: list[int],
) -> None:
    services = fresh(device_source="simulated:3xA100-80GB,1xT4")
    clock = Clock.of(services)
    for number, (devices, seconds) in enumerate(asked):
        clock.forward(minutes=1)
        got = ask(services, f"m{number}", devices, wait=True, seconds=seconds)
        if not isinstance(got, Ticket):
            services.leases.confirm(got.id, "container")
    for index in drains:
        clock.forward(seconds=5)
        before, starting = latest(services), services.positions.decide().starts
        try:
            services.drains.drain(str(index), actor=KIM)
            kept = True
        except CannotDrain:
            kept = False
            assert latest(services) == before
            assert services.drains.drain(str(index), actor=KIM, anyway=True)
        after = latest(services)
        later = {user for user, at in before.items() if user not in after or after[user] > at}
        assert not later if kept else later or starting
