"""Who may read the metrics, as Prometheus does, and what the culler asks. Real: hub, proxy,
accounting service, tokens, jupyterhub-idle-culler, Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import jupyterhub_idle_culler
import pytest
import requests
import sqlalchemy as sa
from playwright.sync_api import Browser
from prometheus_client.parser import text_string_to_metric_families

from gpuspawner.db.schema import device_use
from gpuspawner.leases.models import LeaseState, ServerRef
from gpuspawner.ledger.rules import owed
from gpuspawner.monitoring import repository as monitoring_repository
from gpuspawner.monitoring.idle import IdleState
from gpuspawner.monitoring.repository import WatchedLease
from tests.support.browser import screenshot
from tests.support.pages import WIDE, look_over, sign_in
from tests.support.paying_hub import PayingHub
from tests.support.processes import wait_for

CULLER_ASKS = hasattr(jupyterhub_idle_culler, "IdleCuller")
"""Version 1.4 does not; tests/unit/test_config.py has what is done then."""

CONFIG = """
c.GPUCredits.opening_grant = 100_000
c.GPUIdle.policy = {"*": {"mode": "enforce"}}
c.JupyterHub.services.extend([
    {"name": "prometheus", "api_token": "secret-of-prometheus"},
    {"name": "other", "api_token": "secret-of-another"},
])
c.JupyterHub.load_roles.extend([
    {
        "name": "prometheus",
        "scopes": ["custom:gpuspawner:read:metrics", "access:services!service=gpu"],
        "services": ["prometheus"],
    },
    {"name": "other", "scopes": ["access:services!service=gpu"], "services": ["other"]},
])
"""


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    culler = ", cull_idle_after=3" if CULLER_ASKS else ""
    with PayingHub(folder / "hub", CONFIG, services=culler) as hub:
        yield hub


def scrape(hub: PayingHub, token: str = "") -> requests.Response:
    headers = {"Authorization": f"token {token}"} if token else {}
    url = f"{hub.url}/services/gpu/metrics"
    return requests.get(url, headers=headers, timeout=120, allow_redirects=False)


def test_prometheus_scrapes_leases_and_charges(hub: PayingHub) -> None:
    hub.start_server("ada", gpus=1)

    def charged() -> float:
        answer = scrape(hub, "secret-of-prometheus")
        assert answer.status_code == 200, answer.text
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }
        assert samples["gpuspawner_leases", "running"] == 1
        return samples["gpuspawner_credits_charged_total",]

    assert wait_for(charged, "a charge") > 0


def test_metrics_are_denied_to_members_and_strangers(hub: PayingHub) -> None:
    assert scrape(hub, hub.user_token("admin")).status_code == 200
    for token in (hub.user_token("ada"), "secret-of-another", "made up", ""):
        answer = scrape(hub, token)
        assert answer.status_code == 403, token
        assert "gpuspawner_" not in answer.text
        assert answer.text.startswith(("The metrics are for admins", "You do not have access"))


def test_member_snoozes_an_idle_stop(hub: PayingHub, browser: Browser) -> None:
    lease = hub.lease_of("ada")
    assert lease
    now = hub.services.clock()
    warned = IdleState(credit=60.0, warned_at=now, stops_at=now + timedelta(minutes=10))
    later = WatchedLease(warned, now + timedelta(hours=1))  # no minute is judged meanwhile
    hub.services.store.run(
        lambda connection: monitoring_repository.put_watched(connection, lease.id, later),
        write=True,
    )
    page = browser.new_page(viewport=WIDE)
    sign_in(page, hub, "ada", "")
    assert "its GPU is idle" in page.inner_text(".notice.warn:has(form)")
    look_over(page, "idle")
    page.click("text=30 min more")
    page.wait_for_selector("text=Postponed")
    screenshot(page, "idle-put-off")

    def snooze(user: str) -> requests.Response:
        return hub.call(user, "POST", f"leases/{lease.id}/snooze")

    hub.api("POST", "users/bob")
    assert snooze("bob").status_code == 404
    assert snooze("ada").json()["id"] == lease.id
    refused = snooze("ada")
    assert refused.status_code == 409
    assert "it was already postponed 2 times" in refused.text
    found = hub.services.idle.idle_state(ServerRef("ada"))[1]
    assert found and found.state.stops_at == now + timedelta(minutes=70)


if CULLER_ASKS:

    def test_culler_spares_servers_until_gpus_are_idle(hub: PayingHub) -> None:
        """Both servers are without activity for longer than the culler allows."""
        assert hub.spawn("bob", {"gpus": 0}).ok
        # It is culled a few seconds after its start, perhaps before anybody has looked at it.
        of_bob = wait_for(lambda: hub.services.leases.of_account("member:bob"), "bob's lease")
        culled = hub.wait_end(of_bob[0])
        assert culled.started_at is not None, "it was up"
        wait_for(lambda: "Culling server bob" in hub.log_text(), "the culler's word")
        lease = hub.lease_of("ada")
        assert lease and lease.state is LeaseState.RUNNING and not lease.outcome
        rested = WatchedLease(IdleState(credit=0.0), hub.services.clock())
        hub.services.store.run(
            lambda connection: monitoring_repository.put_watched(connection, lease.id, rested),
            write=True,
        )
        wait_for(lambda: hub.lease_of("ada") is None, "the end of ada's server")
        settled = hub.services.leases.get(lease.id)
        assert settled.state is LeaseState.ENDED and settled.ended_at is not None
        assert settled.charged == owed(settled.rate, settled.started_at, settled.ended_at) > 0
        wait_for(lambda: hub.server("ada") is None, "the hub to forget the server")
        assert hub.service("idle-culler") is not None
        assert "Culling server ada" in hub.log_text()


def test_service_samples_every_device(hub: PayingHub) -> None:
    hub.stop()  # so that the minute that goes on is written too
    with hub.services.store.read() as connection:
        rows = connection.execute(sa.select(device_use.c.uuid, device_use.c.samples)).all()
    assert len({uuid for uuid, _ in rows}) == 3
    assert all(samples > 0 for _, samples in rows)
