"""A drain that members who wait would feel, on the page and by REST. Real: everything of ours,
SQLite, HTTP. Stand-ins: simulated devices, a clock that stands still, a small HTTP server for the
Hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from tests.golden.site import ADMIN, Site


@pytest.fixture
def site(tmp_path: Path, migrated_file: Path) -> Iterator[Site]:
    """A site whose only GPU has a session of an hour; Bob was told to start after it."""
    with Site(tmp_path, migrated_file, "simulated:1xT4") as site:
        for user in ("ada", "bob"):
            site.services.members.membership_returned(user, actor="sign-in")
            got = site.services.queue.ask(
                ServerRef(user),
                Request(devices=1, environment="torch"),
                engine="local",
                terms=Terms(seconds=3600, wait=True),
            )
            if isinstance(got, Lease):
                site.services.leases.confirm(got.id)
        yield site


SENTENCE = (
    "GPU 0 is not drained: without it, 1 waiting member could start later than they were told (by "
    "10:00 UTC at the latest). Wait until they have started, or drain it anyway."
)


def test_drain_that_breaks_a_latest_start_has_to_be_confirmed(site: Site) -> None:
    (device,) = site.services.devices.look().devices
    site.service(ADMIN, "devices")
    session = site.session(ADMIN)
    url = f"{site.service_url()}api/devices/0/drain"
    proof = {"X-XSRFToken": session.cookies.get("_xsrf", path="/services/gpu/")}
    for sent in ({}, {"anyway": False, "reason": "a fan"}):
        answer = session.post(url, json=sent, headers=proof, timeout=60)
        assert (answer.status_code, answer.json()["error"]) == (409, "cannot_drain")
        assert answer.json()["message"] == SENTENCE
    assert session.post(url, json={"anyway": 1}, headers=proof, timeout=60).status_code == 400

    form = {"device": device.uuid, "drained": "yes", "reason": "a <new> fan"}
    asked = site.service(ADMIN, "devices", form)
    assert "Drain GPU 0 anyway?" in asked and SENTENCE in asked
    for field in ('name="drained" value="yes"', 'value="a &lt;new&gt; fan"', 'name="confirm"'):
        assert field in asked
    assert not site.services.devices.closures()
    assert "done=drain" in site.service(ADMIN, "devices", form | {"confirm": "yes"})
    assert site.services.devices.closures()[device.uuid].reason == "a <new> fan"

    site.services.devices.undrain(device.uuid, actor="kim", reason="it stays")
    answer = session.post(url, json={"anyway": True}, headers=proof, timeout=60)
    assert answer.json()["changed"] is True
