"""What cannot be had is a sentence. Real: hub, proxy, Docker Engine, device requests, SQLite."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from gpuspawner.core.units import MICRO
from gpuspawner.engines.base import LABEL_LEASE
from gpuspawner.ledger.models import member_account
from tests.support import images
from tests.support.brokers import services_on
from tests.support.compatibility import HUB_6
from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import (
    GPUHub,
    assert_in_words,
    error_on,
    message_of,
    refused_in_time,
    simulated_uuids,
)
from tests.support.hub import ADMIN

FLEET = "2xA100-80GB,1xT4"
DEVICE = simulated_uuids(FLEET)[0]
SCRIPT = "<script>alert(1)</script>"

CATALOG = f"""
environments:
  - slug: instant
    display_name: Instant
    image: {images.INSTANT}
    default: true
    devices: {{default: 1, max: 8}}
  - slug: cpu
    display_name: Without a GPU
    image: {images.INSTANT}
    devices: {{max: 0}}
  - slug: staff
    display_name: For the staff
    image: {images.INSTANT}
    allowed_groups: [staff]
"""

CONFIG = """
c.GPURates.by_model = {"*": 60}
c.GPUCredits.opening_grant = 100
c.GPUCredits.help_text = "Write to gpu@lab.example for more."
c.GPUDockerSpawner.gpu_limit = lambda spawner: 8 if spawner.user.admin else 3
"""


@pytest.fixture(scope="module")
def hub(hubs: None, engine: PrivateEngine, images: Any, folder: Path) -> Iterator[GPUHub]:
    """Three devices of two models; a balance lasts for an hour and 40 minutes of one."""
    with GPUHub(folder / "hub", engine, CONFIG, fleet=FLEET, catalog=CATALOG) as hub:
        yield hub
    engine.clean()


@pytest.fixture(autouse=True)
def nobody_runs(hub: GPUHub) -> Iterator[None]:
    """Stop what a test left running, so that every test begins with free devices."""
    yield
    hub.stop_all_servers()
    assert not hub.taken()


def rest(hub: GPUHub, user: str, options: dict[str, Any]) -> tuple[int, str]:
    """Ask by REST: the status and the sentence."""
    answer = hub.spawn(user, options)
    assert_in_words(answer.text)
    return answer.status_code, message_of(answer) if answer.text else ""


def form(hub: GPUHub, user: str, options: dict[str, Any]) -> tuple[int, str]:
    """Ask by the form: the status and the sentence in the red box above the form."""
    return _seen_on(hub.send_refused_form(user, options))


def link(hub: GPUHub, user: str, options: dict[str, Any]) -> tuple[int, str]:
    """Ask by a link with ``opt-`` parameters."""
    query = {f"opt-{name}": value for name, value in options.items()}
    return _seen_on(refused_in_time(lambda: hub.open_page(user, "/hub/spawn", **query)))


def stored(hub: GPUHub, user: str, options: dict[str, Any]) -> tuple[int, str]:
    """Write the options where JupyterHub keeps those of the last start, then start anew."""
    hub.browser_of(user).get(f"{hub.url}/hub/home")
    assert hub.api("PATCH", f"users/{user}/server", json={"user_options": options}).ok
    page = hub.open_page(user, "/hub/spawn")  # the form still opens, whatever is stored
    assert page.status_code == 200 and "spawn_form" in page.text
    assert_in_words(page.text)
    answer = hub.api("POST", f"users/{user}/server")
    assert_in_words(answer.text)
    return answer.status_code, message_of(answer)


def _seen_on(page: requests.Response) -> tuple[int, str]:
    assert_in_words(page.text)
    assert SCRIPT not in page.text, "what was asked for is escaped"
    assert "spawn_form" in page.text, "the form is there to choose something else"
    return page.status_code, error_on(page.text).removeprefix("Error: ")


STORED = (stored,) if HUB_6 else ()
ENTRANCES = (rest, form, link, *STORED)


def test_start_is_refused_when_no_device_is_free(hub: GPUHub) -> None:
    hub.spawn_and_wait("holder", {"gpus": 1, "gpu_model": "T4"})
    status, sentence = rest(hub, "member1", {"gpus": 1, "gpu_model": "T4", "wait": False})
    assert status == 409 and sentence.startswith("The only T4 GPU is in use")
    hub.spawn_and_wait("other", {"gpus": 2, "gpu_model": "A100"})
    held = hub.taken()
    for ask in (rest, form):
        status, sentence = ask(hub, "member1", {"gpus": "1", "wait": "no"})
        assert status == 409
        assert sentence.startswith(
            "All 3 GPUs are in use. Expected start in the queue: around "
        ) and sentence.endswith(" (a first guess). Join the queue, or start without a GPU.")
    assert hub.taken() == held and not hub.open_leases("member1")
    # Without a GPU it starts, as the sentence says.
    hub.spawn_and_wait("member1", {"gpus": 0})
    assert hub.environment_of("member1")["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_insufficient_credits_refuse_a_gpu_start(hub: GPUHub) -> None:
    hub.browser_of("poor")
    with services_on(hub.database_url) as services:
        services.ledger.open_account("poor")
        services.ledger.grant(member_account("poor"), -95 * MICRO, actor="admin", reason="poor")
    before = hub.records()
    for ask in (rest, form):
        assert ask(hub, "poor", {"gpus": "1"}) == (
            402,
            "Your balance of 5.00 credits does not cover this: it costs 60.00 credits an hour, and "
            "the first 10 minutes (10.00) must be there at the start. Write to gpu@lab.example for "
            "more. You can start without a GPU: that is free.",
        )
    assert hub.records() == before
    hub.spawn_and_wait("poor", {"environment": "cpu"})
    assert hub.balance("poor") == 5 * MICRO
    assert hub.device_nodes("poor") == []


@pytest.mark.parametrize(
    "user, options, sentence",
    [
        (
            "member1",
            {"gpus": 4},
            "You asked for 4 GPUs; your limit is 3 for one server. Ask for 3 or fewer.",
        ),
        (
            ADMIN,
            {"gpus": 4},
            "You asked for 4 GPUs. This hub has 3 GPUs, and those of one server are of one "
            "model: 2 A100-80GB and 1 T4. Ask for 2 at most.",
        ),
        (
            "member1",
            {"gpus": 2, "gpu_model": "T4"},
            "You asked for 2 GPUs. This hub has 3 GPUs, but only 1 T4. Ask for 1 at most.",
        ),
        (
            "member1",
            {"gpus": 1, "gpu_memory": 100},
            "This hub has no GPU with 100 GB. The most is 80 GB: ask for less.",
        ),
    ],
)
def test_request_beyond_a_limit_is_refused_with_it(
    hub: GPUHub, user: str, options: dict[str, Any], sentence: str
) -> None:
    hub.browser_of(user)
    before = hub.records()
    assert rest(hub, user, options) == (400, sentence)
    assert form(hub, user, options) == (400, sentence)
    assert hub.records() == before


@pytest.mark.parametrize(
    "options, field",
    [
        ({"environment": "nope"}, "environment"),
        ({"gpus": ["1", "1"]}, "gpus"),
        ({"devices": DEVICE}, "devices"),
        ({"spawner_override": "privileged"}, "spawner_override"),
        ({SCRIPT: "x"}, SCRIPT),
    ],
)
def test_unknown_or_injected_fields_are_rejected(
    hub: GPUHub, options: dict[str, Any], field: str
) -> None:
    hub.browser_of("member1")
    before = hub.records()
    for ask in ENTRANCES:
        status, sentence = ask(hub, "member1", options)
        assert status == 400, f"by {ask.__name__}: {status} {sentence}"
        assert field in sentence, f"by {ask.__name__}: {sentence}"
    assert hub.records() == before
    assert not hub.containers()


@pytest.mark.parametrize(
    "options, field",
    [
        ({"gpu_model": ["T4", DEVICE]}, "gpu_model"),
        ({"extra_create_kwargs": {"user": "0"}}, "extra_create_kwargs"),
        ({"devices": [DEVICE], "gpus": 0}, "devices"),
    ],
)
def test_invalid_json_values_are_rejected(hub: GPUHub, options: dict[str, Any], field: str) -> None:
    hub.browser_of("member1")
    before = hub.records()
    for ask in (rest, *STORED):
        status, sentence = ask(hub, "member1", options)
        assert status == 400 and f"'{field}'" in sentence, f"by {ask.__name__}: {sentence}"
    assert hub.records() == before
    assert not hub.containers()


def test_restricted_environment_is_hidden_and_refused(hub: GPUHub) -> None:
    hub.browser_of("member1")
    before = hub.records()
    for ask in ENTRANCES:
        status, sentence = ask(hub, "member1", {"environment": "staff"})
        assert status == 403 and "'staff'" in sentence and "ask your admin" in sentence
    assert hub.records() == before
    page = hub.open_page("member1", "/hub/spawn").text
    assert "For the staff" not in page


def test_refused_options_do_not_affect_the_next_start(hub: GPUHub) -> None:
    """Nothing of what was refused sticks: not the device, not the image, not the count."""
    rest(hub, "member1", {"devices": DEVICE, "image": "evil:latest", "gpus": 2})
    assert hub.send_form("member1", {"environment": "cpu"}).ok
    hub.wait_server("member1")
    [container] = hub.containers()
    assert container["Image"] == images.INSTANT
    [lease] = hub.open_leases("member1")
    assert lease.devices == () and container["Labels"][LABEL_LEASE] == lease.id
    assert hub.environment_of("member1")["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert hub.device_nodes("member1") == []


def test_running_server_cannot_be_started_twice(hub: GPUHub) -> None:
    hub.spawn_and_wait("member1", {"gpus": 1})
    [lease] = hub.open_leases("member1")
    status, sentence = rest(hub, "member1", {"gpus": 1})
    assert status == 400 and "already running" in sentence
    assert [lease.id for lease in hub.open_leases("member1")] == [lease.id]
    assert len(hub.containers()) == 1
    # A named server is another one, with a lease of its own.
    hub.spawn_and_wait("member1", {"gpus": 1}, server="second")
    assert len(hub.open_leases("member1")) == 2
    assert len(set(hub.taken())) == 2


def test_concurrent_starts_grant_each_device_once(hub: GPUHub) -> None:
    members = [f"crowd{n}" for n in range(8)]
    answers = _at_once(hub, members, {"gpus": 1, "wait": False})
    said = {message_of(a) for a in answers.values() if a.status_code == 409}
    started = [name for name, answer in answers.items() if answer.status_code in (201, 202)]
    assert len(started) == 3 and len([a for a in answers.values() if a.status_code == 409]) == 5
    for member in started:
        hub.wait_server(member)
    assert all(sentence.startswith("All 3 GPUs are in use") for sentence in said)
    assert len(hub.taken()) == 3
    seen = {
        hub.environment_of(lease.server.user)["NVIDIA_VISIBLE_DEVICES"]
        for lease in hub.open_leases()
    }
    assert seen == set(hub.devices), "each one sees its own device and no other"


def _at_once(
    hub: GPUHub, members: list[str], options: dict[str, Any]
) -> dict[str, requests.Response]:
    for member in members:
        hub.api("POST", f"users/{member}")
    line = threading.Barrier(len(members))
    answers: dict[str, requests.Response] = {}

    def ask(member: str) -> None:
        line.wait()
        answers[member] = hub.api("POST", f"users/{member}/server", json=options)

    threads = [threading.Thread(target=ask, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers
