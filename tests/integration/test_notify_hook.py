"""The admin's command, run for each notice. Real: SQLite, processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuspawner.service import notifier
from gpuspawner.services import Broker
from tests.support.processes import command_of, free_port
from tests.support.rounds import Clock, open_broker
from tests.support.telling import choose, notifying, sent, tell, tried


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = open_broker(f"sqlite:///{tmp_path}/store.sqlite", Clock())
    yield broker
    broker.store.close()


async def test_the_hook_gets_each_notice_once(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "a secret of the service")
    monkeypatch.setenv("GPUSPAWNER_DATABASE_URL", "a secret of the service")
    said = tmp_path / "said"
    script = f"import os, sys; open({str(said)!r}, 'a').write(sys.stdin.read() + repr(os.environ))"
    choose(broker, "ada")
    settings = {
        "channels": {"mail": f"mailto://127.0.0.1:{free_port()}?from=a@b.example&to={{address}}"},
        "hook": [sys.executable, "-c", script],
    }
    async with notifying(broker, **settings):
        told = tell(broker, "bob", title="Größe", body="zwei\nZeilen")
        await sent(broker, told)
        text = said.read_text()
        assert json.loads(text.splitlines()[0]) == {
            "key": told.key,
            "user": "bob",
            "kind": "turn",
            "title": "Größe",
            "body": "zwei\nZeilen",
            "at": "2026-03-01T12:00:00.000+00:00",
        }
        assert "a secret of the service" not in text
        await tried(broker, tell(broker, "ada"), 4)  # by mail, which does not go
    assert said.read_text().count('"user": "ada"') == 1


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["/no/such/command"], "cannot be started"),
        (["/bin/sh", "-c", "echo broken pipe of mine >&2; exit 3"], "ended with 3: broken pipe"),
        (["/bin/sh", "-c", "sleep 1000.25 & sleep 1000.25"], "not done in 0.3 s and was killed"),
        (["/bin/sh", "-c", "kill -9 $$"], "ended with -9"),
    ],
)
async def test_a_hook_that_fails_is_logged_and_forgotten(
    broker: Broker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    sentence: str,
) -> None:
    monkeypatch.setattr(notifier, "HOOK_SECONDS", 0.3 if "sleep" in command[-1] else 20)
    async with notifying(broker, hook=command):
        await sent(broker, tell(broker))
    (line,) = [r.getMessage() for r in caplog.records if "Hook for" in r.getMessage()]
    assert sentence in line
    children = psutil.Process().children(recursive=True)
    assert not [p for p in children if "1000.25" in command_of(p)], "what it started is gone too"
