"""Every notice that members get, in the situation in which they get it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpuspawner.notifications.models import Notice
from gpuspawner.services import Services
from tests.golden.conftest import Golden
from tests.golden.scenario import situations
from tests.golden.site import START, Site
from tests.support.brokers import Clock, make_services

FLEET = "simulated:2xT4"


@pytest.fixture
def fresh(new_file: Callable[[], str], site: Site) -> Any:
    """Make brokers of two T4 on a database of their own. ``site`` sets the time zone."""
    made = []

    def make(**settings: Any) -> tuple[Services, Clock]:
        clock = Clock(START)
        services = make_services(
            clock=clock, database_url=new_file(), device_source=FLEET, **settings
        )
        made.append(services)
        for user in ("ada", "bob", "cleo"):
            services.ledger.open_account(user)
        return services, clock

    yield make
    for services in made:
        services.store.close()


def test_every_notice_matches_the_recording(golden: Golden, fresh: Any) -> None:
    told: dict[int, set[str]] = {}
    lines = []
    for situation, services in situations(fresh):
        known = told.setdefault(id(services), set())
        new = [n for n in notices(services) if n.key not in known]
        known |= {notice.key for notice in new}
        lines.append(f"# {situation}")
        lines += [f"{n.kind.value} to {n.user}: {n.title}\n  {n.body}" for n in new] or ["nothing"]
    golden("notices.txt", "\n".join(lines))


def notices(services: Services) -> list[Notice]:
    """All notices, oldest first."""
    return [
        n
        for user in ("ada", "bob", "cleo")
        for n in reversed(services.notifications.notices_of(user, 100))
    ]
