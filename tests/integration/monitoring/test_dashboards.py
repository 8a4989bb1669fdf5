"""What Prometheus and Grafana are given, against the metrics. Real: promtool of the installed
Prometheus, Grafana's own classes of a dashboard, databases."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from gpuspawner.monitoring.health import XIDS
from gpuspawner.monitoring.metrics import HubCollector
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.services import Services
from tests.support.brokers import Clock, open_services, running
from tests.support.processes import REPO

pytestmark = pytest.mark.usefixtures("processes")

DASHBOARD = REPO / "hub_config/grafana.json"
ALERTS = REPO / "hub_config/alerts.yaml"
SERIES = REPO / "tests/support/alerts.yaml"


@pytest.fixture(scope="module")
def told(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of all metrics, of a site where a GPU reports errors and one is in use."""
    file = shutil.copy(migrated_file, tmp_path_factory.mktemp("dashboards"))
    services: Services = open_services(f"sqlite:///{file}", Clock(), gpu_rates={"*": 4})
    lease = running(services, "ada", 1)
    since = services.clock().replace(second=0, microsecond=0)
    services.monitoring.remember_use(
        [DeviceUse(uuid=lease.uuids[0], since=since, seconds=60, xids=(79,))]
    )
    text = HubCollector(services, {"Charges": 1}).text().decode()
    services.store.close()
    return set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What it says; nothing leaves this machine."""
    command = ["promtool", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def queries() -> list[str]:
    """Every query of the dashboard."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def rules() -> list[dict[str, Any]]:
    """Every alert."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


# Alerts.


def test_alerts_fire_on_faults_and_stay_quiet_otherwise(tmp_path: Path) -> None:
    checked = promtool("check", "rules", "--lint-fatal", ALERTS)
    assert checked.returncode == 0, checked.stderr
    file = tmp_path / "series.yaml"
    file.write_text(SERIES.read_text(encoding="utf-8").replace("RULES", str(ALERTS)))
    tried = promtool("test", "rules", file)
    assert tried.returncode == 0, tried.stdout + tried.stderr


def test_every_alert_is_tested_and_uses_only_existing_metrics(told: set[str]) -> None:
    series = SERIES.read_text(encoding="utf-8")
    for rule in rules():
        assert series.count(rule["alert"]) >= 2, f"{rule['alert']}: once quiet, once firing"
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(re.findall(r"gpuspawner_\w+", rule["expr"])) <= told, rule["alert"]


def test_xid_alert_excludes_errors_of_member_programs() -> None:
    """The same errors as those that drain nothing."""
    (program,) = (kind for kind in XIDS if kind.cause == "xid program")
    (rule,) = (rule for rule in rules() if rule["alert"] == "GPUReportsAnError")
    found = re.search(r'xid!~"([\d|]+)"', rule["expr"])
    assert found
    assert tuple(map(int, found[1].split("|"))) == program.codes


# The dashboard.


def test_dashboard_shows_exactly_the_exported_metrics(told: set[str], tmp_path: Path) -> None:
    asked = {name for query in queries() for name in re.findall(r"gpuspawner_\w+", query)}
    assert asked == told
    found = [query.replace("$__rate_interval", "5m") for query in queries()]
    named = [{"record": f"query:{n}", "expr": query} for n, query in enumerate(found)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": named}]}))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stderr


def test_grafana_accepts_every_dashboard_field() -> None:
    """Read by Grafana's own classes and written again, nothing is lost: no name is misspelt."""
    register_default_plugins()
    ours = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert list(_lost(ours, _read(ours))) == []
    ours["panels"][1]["gridPos"]["wide"] = 3
    ours["panels"][2]["targets"][0]["expression"] = "1"
    found = list(_lost(ours, _read(ours)))
    assert found == ["panels.1.gridPos.wide", "panels.2.targets.0.expression"], "it would be seen"


def test_dashboard_panels_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        places = {(x, y) for x in range(at["w"]) for y in range(at["h"])}
        places = {(x + at["x"], y + at["y"]) for x, y in places}
        assert not places & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= places


def _read(dashboard: dict[str, Any]) -> Any:
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


def _lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Where ``theirs`` lacks something of ``ours``, or has it otherwise."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            at = f"{path}.{name}".lstrip(".")
            if name in theirs:
                yield from _lost(value, theirs[name], at)
            else:
                yield at
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _lost(one, other, f"{path}.{number}")
    elif ours != theirs:
        yield path
