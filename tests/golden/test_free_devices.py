"""How many GPUs are free is one figure, wherever it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.golden.scenario import start
from tests.golden.site import ADMIN, Site

SCRIPT = {
    "2": {"processes": [[4711, "python"]]},
    "3": {"held_bytes": 8 * 2**30},
    "4": {"error": "It fell off the bus."},
}
"""Two are occupied without a lease, and one is sick."""


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_free_and_total_devices_agree_everywhere(
    tmp_path: Path, migrated_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight devices one is free and one leased; the other six are out of service."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SCRIPT))
    monkeypatch.setenv("GPUSPAWNER_SIMULATION", str(script))
    folder = tmp_path / "site"
    folder.mkdir()
    with Site(folder, migrated_file, "simulated:8xA100-80GB") as site:
        services = site.services
        services.members.membership_returned("ada", actor="sign-in")
        services.ledger.open_account("ada")
        start(services, site.clock, "ada", environment="torch")
        going = start(services, site.clock, "ada", "going", environment="torch")
        views = services.monitoring.overview().devices
        free = [view.device.uuid for view in views if view.state == "free"]
        for uuid in (going.devices[0].uuid, *free[1:]):
            services.devices.drain(uuid, actor="kim", reason="A new fan")

        states = sorted(view.state for view in services.monitoring.overview().devices)
        out = ["drained", "drained", "draining", "occupied", "occupied", "unknown"]
        assert states == sorted([*out, "free", "leased"])

        form, card = text_of(site.hub("ada", "spawn")), text_of(site.hub("", "environments/torch"))
        assert "1 of 2 GPUs free" in form, "the header"
        assert "1 of 2 GPUs free now" in form and "1 of 2 GPUs free now" in card
        assert re.search(r"A100-80GB 1 of 2 3\.60", form), "the table of prices"
        assert "1 of 2 free" in text_of(site.service("ada", "cluster"))
        assert "GPUs 1 of 2 free" in text_of(site.service(ADMIN, "admin"))
        answer = json.loads(site.service("ada", "api/cluster").partition("\n")[2])
        assert (answer["free"], answer["total"]) == (1, 2)
        assert "1 of 2 devices free" in site.command("devices")
        told = json.loads(site.command("devices", "--json"))
        assert (told["free"], told["total"]) == (1, 2)
        metrics = site.service(ADMIN, "metrics")
        for state in ("free", "leased"):
            assert f'gpuspawner_devices{{model="A100-80GB",state="{state}"}} 1' in metrics
