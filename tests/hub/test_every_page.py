"""Every page of the hub, as its readers see it: on a desk and on a phone, by day and in the dark.

The pictures are in ``test-results/pages``, which CI keeps. Real here: JupyterHub, proxy, accounting
service, local servers, Chromium, axe-core; one hub for all.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, ConsoleMessage
from tornado.web import RequestHandler

from gpuspawner.config import PAGES
from gpuspawner.core.units import MICRO
from gpuspawner.ledger.models import member_account
from gpuspawner.runs import schedule_repository
from gpuspawner.runs.models import Run, Work
from gpuspawner.runs.rules import slug_of
from gpuspawner.runs.schedules import Schedule
from gpuspawner.runs.sweeps import SweepRequest
from gpuspawner.web.app import ROUTES
from tests.support.catalog_files import CATALOG, FILES
from tests.support.compatibility import HUB_6
from tests.support.hub import ADMIN
from tests.support.pages import WIDE, add_cookies, look_over_page
from tests.support.paying_hub import PayingHub
from tests.support.processes import BIN, command_of, system_path, wait_for
from tests.support.tickets import line_up

CONFIG = """
c.JupyterHub.authenticator_class = "gpu-members-shared-password"
c.Authenticator.allow_all = False
c.MemberMixin.roster = True
c.JupyterHub.load_groups = {{"ml101": {{"users": ["ada", "bob"]}}}}
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 1}}
c.GPUSpawnerMixin.catalog = {catalog!r}
c.GPUFolders.source = {folders!r}
c.GPUCredits.opening_grant = 100
c.GPUCredits.hold_minutes = 1
c.GPUCredits.grace_seconds = 3600
c.GPUCredits.charge_seconds = 30
c.Accounting.reconcile_seconds = 5
c.GPURates.by_model = {{"*": 1, "A100": 4}}
"""

HALTED = "#!/bin/sh\nkill -STOP $$\n"
"""A ``tar`` that the hub finds first: an archive that is begun goes on as long as the tests."""

LONG = "the weekly seminar on representation learning, winter term"


class FurnishedHub(PayingHub):
    """A hub with something on every page, and the ids by which pages are asked for."""

    ids: dict[str, str]


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[FurnishedHub]:
    """Ada and Bob use all GPUs, Cleo and Dan wait, Eve's credits ran out, Fay is new."""
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    config = CONFIG.format(catalog=str(folder / "catalog.yaml"), folders=f"{folder}/folders/{{id}}")
    (folder / "catalog.yaml").write_text(CATALOG, encoding="utf-8")
    halted = folder / "programs" / "tar"
    halted.parent.mkdir()
    halted.write_text(HALTED, encoding="utf-8")
    halted.chmod(0o755)
    environment = {"PATH": system_path(halted.parent, BIN)}
    with FurnishedHub(folder / "hub", config, environment=environment) as hub:
        hub.ids = furnish(hub)
        tar = begin_archive(hub, halted)
        yield hub
        os.kill(tar, signal.SIGKILL)


def furnish(hub: FurnishedHub) -> dict[str, str]:
    """Give every page something to show, and return what the addresses need."""
    services = hub.services
    lines = ["name,ends", *(f"{user}," for user in ("ada", "bob", "cleo", "dan", "eve", "fay"))]
    assert services.roster.import_roster("\n".join(lines).encode(), actor="kim").done
    past = hub.start_server("ada", "past", environment="torch", gpus=1)
    wait_for(lambda: services.leases.get(past.id).seen_at, "a look at the server")
    hub.stop_server("ada", "past")
    lease = hub.start_server("ada", environment="torch", gpus=2, hours=4)
    hub.start_server("bob", environment="jax", gpus=1)
    tickets = line_up(hub, "cleo", "dan", environment="torch", gpus=2)
    hub.login("eve")
    services.ledger.open_account("eve")
    hub.set_balance("eve", 0)
    for account in ("ada", "eve"):
        services.ledger.grant(member_account(account), MICRO, actor="kim", reason=LONG)
    rate = services.prices.set_rate(
        "2.5", model="T4", environment="torch", hours="Sat, Sun", actor="kim", reason=LONG
    )
    refill = services.refills.add_refill(
        services.refills.plan_refill(
            "FREQ=MONTHLY;BYMONTHDAY=1",
            amount=10 * MICRO,
            audience=["everybody"],
            actor="kim",
            reason=LONG,
            starts_at=datetime(2999, 1, 1, tzinfo=timezone.utc),
        )
    )
    for user, quota in (("ada", 2 * MICRO), ("bob", None), ("fay", 50 * MICRO)):
        place = hub.folder / "workspaces" / user
        place.mkdir(parents=True, exist_ok=True)
        (place / "large").write_bytes(bytes(2 * MICRO))
        services.storage.use_workspace(str(place), user, quota)
    services.storage.note_workspace(
        str(place), "archive workspace", actor="kim", detail="/srv/archives/fay-2026-11-01.tar.zst"
    )
    services.storage.claim_workspace(str(place), "an admin puts them back")
    for title in ("train", "a notebook with a name that is longer than most others", "sweep"):
        work = Work(command=("python3", "train.py"), folder=f"runs/2026-11-01-120000-{title}")
        run = Run(
            id=slug_of(title), user="ada", title=title, work=work, created_at=services.clock()
        )
        services.runs.submit(run)
        services.runs.refuse(run.id, "Its program ended with exit status 1.")
    names = [(f"train lr={number}", Work(command=("train",))) for number in range(60)]
    sweep = SweepRequest(title="train", works=names, options={}, at_most=4)
    services.runs.submit_all(sweep.runs("ada", "0a1b", services.clock()))
    for number in range(1, 60):
        services.runs.refuse(f"train-0a1b-{number:03}", "Its program ended with exit status 1.")
    services.runs.stop("train-0a1b-060", actor="ada")
    for schedule, cron in (("nightly", "30 2 * * 1-5"), ("weekly", "0 7 * * 1")):
        first = Schedule(
            id=schedule,
            user="ada",
            title=f"{schedule} training with a long name",
            cron=cron,
            zone="Europe/Vienna",
            work=Work(notebook=f"runs/schedules/2026-11-01-120000-{schedule}/input.ipynb"),
            paused=schedule == "weekly",
            created_at=services.clock(),
            next_at=services.clock(),
        )
        services.schedules.create(first)
    with services.store.write() as connection:
        schedule_repository.add_time(connection, "nightly", services.clock())
        (due,) = schedule_repository.due_runs(connection)
    services.schedules.note_refused(due, "The account member:ada has no credits.")
    made = hub.call("ada", "POST", "folders", json={"name": "seminar-data"})
    assert made.ok, made.text
    transfer = services.reports.statement_page("member:ada").entries[0].transfer
    return {
        "past": past.id,
        "run": run.id,
        "lease": lease.id,
        "ticket": tickets[0].id,
        "next_ticket": tickets[1].id,
        "rate": str(rate.id),
        "refill": refill.id,
        "transfer": transfer,
        "folder": made.json()["id"],
    }


def begin_archive(hub: FurnishedHub, halted: Path) -> int:
    """Let Dan's workspace be archived, without an end, and return the process to kill."""
    place = hub.folder / "workspaces" / "dan"
    place.mkdir(parents=True)
    (place / "large").write_bytes(os.urandom(2 * MICRO))
    hub.services.storage.use_workspace(str(place), "dan", None)
    begun = hub.call(ADMIN, "POST", "workspaces/archive", json={"workspace": str(place)})
    assert begun.ok, begun.text

    def tar() -> int | None:
        below = psutil.Process(hub.pid).children(recursive=True)
        return next((each.pid for each in below if str(halted) in command_of(each)), None)

    return wait_for(tar, "the archive")


MEMBER, WAITS, BROKE, NEW = "ada", "cleo", "eve", "fay"

SERVICE: dict[str, tuple[tuple[str, str], ...]] = {
    "": ((MEMBER, ""), (WAITS, ""), (BROKE, ""), (NEW, "")),
    "billing": ((MEMBER, "billing"), (BROKE, "billing")),
    "admin": ((ADMIN, "admin"),),
    "notices": ((MEMBER, "notices"),),
    "notices/test": ((MEMBER, "notices/test"),),
    "queue": ((ADMIN, "queue"), (ADMIN, "queue?a={ticket}&b={next_ticket}")),
    "queue/granting": ((ADMIN, "queue/granting"),),
    "devices": ((ADMIN, "devices"),),
    "workspaces": ((ADMIN, "workspaces"),),
    "workspaces/(archive|restore|cancel|unlock)": ((ADMIN, "workspaces/archive"),),
    "queue/([0-9A-Za-z-]{1,64})": ((ADMIN, "queue/{ticket}"),),
    "queue/([0-9A-Za-z-]{1,64})/(move|boost|cancel)": ((ADMIN, "queue/{ticket}/move"),),
    "tickets/([0-9A-Za-z-]{1,64})/cancel": ((WAITS, "tickets/{ticket}/cancel"),),
    "leases": ((MEMBER, "leases"), (ADMIN, "leases")),
    "leases/([0-9a-f]{1,64})": ((MEMBER, "leases/{past}"), (ADMIN, "leases/{past}")),
    "leases/([0-9a-f]{1,64})/stop": ((ADMIN, "leases/{lease}/stop"),),
    "leases/([0-9a-f]+)/extend": ((MEMBER, "leases/{lease}/extend"),),
    "leases/([0-9a-f]{1,64})/snooze": ((MEMBER, "leases/{lease}/snooze"),),
    "leases/([0-9a-f]{1,64})/restart": ((MEMBER, "leases/{lease}/restart"),),
    "leases/([0-9a-f]{1,64})/refund": ((ADMIN, "leases/{past}/refund"),),
    "runs/([0-9a-z-]{1,64})": ((MEMBER, "runs/{run}"), (ADMIN, "runs/{run}")),
    "runs/([0-9a-z-]{1,64})/again": ((MEMBER, "runs/{run}/again"),),
    "runs": ((MEMBER, "runs"), (ADMIN, "runs?all=1"), (NEW, "runs")),
    "runs/([0-9a-z-]{1,64})/stop": ((MEMBER, "runs/{run}/stop"),),
    "schedules/([0-9a-z-]{1,64})/(pause|resume)": ((MEMBER, "schedules/nightly/pause"),),
    "schedules/([0-9a-z-]{1,64})/delete": ((MEMBER, "schedules/nightly/delete"),),
    "runs/sweeps/([0-9a-z-]{1,60})": (
        (MEMBER, "runs/sweeps/train-0a1b"),
        (ADMIN, "runs/sweeps/train-0a1b"),
    ),
    "runs/sweeps/([0-9a-z-]{1,60})/stop": ((MEMBER, "runs/sweeps/train-0a1b/stop"),),
    "runs/sweeps/([0-9a-z-]{1,60})/again": ((MEMBER, "runs/sweeps/train-0a1b/again"),),
    "payer": ((MEMBER, "payer"),),
    "statement": ((MEMBER, "statement"),),
    "accounts": ((ADMIN, "accounts"),),
    "accounts/([^/]+)": ((ADMIN, "accounts/member:ada"),),
    "accounts/([^/]+)/grant": ((ADMIN, "accounts/member:ada/grant"),),
    "accounts/([^/]+)/statement": ((ADMIN, "accounts/member:ada/statement"),),
    "transfers/([0-9a-f]{32})": ((ADMIN, "transfers/{transfer}"),),
    "bulk": ((ADMIN, "bulk"),),
    "rates": ((ADMIN, "rates"),),
    "rates/([0-9]{1,18})/remove": ((ADMIN, "rates/{rate}/remove"),),
    "refills": ((ADMIN, "refills"),),
    "refills/([0-9a-f]{1,32})/end": ((ADMIN, "refills/{refill}/end"),),
    "trail": ((ADMIN, "trail"),),
    "members": ((ADMIN, "members"),),
    "members/([^/]{1,200})/end": ((ADMIN, "members/fay/end"),),
    "folders": ((MEMBER, "folders"), (ADMIN, "folders")),
    "folders/([0-9a-f]{16})/(invite|accept|leave|uninvite|hand-on|delete|restore)": (
        (MEMBER, "folders/{folder}/invite"),
    ),
    "usage": ((ADMIN, "usage"),),
    "used": ((ADMIN, "used"),),
    "cluster": ((MEMBER, "cluster"), (ADMIN, "cluster")),
}
"""Every page of the service by its route: who opens which address. Some lead on to another page."""

HUB: dict[str, tuple[tuple[str, str], ...]] = {
    r"/environments/?": (("", "environments"), (MEMBER, "environments")),
    r"/environments/([^/]+)": (("", "environments/torch"), (NEW, "environments/jax")),
    r"/catalog": ((ADMIN, "catalog"),),
    r"/catalog/([^/]+)/update": ((ADMIN, "catalog/torch/update"),),
    r"/glossary": (("", "glossary"), (MEMBER, "glossary")),
    r"/help": (("", "help"), (MEMBER, "help")),
    r"/help/([a-z-]+)": (("", "help/start-a-server"), (MEMBER, "help/wait-in-the-queue")),
    r"/welcome/?": ((NEW, "welcome"),),
    r"/welcome/first": ((NEW, "welcome/first"),),
    "home": ((MEMBER, "home"), (WAITS, "home"), (BROKE, "home"), (NEW, "home")),
    # JupyterHub 5 numbers the fields for the tabulator key, which axe-core calls serious.
    **({"login": (("", "login"),)} if HUB_6 else {}),
    "spawn": ((NEW, "spawn"), (BROKE, "spawn")),
    "spawn-pending": ((WAITS, "spawn-pending/cleo"),),
    "not running": ((NEW, "user/fay/lab"),),
    "not found": ((MEMBER, "environments/none"),),
    "not allowed": ((MEMBER, "spawn/bob"),),
}
"""The Hub's pages that are ours, in whole or in part."""

NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"

NO_PAGES = {"oauth_callback", "metrics", "cluster/live", r"catalog\.schema\.json"}
NO_PAGES |= {"runs/([0-9a-z-]{1,64})/output"}  # what stands in the frame of a run's page
NO_HUB_PAGES = {
    r"/environments/-/live": "JSON",
    r"/catalog/-/updates": "JSON",
    r"/environments/([^/]+)/logo": "a picture",
    r"/api/gpuspawner/launcher": "JSON, for the accounting service",
    r"/api/gpuspawner/launcher/quote": "JSON, for the accounting service",
    r"/api/gpuspawner/launcher/sweep(/quote)?": "JSON, for the accounting service",
    r"/api/gpuspawner/launcher/environments": "JSON, for the accounting service",
    r"/api/gpuspawner/launcher/start": "JSON, for the accounting service",
    r"/api/gpuspawner/updates": "JSON",
    r"/api/gpuspawner/updates/([^/]+)": "JSON",
    r"/notices": "JSON",
    r"/without-gpu/([^/]*)": "a form's action",
    r"/gpuspawner/static/(.*)": "files",
    r"/api/gpuspawner/(.*)": "JSON",
}


def test_every_page_is_looked_at() -> None:
    """Every route that answers with a page is in one of the tables above."""
    shown = {
        route
        for route, handler in ROUTES
        if handler.get is not RequestHandler.get
        and not route.startswith("api/")
        and not route.endswith(r"\.csv")
    }
    assert shown - NO_PAGES == set(SERVICE)
    assert {route for route, _ in PAGES} - set(NO_HUB_PAGES) == {r for r in HUB if r[0] == "/"}


def name_of(user: str, address: str) -> str:
    """The name of a page's pictures, without ids."""
    plain = re.sub(r"[{}?=]+", "-", address).strip("/-") or "home"
    return f"{plain.replace('/', '-').replace(':', '-')}-{user or 'stranger'}"


def test_pages_are_readable_on_every_screen(hub: FurnishedHub, browser: Browser) -> None:
    """No finding of axe-core, no complaint on the console, nothing wider than the window."""
    page = browser.new_context(viewport=WIDE, reduced_motion="reduce").new_page()
    asked: list[str] = []
    said: list[ConsoleMessage] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message))
    pages = [("/services/gpu/", it) for its in SERVICE.values() for it in its]
    pages += [("/hub/", it) for its in HUB.values() for it in its]
    found: list[str] = []
    for user in ("", MEMBER, WAITS, BROKE, NEW, ADMIN):
        page.context.clear_cookies()
        if user:
            add_cookies(page, hub, user)
        seen: set[str] = set()
        for prefix, address in [
            (prefix, address) for prefix, (who, address) in pages if who == user
        ]:
            while True:
                said.clear()
                page.goto(f"{hub.url}{prefix}{address.format(**hub.ids)}")
                # Chromium gives up what it loads when other tests make a network on this machine.
                if not any(NETWORK_CHANGED in it.text for it in said):
                    break
            if page.url in seen:
                continue  # it leads on to a page that was looked at
            seen.add(page.url)
            if prefix == "/services/gpu/":
                assert page.locator("[aria-current=page]").count() == 1, "where it is in the menu"
            name = f"pages/{prefix.split('/')[1]}-{name_of(user, address)}"
            found += look_over_page(page, name)
            # Its status is no complaint, nor is a question that is asked again later, nor what
            # JupyterHub's pending page logs: that may arrive when the next page is open already.
            complaints = [it for it in said if it.type in ("warning", "error")]
            texts = [it.text for it in complaints if it.location["url"] != page.url]
            found += [f"{name}: on the console: {it}" for it in texts if NETWORK_CHANGED not in it]
        assert len(seen) >= 2
    assert not found, "\n".join(found)
    assert {url for url in asked if not url.startswith((f"{hub.url}/", "data:"))} == set()
