"""Sick GPUs on the command line and to Prometheus. Real: the command as a process, both
databases."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from gpuspawner.monitoring.health import Symptom
from gpuspawner.monitoring.health_service import FoundSymptoms
from gpuspawner.monitoring.metrics import HubCollector
from gpuspawner.services import Broker
from tests.support.command import ADA, Command, grant


def find(broker: Broker, index: int, cause: str, said: str) -> str:
    """Find this of a device; its UUID."""
    uuid = broker.look().devices[index].uuid
    broker.health.judge_health({uuid: FoundSymptoms((Symptom(cause, said, broker.clock()),))})
    return uuid


def test_who_types_sees_what_is_sick_and_gives_it_out_again(cli: Command, broker: Broker) -> None:
    lease = grant(broker, ADA, devices=1, model="A100")
    find(broker, 0, "xid link", "Xid 79: it lost power, NVLink or the bus")
    find(broker, 2, "slowed", "slowed down: power brake")
    printed = cli("devices").stdout
    assert f"ada, lease {lease.id}; drained by health: Xid 79: it lost power" in printed
    assert "on watch: slowed down: power brake" in printed
    first, second, third = (device["health"] for device in cli.json("devices")["devices"])
    assert (first["verdict"], first["cause"], first["falls"]) == ("sick", "xid link", 1)
    assert (second, third["verdict"]) == (None, "watch")

    checked = cli("check", "--no-containers", code=1).stdout
    assert "1 device sick" in checked
    assert "Sick devices come back after a probe, or by gpuspawner undrain. 0 (" in checked

    broker.health.probed(lease.uuids[0], "memory changed by itself")
    assert "its last probe failed: memory changed by itself" in cli("devices").stdout
    cli("undrain", "0", "--reason", "a new cable")
    assert cli.json("devices")["devices"][0]["health"]["verdict"] == "watch"
    assert "sick" not in cli("check", "--no-containers", code=1).stdout
    trail = [(line["actor"], line["action"]) for line in cli.json("trail")]
    assert trail == [("cli:root", "undrain"), ("health", "probe"), ("health", "drain")]


def test_prometheus_hears_how_devices_are(broker: Broker) -> None:
    sick = find(broker, 0, "ecc", "3 memory errors that ECC could not correct")
    watched = find(broker, 2, "slowed", "slowed down: power brake")
    broker.devices.drain("1", actor="root")
    told = {
        (sample.name, sample.labels.get("UUID", "") or sample.labels.get("reason", "")): sample
        for family in text_string_to_metric_families(HubCollector(broker).text().decode())
        for sample in family.samples
    }
    assert told["gpuspawner_device_health", sick].value == 2
    assert told["gpuspawner_device_health", watched].value == 1
    assert told["gpuspawner_device_falls", sick].value == 1
    assert told["gpuspawner_device_sick", sick].labels == {
        "gpu": "0",
        "UUID": sick,
        "modelName": "A100-80GB",
        "cause": "ecc",
    }
    assert ("gpuspawner_device_sick", watched) not in told
    drained = [told["gpuspawner_devices_drained", why].value for why in ("health", "leak", "admin")]
    assert drained == [1, 0, 1]
