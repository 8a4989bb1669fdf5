"""Which browser the tests take, and what it gets. No browser is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import browser


def program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o755)
    return str(path)


def test_playwrights_browser_is_taken_only_without_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(RuntimeError, match="no Chromium is installed"):
        browser.chromium()
    own = program(tmp_path / ".cache/ms-playwright/chromium-1/chrome-linux/chrome")
    assert browser.chromium() == own
    debian = program(tmp_path / "bin/chromium")
    assert browser.chromium() == debian


def test_preloaded_libraries_of_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    ours = browser.environment()["LD_PRELOAD"]
    monkeypatch.setenv("LD_PRELOAD", "/opt/other.so")
    assert browser.environment()["LD_PRELOAD"].split() == ["/opt/other.so", ours]
