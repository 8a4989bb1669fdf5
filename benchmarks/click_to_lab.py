"""From the click on Start to a JupyterLab that works, in a real browser.

Real: Chromium, JupyterHub with its proxy, Docker Engine, images/base. GPUDockerSpawner and plain
DockerSpawner serve one hub and one engine, in turns, with the same image and the same settings;
the GPU is a stand-in. The member is signed in and sees the form of either spawner; the clock runs
from the click on its Start.

DockerSpawner's server is JupyterHub's own program, started as in any other image; ours is what
images/base has in its place (images/common/singleuser.py). ``--same-server`` gives it to both. The
kernel that is ready in advance and the list of export formats (images/common/lab) only ours has.

* ``page usable``: until JupyterLab's launcher is there to be clicked;
* ``kernel answers``: until a new notebook has worked something out and shows it. The cell is run
  when JupyterLab says that the kernel is idle.

``cold``: the machine has nothing of the image in memory (its page cache was dropped) and the
browser nothing in its cache. ``warm``: the same member comes back, with the browser's profile. The
rows below say where the seconds of a warm start go: ``container made`` holds the hub's own work,
the lease and the workspace; ``server listens`` is Python importing the server.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from functools import partial

from playwright.sync_api import BrowserContext
from support.clicking import Click, click_to_lab, sign_in
from support.docker_hub import DockerHub, docker_hub
from support.report import Report, argument_parser, in_turns, pair, quantile

from tests.support import images
from tests.support.browser import open_browser
from tests.support.processes import as_root

MOST_P95 = 0.5
"""Our warm p95 of ``kernel answers``, as a part of the stock spawner's."""

CONFIG = """
c.Spawner.default_url = "/lab?reset"  # not what was open last time
c.Spawner.http_timeout = c.Spawner.start_timeout = 120
c.StockSpawner.options_form = "<p>JupyterLab</p>"
c.GPUDockerSpawner.workspace = "work-{username}"
c.StockSpawner.volumes = {"work-{username}": "/home/jovyan/work"}
"""

OWN_PROGRAM = """
c.StockSpawner.cmd = ["python", "-m", "jupyterhub.singleuser"]
"""

FILL = 2
"""Starts that fill the browser's cache: at its second use a script is kept compiled."""

Found = dict[str, list[Click]]


def drop_page_cache() -> None:
    """What files hold has to come from the disk again."""
    os.sync()
    subprocess.run(as_root(["sysctl", "-q", "vm.drop_caches=3"]), check=True)


def measure(hub: DockerHub, cold: int, warm: int) -> tuple[Found, Found]:
    """The clicks of both sides, cold and warm."""
    users = {"ours": hub.ours[0], "stock": hub.stock[0]}
    with open_browser() as browser, tempfile.TemporaryDirectory() as profiles:

        def click(found: Found, context: BrowserContext, side: str, *_: int) -> None:
            user = users[side]
            found[side].append(click_to_lab(context, hub.hub, hub.engine, user))
            hub.members.stop(user)

        def click_cold(found: Found, side: str, *_: int) -> None:
            context = sign_in(browser, hub.hub, users[side])
            drop_page_cache()
            click(found, context, side)
            context.close()

        first: Found = {side: [] for side in users}
        in_turns(cold, partial(click_cold, first, "ours"), partial(click_cold, first, "stock"))
        contexts = {
            side: sign_in(browser, hub.hub, user, f"{profiles}/{side}")
            for side, user in users.items()
        }
        later: Found = {side: [] for side in users}
        sides = [partial(click, later, contexts[side], side) for side in users]
        in_turns(FILL, *sides)
        for clicks in later.values():
            clicks.clear()
        in_turns(warm, *sides)
        for context in contexts.values():
            context.close()
    return first, later


def main() -> None:
    parser = argument_parser(__doc__, runs=20)
    parser.add_argument("--cold", type=int, default=5, help="cold runs of each side (5)")
    same = "both sides have our images' server"
    parser.add_argument("--same-server", action="store_true", help=same)
    args = parser.parse_args()
    config = CONFIG if args.same_server else CONFIG + OWN_PROGRAM
    with docker_hub(1, config, image=images.BASE) as hub:
        cold, warm = measure(hub, args.cold, args.runs)
    columns = ("seconds since the click", "runs", "GPUDockerSpawner", "DockerSpawner", "ratio")
    report = Report("click_to_lab", columns)
    report.figure("runs", args.runs)
    for name, found in (("cold", cold), ("warm", warm)):
        if found["ours"]:
            fill(report, name, found)
    parts = {side: [click.parts() for click in clicks] for side, clicks in warm.items()}
    for part in parts["ours"][0]:
        both = pair(*([parts_of[part] for parts_of in parts[side]] for side in ("ours", "stock")))
        texts = (both.ours.text(2), both.baseline.text(2), "")
        report.row(f"of a warm start: {part}", str(args.runs), *texts)
    report.print(args.json)


def fill(report: Report, name: str, found: Found) -> None:
    """The rows and figures of cold or warm starts."""
    for what, attribute in (("page usable", "usable"), ("kernel answers", "answered")):
        ours, stock = ([getattr(click, attribute) for click in found[s]] for s in ("ours", "stock"))
        both = pair(ours, stock)
        texts = (both.ours.text(2), both.baseline.text(2), both.ratios.text(2))
        report.row(f"{name}: {what}", str(len(ours)), *texts)
        p95 = [quantile(side, 0.95) for side in (ours, stock)]
        report.row(f"{name}: {what}, p95", str(len(ours)), *(f"{x:.2f}" for x in p95), "")
        report.figure(f"{name}_{attribute}_ratio", both.ratios.median)
        target = MOST_P95 if (name, attribute) == ("warm", "answered") else None
        report.figure(f"{name}_{attribute}_p95_ratio", p95[0] / p95[1], target)


if __name__ == "__main__":
    main()
