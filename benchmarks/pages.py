"""How long the pages of the hub and of the accounting service take, and how much they weigh.

Real: JupyterHub with its proxy, the accounting service, local servers, Chromium. 50 environments,
500 members who are signed in, 10,000 sessions of a year by 500 more, 16 GPUs of which all are in
use, and four members in the queue. Beside ours, in turns, is a page of JupyterHub's own in the
same hub, which asks no store of ours. The Hub's pages are read by one member after the other, the
service's by the member with the most sessions, one who waits, and an admin.

* ``ms``: from the request to the whole page, through the proxy;
* ``processor``: of the process that makes the page, whatever else the machine does meanwhile;
* ``first paint``: in a new browser window with nothing kept, to the first contentful paint;
* ``kB``: all that such a window is sent for the page, with style, scripts, fonts and pictures;
* ``elsewhere``: requests to any other host than the hub's own.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psutil
import requests
import sqlalchemy as sa
from playwright.sync_api import Browser
from support.report import Report, Series, argument_parser, quantile

from gpuspawner.core.units import MICRO
from gpuspawner.db.engine import Store
from gpuspawner.db.schema import audit, leases
from gpuspawner.ledger import totals
from tests.support.browser import open_browser
from tests.support.hub import ADMIN, NAVIGATION
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for
from tests.support.years import Year, member, write_year

ENVIRONMENTS, MEMBERS, GPUS, WAITING, SESSIONS = 50, 500, 16, 4, 10_000
MOST_MS, MOST_SERVICE_MS, MOST_PAINT_MS, MOST_KB = 100, 150, 1000, 300
"""Bounds: of the Hub's pages (p90), of the service's (p95), of the first paint, of the weight."""

PAGES = {
    "environments": "environments",
    "environments, searched": "environments?q=learning&gpu=with&framework=PyTorch",
    "one environment": "environments/e7",
    "form": "spawn",
    "form by a link": "spawn?opt-environment=e7&opt-gpus=1",
    "Home": "home",
    "JupyterHub's tokens": "token",
}
SERVICE_PAGES = {
    "member": {
        "sessions": "",
        "billing": "billing",
        "statement": "statement",
        "history": "leases",
        "history, older": "leases?before={before}",
        "history, searched": "leases?search=pytorch",
        "receipt": "leases/{lease}",
        "files": "folders",
        "notifications": "notices",
        "cluster": "cluster",
    },
    "waiting": {"sessions": "", "cluster": "cluster"},
    "admin": {
        "overview": "admin",
        "sessions": "leases",
        "sessions, searched": "leases?search={member}",
        "sessions, none found": "leases?search=nothing-like-this",
        "queue": "queue",
        "ticket": "queue/{ticket}",
        "members": "members",
        "accounts": "accounts",
        "account": "accounts/member:{member}",
        "account's statement": "accounts/member:{member}/statement",
        "receipt": "leases/{lease}",
        "bulk grants": "bulk",
        "rates": "rates",
        "refills": "refills",
        "reports": "usage",
        "reports, a year": "usage?{span}&by=member",
        "utilization": "used",
        "audit log": "trail",
        "audit log, searched": "trail?search=nothing-like-this",
        "devices": "devices",
        "cluster": "cluster",
        "files": "folders",
        "workspaces": "workspaces",
        "catalog": "/hub/catalog",
    },
}
"""By who reads them; below the service's prefix but for the one that is the Hub's."""
STRANGER = "environments, not signed in"
TURNS = 5
BROWSER = ("first paint, ms", "kB", "elsewhere")
PAINTED = ("environments", "one environment", "form")

LOGO = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><path d="M0 0h9v9z"/></svg>'
TEXT = "Deep learning with **notebooks**, a terminal and everything that a course needs. "


def catalog(folder: Path, environments: int) -> Path:
    """A catalog in which no two entries are alike, with the files that it names."""
    entries = []
    for number in range(environments):
        (folder / f"logo{number}.svg").write_text(LOGO)
        entry: dict[str, Any] = {
            "slug": f"e{number}",
            "display_name": f"PyTorch {number} for the course",
            "summary": TEXT + str(number),
            "description": "\n\n".join([TEXT * 3] * 5),
            "image": f"lab/torch:{number}",
            "logo": f"logo{number}.svg",
            "frameworks": {"PyTorch": f"2.{number}", "CUDA": "12.4", "Lightning": "2.4"},
            "devices": {"max": (0, 1, 2, 4)[number % 4]},
            "packages": "packages.txt",
            "sample_notebook": "sample.ipynb",
            "changes": "changes.md",
            "mem_limit": "16G",
            "maintainer": "The lab",
        }
        if number % 4:
            entry |= {"hours": {"default": 2, "max": 8 + number % 3}}
            entry |= {"models": [["A100"], ["T4"], ["A100", "T4"]][number % 3]}
        entries.append(entry)
    (folder / "packages.txt").write_text("".join(f"package-{n}=={n}.0\n" for n in range(300)))
    (folder / "changes.md").write_text("- newer than before\n" * 20)
    cells = [
        {"cell_type": "markdown", "source": "## A part\n" + TEXT},
        {"cell_type": "code", "source": "train()\n" * 10, "outputs": [{"text": "loss\n" * 20}]},
    ]
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells * 10}
    (folder / "sample.ipynb").write_text(json.dumps(notebook))
    path = folder / "catalog.yaml"
    path.write_text(json.dumps({"environments": entries}))  # JSON is YAML too
    return path


def config(path: Path) -> str:
    return f"""
c.GPUSpawnerMixin.catalog = {str(path)!r}
c.GPUDevices.source = "simulated:{GPUS // 2}xA100-80GB,{GPUS // 2}xT4"
c.GPURates.by_model = {{"A100": 4, "T4": 1}}
c.GPUCredits.opening_grant = 1000
c.GPUCredits.charge_seconds = 60
c.Accounting.reconcile_seconds = 60
c.GPUFolders.source = {str(path.parent / "folders")!r} + "/{{id}}"
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 1}}
"""


@dataclass(frozen=True, slots=True)
class History:
    """What a year has left: the member with the most sessions, and one session of theirs."""

    member: str
    lease: str
    span: str


def write_history(url: str, sessions: int) -> History:
    """Write a year of so many sessions, all over, and a little of everything else of a site."""
    began = datetime.now(timezone.utc) - timedelta(days=Year().days + 1)
    year = replace(Year(), members=MEMBERS, devices=GPUS, leases=sessions, begins=began)
    store = Store(url)
    write_year(store, year)
    # As the accounting service does it, which here would have had a year for it.
    while store.run(totals.add_up, write=True) == totals.LEASES_AT_ONCE:
        pass
    with store.write() as connection:
        change = {"actor": "kim", "action": "grant", "subject": "member:ada", "detail": "Autumn"}
        at = ({"at": year.begins + timedelta(minutes=minute)} for minute in range(sessions))
        connection.execute(sa.insert(audit), [change | when for when in at])
        connection.exec_driver_sql("ANALYZE")
    with store.read() as connection:
        count = sa.func.count()
        found = sa.select(leases.c.account).group_by(leases.c.account).order_by(count.desc())
        account = connection.execute(found.limit(1)).scalar_one()
        one = sa.select(leases.c.id).where(leases.c.account == account, leases.c.state == "ended")
        lease_id = connection.execute(one.limit(1)).scalar_one()
    store.close()
    span = f"from={year.begins:%Y-%m-%d}&to={year.ends:%Y-%m-%d}"
    return History(str(account).partition(":")[2], str(lease_id), span)


def furnish(hub: PayingHub, heaviest: str) -> None:
    """Something for every page: an audit log, a roster, rates, refills, folders, workspaces."""
    services = hub.services
    hub.login(heaviest)
    for lease in services.leases.open_leases():  # of the year: their servers are in no hub
        services.leases.release(lease.id, ended_at=services.clock(), reason="stopped")
    services.ledger.grant(f"member:{heaviest}", 10**5 * MICRO, actor="kim", reason="A year more")
    names = [member(number) for number in range(MEMBERS)]
    roster = "\n".join(["name,ends", *(f"{name}," for name in names)])
    assert services.roster.import_roster(roster.encode(), actor="kim").done
    for name in names:
        services.ledger.grant(f"member:{name}", MICRO, actor="kim", reason="Autumn")
        services.storage.use_workspace(str(hub.folder / "workspaces" / name), name, 50 * MICRO)
    for number in range(10):
        services.prices.set_rate(
            "2.5", model="T4", environment=f"e{number}", actor="kim", reason="A course"
        )
        plan = services.refills.plan_refill(
            "FREQ=MONTHLY;BYMONTHDAY=1",
            amount=10 * MICRO,
            audience=["everybody"],
            actor="kim",
            reason=f"Course {number}",
            starts_at=datetime(2999, 1, 1, tzinfo=timezone.utc),
        )
        services.refills.add_refill(plan)
        assert hub.call(heaviest, "POST", "folders", json={"name": f"course-{number}"}).ok


def fill(hub: PayingHub, first: str) -> None:
    """All GPUs are in use, one of them by ``first``, and some wait for one."""
    for number in range(GPUS + WAITING):
        user = f"busy{number}" if number else first
        answer = hub.spawn(user, {"environment": "e2", "gpus": 1, "hours": 4})
        assert answer.ok, answer.text
    wait_for(lambda: len(hub.services.leases.open_leases()) == GPUS, "the servers", timeout=120)
    wait_for(lambda: len(hub.services.queue.waiting()) == WAITING, "the line", timeout=60)


def measure_service(
    hub: PayingHub, history: History, runs: int
) -> dict[tuple[str, str], tuple[Series, float]]:
    """Milliseconds and the processor time for one page, by reader and page."""
    waiting = hub.services.queue.waiting()[0]
    users = {"member": history.member, "waiting": waiting.server.user, "admin": ADMIN}
    listed = hub.services.reports.find_leases(user=history.member, text="", before=None, limit=50)
    assert listed.older, "a second page"
    words = {
        "member": history.member,
        "lease": history.lease,
        "span": history.span,
        "before": listed.older,
        "ticket": waiting.id,
    }
    asked = [
        (who, name, path) for who, them in SERVICE_PAGES.items() for name, path in them.items()
    ]
    found: dict[tuple[str, str], list[float]] = {(who, name): [] for who, name, _ in asked}
    spent = dict.fromkeys(found, 0.0)
    service = hub.service()
    assert service is not None
    browsers = {who: hub.login(user) for who, user in users.items()}
    turns = min(TURNS, runs)
    for turn in range(turns + 1):  # the first is not counted: it signs in and reads templates
        for who, name, path in asked:
            prefix = "" if path.startswith("/") else "/services/gpu/"
            url = f"{hub.url}{prefix}{path.format(**words)}"
            pid = service.pid if prefix else hub.pid
            before = processor(pid)
            took = [timed(browsers[who], url) for _ in range(runs // turns if turn else 1)]
            if turn:
                found[who, name] += took
                spent[who, name] += processor(pid) - before
    return {key: (Series(tuple(all)), spent[key] / len(all)) for key, all in found.items()}


def timed(session: requests.Session, url: str) -> float:
    """Milliseconds until the whole page is there."""
    began = time.perf_counter()
    answer = session.get(url, headers=NAVIGATION, timeout=60)
    took = 1e3 * (time.perf_counter() - began)
    assert answer.status_code == 200, f"{url}: {answer.status_code}"
    return took


def processor(pid: int) -> float:
    """Milliseconds of processor time that a process has used."""
    used = psutil.Process(pid).cpu_times()
    return 1e3 * (used.user + used.system)


def in_browser(browser: Browser, hub: PayingHub, path: str, user: str = "") -> dict[str, float]:
    """First paint, weight and requests elsewhere of one page in a window with nothing kept."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    if user:
        cookies = hub.login(user).cookies
        context.add_cookies(
            [{"name": c.name, "value": c.value or "", "domain": "127.0.0.1", "path": c.path}
             for c in cookies]
        )  # fmt: skip
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    sent, elsewhere = [0.0], [0]
    session.on("Network.loadingFinished", lambda e: sent.append(e["encodedDataLength"]))
    page.on("request", lambda r: elsewhere.append(not r.url.startswith((hub.url, "data:"))))
    page.goto(f"{hub.url}/hub/{path}", wait_until="networkidle")
    painted = page.wait_for_function(
        "(performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime"
    )
    paint = float(painted.json_value())
    context.close()
    return {"paint": paint, "kb": sum(sent) / 1000, "elsewhere": sum(elsewhere)}


def measure(
    hub: PayingHub, members: int, runs: int
) -> tuple[dict[str, Series], dict[str, float], dict[str, list[dict[str, float]]]]:
    """Milliseconds, the hub's processor time for one page, and what a browser saw, by page."""
    names = [f"member{number}" for number in range(members)]
    signed_in = {name: hub.login(name) for name in names}
    for session in signed_in.values():  # the first visit opens the account
        session.get(f"{hub.url}/hub/spawn", headers=NAVIGATION, timeout=60)
    took: dict[str, list[float]] = {name: [] for name in PAGES}
    everybody = itertools.cycle(signed_in.values())
    spent = dict.fromkeys([*PAGES, STRANGER], 0.0)
    took[STRANGER] = []
    turns = min(TURNS, runs)
    for _ in range(turns):
        for name in spent:
            path = PAGES.get(name, "environments")
            before = processor(hub.pid)
            for _ in range(runs // turns):
                session = next(everybody) if name != STRANGER else requests.Session()
                took[name].append(timed(session, f"{hub.url}/hub/{path}"))
            spent[name] += processor(hub.pid) - before
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in PAINTED}
    with open_browser() as browser:
        in_browser(browser, hub, "environments")  # the browser's own beginning
        for turn in range(max(1, runs // 5)):
            for name in PAINTED:
                user = names[turn % members] if name == "form" else ""
                seen[name].append(in_browser(browser, hub, PAGES[name], user))
    each = {name: spent[name] / len(values) for name, values in took.items()}
    return {name: Series(tuple(values)) for name, values in took.items()}, each, seen


def main() -> None:
    parser = argument_parser(__doc__, runs=50)
    parser.add_argument("--members", type=int, default=MEMBERS, help=f"signed in ({MEMBERS})")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help=f"in the past ({SESSIONS})")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = catalog(Path(folder), ENVIRONMENTS)
        url = f"sqlite:///{folder}/history.sqlite"
        history = write_history(url, args.sessions)
        with PayingHub(Path(folder) / "hub", config(path), database_url=url) as hub:
            furnish(hub, history.member)
            fill(hub, history.member)
            took, spent, seen = measure(hub, args.members, args.runs)
            ours = measure_service(hub, history, args.runs)
    report = Report("pages", ("page", "runs", "ms", "p95, ms", "processor, ms", *BROWSER))
    report.figure("runs", args.runs)
    report.figure("members", args.members)
    report.figure("sessions", args.sessions)
    for name, series in took.items():
        report_hub_page(report, name, series, spent[name], seen.get(name, []))
    for (who, name), (series, each) in ours.items():
        p95 = quantile(series.values, 0.95)
        texts = (series.text(), f"{p95:.1f}", f"{each:.1f}")
        report.row(f"{who}: {name}", str(len(series.values)), *texts, *[""] * len(BROWSER))
        report.figure(f"{figure_name(f'{who}_{name}')}_p95_ms", p95, MOST_SERVICE_MS)
    report.print(args.json)


def figure_name(page: str) -> str:
    """The name of a page's figures."""
    return page.replace(", ", "_").replace(" ", "_").replace("'", "").lower()


def report_hub_page(
    report: Report, name: str, series: Series, spent: float, looks: list[dict[str, float]]
) -> None:
    """Add a row and the figures of a page of the Hub."""
    paint = Series(tuple(look["paint"] for look in looks)) if looks else None
    weight = max((look["kb"] for look in looks), default=0.0)
    strangers = sum(look["elsewhere"] for look in looks)
    report.row(
        name,
        str(len(series.values)),
        series.text(),
        f"{quantile(series.values, 0.95):.1f}",
        f"{spent:.1f}",
        paint.text(0) if paint else "",
        f"{weight:.0f}" if paint else "",
        f"{strangers:.0f}" if paint else "",
    )
    key = figure_name(name)
    ours = name != "JupyterHub's tokens"
    report.figure(f"{key}_processor_ms", spent)
    report.figure(f"{key}_p90_ms", quantile(series.values, 0.9), MOST_MS if ours else None)
    if paint:
        report.figure(f"{key}_paint_p90_ms", paint.p90, MOST_PAINT_MS)
        report.figure(f"{key}_kb", weight, MOST_KB)
        report.figure(f"{key}_elsewhere", strangers, 0)


if __name__ == "__main__":
    main()
