"""How long the catalog's pages and the spawn form take, and how much they weigh.

Real: JupyterHub with its proxy, the accounting service, local servers, Chromium. 50 environments,
500 members who are signed in, 16 GPUs of which all are in use, and four who wait in the queue.
Beside ours, in turns, is a page of JupyterHub's own in the same hub, which asks no store of ours.

* ``ms``: from the request to the whole page, through the proxy, each by another member;
* ``processor``: of the hub's process for one page, whatever else the machine does meanwhile;
* ``first paint``: in a new browser window with nothing kept, to the first contentful paint;
* ``kB``: all that such a window is sent for the page, with style, scripts, fonts and pictures;
* ``elsewhere``: requests to any other host than the hub's own.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import requests
from playwright.sync_api import Browser
from support.report import Report, Series, argument_parser, quantile

from tests.support.browser import open_browser
from tests.support.hub import NAVIGATION
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

ENVIRONMENTS, MEMBERS, GPUS, WAITING = 50, 500, 16, 4
MOST_MS, MOST_PAINT_MS, MOST_KB = 100, 1000, 300

PAGES = {
    "environments": "environments",
    "environments, searched": "environments?q=learning&gpu=with&framework=PyTorch",
    "one environment": "environments/e7",
    "form": "spawn",
    "form by a link": "spawn?opt-environment=e7&opt-gpus=1",
    "JupyterHub's home": "home",
}
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
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 1}}
"""


def fill(hub: PayingHub) -> None:
    """All GPUs are in use, and some wait for one."""
    for number in range(GPUS + WAITING):
        answer = hub.spawn(f"busy{number}", {"environment": "e2", "gpus": 1, "hours": 4})
        assert answer.ok, answer.text
    wait_for(lambda: len(hub.services.leases.open_leases()) == GPUS, "the servers", timeout=120)
    wait_for(lambda: len(hub.services.queue.waiting()) == WAITING, "the line", timeout=60)


def timed(session: requests.Session, url: str) -> float:
    """Milliseconds until the whole page is there."""
    began = time.perf_counter()
    answer = session.get(url, headers=NAVIGATION, timeout=60)
    took = 1e3 * (time.perf_counter() - began)
    assert answer.status_code == 200, f"{url}: {answer.status_code}"
    return took


def processor(hub: PayingHub) -> float:
    """Milliseconds of processor time that the hub's process has used."""
    used = psutil.Process(hub.pid).cpu_times()
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
            before = processor(hub)
            for _ in range(runs // turns):
                session = next(everybody) if name != STRANGER else requests.Session()
                took[name].append(timed(session, f"{hub.url}/hub/{path}"))
            spent[name] += processor(hub) - before
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
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = catalog(Path(folder), ENVIRONMENTS)
        with PayingHub(Path(folder) / "hub", config(path)) as hub:
            fill(hub)
            took, spent, seen = measure(hub, args.members, args.runs)
    report = Report("pages", ("page", "runs", "ms", "processor, ms", *BROWSER))
    report.figure("runs", args.runs)
    report.figure("members", args.members)
    for name, series in took.items():
        looks = seen.get(name, [])
        paint = Series(tuple(look["paint"] for look in looks)) if looks else None
        weight = max((look["kb"] for look in looks), default=0.0)
        strangers = sum(look["elsewhere"] for look in looks)
        report.row(
            name,
            str(len(series.values)),
            series.text(),
            f"{spent[name]:.1f}",
            paint.text(0) if paint else "",
            f"{weight:.0f}" if paint else "",
            f"{strangers:.0f}" if paint else "",
        )
        key = name.replace(", ", "_").replace(" ", "_").replace("'", "").lower()
        ours = name != "JupyterHub's home"
        report.figure(f"{key}_processor_ms", spent[name])
        report.figure(f"{key}_p90_ms", quantile(series.values, 0.9), MOST_MS if ours else None)
        if paint:
            report.figure(f"{key}_paint_p90_ms", paint.p90, MOST_PAINT_MS)
            report.figure(f"{key}_kb", weight, MOST_KB)
            report.figure(f"{key}_elsewhere", strangers, 0)
    report.print(args.json)


if __name__ == "__main__":
    main()
