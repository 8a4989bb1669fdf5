"""Devices from a shell, sick ones too. Real: the command. Simulated: the devices."""

from __future__ import annotations

import glob
from pathlib import Path

import sqlalchemy as sa

from gpuspawner.monitoring.health import Symptom
from gpuspawner.monitoring.health_service import FoundSymptoms
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.services import Services, utcnow
from tests.support.command import ADA, FLEET, Command, grant


def test_devices_command_shows_leases_use_and_rates(cli: Command, services: Services) -> None:
    lease = grant(services, ADA, devices=1, model="A100")
    minute = utcnow().replace(second=0, microsecond=0)
    counts = {"samples": 60, "known": 60, "measured": 60, "busy": 45, "use_sum": 60 * 71}
    services.monitoring.remember_use(
        [DeviceUse(uuid=lease.uuids[0], since=minute, seconds=60, **counts)]
    )
    printed = cli("devices").stdout
    assert printed.splitlines()[0].split() == [
        *("INDEX", "MODEL", "MEMORY", "STATE", "USE", "UUID", "DETAIL")
    ]
    row = next(line for line in printed.splitlines() if " leased " in line)
    assert row.split()[:7] == ["0", "A100-80GB", "80", "GB", "leased", "71", "%"]
    assert row.endswith(f"ada, lease {lease.id}")
    assert printed.splitlines()[-1] == "2 of 3 devices free (simulated)"

    plain = cli.json("devices")
    assert (plain["source"], plain["total"], plain["free"]) == ("simulated", 3, 2)
    first = plain["devices"][0]
    assert (first["uuid"], first["state"]) == (lease.uuids[0], "leased")
    assert (first["lease"], first["member"]) == (lease.id, "ada")
    used = [d["last_minute"] and d["last_minute"]["use_percent"] for d in plain["devices"]]
    assert used == [71.0, None, None]
    assert [m["rate"] for m in plain["models"]] == ["3.600000", "1.000000"]


def test_devices_command_works_without_a_database(tmp_path: Path) -> None:
    cli = Command(tmp_path, f"sqlite:///{tmp_path}/not-yet.sqlite", is_process=False)
    done = cli("devices")
    assert "3 of 3 devices free" in done.stdout
    assert "what is leased is not known" in done.stderr
    assert not (tmp_path / "not-yet.sqlite").exists()


def test_invalid_device_source_is_rejected(
    cli: Command, services: Services, tmp_path: Path
) -> None:
    grant(services, ADA, devices=1)
    config = tmp_path / "jupyterhub_config.py"
    config.write_text(config.read_text().replace(FLEET, "simulated:0xT4"))
    assert "'0xT4' is not part of a simulated fleet" in cli("devices", code=2).stderr


def test_devices_command_leaves_device_records_unchanged(
    cli: Command, services: Services, tmp_path: Path
) -> None:
    services.monitoring.overview()
    with services.store.read() as connection:
        before = connection.execute(sa.text("SELECT * FROM devices ORDER BY uuid")).all()
    config = tmp_path / "jupyterhub_config.py"
    text = config.read_text()
    config.write_text(text.replace(FLEET, "simulated:1xA100-80GB"))
    plain = cli.json("devices")
    assert [device["state"] for device in plain["devices"]] == ["free", "unknown", "unknown"]
    assert plain["devices"][1]["detail"] == "no longer present"
    config.write_text(text.replace(FLEET, "nvml"))
    assert cli.json("devices", code=0 if glob.glob("/dev/nvidia[0-9]*") else 1)
    with services.store.read() as connection:
        after = connection.execute(sa.text("SELECT * FROM devices ORDER BY uuid")).all()
    assert after == before


def find(services: Services, index: int, cause: str, said: str) -> str:
    """Find this of a device; its UUID."""
    uuid = services.devices.look().devices[index].uuid
    services.health.judge_health({uuid: FoundSymptoms((Symptom(cause, said, services.clock()),))})
    return uuid


def test_drained_unhealthy_devices_can_be_undrained(cli: Command, services: Services) -> None:
    lease = grant(services, ADA, devices=1, model="A100")
    find(services, 0, "xid link", "Xid 79: it lost power, NVLink or the bus")
    find(services, 2, "slowed", "slowed down: power brake")
    printed = cli("devices").stdout
    assert f"ada, lease {lease.id}; drained by health: Xid 79: it lost power" in printed
    assert "on watch: slowed down: power brake" in printed
    first, second, third = (device["health"] for device in cli.json("devices")["devices"])
    assert (first["verdict"], first["cause"], first["falls"]) == ("sick", "xid link", 1)
    assert (second, third["verdict"]) == (None, "watch")

    checked = cli("check", "--no-containers", code=1).stdout
    assert "1 device sick" in checked
    assert "Sick devices come back after a probe, or by gpuspawner undrain. 0 (" in checked

    services.health.probed(lease.uuids[0], "memory changed by itself")
    assert "its last probe failed: memory changed by itself" in cli("devices").stdout
    cli("undrain", "0", "--reason", "a new cable")
    assert cli.json("devices")["devices"][0]["health"]["verdict"] == "watch"
    assert "sick" not in cli("check", "--no-containers", code=1).stdout
    trail = [(line["actor"], line["action"]) for line in cli.json("trail")]
    assert trail == [("cli:root", "undrain"), ("health", "probe"), ("health", "drain")]
