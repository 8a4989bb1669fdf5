"""One session's cost and end in every place that shows them. Real: everything of ours, SQLite,
HTTP. Stand-ins: simulated devices, a clock that stands still, a small HTTP server for the Hub.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from gpuspawner.core.units import MICRO, format_credits, format_price, parse_credits, round_credits
from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.ledger.rules import owed
from gpuspawner.notifications.models import Notice
from tests.golden.site import ADMIN, Site
from tests.support.tier import SOAK

CENT = Decimal("0.01")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[Site]:
    """A site with one member, who has a lot of credits."""
    with Site(tmp_path_factory.mktemp("site"), migrated_file) as site:
        site.services.members.membership_returned("ada", actor="sign-in")
        site.services.ledger.open_account("ada")
        site.services.ledger.grant("member:ada", 10**6 * MICRO, actor="kim", reason="A lot")
        yield site


def rounded(text: str) -> str:
    """An exact decimal with two decimals, rounded as people do it."""
    return str(Decimal(text.replace("\N{MINUS SIGN}", "-")).quantize(CENT, ROUND_HALF_UP))


@given(micro=st.integers(-(10**12), 10**12))
def test_credits_are_rounded_half_away_from_zero(micro: int) -> None:
    exact = Decimal(micro) / MICRO
    assert Decimal(format_credits(micro)) == exact.quantize(CENT, ROUND_HALF_UP)
    assert parse_credits(format_credits(micro)) == round_credits(micro) == -round_credits(-micro)
    assert format_credits(micro, 6) == f"{exact:.6f}"
    assert format_credits(micro) != "-0.00"


WHY = {"time": "at its time limit", "credits": "because your credits run out"}


def minute(text: str) -> datetime:
    """The minute of a moment: pages show no seconds of an end."""
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return moment.replace(second=0, microsecond=0)


class Shown:
    """What the places say about one session, as texts with two decimals."""

    def __init__(self, site: Site, lease: Lease) -> None:
        self.site = site
        self.lease = lease

    def read(self, path: str) -> str:
        """A page, with the real ids."""
        return self.site.read("ada", path)

    def home(self) -> str:
        """The Hub's home page."""
        return self.site.hub_page("ada", "home").text

    def ends(self) -> dict[str, tuple[datetime, str]]:
        """When the session ends, to the minute, and why, by place."""
        id = self.lease.id
        (listed,) = [
            each for each in json.loads(self.read("api/leases"))["leases"] if each["id"] == id
        ]
        answers = {
            "REST": listed["end"],
            "JupyterLab": json.loads(self.read(f"api/leases/{id}/now"))["lease"]["end"],
        }
        found = {name: (minute(end["at"]), end["reason"]) for name, end in answers.items()}
        for name, page in (("session list", self.read("")), ("Home", self.home())):
            shown = only(r"<dt>Ends</dt><dd>(.*?)</dd>", page)
            [reason] = [why for why, words in WHY.items() if words in shown]
            found[name] = (minute(only(r'datetime="([^"]+)"', shown)), reason)
        return found

    def costs(self) -> dict[str, str]:
        """The cost of the session, by place."""
        lease, found = self.lease, {}
        receipt, table = self.read(f"leases/{lease.id}"), self.site.command("leases", "--all")
        page, statement = self.read(""), self.read("statement")
        if lease.ended_at:
            row = rf'<td class="number">([\d.]+)<br><a class="small" href="[^"]*{lease.id}"'
        else:
            row = r"<dt>Cost so far</dt><dd>([\d.]+) credits"
        found["session list"] = only(row, page)
        found["receipt headline"] = only(r'class="amount">([\d.]+)<', receipt)
        found["receipt total"] = only(r"Total</th>.*?<strong>([\d.]+)<", receipt)
        found["receipt's exact sum"] = only(r"Sum, shown as ([\d.]+)<", receipt)
        found["receipt's exact sum, rounded"] = rounded(
            only(r"Sum, shown as .*?<strong>([\d.]+)</strong>", receipt)
        )
        (line,) = [each for each in rows(statement) if f"leases/{lease.id}" in each]
        found["statement"] = only(r'</td>\s*<td class="number">\W?([\d.]+)</td>\s*<td', line)
        found["statement's exact sum"] = only(r"Sum, shown as \W?([\d.]+)<", line)
        newest = only(r"\n(\w+ +ada +torch .*?)\n", table)
        cells = newest.split()
        found["gpuspawner leases"] = cells[cells.index("UTC", cells.index("UTC") + 1) + 2]
        told = json.loads(self.read("api/leases"))["leases"]
        (answer,) = [each for each in told if each["id"] == lease.id]
        found["REST"] = rounded(answer["cost"])
        found["receipt by REST"] = rounded(
            json.loads(self.read(f"api/leases/{lease.id}/receipt"))["lease"]["cost"]
        )
        if not lease.ended_at:
            told = json.loads(self.read(f"api/leases/{lease.id}/now"))
            found["JupyterLab"] = rounded(told["lease"]["cost"])
            found["Home"] = only(r"<dt>Cost so far</dt><dd>([\d.]+) credits", self.home())
        else:  # before, files have what was charged
            items = csv.DictReader(io.StringIO(self.read(f"leases/{lease.id}.csv")))
            found["CSV"] = rounded(str(sum(Decimal(item["amount"]) for item in items)))
        return found

    def must_add_up(self) -> None:
        """Every total is the sum of the rows above it, as they are shown."""
        receipt = self.read(f"leases/{self.lease.id}")
        section = receipt[
            receipt.index('id="items"') : receipt.index("<details", receipt.index('id="items"'))
        ]
        *parts, total = re.findall(r'class="number">(?:<strong>)?(\W?[\d.]+)<', section)
        assert sum(map(amount, parts)) == amount(total)
        detail = receipt[receipt.index('class="after exact"') :]
        *exact, whole = re.findall(r'class="number">(?:<strong>)?(\W?[\d.]+)<', detail)
        assert sum(map(amount, exact[::2])) == amount(whole) == amount(exact[-1])
        for line in rows(self.read("statement")):
            parts = re.findall(r'<td class="number">(\W?[\d.]+\.\d{6})</td>', line)
            assert sum(map(amount, parts[:-1])) == sum(map(amount, parts[-1:]))

    def must_agree_on_the_balance(self) -> None:
        """The newest balance of the statement, the headline, REST and the command line agree."""
        billing, statement = self.read("billing"), self.read("statement")
        balance = only(r'class="amount">([\d.]+)<', billing)
        newest = only(r'<td class="number">([\d]+\.\d\d)</td>\s*</tr>', statement)
        table = self.site.command("accounts")
        me = json.loads(self.read("api/me"))
        assert {
            "headline": balance,
            "statement": newest,
            "gpuspawner accounts": only(r"member:ada +([\d.]+)", table),
            "gpuspawner statement": only(
                r"member:ada: ([\d.]+) credits", self.site.command("statement", "ada")
            ),
            "REST": rounded(me["account"]["balance"]),
        } == dict.fromkeys(
            ("headline", "statement", "gpuspawner accounts", "gpuspawner statement", "REST"),
            balance,
        )

    def end_now(self) -> tuple[datetime, str]:
        """When the session ends and why, by REST."""
        end = json.loads(self.read(f"api/leases/{self.lease.id}/now"))["lease"]["end"]
        return minute(end["at"]), end["reason"]


def form(site: Site) -> dict[str, Any]:
    """What the form shows of a T4 with PyTorch: its figures for the page's script."""
    page = site.hub_page("ada", "spawn").text
    costs = json.loads(html.unescape(only(r'id="gpuspawner-told">(.*?)</script>', page)))["costs"]
    found: dict[str, Any] = costs["tables"][costs["of"]["torch"]]["1|T4"]
    return found


def foreseen(offer: Mapping[str, Any], limit: int) -> str:
    """Why a session of so many seconds ends, as the form's script says it."""
    hours, _ = offer["lasts"][""]
    return "credits" if hours is not None and hours < limit / 3600 else "time"


def named_end(notice: Notice, now: datetime) -> datetime:
    """The end of the session that a notice names, the last of its times."""
    text = f"{notice.title} {notice.body}"
    *_, (time, day) = re.findall(r"(\d\d:\d\d)(?: on (\d+ \w+))? \(UTC\)", text)
    return datetime.strptime(
        f"{time} {day or f'{now:%d %B}'} {now.year} +0000", "%H:%M %d %B %Y %z"
    )


def amount(text: str) -> Decimal:
    return Decimal(text.replace("\N{MINUS SIGN}", "-"))


def only(pattern: str, text: str) -> str:
    """The one thing that a pattern finds first."""
    found = re.search(pattern, text, re.DOTALL)
    assert found, (pattern, text)
    return found[1]


def rows(page: str) -> list[str]:
    """The lines of a statement, with what each opens to."""
    return page[page.index("<tbody>") :].split("        <tr>\n          <td>")[1:]


@settings(
    phases=(Phase.explicit, Phase.generate),  # an example takes a second: none is made smaller
    max_examples=10 if SOAK else 4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    rate=st.integers(100_000, 9_999_999),
    ticks=st.lists(st.integers(30, 4000), min_size=1, max_size=6),
    grant=st.booleans(),
    refund=st.none() | st.integers(1, 200),
    rest=st.integers(0, 200),
)
def test_cost_of_a_session_is_the_same_wherever_it_is_shown(
    site: Site, rate: int, ticks: list[int], grant: bool, refund: int | None, rest: int
) -> None:
    services, clock = site.services, site.clock
    for left in services.leases.open_leases():  # by an example that failed
        services.leases.release(left.id, ended_at=clock(), reason="stopped")
    clock.forward(seconds=1)
    services.prices.set_rate(format_credits(rate, 6), model="T4", actor="kim", reason="Today")
    clock.forward(seconds=1)
    wanted = Request(devices=1, model="T4", environment="torch")
    lease = services.leases.grant(ServerRef("ada"), wanted, engine="local")
    lease = services.leases.confirm(lease.id)
    for number, seconds in enumerate(ticks):
        clock.forward(seconds=seconds)
        services.ledger.charge_all()
        if grant and not number:  # between two charges
            services.ledger.grant("member:ada", MICRO, actor="kim", reason="In between")
    clock.forward(seconds=rest)
    running = Shown(site, services.leases.get(lease.id))
    costs = running.costs()
    assert len(costs) == 12 and len(set(costs.values())) == 1, costs
    running.must_add_up()
    running.must_agree_on_the_balance()

    lease = services.leases.release(lease.id, ended_at=clock(), reason="stopped")
    clock.forward(seconds=1)
    if refund and lease.charged:
        part = min(lease.charged, refund * 10_000 + lease.charged % 7_000)
        services.ledger.refund(lease.id, part, actor="kim", reason="A slow disk")
    ended = Shown(site, services.leases.get(lease.id))
    costs = ended.costs()
    assert len(costs) == 11 and len(set(costs.values())) == 1, costs
    ended.must_add_up()
    ended.must_agree_on_the_balance()


@settings(
    phases=(Phase.explicit, Phase.generate),
    max_examples=10 if SOAK else 4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    rate=st.integers(100_000, 9_999_999),
    limit=st.integers(3600, 36_000),
    lasts=st.integers(3600, 36_000),
    passed=st.integers(1, 1800),
)
@example(rate=MICRO, limit=3800, lasts=3700, passed=60)  # the limit comes within the grace period
def test_end_of_a_session_is_the_same_wherever_it_is_shown(
    site: Site, rate: int, limit: int, lasts: int, passed: int
) -> None:
    services, clock = site.services, site.clock
    for left in services.leases.open_leases():
        services.leases.release(left.id, ended_at=clock(), reason="stopped")
    clock.forward(seconds=1)
    services.prices.set_rate(format_credits(rate, 6), model="T4", actor="kim", reason="Today")
    clock.forward(seconds=1)
    balance = services.ledger.member("ada").balance
    change = rate * lasts // 3600 - balance
    services.ledger.grant("member:ada", change, actor="kim", reason="For this example")
    try:
        offer = form(site)
        wanted = Request(devices=1, model="T4", environment="torch")
        terms = Terms(seconds=limit)
        lease = services.leases.grant(ServerRef("ada"), wanted, engine="local", terms=terms)
        lease = services.leases.confirm(lease.id)
        assert lease.started_at is not None
        clock.forward(seconds=passed)
        services.ledger.charge_all()
        ends = Shown(site, services.leases.get(lease.id)).ends()
        assert len(ends) == 4 and len(set(ends.values())) == 1, ends
        [(at, why)] = set(ends.values())
        dry = lasts + services.settings.credits.grace_seconds
        assert why == ("time" if limit <= dry else "credits")
        end = lease.started_at + timedelta(seconds=min(limit, dry))
        assert abs(end - at).total_seconds() < 62
        assert foreseen(offer, limit) == why, offer
        assert offer["price"] == f"{format_price(rate)} credits an hour"
        for hours, total in offer["totals"].items():
            length = timedelta(hours=float(hours or 4))  # the environment's default
            cost = owed(lease.rate, lease.started_at, lease.started_at + length)
            assert total == f"{format_price(cost)} credits"

        # The warnings, and what the member is told once the credits are gone.
        warned = [limit - 60, lasts - 60, lasts + 1]
        named = 0
        for seconds in sorted(each for each in warned if passed < each < min(limit, dry)):
            clock.now = lease.started_at + timedelta(seconds=seconds)
            services.ledger.charge_all()
            told = {notice.key for notice in services.notifications.notices_of("ada")}
            services.sessions.warn_session(lease.id, [2])
            services.exhaustion.see_to("member:ada", [2])
            new = [x for x in services.notifications.notices_of("ada") if x.key not in told]
            end, reason = Shown(site, lease).end_now()
            assert reason == why
            assert {named_end(notice, clock.now) for notice in new} <= {end}, new
            named += len(new)
        assert named
        if why == "time":
            clock.now = lease.started_at + timedelta(seconds=limit)
            assert services.sessions.end_session(lease.id)
            assert named_end(services.notifications.notices_of("ada")[0], clock.now) == at
    finally:
        services.ledger.grant("member:ada", -change, actor="kim", reason="After this example")


@settings(
    phases=(Phase.explicit, Phase.generate),
    max_examples=3,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    amounts=st.lists(st.integers(1, 10**8), min_size=2, max_size=4),
    seconds=st.integers(30, 4000),
)
def test_bulk_grant_adds_up_and_is_what_is_posted(
    site: Site, amounts: list[int], seconds: int
) -> None:
    """Ada has a session that is not charged yet; the others' accounts are opened."""
    services, clock = site.services, site.clock
    lease = services.leases.open_leases() or [
        services.leases.grant(ServerRef("ada"), Request(devices=1, model="T4"), engine="local")
    ]
    services.leases.confirm(lease[0].id)
    clock.forward(seconds=seconds)
    names = ["ada", *(f"new{number}-{clock.now:%H%M%S}" for number in range(len(amounts) - 1))]
    credits = [f"{Decimal(each) / MICRO:.6f}" for each in amounts]
    lines = "".join(f"{name},{each}\n" for name, each in zip(names, credits, strict=True))
    (site.folder / "course.csv").write_text(lines)
    form = {"lines": lines, "reason": "A course", "open": "yes"}
    site.service(ADMIN, "bulk")
    page = site.service(ADMIN, "bulk", form)
    gifts = re.findall(r'class="number">\+([\d.]+)</td><td class="number">([\d.]+)</td>', page)
    total = only(r"lines, ([\d.]+) credits", page)
    assert [gift for gift, _ in gifts] == [rounded(each) for each in credits]
    assert sum(Decimal(gift) for gift, _ in gifts) == Decimal(total)
    command = ("grant", "--file", "course.csv", "--reason", "A course", "--open")
    assert f"Would give {total} credits" in site.command(*command, "--dry-run")
    given = site.service(ADMIN, "bulk", form | {"confirm": "yes"})
    assert f"{total} credits were given to" in given
    table = site.command("accounts")
    balances = [only(rf"member:{name} +([\d.]+)", table) for name in names]
    assert balances == [balance for _, balance in gifts]
