"""Duties that fail, images pulled ahead, texts that are sent. Real: asyncio and files."""

from __future__ import annotations

import asyncio
import logging
import unicodedata
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuspawner.catalog.loader import WatchedCatalog
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.queue.models import Ticket
from gpuspawner.service.image_prefetch import image_of
from gpuspawner.service.notifier import BODY, TITLE, one_line, plain
from gpuspawner.service.worker import Supervisor


@pytest.fixture
def supervisor() -> Supervisor:
    return Supervisor(logging.getLogger("duties"), pauses=(0.0, 0.001))


async def until(look: Callable[[], object]) -> None:
    async def wait() -> None:
        while not look():
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), 60)


async def test_duty_that_always_fails_is_retried(supervisor: Supervisor) -> None:
    async def fail() -> None:
        raise ValueError

    task = asyncio.ensure_future(supervisor.keep("fails", fail))
    await until(lambda: task.done() or _failures(supervisor) > 5)
    assert not task.done()
    task.cancel()


async def test_duty_that_returns_is_not_a_failure(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    await supervisor.keep("returns", lambda: asyncio.sleep(0))
    assert supervisor.states == {}
    assert not caplog.records


def _failures(supervisor: Supervisor) -> int:
    return sum(state.failures for state in supervisor.states.values())


# Images that are pulled ahead.


CATALOG = """
environments:
  - {slug: lab, display_name: Lab, image: "lab:1"}
  - slug: torch
    display_name: Torch
    image: "torch:1"
    profile_options:
      version:
        display_name: Version
        choices:
          old: {display_name: Old, image: "torch:0"}
          new: {display_name: New}
"""


@pytest.fixture
def catalog(tmp_path: Path) -> WatchedCatalog:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    return WatchedCatalog(tmp_path / "catalog.yaml")


def ticket(environment: str, **options: Any) -> Ticket:
    return Ticket(
        id="t1",
        server=ServerRef("ann"),
        request=Request(devices=1, environment=environment),
        options=options,
        created_at=datetime(2026, 3, 2, tzinfo=timezone.utc),
    )


def test_ticket_image_is_known_only_when_unambiguous(
    catalog: WatchedCatalog, tmp_path: Path
) -> None:
    assert image_of(catalog, ticket("lab")) == "lab:1"
    assert image_of(catalog, ticket("lab", own_image="mine:1")) == "mine:1"
    assert image_of(catalog, ticket("torch")) == "", "it is one of two"
    assert image_of(catalog, ticket("gone")) == ""
    assert image_of(WatchedCatalog(tmp_path / "none.yaml"), ticket("lab")) == ""


# What is sent is readable text, whatever names are in it.


ANY = st.text(st.characters(codec=None, categories=None), max_size=300)


def control(text: str) -> list[str]:
    """Characters that end lines or do worse, and halves of characters."""
    return [c for c in text if unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs")]


@given(ANY)
@example("Your server x\r\nBcc: eve@evil.example\r\n\r\nbody")
@example("a\u2028b\u2029c\x85d\x0be\x1cf\ud800g\x00h")
def test_notice_title_is_one_line_without_control_characters(text: str) -> None:
    line = one_line(text)
    assert control(line) == []
    assert len(line.splitlines()) <= 1
    assert len(line) <= TITLE
    line.encode("utf-8")


@given(ANY)
@example("one\r\ntwo\n\nthree\tfour\x1b[31m")
def test_notice_body_has_only_newline_and_tab_control_characters(text: str) -> None:
    body = plain(text)
    assert set(control(body)) <= {"\n", "\t"}
    assert len(body) <= BODY
    body.encode("utf-8")


@pytest.mark.parametrize("text", ["Größe: 80 GB", "José \N{ROCKET} 日本", "a <b> & 'c'"])
def test_notice_text_keeps_ordinary_characters(text: str) -> None:
    assert one_line(text) == text
    assert plain(f"{text}\n{text}") == f"{text}\n{text}"
