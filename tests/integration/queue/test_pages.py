"""The queue on pages and as JSON, and who may change it. Real: the service's pages over HTTP,
SQLite. Stand-ins: simulated devices, a clock that stands still, a small HTTP server for the Hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.leases.models import Lease, Request, ServerRef, Sharing, Terms
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.schemas import TicketAnswer
from tests.golden.site import ADMIN, Site
from tests.support.pages import mentions, words

LINE = ["dan", "eve", "fay"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[Site]:
    """Three GPUs in use; Dan, Eve and Fay wait for one each, in this order."""
    fleet = "simulated:2xA100-80GB,1xT4"
    with Site(tmp_path_factory.mktemp("site"), migrated_file, fleet) as site:
        site.services.settings.queue.group_weights = {"research": 2}
        for user in ("ada", "bob", "cleo", *LINE):
            site.clock.forward(minutes=1)
            site.services.members.membership_returned(user, actor="sign-in")
            groups = frozenset({"research"} if user == "dan" else ())
            got = site.services.queue.ask(
                ServerRef(user),
                Request(devices=1),
                engine="local",
                terms=Terms(wait=True, groups=groups),
            )
            if isinstance(got, Lease):
                site.services.leases.confirm(got.id)
        yield site


def tickets(site: Site) -> dict[str, Ticket]:
    """The tickets that wait, by member."""
    return {ticket.server.user: ticket for ticket in site.services.queue.waiting()}


def users_in_line(site: Site) -> list[str]:
    return [ticket.server.user for ticket, _, _ in site.services.positions.order()]


def state(site: Site) -> tuple[Any, ...]:
    services = site.services
    return services.queue.waiting(), services.audit.trail(), services.devices.closures()


# Who may see and change what.


def test_only_admins_see_all_tickets(site: Site) -> None:
    everything = site.call(ADMIN, "queue").json()
    assert [ticket["user"] for ticket in everything["tickets"]] == LINE
    for place, ticket in enumerate(everything["tickets"], start=1):
        assert (ticket["place"], ticket["of"], ticket["gpus"]) == (place, 3, 1)
        assert ticket["waits_for"] == "a GPU; none is free"
        assert sum(part["points"] for part in ticket["parts"]) == pytest.approx(ticket["score"])
    assert [ticket["group"] for ticket in everything["tickets"]] == ["research", "", ""]

    own = site.call("eve", "queue").json()
    assert (own["waiting"], own["paused"]) == (3, None)
    (ticket,) = own["tickets"]
    assert (ticket["user"], ticket["place"], ticket["of"]) == ("eve", 2, 3)
    assert (ticket["sharing"], ticket["gpu_memory_bytes"]) == ("whole", 0)
    share = Request(devices=1, sharing=Sharing.SLOT, memory_bytes=4 * 10**9)
    told = TicketAnswer.of(ticket=replace(tickets(site)["eve"], request=share), standing=None)
    assert (told.sharing, told.gpu_memory_bytes) == ("slot", 4 * 10**9)
    assert "parts" not in ticket and "trail" not in own
    pages = [site.answer("eve", path) for path in ("", "cluster")]
    for answer in (site.call("eve", "queue"), *pages):
        for name in ("dan", "fay", "ada"):
            assert not mentions(answer.text, name), f"{name} in {answer.url}"
    for page in map(words, pages):
        assert "number 2 of 3" in page and "a GPU; none is free" in page


def test_member_can_neither_change_nor_find_tickets(site: Site) -> None:
    """Of another's ticket not even that it is there is told."""
    before, gpu = state(site), site.services.devices.look().devices[0].uuid
    dan, own = tickets(site)["dan"].id, tickets(site)["eve"].id
    for path, status, sent in (
        (f"queue/{dan}/move", 404, {"position": 9}),
        (f"queue/{dan}/boost", 404, {"points": -9}),
        (f"queue/{dan}/cancel", 404, {"reason": "x"}),
        (f"queue/{own}/boost", 403, {"points": 9}),
        (f"queue/{own}/move", 403, {"position": 1}),
        ("granting", 403, {"paused": True}),
        (f"devices/{gpu}/drain", 403, {}),
    ):
        answer = site.call("eve", path, json=sent)
        assert (answer.status_code, "dan" in answer.text) == (status, False), answer.text
    assert site.answer("eve", f"tickets/{dan}/cancel", {}).status_code == 404
    assert state(site) == before


def test_cookie_json_requests_require_an_xsrf_header(site: Site) -> None:
    path = f"queue/{tickets(site)['fay'].id}/boost"
    cookie = site.answer(ADMIN, "queue").request.headers["Cookie"]
    [proof] = re.findall(r"_xsrf=([^;]+)", cookie)
    cors = {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Site": "same-origin"}
    forged = ({}, {"X-XSRFToken": "forged"}, {"Authorization": "token forged"})
    for headers in forged:
        answer = site.answer(ADMIN, f"api/{path}", json={"points": 5}, headers=cors | headers)
        assert answer.status_code == 403
        assert "in the header X-XSRFToken" in answer.json()["message"]
        assert tickets(site)["fay"].boost == 0
    proved = cors | {"X-XSRFToken": proof}
    answer = site.answer(ADMIN, f"api/{path}", json={"points": 0.5}, headers=proved)
    assert answer.ok, answer.text
    assert tickets(site)["fay"].boost == 0.5
    assert site.call(ADMIN, path, json={"points": 0}).ok, "a token needs none"
    assert tickets(site)["fay"].boost == 0


# What admins change.


def test_move_and_boost_reorder_queue_and_are_audited(site: Site) -> None:
    found = tickets(site)
    move, boost = f"queue/{found['fay'].id}/move", f"queue/{found['eve'].id}/boost"
    answer = site.answer(ADMIN, move, {"position": "1", "reason": "  a demo\tat noon "})
    assert answer.history[0].status_code == 303
    assert "The ticket is moved." in words(answer)
    assert users_in_line(site) == ["fay", "dan", "eve"]
    site.clock.forward(seconds=1)
    site.answer(ADMIN, boost, {"points": "24", "reason": "a deadline"})
    assert users_in_line(site) == ["fay", "eve", "dan"]
    assert "number 1 of 3" in words(site.answer("fay", ""))

    page = words(site.answer(ADMIN, "queue"))
    for text in ("to place 1: a demo at noon", "+24 points: a deadline", "boost"):
        assert text in page
    boosted, moved = site.services.audit.trail(2)
    assert [(change.actor, change.action) for change in (boosted, moved)] == [
        (ADMIN, "boost"),
        (ADMIN, "move"),
    ]

    why = words(site.answer(ADMIN, f"queue?a={found['dan'].id}&b={found['eve'].id}"))
    assert "Why eve is before dan" in why
    assert re.search(r"boost 24\.00 \D+ none 24\.00", why), why
    assert re.search(r"Score \S+ \S+ 2[34]\.\d\d", why), why

    site.answer(ADMIN, move, {"position": "", "reason": ""})
    site.answer(ADMIN, boost, {"points": "0"})
    assert users_in_line(site) == LINE


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
    site: Site, action: str, fields: dict[str, str], sentence: str
) -> None:
    before = state(site)
    answer = site.answer(ADMIN, f"queue/{tickets(site)['dan'].id}/{action}", fields)
    assert answer.status_code == 400
    assert "Nothing was changed." in words(answer) and sentence in words(answer)
    assert "<b>first" not in answer.text
    if "position" in fields and "<" not in fields["position"]:
        assert f'value="{fields["position"]}"' in answer.text, "what was typed is still there"
    assert state(site) == before


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
    site: Site, path: str, body: str, sentence: str
) -> None:
    before = state(site)
    answer = site.call(ADMIN, path.format(dan=tickets(site)["dan"].id), data=body)
    status = 404 if path.startswith("devices/") else 400
    assert (answer.status_code, answer.json()["error"]) == (status, "invalid_request")
    assert sentence in answer.json()["message"]
    assert state(site) == before


def test_unknown_ticket_is_not_found(site: Site) -> None:
    assert site.call(ADMIN, "queue/no-such/boost", json={"points": 1}).status_code == 404
    assert site.answer(ADMIN, "queue/no-such").status_code == 404
    assert site.answer(ADMIN, "queue/no-such/move", {"position": "1"}).status_code == 404
    assert site.answer(ADMIN, "tickets/no-such/cancel", {}).status_code == 404
    page = site.answer(ADMIN, "queue?a=x&b=y")
    assert page.status_code == 400
    assert "One of the two tickets is no longer waiting." in words(page)


def test_pause_is_shown_on_every_page(site: Site, request: pytest.FixtureRequest) -> None:
    reason = "new fans <until> 15:00"
    pause = {"paused": "yes", "reason": reason}
    request.addfinalizer(lambda: site.services.devices.resume(actor=ADMIN))
    assert "Granting is paused." in words(site.answer(ADMIN, "queue/granting", pause))
    for user, path in (("eve", ""), ("ada", "notices"), (ADMIN, "admin"), (ADMIN, "queue")):
        page = site.answer(user, path)
        assert "New GPU sessions are paused: new fans &lt;until&gt; 15:00." in page.text
    assert site.call("eve", "queue").json()["paused"] == {"reason": reason}
    assert "new GPU sessions to resume" in words(site.answer("eve", ""))
    again = site.answer(ADMIN, "queue/granting", pause | {"reason": "other"})
    assert "Already done: nothing was changed." in words(again)
    assert site.call(ADMIN, "queue").json()["paused"]["reason"] == reason
    site.clock.forward(seconds=1)
    assert site.call(ADMIN, "granting", json={"paused": False}).json()["changed"] is True
    assert "New GPU sessions are paused" not in words(site.answer("eve", ""))
    assert [change.action for change in site.services.audit.trail(2)] == ["resume", "pause"]


def test_drained_device_is_shown_on_every_page(site: Site, request: pytest.FixtureRequest) -> None:
    gpu = site.services.devices.look().devices[0].uuid
    request.addfinalizer(lambda: site.services.devices.undrain(gpu, actor=ADMIN))
    page = words(
        site.answer(ADMIN, "devices", {"drained": "yes", "device": gpu, "reason": "a fan"})
    )
    assert "The GPU is drained" in page and "drained by admin: a fan" in page
    assert "1 of 3 GPUs is drained" in words(site.answer(ADMIN, "queue"))
    cluster = words(site.answer("eve", "cluster"))
    assert "draining" in cluster and "a fan" not in cluster, "somebody's session continues on it"
    states = [device["state"] for device in site.call("eve", "devices").json()["devices"]]
    assert states == ["draining", "leased", "leased"]
    assert list(site.call(ADMIN, "queue").json()["drained"]) == [gpu]
    site.clock.forward(seconds=1)
    undrained = site.call(ADMIN, "devices/0/undrain", json={"reason": "works again"}).json()
    assert undrained == {"uuid": gpu, "changed": True, "drained": None, "whole_machine": ""}
    assert site.services.audit.trail(1)[0].detail == "works again"
    states = [view.state for view in site.services.monitoring.overview().devices]
    assert states == ["leased"] * 3
