"""A catalog's file that is edited while the hub runs: real files, and nothing in their place."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest

from gpuspawner.catalog import loader
from gpuspawner.catalog.loader import WatchedCatalog, watched
from gpuspawner.core.errors import ConfigError

ONE = "environments:\n  - {slug: one, image: base}\n"
TWO = "environments:\n  - {slug: one, image: base}\n  - {slug: two, image: base}\n"
BROKEN = "environments:\n  - {slug: one, image: base, colour: red}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "catalog.yaml"
    file.write_text(ONE)
    return file


def slugs(catalog: WatchedCatalog) -> list[str]:
    return [environment.slug for environment in catalog.current().environments]


def test_catalog_edit_applies_from_the_next_use(path: Path) -> None:
    settings: dict[str, object] = {}
    kept = watched(settings, os.fspath(path))
    assert watched(settings, os.fspath(path)) is kept, "a hub reads a file once for all"
    assert slugs(kept) == ["one"] and kept.current() is kept.current()
    path.write_text(TWO)
    assert slugs(kept) == ["one", "two"]
    other = path.with_name("new.yaml")
    other.write_text(ONE)
    other.replace(path)  # as many editors save
    assert slugs(kept) == ["one"]


def test_invalid_edit_keeps_last_good_catalog_and_logs_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = WatchedCatalog(path)
    good = kept.current()
    path.write_text(BROKEN)
    with caplog.at_level(logging.INFO):
        assert kept.current() is good
        assert kept.current() is good
    assert kept.problem.startswith(f"{path}, line 2: environment 'one' has an unknown key 'colour'")
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"The catalog is invalid; the last valid one stays. {kept.problem}"]
    path.write_text(TWO)
    assert slugs(kept) == ["one", "two"]
    assert kept.problem == ""
    good = kept.current()
    path.unlink()
    assert kept.current() is good
    assert "cannot be read: No such file" in kept.problem


def test_catalog_broken_at_startup_fails_until_it_is_fixed(path: Path) -> None:
    path.write_text(BROKEN)
    kept = WatchedCatalog(path)
    for _ in range(2):
        with pytest.raises(ConfigError, match="unknown key 'colour'"):
            kept.current()
    path.write_text(ONE)
    assert slugs(kept) == ["one"]


def test_missing_referenced_file_is_checked_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "AGAIN", 3600.0)
    kept = WatchedCatalog(path)
    good = kept.current()
    path.write_text("environments:\n  - {slug: new, image: base, changes: new.md}\n")
    assert kept.current() is good
    assert "'changes' of environment 'new' names 'new.md', which cannot be read" in kept.problem
    path.with_name("new.md").write_text("* new")
    assert kept.current() is good  # the catalog itself has not changed, and it is soon after
    monkeypatch.setattr(loader, "AGAIN", 0.0)
    assert slugs(kept) == ["new"]


async def test_event_loop_leaves_catalog_reads_to_a_thread(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = WatchedCatalog(path)
    await kept.refresh()
    good = kept.current()
    reading, go_on = threading.Event(), threading.Event()
    load = loader.load

    def slowly(name: str) -> object:
        assert threading.current_thread() is not threading.main_thread()
        reading.set()
        assert go_on.wait(60)
        return load(name)

    monkeypatch.setattr(loader, "load", slowly)
    await asyncio.to_thread(path.write_text, TWO)
    assert kept.current() is good
    assert reading.wait(60)
    assert kept.current() is good
    go_on.set()
    await kept.refresh()
    assert slugs(kept) == ["one", "two"]
    await asyncio.to_thread(path.write_text, TWO.replace("two", "three"))
    await kept.refresh()
    assert slugs(kept) == ["one", "three"]


def test_concurrent_readers_see_only_valid_catalog_states(path: Path) -> None:
    kept = WatchedCatalog(path)
    assert slugs(kept) == ["one"]  # a file that never was right is refused
    seen: set[tuple[str, ...]] = set()
    wrong: list[Exception] = []
    done = threading.Event()

    def use() -> None:
        while not done.is_set():
            try:
                seen.add(tuple(slugs(kept)))
            except Exception as error:
                wrong.append(error)

    readers = [threading.Thread(target=use) for _ in range(4)]
    for reader in readers:
        reader.start()
    for number in range(60):
        path.write_text((ONE, TWO, BROKEN, "environments: [")[number % 4])
    path.write_text(TWO)
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert seen <= {("one",), ("one", "two")}
    assert slugs(kept) == ["one", "two"]
