"""``gpuspawner mig`` with a configuration file. Real: the command in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner.db.engine import Store
from gpuspawner.db.schema import mig_instances
from gpuspawner.devices import closures
from gpuspawner.devices.closures import Closure
from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.divided import NVIDIA_SMI, DividedMachine, dividable
from tests.support.processes import wait_for

UUID = dividable().uuid
HANGS = "nvmlDeviceGetCount_v2"


class Cli:
    """The command in a folder with a hub's configuration."""

    def __init__(self, machine: DividedMachine, folder: Path) -> None:
        self.machine = machine
        self.file = folder / "jupyterhub_config.py"
        self.configure("nvml")

    def configure(self, source: str) -> None:
        """Write the configuration."""
        self.file.write_text(
            f"c.GPUDatabase.url = {self.machine.url!r}\n"
            f"c.GPUDevices.source = {source!r}\n"
            f"c.GPUSharing.mig_command = {[sys.executable, str(NVIDIA_SMI)]!r}\n"
            "c.JupyterHub.spawner_class = 'gpu-local'\n"
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Begin a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "gpuspawner", *words, "-f", str(self.file)],
            env=self.machine.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.file.parent,
        )

    def __call__(self, *words: str, code: int = 0, answer: str = "") -> str:
        with self.start(*words) as process:
            said, errors = process.communicate(answer)
        assert process.returncode == code, said + errors
        return said + errors if code or answer else said

    def json(self, *words: str, code: int = 0) -> Any:
        """What it prints for scripts."""
        printed = self(*words, "--json", code=code)
        return json.loads(printed[: printed.rindex("\n")])


@pytest.fixture
def cli(machine: DividedMachine, store: Store, tmp_path: Path) -> Cli:
    with store.write() as connection:
        closures.close(connection, Closure(UUID, store.clock(), "kim", "MIG"))
    return Cli(machine, tmp_path)


def test_plan_shows_the_steps_and_changes_nothing(cli: Cli, store: Store) -> None:
    before = cli.machine.fleet.read_text()
    assert cli("mig", "plan", "0", "3g.20gb,2x1g.5gb") == (
        "GPU 0 (NVIDIA A100-SXM4-40GB): 3g.20gb,2x1g.5gb\n"
        "  make     3g.20gb at 4:4\n"
        "  make     1g.5gb at 0:1\n"
        "  make     1g.5gb at 1:1\n"
    )
    with store.write() as connection:
        closures.reopen(connection, UUID)
    said = cli("mig", "plan", UUID, "7g.40gb", code=1)
    assert "  make     7g.40gb at 0:8\n" in said
    assert f"Not now: GPU 0 is not drained: gpuspawner drain {UUID} --reason MIG" in said
    assert "has the UUID or index '7'" in cli("mig", "plan", "7", "7g.40gb", code=1)
    assert cli.machine.fleet.read_text() == before


def test_apply_asks_and_show_compares(cli: Cli) -> None:
    machine = cli.machine
    machine.smi("0", "-cgi", "1g.5gb:6", "-C")
    assert "Nothing was changed." in cli("mig", "apply", "0", "4g.20gb", code=1, answer="n\n")
    assert machine.layout() == [("1g.5gb", 6, 1)]
    said = cli("mig", "apply", "0", "4g.20gb", answer="y\n")
    assert "  beside   1g.5gb at 6:1 (id 1) " in said
    assert f"has the layout 4g.20gb. Return it to service: gpuspawner undrain {UUID}" in said
    theirs, ours = machine.uuids()
    lines = cli("mig", "show").splitlines()
    assert lines[0] == f"GPU 0 (NVIDIA A100-SXM4-40GB, {UUID}): in MIG mode"
    assert [re.split(" {2,}", line) for line in lines[2:]] == [
        ["4g.20gb at 0:4", "made by gpuspawner", ours],
        ["1g.5gb at 6:1", "made by somebody else", theirs],
    ]
    (plain,) = cli.json("mig")
    assert [(each["profile"], each["state"]) for each in plain["recorded"]] == [("4g.20gb", "made")]
    assert [each["uuids"] for each in plain["instances"]] == [[ours], [theirs]]


def test_check_says_that_instances_are_gone_until_they_are_restored(cli: Cli, store: Store) -> None:
    def finding() -> list[tuple[str, str, str]]:
        checks = cli.json("check", "--no-containers", code=1)["checks"]
        found = [each for each in checks if each["name"] == "MIG layouts"]
        return [(each["status"], each["text"], each["remedy"]) for each in found]

    assert finding() == []
    cli("mig", "apply", "0", "4g.20gb,3g.20gb", "--yes")
    assert finding() == [("ok", "2 instances made by gpuspawner", "")]
    cli.machine.has(dividable())
    with store.write() as connection:
        connection.execute(sa.update(mig_instances).values(boot_id="the boot before"))
    assert finding() == [
        (
            "fail",
            "Instances are gone, as after a restart of the machine. GPU 0: 4g.20gb at 0:4, "
            "3g.20gb at 4:4",
            "As root: gpuspawner mig restore",
        )
    ]
    assert cli("mig", "restore") == f"{UUID}: 4g.20gb,3g.20gb is restored.\n"
    assert cli("mig", "restore") == f"{UUID}: 4g.20gb,3g.20gb is complete.\n"
    assert finding()[0][0] == "ok"
    cli.machine.beside("refuses").write_text("-dci")
    cli("mig", "apply", "0", "none", "--yes", code=1)
    assert finding()[0][:2] == ("fail", f"{UUID}: none is not complete")


def test_check_and_rates_say_what_instances_cost_that_no_rate_names(cli: Cli) -> None:
    said = "NVIDIA A100-SXM4-40GB MIG 3g.20gb 0.50 (1/2 of a GPU)"

    def findings() -> list[str]:
        checks = cli.json("check", "--no-containers", code=1)["checks"]
        return [each["text"] for each in checks if each["name"] == "MIG prices"]

    assert findings() == []
    cli("mig", "apply", "0", "1g.5gb,3g.20gb", "--yes")
    start = "A MIG instance that no rate names costs its part of a GPU's rate, in credits an hour"
    small = "NVIDIA A100-SXM4-40GB MIG 1g.5gb 0.14 (1/7 of a GPU)"
    assert findings() == [f"{start}: {small}; {said}"]
    assert f"{start}: {small}, {said}." in cli("rates")
    cli("rates", "set", "A100 MIG 1g", "0.2")
    assert findings() == [f"{start}: {said}"]
    cli("rates", "set", "MIG", "0.2")
    assert findings() == [] and start not in cli("rates")


def test_devices_that_are_not_of_this_machine_are_not_divided(cli: Cli) -> None:
    cli.configure("simulated:1xA100-80GB")
    assert "The hub's devices come from simulated" in cli("mig", "plan", "0", "none", code=1)
    assert cli("mig", "restore") == "No layouts are recorded.\n"


def test_restore_asks_no_driver_if_no_layout_was_ever_recorded(
    cli: Cli, store: Store, tmp_path: Path
) -> None:
    """Nor before the hub's first start, when there is no database. A driver that hangs, or is not
    there, cannot hold up such a hub."""
    machine = cli.machine
    nvml.write_fleet(machine.fleet, [dividable()], hangs=[HANGS])
    assert cli("mig", "restore") == "No layouts are recorded.\n"
    assert not machine.beside("opened").exists()
    cli.file.write_text(cli.file.read_text().replace(machine.url, f"sqlite:///{tmp_path}/none"))
    assert cli("mig", "restore") == "No layouts are recorded.\n"
    assert not (tmp_path / "none").exists()


def test_restore_that_a_driver_holds_up_ends_when_systemd_ends_it(cli: Cli, store: Store) -> None:
    """Then a later one does the work."""
    machine = cli.machine
    cli("mig", "apply", "0", "4g.20gb", "--yes")
    (before,) = machine.uuids()
    with store.write() as connection:
        connection.execute(sa.update(mig_instances).values(boot_id="the boot before"))
    nvml.write_fleet(machine.fleet, [dividable()], hangs=[HANGS])
    with cli.start("mig", "restore") as process:
        wait_for(lambda: nvml.times_open(machine.fleet) == 1, "it to ask the driver")
        assert process.poll() is None
        process.terminate()  # as systemd does after TimeoutStartSec=
        assert process.wait() == -signal.SIGTERM
    assert machine.layout() == []
    machine.has(dividable())
    assert cli("mig", "restore") == f"{UUID}: 4g.20gb is restored.\n"
    assert machine.layout() == [("4g.20gb", 0, 1)]
    assert machine.uuids() != [before]


def test_restore_makes_nothing_that_the_gpu_does_not_offer(cli: Cli, store: Store) -> None:
    """Whoever writes to the database tells root what to make. SQLite takes any value."""
    machine = cli.machine
    cli("mig", "apply", "0", "4g.20gb", "--yes")
    machine.has(dividable())
    machine.beside("calls").unlink()
    true = {"profile": "4g.20gb", "profile_id": 5, "start": 0, "size": 4}
    for forged in (
        {"profile_id": "5:0 -C --list"},
        {"profile_id": "0,5"},
        {"profile_id": 0},
        {"profile": "7g.40gb"},
        {"profile": "no number"},
        {"start": 2},
        {"start": "0 -dgi"},
        {"size": 8},
    ):
        with store.write() as connection:
            for name, value in {"boot_id": "the boot before", **true, **forged}.items():
                changed = sa.text(f"UPDATE mig_instances SET {name} = :value")
                assert connection.execute(changed, {"value": value}).rowcount == 1
        said = cli("mig", "restore", code=1)
        assert "GPU 0 can have no instance" in said and "gpuspawner mig apply" in said, forged
        assert machine.calls() == [] and machine.layout() == []
    cli("mig", "apply", "0", "4g.20gb", "--yes")
    assert machine.layout() == [("4g.20gb", 0, 1)]
