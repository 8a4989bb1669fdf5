"""The units that `gpuspawner init` writes. Real: their texts, and systemd as the first process of a
Debian. Stand-ins: the programs that the units run, and Docker's unit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuspawner.install.documents import configuration_files
from gpuspawner.install.models import BIN_FOLDER, HUB_UNIT, MIG_UNIT, STATE_FOLDER, Answers
from tests.support.box import Box
from tests.support.engine import PrivateEngine
from tests.support.processes import wait_for

RUNS = "#!/bin/sh\nexec sleep infinity\n"
MIG = f"""#!/bin/bash
echo "$(id -un) $PWD $*" >> {STATE_FOLDER}/calls
case "$(cat {STATE_FOLDER}/mig)" in
    fails) exit 1 ;;
    hangs) trap '' TERM; while :; do sleep 1; done ;;
    follows) ln -sf /etc/written {STATE_FOLDER}/link; echo x > {STATE_FOLDER}/link ;;
esac
"""
"""``gpuspawner mig restore`` as the test says: a hang of the driver takes no notice of SIGTERM."""

DOCKER = """[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/true
"""
SOON = "[Service]\nTimeoutStartSec=15s\nTimeoutStopSec=1s\n"
"""The same in less time, as by ``systemctl edit``."""


@pytest.fixture
def box(hubs: None, processes: None, engine: PrivateEngine, tmp_path: Path) -> Iterator[Box]:
    """A machine with the units."""
    answers = Answers("shared-password")
    proxy = f"{BIN_FOLDER}/configurable-http-proxy"
    made = configuration_files(answers, bin_folder=BIN_FOLDER, proxy=proxy, node_path="")
    with Box(engine, tmp_path / "copy") as box:
        box.run(
            f"groupadd docker; useradd --system --groups docker gpuspawner; mkdir -p {BIN_FOLDER} "
            f"/etc/gpuspawner /etc/systemd/system/{MIG_UNIT}.d; touch /etc/gpuspawner/environment; "
            f"install -d -m 700 -o gpuspawner {STATE_FOLDER}"
        )
        for file in made:
            if file.path.endswith(".service"):
                box.write(file.path, file.text)
        for path, text in {proxy: RUNS, f"{BIN_FOLDER}/jupyterhub": RUNS}.items():
            box.write(path, text)
        box.write(f"{BIN_FOLDER}/gpuspawner", MIG)
        box.write("/etc/systemd/system/docker.service", DOCKER)
        box.write(f"/etc/systemd/system/{MIG_UNIT}.d/override.conf", SOON)
        box.run(f"chmod 755 {BIN_FOLDER}/*; systemctl daemon-reload")
        yield box


def shown(box: Box, unit: str, *names: str) -> list[str]:
    """What systemd says of a unit."""
    words = " ".join(f"-p {name}" for name in names)
    lines = dict(
        line.split("=", 1) for line in box.run(f"systemctl show {words} {unit}").split("\n") if line
    )
    return [lines[name] for name in names]


def test_hub_starts_after_the_mig_unit_whatever_becomes_of_that(box: Box) -> None:
    calls = f"root {STATE_FOLDER} mig -f /etc/gpuspawner/jupyterhub_config.py restore\n"
    for does, result in (
        ("nothing", "success"),
        ("fails", "exit-code"),
        ("hangs", "timeout"),
        ("follows", "exit-code"),
    ):
        box.run(
            f"systemctl stop {HUB_UNIT}; cd {STATE_FOLDER}; echo {does} > mig; rm -f calls; "
            f"systemctl start {HUB_UNIT}"
        )
        assert shown(box, HUB_UNIT, "ActiveState") == ["active"], does
        assert shown(box, MIG_UNIT, "Result") == [result], does
        assert box.run(f"cat {STATE_FOLDER}/calls") == calls
        ended, started = (
            int(shown(box, unit, name)[0])
            for unit, name in (
                (MIG_UNIT, "ExecMainExitTimestampMonotonic"),
                (HUB_UNIT, "ExecMainStartTimestampMonotonic"),
            )
        )
        assert 0 < ended < started, does

    # A link of the hub's user led root to another file, which did not come to be.
    assert "absent" in box.run("test -e /etc/written || echo absent")
    assert "Read-only file system" in box.run(f"journalctl --no-pager -u {MIG_UNIT}")

    # As when the machine starts: the hub is enabled, and that is enough.
    box.run(f"echo nothing > {STATE_FOLDER}/mig; systemctl enable {HUB_UNIT}")
    box.reboot()
    wait_for(lambda: shown(box, HUB_UNIT, "ActiveState") == ["active"], "the hub")
    assert shown(box, MIG_UNIT, "Result", "ExecMainStatus") == ["success", "0"]
    assert box.run(f"cat {STATE_FOLDER}/calls") == calls * 2
