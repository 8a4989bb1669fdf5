"""``poll()`` of other members' servers while one member's spawn pulls a large image.

Real: Docker Engine, JupyterHub with its proxy, SQLite, the pull. The registry is a small one on
this machine, which sends the image's blobs slowly.

One hub and one engine serve both sides. In turns, a member of GPUDockerSpawner and one of plain
DockerSpawner spawn from an image that the engine does not have, while the hub polls the running
servers of that side's other members every 50 ms, whether or not the last poll has answered: the
Hub's own poll of each server, and nothing but it, every 30 s, waits as long. The pull reaches its
end each time, and the member's server answers.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
import time
from collections.abc import Iterator
from typing import Any

from support.docker_hub import DockerHub, docker_hub
from support.report import Report, Series, arguments, in_turns, quantile

from tests.support.engine import PrivateEngine
from tests.support.images import INSTANT
from tests.support.registry import SlowRegistry

RUNNING = 4
IMAGE_BYTES = 64_000_000
BYTES_A_SECOND = 16_000_000
QUIET_SECONDS = 2.0
MOST_MS = 100
PROGRAM = "/usr/local/bin/instant"

CONFIG = """
from support.polling import HANDLERS
c.JupyterHub.extra_handlers = HANDLERS
c.Spawner.start_timeout = 300

def choose_image(spawner):
    if "-pulls-" in spawner.user.name:
        spawner.image = {image!r} + spawner.user.name

c.Spawner.pre_spawn_hook = choose_image
"""


def program(engine: PrivateEngine) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The file of the instant image that matters, and what the image says about it."""
    made = engine.client.create_container(INSTANT)["Id"]
    try:
        stream, _ = engine.client.get_archive(made, PROGRAM)
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as tar:
            content = tar.extractfile(tar.getmembers()[0])
            assert content is not None
            files = {PROGRAM.lstrip("/"): content.read()}
    finally:
        engine.client.remove_container(made)
    said = engine.client.inspect_image(INSTANT)["Config"]
    return files, {name: said[name] for name in ("Env", "Cmd", "ExposedPorts")}


def main() -> None:
    args = arguments(__doc__, runs=6)
    pulling: dict[str, list[float]] = {"ours": [], "stock": []}
    quiet: dict[str, list[float]] = {"ours": [], "stock": []}
    spawns: dict[str, list[float]] = {"ours": [], "stock": []}
    with SlowRegistry(size=IMAGE_BYTES, rate=BYTES_A_SECOND) as registry:
        config = CONFIG.format(image=f"{registry.repository}:")
        with docker_hub(RUNNING, config, spare=1) as hub:
            hub.members.spawn_all(hub.ours + hub.stock, at_once=4)
            files, settings = program(hub.engine)

            def turn_of(side: str, turn: int) -> None:
                name = f"{side}-pulls-{turn}"
                registry.add(name, files, settings)
                hub.members.add([name])
                with polled(hub, side, quiet[side]):
                    time.sleep(QUIET_SECONDS)
                with polled(hub, side, pulling[side]):
                    began = time.perf_counter()
                    hub.members.spawn(name)
                    spawns[side].append(time.perf_counter() - began)
                hub.members.stop(name)
                hub.engine.client.remove_image(f"{registry.repository}:{name}", force=True)
                registry.forget(name)

            in_turns(
                args.runs,
                lambda turn: turn_of("ours", turn),
                lambda turn: turn_of("stock", turn),
            )
    make_report(args.runs, pulling, quiet, spawns).print(args.json)


@contextlib.contextmanager
def polled(hub: DockerHub, side: str, found: list[float]) -> Iterator[None]:
    """Add the seconds of each poll that is made during the block."""
    ask = hub.members.ask
    ask("polls", side=side)
    yield
    found += ask("polled")


def make_report(
    runs: int,
    pulling: dict[str, list[float]],
    quiet: dict[str, list[float]],
    spawns: dict[str, list[float]],
) -> Report:
    """The table. All values come in seconds."""
    columns = ("poll(), ms", "polls", "median (p10-p90)", "p99", "most")
    report = Report("poll_during_pull", columns)
    report.figure("runs", runs)
    report.figure("image_mb", IMAGE_BYTES / 1e6)
    names = {"ours": "GPUDockerSpawner", "stock": "DockerSpawner"}
    for when, found in (("during a pull", pulling), ("otherwise", quiet)):
        for side, name in names.items():
            times = Series(tuple(found[side])).times(1e3)
            p99, most = quantile(times.values, 0.99), max(times.values)
            cells = (str(len(times.values)), times.text(), f"{p99:.1f}", f"{most:.1f}")
            report.row(f"{name}, {when}", *cells)
            key = f"{'pull' if found is pulling else 'quiet'}_{side}"
            report.figure(f"{key}_median_ms", times.median)
            bound = MOST_MS if key == "pull_ours" else None
            report.figure(f"{key}_p99_ms", p99, bound)
            report.figure(f"{key}_max_ms", most)
    took = {side: Series(tuple(seconds)) for side, seconds in spawns.items()}
    report.notes.append(
        f"The spawns that pulled took {took['ours'].text()} s with ours, "
        f"{took['stock'].text()} s with the stock spawner."
    )
    return report


if __name__ == "__main__":
    main()
