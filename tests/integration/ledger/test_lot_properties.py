"""Whatever ends when, and whenever somebody looks: the same credits are left. Real: SQLite, the
services; simulated: devices and the clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuspawner.core.units import MICRO
from gpuspawner.services import Services
from tests.support.brokers import T0, Clock, open_services, problems, running
from tests.support.tier import rounds

ANNA = "member:anna"
Session = tuple[int, int, int]
"""When it starts, how long its server lives, and how much later that is noticed; minutes."""

LAST = 600
minutes = st.integers(0, 300)
grants = st.lists(
    st.tuples(minutes, st.integers(1, 2000), st.none() | st.integers(1, 200)), max_size=4
)
sessions = st.lists(
    st.tuples(minutes, st.integers(0, 120), st.integers(0, 120)), min_size=1, max_size=3
)
looks = st.lists(st.tuples(st.integers(0, LAST), st.booleans()), max_size=8)


def at(minute: float) -> datetime:
    return T0 + timedelta(minutes=minute)


@settings(
    max_examples=rounds(200),
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,  # a new file for each example
    ],
)
@given(given_=grants, ran=sessions, looked=looks)
def test_remaining_credits_do_not_depend_on_check_times(
    new_file: Callable[[], str],
    given_: list[tuple[int, int, int | None]],
    ran: list[Session],
    looked: list[tuple[int, bool]],
) -> None:
    assert _play(new_file(), given_, ran, looked) == _play(new_file(), given_, ran, [])


def _play(
    url: str,
    given_: list[tuple[int, int, int | None]],
    ran: list[Session],
    looked: list[tuple[int, bool]],
) -> int:
    """The balance in the end, after all of it happened in the order of its times."""
    clock = Clock()
    services = open_services(url, clock, gpu_rates={"*": "1.234567"}, opening_grant=1000)
    services.ledger.open_account("anna")
    leases: dict[int, str] = {}
    for minute, kind, what in sorted(_steps(given_, ran, looked), key=lambda step: step[:2]):
        clock.now = at(minute)
        _step(services, clock, leases, kind, what)
    clock.now = at(LAST + 1)
    services.ledger.charge_all()
    services.ledger.end_lots()
    assert problems(services.store, chains=not looked) == []
    left = services.ledger.member("anna").balance
    services.store.close()
    return left


def _steps(
    given_: list[tuple[int, int, int | None]], ran: list[Session], looked: list[tuple[int, bool]]
) -> list[tuple[int, int, Any]]:
    """Minute, order at that minute, and what; looks come first: they are not to matter."""
    steps: list[tuple[int, int, Any]] = [(minute, 0, charge) for minute, charge in looked]
    steps += [(minute, 1, (credits, keep)) for minute, credits, keep in given_]
    for number, (start, length, late) in enumerate(ran):
        steps.append((start, 2, number))
        steps.append((start + length + late, 3, (number, start + length)))
    return steps


def _step(services: Services, clock: Clock, leases: dict[int, str], kind: int, what: Any) -> None:
    if kind == 0:
        services.ledger.charge_all() if what else services.ledger.end_lots()
    elif kind == 1:
        credits, keep = what
        until = None if keep is None else clock.now + timedelta(minutes=keep)
        key = f"{clock.now}:{credits}:{keep}"
        services.ledger.grant(
            ANNA, credits * MICRO // 100, actor="a", reason="r", until=until, key=key
        )
    elif kind == 2:
        leases[what] = running(services, "anna", server=f"s{what}").id
    else:
        number, ended = what
        services.leases.release(leases[number], ended_at=at(ended), reason="stopped")
