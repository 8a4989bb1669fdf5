"""A ticket's expected start in every place that shows it. Real: everything of ours, JupyterHub's
pages with a start that waits, SQLite, HTTP. Stand-ins: simulated devices, a clock that stands
still, a small HTTP server for the Hub that the service asks.

The service has seen all of the queue, the Hub has learned what it knows from the store when it
started, and each command when it is called: they show the estimates that the Hub has stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from gpuspawner.core.units import MICRO
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.queue.models import Ticket
from tests.golden.site import ADMIN, Site
from tests.support.processes import wait_for

RUNNING = ("run0", "run1", "run2", "run3")
"""Whose sessions have the four GPUs: two A100s, two T4s."""

WAITING = ("ada", "bob", "cleo")
"""Who waits for one."""
TORCH = {"environment": "torch", "gpus": "1", "hours": "4", "gpu_model": "A100"}

HOUR = 3600


@dataclass(frozen=True)
class Start:
    """An expected start as a reader sees it: the figures to the minute, each with its label."""

    eight_of_ten: tuple[datetime, datetime] | None = None
    guess: datetime | None = None
    latest: datetime | None = None

    def __str__(self) -> str:
        low, high = self.eight_of_ten or (None, None)
        return f"8 of 10: {low} to {high}, guess: {self.guess}, at the latest: {self.latest}"

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(
            name for name in ("eight_of_ten", "guess", "latest") if getattr(self, name)
        )


def minute_after(at: datetime) -> datetime:
    """The minute in which, or at whose begin, a moment is over."""
    whole = at.replace(second=0, microsecond=0)
    return whole if whole == at else whole + timedelta(minutes=1)


def of_answer(ticket: dict[str, Any], now: datetime) -> Start:
    """What the figures of a REST answer say, by its documentation: nothing starts before now."""

    def shown(text: str) -> datetime:
        return minute_after(max(datetime.fromisoformat(text.replace("Z", "+00:00")), now))

    estimate, planned, latest = ticket["estimate"], ticket["planned"], ticket["latest"]
    bound = shown(latest) if latest else None
    if estimate:
        return Start(eight_of_ten=(shown(estimate["low"]), shown(estimate["high"])), latest=bound)
    is_earlier = planned and (not latest or planned < latest)
    return Start(guess=shown(planned) if is_earlier else None, latest=bound)


def of_page(shown: str) -> Start:
    """What the HTML of an expected start says: the times by their machine-readable values."""
    text = re.sub(r'<time [^>]*datetime="([^"]+)"[^>]*>[^<]*</time>', r"[\1]", shown).strip()
    return of_words(
        text, r"\[([^\]]+)\]", lambda at: datetime.fromisoformat(at.replace("Z", "+00:00"))
    )


def of_sentence(sentence: str, now: datetime) -> Start:
    """What a sentence says, whose times have the zone and a date unless it is today."""

    def read(text: str) -> datetime:
        time, _, day = text.partition(" on ")
        moment = datetime.strptime(
            f"{time} {day or f'{now:%d %B}'} {now.year}", "%H:%M UTC %d %B %Y"
        )
        return moment.replace(tzinfo=timezone.utc)

    found = re.search(r"Expected start: (.*)\.$", sentence)
    return of_words(found[1] if found else "", r"(\d\d:\d\d UTC(?: on \d+ \w+)?)", read)


def of_words(text: str, moment: str, read: Any) -> Start:
    """The figures in a text, each by the words around it; no other text may be there."""
    if text in ("", "-", "not known yet"):
        return Start()
    eight = rf"about {moment}(?: to {moment})? \(8 of 10 starts\)"
    guess = rf"around {moment} \(a first guess\)"
    found = re.fullmatch(rf"(?:{eight}|{guess})?(?:(?:^|, )by {moment} at the latest)?", text)
    assert found, text
    low, high, around, by = (each and read(each) for each in found.groups())
    return Start((low, high or low) if low else None, around or None, by or None)


class Places:
    """Where the expected start of a ticket is shown."""

    def __init__(self, site: Site, ticket: Ticket) -> None:
        self.site, self.ticket = site, ticket
        self.user = ticket.server.user

    def of_service(self) -> dict[str, Start]:
        """The expected start by place, on the service's pages and in its answers."""
        now, ticket = self.site.clock(), self.ticket
        found = {}
        told = json.loads(self.site.read(ADMIN, "api/queue"))["tickets"]
        [mine] = [each for each in told if each["id"] == ticket.id]
        found["REST, the whole queue"] = of_answer(mine, now)
        rows = self.site.read(ADMIN, "queue").split("<tr>")
        [row] = [each for each in rows if f'queue/{ticket.id}">{ticket.server}</a>' in each]
        cells = re.findall(r"<td>(.*?)</td>", row, re.DOTALL)
        found["queue page"] = of_page(cells[3])
        found["ticket page"] = self.card(self.site.read(ADMIN, f"queue/{ticket.id}"))
        [mine] = json.loads(self.site.read(self.user, "api/queue"))["tickets"]
        found["REST"] = of_answer(mine, now)
        found["Sessions"] = self.card(self.site.read(self.user, ""))
        return found

    def of_hub(self) -> dict[str, Start]:
        """The same on the Hub's pages; the pending page is sent, and then goes on by events."""
        page = self.site.hub_page(self.user, f"spawn-pending/{self.user}").text
        assert "Waiting for a GPU" in page
        event = self.event()
        return {
            "Home": self.card(self.site.hub_page(self.user, "home").text),
            "pending page": self.card(page),
            "pending page, live": self.card(event["queue"]),
            "pending page, sentence": of_sentence(event["message"], self.site.clock()),
        }

    def of_command(self) -> Start:
        """The same by ``gpuspawner queue --json``, whose ids are no real ones here."""
        listed = json.loads(self.site.command("queue", "--json"))["tickets"]
        [mine] = [each for each in listed if each["member"] == self.user]
        return of_answer(mine, self.site.clock())

    def event(self) -> dict[str, Any]:
        """What the pending page is told of the queue first."""
        session = self.site.hub_session(self.user)
        url = f"{self.site.hub_url()}/hub/api/users/{self.user}/server/progress"
        with session.get(url, stream=True, timeout=60) as stream:
            for line in stream.iter_lines(chunk_size=1, decode_unicode=True):
                event = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
                if event.get("queue"):
                    return event
        raise AssertionError("the stream ended")

    def card(self, page: str) -> Start:
        """What stands beside ``Expected start``."""
        [shown] = re.findall(r"<dt>Expected start</dt><dd>(.*?)</dd>", page, re.DOTALL)
        return of_page(shown)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[Site]:
    """A site that has seen 24 waits, all of about an hour."""
    with Site(tmp_path_factory.mktemp("site"), migrated_file) as site:
        for user in (*WAITING, *RUNNING):
            site.services.members.membership_returned(user, actor="sign-in")
            site.services.ledger.open_account(user)
            site.services.ledger.grant(f"member:{user}", 10**6 * MICRO, actor="kim", reason="A lot")
        for _ in range(24):
            leases = [start(site, user, "T4") for user in RUNNING[:2]]
            site.clock.forward(minutes=1)
            ticket = line_up(site, "ada", Request(devices=1, model="T4"))
            site.services.positions.standings()
            site.clock.forward(minutes=59)
            for lease in leases:
                end(site, lease)
            [turn] = site.services.queue.turns(frozenset({ticket.id}))
            lease = site.services.leases.confirm(site.services.queue.start_ticket(turn).id)
            site.services.queue.turns(frozenset())
            site.clock.forward(minutes=30)
            end(site, lease)
        yield site


def start(site: Site, user: str, model: str, seconds: int | None = None) -> Lease:
    """A session on one device, of an engine whose servers are not the Hub's to look after."""
    wanted, terms = Request(devices=1, model=model), Terms(seconds=seconds)
    lease = site.services.leases.grant(ServerRef(user), wanted, engine="docker", terms=terms)
    return site.services.leases.confirm(lease.id)


def end(site: Site, lease: Lease) -> None:
    site.services.leases.release(lease.id, ended_at=site.clock(), reason="stopped")


def line_up(site: Site, user: str, wanted: Request, seconds: int | None = None) -> Ticket:
    terms = Terms(seconds=seconds, wait=True)
    ticket = site.services.queue.ask(ServerRef(user), wanted, engine="docker", terms=terms)
    assert isinstance(ticket, Ticket)
    return ticket


def line_up_at_hub(site: Site, user: str, **choice: str) -> Ticket:
    """The ticket of a member who sent the form."""
    site.hub_page(user, "spawn", choice)

    def found() -> Ticket | None:
        waiting = site.services.queue.waiting()
        return next((each for each in waiting if each.server.user == user), None)

    return wait_for(found, f"{user}'s ticket", timeout=20)


def wait_rounds(site: Site, count: int) -> None:
    """Wait until the Hub has looked at its queue this often."""
    queueing = site._app.tornado_settings["gpuspawner_queueing"]
    enough = queueing.looks + count
    wait_for(lambda: queueing.looks >= enough, f"{count} rounds of the queue", timeout=30)


SEEN = set[str]()
"""The kinds of figures that were shown."""

lengths = st.none() | st.integers(HOUR // 2, 10 * HOUR)
choices = st.fixed_dictionaries(
    {
        "environment": st.just("torch"),
        "gpus": st.sampled_from(["1", "2"]),
        "hours": st.sampled_from(["1", "4", "12"]),
        "gpu_model": st.sampled_from(["A100", "T4"]),
    }
)


@settings(
    phases=(Phase.explicit, Phase.generate),  # an example takes seconds: none is made smaller
    max_examples=5,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    running=st.tuples(lengths, lengths, lengths, lengths),
    credits=st.lists(st.integers(1, 9), max_size=4),
    wanted=st.lists(choices, min_size=1, max_size=3),
    passed=st.integers(61, 2 * HOUR),
)
@example((None, 5000, 9000, 9000), [], [dict(TORCH, gpu_model="T4"), dict(TORCH)], 100)
def test_expected_start_is_the_same_wherever_it_is_shown(
    site: Site,
    running: tuple[int | None, ...],
    credits: list[int],
    wanted: list[dict[str, str]],
    passed: int,
) -> None:
    services, clock = site.services, site.clock
    clear(site)
    clock.forward(seconds=1)
    for number, user in enumerate(RUNNING):
        hours_left = credits[number] if number < len(credits) else 1000
        balance = services.ledger.member(user).balance
        services.ledger.grant(
            f"member:{user}", hours_left * MICRO - balance, actor="kim", reason="For this example"
        )
    for user, kind, seconds in zip(RUNNING, ("A100", "A100", "T4", "T4"), running, strict=True):
        start(site, user, kind, seconds)
    waiting = [
        line_up_at_hub(site, user, **choice) for user, choice in zip(WAITING, wanted, strict=False)
    ]
    clock.forward(seconds=passed)
    wait_rounds(site, 3)  # one may be under way, one sees the new time, one what that changed
    for ticket in waiting:
        places = Places(site, ticket)
        service, hub, command = places.of_service(), places.of_hub(), places.of_command()
        for found in (service, hub):
            shown = "\n".join(f"{place}: {start}" for place, start in found.items())
            assert len(set(found.values())) == 1, shown
        starts = {"REST": service["REST"], "Home": hub["Home"], "command": command}
        assert len(set(starts.values())) == 1, "\n".join(map(str, starts.items()))
        SEEN.update(command.labels)


def test_every_kind_of_figure_was_compared() -> None:
    """By the examples above."""
    assert {"eight_of_ten", "latest"} == SEEN


def clear(site: Site) -> None:
    """End all that an example has left."""
    services = site.services
    for ticket in services.queue.waiting():
        services.queue.cancel(ticket.id, actor="kim", reason="the next example")
    for lease in services.leases.open_leases():
        end(site, lease)
    wait_for(lambda: not any(is_pending(site, user) for user in WAITING), "the end of all starts")


def is_pending(site: Site, user: str) -> bool:
    """Whether the Hub starts or stops this member's server."""
    return bool(json.loads(site.hub_page(user, f"api/users/{user}").text).get("pending"))
