"""The line on pages and as JSON. Real: JupyterHub, proxy, service, local servers, Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from gpuspawner.queue.models import Ticket
from tests.support.hub import ADMIN, NAVIGATION
from tests.support.pages import mentions, words
from tests.support.paying_hub import PayingHub
from tests.support.tickets import CONFIG, change, fill, line_up, users_in_line

GROUPS = """
c.GPUQueue.group_weights = {"research": 2}
"""


@pytest.fixture(scope="module")
def hub(hubs: None, folder: Path) -> Iterator[PayingHub]:
    """Three GPUs in use; Dan, Eve and Fay wait for one each, in this order."""
    with PayingHub(folder / "hub", CONFIG + GROUPS) as hub:
        fill(hub, "ada", "bob", "cleo")
        hub.api("POST", "groups/research").raise_for_status()
        hub.api("POST", "users/dan").raise_for_status()
        hub.api("POST", "groups/research/users", json={"users": ["dan"]}).raise_for_status()
        line_up(hub, "dan", "eve", "fay")
        yield hub


# Who may see and change what.


def test_only_admins_see_all_tickets(hub: PayingHub) -> None:
    everything = hub.json(ADMIN, "queue").json()
    assert [ticket["user"] for ticket in everything["tickets"]] == ["dan", "eve", "fay"]
    for place, ticket in enumerate(everything["tickets"], start=1):
        assert (ticket["place"], ticket["of"], ticket["gpus"]) == (place, 3, 1)
        assert ticket["waits_for"] == "a GPU; none is free"
        assert sum(part["points"] for part in ticket["parts"]) == pytest.approx(ticket["score"])
    assert [ticket["group"] for ticket in everything["tickets"]] == ["research", "", ""]

    own = hub.json("eve", "queue").json()
    assert (own["waiting"], own["paused"]) == (3, None)
    (ticket,) = own["tickets"]
    assert (ticket["user"], ticket["place"], ticket["of"]) == ("eve", 2, 3)
    assert "parts" not in ticket and "trail" not in own
    for answer in (hub.json("eve", "queue"), hub.page("eve"), hub.page("eve", "cluster")):
        for name in ("dan", "fay", "ada"):
            assert not mentions(answer.text, name), f"{name} in {answer.url}"
    for page in (words(hub.page("eve")), words(hub.page("eve", "cluster"))):
        assert "number 2 of 3" in page and "a GPU; none is free" in page


def test_stranger_cannot_read_or_change_the_queue(hub: PayingHub) -> None:
    dan = tickets(hub)["dan"].id
    for path in ("api/queue", "queue"):
        answer = requests.get(f"{hub.url}/services/gpu/{path}", headers=NAVIGATION, timeout=120)
        assert answer.status_code == 401 or "/hub/login" in answer.url
    for path in (f"api/queue/{dan}/cancel", f"queue/{dan}/cancel", "api/granting"):
        answer = requests.post(f"{hub.url}/services/gpu/{path}", timeout=120)
        assert answer.status_code == (401 if path.startswith("api/") else 403), path
    assert users_in_line(hub) == ["dan", "eve", "fay"]


def test_member_cannot_use_queue_administration(hub: PayingHub) -> None:
    dan = tickets(hub)["dan"].id
    gpu = hub.services.monitoring.overview().devices[0].device.uuid
    before = hub.services.audit.trail()
    for path in ("queue", f"queue/{dan}"):
        assert hub.page("eve", path).status_code == 403
    for path, fields in (
        (f"queue/{dan}/move", {"position": "9"}),
        (f"queue/{dan}/boost", {"points": "-9"}),
        (f"queue/{dan}/cancel", {"reason": "x"}),
        ("queue/granting", {"paused": "yes"}),
        ("devices", {"drained": "yes", "device": gpu}),
    ):
        assert hub.send("eve", path, **fields).status_code == 403, path
    for path, status, sent in (
        (f"queue/{dan}/move", 404, {"position": 9}),
        (f"queue/{dan}/boost", 404, {"points": -9}),
        (f"queue/{dan}/cancel", 404, {"reason": "x"}),
        ("granting", 403, {"paused": True}),
        (f"devices/{gpu}/drain", 403, {}),
        (f"devices/{gpu}/undrain", 403, {}),
    ):
        answer = change(hub, "eve", path, **sent)
        assert (answer.status_code, "dan" in answer.text) == (status, False), answer.text
    own = tickets(hub)["eve"].id
    assert change(hub, "eve", f"queue/{own}/boost", points=9).status_code == 403
    assert change(hub, "eve", f"queue/{own}/move", position=1).status_code == 403
    assert hub.send("eve", f"tickets/{dan}/cancel").status_code == 404
    assert users_in_line(hub) == ["dan", "eve", "fay"]
    assert hub.services.audit.trail() == before and hub.services.devices.closures() == {}


def test_cookie_json_requests_require_an_xsrf_header(hub: PayingHub) -> None:
    fay = tickets(hub)["fay"].id
    url = f"{hub.url}/services/gpu/api/queue/{fay}/boost"
    hub.page(ADMIN, "queue")
    session = hub.browser_of(ADMIN)
    proof = session.cookies.get("_xsrf", path="/services/gpu/") or ""
    cors = {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Site": "same-origin"}
    for headers in ({}, {"X-XSRFToken": "forged"}, {"Authorization": "token forged"}):
        answer = session.post(url, json={"points": 5}, headers=cors | headers, timeout=120)
        assert answer.status_code == 403
        assert "in the header X-XSRFToken" in answer.json()["message"]
        assert tickets(hub)["fay"].boost == 0
    proved = cors | {"X-XSRFToken": proof}
    answer = session.post(url, json={"points": 0.5}, headers=proved, timeout=120)
    assert answer.ok, answer.text
    assert tickets(hub)["fay"].boost == 0.5
    assert change(hub, ADMIN, f"queue/{fay}/boost", points=0).ok, "a token needs none"
    assert tickets(hub)["fay"].boost == 0


# What admins change.


def test_move_and_boost_reorder_queue_and_are_audited(hub: PayingHub) -> None:
    found = tickets(hub)
    answer = hub.send(
        ADMIN, f"queue/{found['fay'].id}/move", position="1", reason="  a demo\tat noon "
    )
    assert answer.history[0].status_code == 303
    assert "The ticket is moved." in words(answer)
    assert users_in_line(hub) == ["fay", "dan", "eve"]
    hub.send(ADMIN, f"queue/{found['eve'].id}/boost", points="24", reason="a deadline")
    assert users_in_line(hub) == ["fay", "eve", "dan"]
    assert "number 1 of 3" in words(hub.page("fay"))

    page = words(hub.page(ADMIN, "queue"))
    for text in ("to place 1: a demo at noon", "+24 points: a deadline", "boost"):
        assert text in page
    boosted, moved = hub.services.audit.trail(2)
    assert (boosted.actor, boosted.action, moved.actor, moved.action) == (
        *(ADMIN, "boost"),
        *(ADMIN, "move"),
    )
    assert (boosted.at - moved.at).total_seconds() > 0

    why = words(hub.page(ADMIN, f"queue?a={found['dan'].id}&b={found['eve'].id}"))
    assert "Why eve is before dan" in why
    assert re.search(r"boost 24\.00 \D+ none 24\.00", why), why
    assert re.search(r"Score \S+ \S+ 2[34]\.\d\d", why), why

    hub.send(ADMIN, f"queue/{found['fay'].id}/move", position="", reason="")
    hub.send(ADMIN, f"queue/{found['eve'].id}/boost", points="0")
    assert users_in_line(hub) == ["dan", "eve", "fay"]


@pytest.mark.parametrize(
    ("action", "fields", "sentence"),
    [
        ("move", {"position": "0"}, "0 is not a position in the queue"),
        ("move", {"position": "1.5"}, "The field 'position' is '1.5': write a whole number."),
        ("move", {"position": "<b>first</b>"}, "write a whole number"),
        ("boost", {"points": ""}, "The field 'points' is ''"),
        ("boost", {"points": "nan"}, "nan is not a number of points"),
        ("boost", {"points": "5", "reason": "x" * 301}, "The reason has 301 characters"),
        ("cancel", {"reason": " "}, "The reason is missing"),
    ],
)
def test_invalid_queue_form_changes_nothing(
    hub: PayingHub, action: str, fields: dict[str, str], sentence: str
) -> None:
    before, trail = hub.services.queue.waiting(), hub.services.audit.trail()
    answer = hub.send(ADMIN, f"queue/{tickets(hub)['dan'].id}/{action}", **fields)
    assert answer.status_code == 400
    assert "Nothing was changed." in words(answer) and sentence in words(answer)
    assert "<b>first" not in answer.text
    if "position" in fields and "<" not in fields["position"]:
        assert f'value="{fields["position"]}"' in answer.text, "what was typed is still there"
    assert (hub.services.queue.waiting(), hub.services.audit.trail()) == (before, trail)


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("queue/{dan}/move", "nonsense", "Send one JSON object; its fields are position, reason."),
        ("queue/{dan}/move", "[" * 60_000, "Send one JSON object"),
        ("queue/{dan}/move", "{}", "The field 'position' is missing."),
        ("queue/{dan}/move", '{"place": 1}', "There is no field 'place'"),
        ("queue/{dan}/move", '{"position": 1.5}', "1.5 is not a position in the queue"),
        ("queue/{dan}/boost", '{"points": NaN}', "nan is not a number of points"),
        ("queue/{dan}/boost", '{"points": 5, "reason": 5}', "The field 'reason' is text."),
        ("queue/{dan}/boost", '{"points": 5, "reason": "\\ud800"}', "unreadable characters"),
        ("queue/{dan}/cancel", "{}", "The reason is missing"),
        ("queue/{dan}/cancel", '{"reason": "x", "user": "dan"}', "There is no field 'user'"),
        ("granting", "{}", "The field 'paused' is true or false."),
        ("granting", '{"paused": true, "reason": null}', "The field 'reason' is text."),
        ("devices/GPU-0/drain", "{}", "No device has the UUID or index 'GPU-0'"),
    ],
)
def test_invalid_queue_json_is_rejected_and_explained(
    hub: PayingHub, path: str, body: str, sentence: str
) -> None:
    before, trail = hub.services.queue.waiting(), hub.services.audit.trail()
    url = f"{hub.url}/services/gpu/api/{path.format(dan=tickets(hub)['dan'].id)}"
    headers = {"Authorization": f"token {hub.user_token(ADMIN)}"}
    answer = requests.post(url, data=body, headers=headers, timeout=120)
    status = 404 if path.startswith("devices/") else 400
    assert (answer.status_code, answer.json()["error"]) == (status, "invalid_request")
    assert sentence in answer.json()["message"]
    assert (hub.services.queue.waiting(), hub.services.audit.trail()) == (before, trail)
    assert hub.services.devices.closures() == {}


def test_unknown_ticket_is_not_found(hub: PayingHub) -> None:
    assert change(hub, ADMIN, "queue/no-such/boost", points=1).status_code == 404
    assert hub.page(ADMIN, "queue/no-such").status_code == 404
    assert hub.send(ADMIN, "queue/no-such/move", position="1").status_code == 404
    assert hub.send(ADMIN, "tickets/no-such/cancel").status_code == 404
    page = hub.page(ADMIN, "queue?a=x&b=y")
    assert page.status_code == 400
    assert "One of the two tickets is no longer waiting." in words(page)


def test_pause_is_shown_on_every_page(hub: PayingHub) -> None:
    reason = "new fans <until> 15:00"
    answer = hub.send(ADMIN, "queue/granting", paused="yes", reason=reason)
    try:
        assert "Granting is paused." in words(answer)
        for user, path in (("eve", ""), ("ada", "notices"), (ADMIN, "admin"), (ADMIN, "queue")):
            page = hub.page(user, path)
            assert "New GPU sessions are paused: new fans &lt;until&gt; 15:00." in page.text
        paused = hub.json("eve", "queue").json()["paused"]
        assert paused == {"reason": reason}
        assert "new GPU sessions to resume" in words(hub.page("eve"))
        form = words(hub.login("gus").get(f"{hub.url}/hub/spawn", timeout=120))
        assert "New GPU sessions are paused (new fans &lt;until&gt; 15:00). You can join" in form
        assert "3 servers wait in the queue." in form
        again = hub.send(ADMIN, "queue/granting", paused="yes", reason="other")
        assert "Already done: nothing was changed." in words(again)
        assert hub.json(ADMIN, "queue").json()["paused"]["reason"] == reason
    finally:
        assert change(hub, ADMIN, "granting", paused=False).json()["changed"] is True
    assert "New GPU sessions are paused" not in words(hub.page("eve"))
    assert [change.action for change in hub.services.audit.trail(2)] == ["resume", "pause"]


def test_drained_device_is_shown_on_every_page(hub: PayingHub) -> None:
    gpu = hub.services.monitoring.overview().devices[0].device.uuid
    answer = hub.send(ADMIN, "devices", drained="yes", device=gpu, reason="a fan")
    try:
        page = words(answer)
        assert "The GPU is drained" in page and "drained by admin: a fan" in page
        assert "1 of 3 GPUs is drained" in words(hub.page(ADMIN, "queue"))
        assert "draining" in words(hub.page("eve", "cluster")), "somebody's session goes on on it"
        assert "a fan" not in words(hub.page("eve", "cluster"))
        states = [device["state"] for device in hub.json("eve", "devices").json()["devices"]]
        assert states == ["draining", "leased", "leased"]
        assert list(hub.json(ADMIN, "queue").json()["drained"]) == [gpu]
    finally:
        undrained = change(hub, ADMIN, "devices/0/undrain", reason="works again").json()
    assert undrained == {"uuid": gpu, "changed": True, "drained": None, "whole_machine": ""}
    assert hub.services.audit.trail(1)[0].detail == "works again"
    assert [view.state for view in hub.services.monitoring.overview().devices] == ["leased"] * 3


def tickets(hub: PayingHub) -> dict[str, Ticket]:
    """The tickets that wait, by member."""
    return {ticket.server.user: ticket for ticket in hub.services.queue.waiting()}
