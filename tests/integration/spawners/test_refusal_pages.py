"""What a member reads when a start is refused or waits. Real: JupyterHub's application in this
process, its templates and ours, the queue, SQLite. Stand-ins: simulated devices; no server ever
starts."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuspawner.leases.models import Lease, ServerRef
from tests.golden.scenario import fill
from tests.golden.site import Site
from tests.support.brokers import running
from tests.support.gpu_hub import error_on
from tests.support.page_text import text_of
from tests.support.processes import wait_for

TWO_T4 = {"environment": "torch", "gpus": "2", "gpu_model": "T4"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[Site]:
    """Two members wait in the queue, so that nobody gets a GPU at once."""
    with Site(tmp_path_factory.mktemp("site"), migrated_file) as site:
        fill(site)
        # Before the first grant, the Hub releases the leases whose servers do not run.
        site.hub_page("cleo", "spawn", {**TWO_T4, "wait": "no"})
        yield site


class Kept(logging.Handler):
    """Keeps the records of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def log(site: Site) -> Iterator[Kept]:
    site.hub("cleo", "home")  # the Hub sets up its log when it starts
    kept, logger = Kept(), logging.getLogger("JupyterHub")
    logger.addHandler(kept)
    yield kept
    logger.removeHandler(kept)


def test_refused_form_says_what_can_be_done_and_keeps_the_choices(site: Site, log: Kept) -> None:
    page = site.hub_page("cleo", "spawn", {**TWO_T4, "wait": "no"})
    assert page.status_code == 409
    said = text_of(page.text)
    assert "No suitable GPU is free" in said and "Server Options" not in said
    assert error_on(page.text).startswith("2 servers wait for a GPU before you.")
    for way, label in (("queue", "Join the queue"), ("cpu", "Start without a GPU")):
        button = f'form="spawn_form" name="gpuspawner_instead" value="{way}"'
        assert button in page.text and label in said
    assert 'value="2" selected' in page.text, "the form is there, as it was filled in"
    refusals = [r for r in log.records if "2 servers wait for a GPU" in r.getMessage()]
    assert refusals and not any(r.exc_info for r in log.records), "no traceback"


def test_later_refusal_is_a_page_that_leads_back_to_the_form(site: Site) -> None:
    site.hub_page("cleo", "spawn", {**TWO_T4, "wait": "no"})
    page = site.hub_page("cleo", "spawn-pending/cleo")
    assert page.status_code == 409
    said = text_of(page.text)
    assert "No suitable GPU is free" in said and "2 servers wait for a GPU" in said
    assert "Spawn failed" not in said and "Relaunch" not in said
    again = "/hub/spawn/cleo?opt-environment=torch&amp;opt-gpus=2&amp;opt-gpu_model=T4"
    assert f'href="{again}&amp;opt-wait=True">Join the queue' in page.text
    assert f'href="{again}&amp;opt-wait=False">Change options' in page.text
    assert 'href="/hub/spawn/cleo?opt-environment=torch&amp;opt-gpus=0">Start without' in page.text
    assert 'href="/hub/environments">Other environments' in page.text


def test_refusal_says_when_the_queue_would_start_it(site: Site) -> None:
    held = running(site.services, "holder", devices=2, model="A100")
    form = {"environment": "torch", "gpus": "1", "gpu_model": "A100", "wait": "no"}
    for page in (
        site.hub_page("cleo", "spawn", form),
        site.hub_page("cleo", "spawn-pending/cleo"),
    ):
        assert page.status_code == 409
        sentence = error_on(page.text)
        assert "Expected start in the queue: around" in sentence and " UTC" in sentence
        assert sentence.endswith("(a first guess). Join the queue, or start without a GPU.")
        assert re.search(r'<time datetime="[^"]*">\d\d:\d\d UTC', page.text)
    site.services.leases.release(held.id, reason="stopped")


def test_too_many_gpus_and_an_unknown_choice_are_refused_above_the_form(site: Site) -> None:
    page = site.hub_page("cleo", "spawn", {"environment": "torch", "gpus": "3"})
    assert (page.status_code, error_on(page.text)) == (
        400,
        "You asked for 3 GPUs; PyTorch allows 2. Ask for 2 or fewer.",
    )
    assert "This is over your limit" in text_of(page.text)
    page = site.hub_page("cleo", "spawn", {**TWO_T4, "gpuspawner_instead": "both"})
    assert page.status_code == 400 and "gpuspawner_instead" in error_on(page.text)
    page = site.hub_page("cleo", "spawn?opt-environment=torch&opt-gpus=3")
    assert page.status_code == 400
    assert error_on(page.text).startswith("You asked for 3 GPUs")
    assert "This is over your limit" in text_of(page.text)


def test_pending_page_of_a_queued_start_shows_the_queue_and_not_a_start(site: Site) -> None:
    page = site.hub_page("cleo", "spawn", {**TWO_T4, "wait": "no", "gpuspawner_instead": "queue"})
    assert (page.status_code, page.history[0].status_code) == (200, 302)
    ticket = next(t for t in site.services.queue.waiting() if t.server == ServerRef("cleo"))
    assert '<main id="gs-pending" class="gs-queued">' in page.text, (
        "by its style nothing else shows"
    )
    [card] = re.findall(r'<section id="gs-queue".*?</section>', page.text, re.DOTALL)
    said = text_of(card)
    assert re.match(r"Waiting for a GPU Number \d of 3 in the queue Expected start", said)
    assert "Waiting for 2 GPUs of model T4" in said
    assert f'href="/services/gpu/tickets/{ticket.id}/cancel">Leave queue' in card
    assert '<meta http-equiv="refresh" content="3">' in page.text, "without JavaScript"

    [action] = re.findall(r'<form method="post" action="(/hub/without-gpu/[^"]*)"', card)
    answer = site.hub_page("cleo", action.removeprefix("/hub/"), {})
    assert answer.history[0].headers["Location"] == "/hub/spawn-pending/cleo"
    wait_for(lambda: site.services.queue.ticket(ticket.id).outcome, "the end of the wait")
    ended = site.services.queue.ticket(ticket.id)
    assert (ended.outcome, ended.end_reason) == (
        "cancelled",
        "the server was started without a GPU",
    )
    lease = wait_for(lambda: newest_lease(site, "cleo"), "a lease without devices")
    assert lease.devices == () and lease.environment == "torch"


def newest_lease(site: Site, user: str) -> Lease | None:
    """The newest lease of the member's default server."""
    found = site.services.reports.find_leases(user=user, limit=20).found
    return next((lease for lease in found if lease.server == ServerRef(user)), None)
