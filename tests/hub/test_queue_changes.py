"""What changes of the line do to spawns that wait. Real: hub, proxy, service, CLI, Chromium."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from gpuspawner.leases.models import ServerRef
from tests.support.hub import ADMIN
from tests.support.lines import (
    CONFIG,
    COUNTED,
    change,
    fill,
    last_word,
    line_up,
    ticket_of,
    wait_looks,
)
from tests.support.pages import sign_in, words
from tests.support.paying_hub import PayingHub
from tests.support.processes import REPO, wait_for

SOON = 5.0
"""Seconds within which the hub sees what others changed; a second on a machine with time."""


@pytest.fixture(scope="module")
def hub(hubs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayingHub]:
    """Three GPUs, all in use."""
    with PayingHub(tmp_path_factory.mktemp("changes") / "hub", CONFIG + COUNTED) as hub:
        fill(hub, "ada", "bob", "cleo")
        yield hub


def command(hub: PayingHub, *arguments: str) -> str:
    """``gpuspawner`` in a shell on the hub's machine; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuspawner", *arguments],
        cwd=hub.folder,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_admins_cancel_ends_the_spawn_with_the_reason(hub: PayingHub) -> None:
    (ticket,) = line_up(hub, "dan")

    def cancel() -> None:
        answer = change(hub, ADMIN, f"queue/{ticket.id}/cancel", reason="the course is over")
        assert answer.json()["outcome"] == "cancelled", answer.text

    message = last_word(hub, "dan", cancel, SOON)
    assert "an admin cancelled it: the course is over." in message
    wait_for(lambda: hub.server("dan") is None, "the end of dan's spawn", timeout=10)
    (told,) = hub.broker.notifications.notices_of("dan")
    assert told.title == "Your place in line is gone" and "the course is over" in told.body
    (trail,) = hub.broker.trail(1)
    assert (trail.actor, trail.action) == (ADMIN, "cancelled")
    assert trail.subject == f"ticket {ticket.id} of dan"
    assert "Cancelled an admin cancelled it: the course is over" in words(hub.page("dan"))
    again = change(hub, ADMIN, f"queue/{ticket.id}/cancel", reason="again")
    assert (again.status_code, again.json()["error"]) == (409, "ticket_ended")


def test_the_command_lines_cancel_does_too(hub: PayingHub) -> None:
    line_up(hub, "eve")
    cancel = ("queue", "cancel", "eve", "--reason", "a mistake")
    message = last_word(hub, "eve", lambda: command(hub, *cancel))
    assert "an admin cancelled it: a mistake." in message
    assert hub.broker.trail(1)[0].actor.startswith("cli:")


def test_a_member_gives_up_on_their_page(hub: PayingHub, browser: Browser) -> None:
    line_up(hub, "fay", "gus")
    page = browser.new_context().new_page()
    sign_in(page, hub, "fay", "")
    assert page.get_by_text("number 1 of 2").is_visible()
    page.get_by_role("button", name="Cancel the wait for my server").click()
    page.wait_for_url(f"{hub.url}/services/gpu/?given_up=1")
    assert page.get_by_text("You gave your place up.").is_visible()
    assert page.get_by_text("it was given up on the member's page").is_visible()
    assert page.get_by_text("My place in line").count() == 0
    wait_for(lambda: hub.server("fay") is None, "the end of fay's spawn", timeout=SOON)
    assert hub.broker.notifications.notices_of("fay") == [], (
        "nobody is told what they did themselves"
    )
    assert "number 1 of 1" in words(hub.page("gus"))
    hub.stop_server("gus")


def test_nobody_gets_a_gpu_while_granting_is_paused(hub: PayingHub) -> None:
    line_up(hub, "hal")
    command(hub, "pause", "--reason", "new fans")
    try:
        hub.stop_server("ada")
        wait_looks(hub, 2)
        waits = ticket_of(hub, "hal")
        assert waits is not None and not waits.outcome
        assert hub.broker.overview().free == 1
    finally:
        command(hub, "resume")
    hub.wait_server("hal", timeout=15)
    hub.stop_server("hal")
    fill(hub, "ada")


def test_nobody_gets_a_device_that_is_drained(hub: PayingHub) -> None:
    lease = hub.broker.lease_of(ServerRef("bob"))
    assert lease is not None
    (uuid,) = lease.uuids
    drained = change(hub, ADMIN, f"devices/{uuid}/drain", reason="a fan").json()
    assert (drained["changed"], drained["drained"]["reason"]) == (True, "a fan")
    line_up(hub, "ida")
    hub.stop_server("bob")
    wait_looks(hub, 2)
    assert ticket_of(hub, "ida") is not None
    states = {view.device.uuid: view.state for view in hub.broker.overview().devices}
    assert states[uuid] == "drained"
    assert "drained by admin: a fan" in command(hub, "devices")
    change(hub, ADMIN, f"devices/{uuid}/undrain").raise_for_status()
    hub.wait_server("ida", timeout=15)
    granted = hub.broker.lease_of(ServerRef("ida"))
    assert granted is not None and granted.uuids == (uuid,)
    hub.stop_server("ida")
    fill(hub, "bob")


def test_who_is_moved_starts_first(hub: PayingHub) -> None:
    _, _, last = line_up(hub, "jan", "kim", "lea")
    assert command(hub, "queue", "move", last.id, "1").endswith("it is number 1 in line now.\n")
    hub.stop_server("cleo")
    hub.wait_server("lea", timeout=15)
    assert ticket_of(hub, "jan") and ticket_of(hub, "kim")
