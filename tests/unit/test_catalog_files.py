"""What is inside an image, and what is new in it, as files beside the catalog."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from gpuspawner.catalog.editor import MOST_CHANGES, changes, changes_file, packages_file
from gpuspawner.catalog.models import Environment
from gpuspawner.core.errors import ConfigError

DAY = date(2026, 11, 22)
OLD = {"torch": "2.12.0", "numpy": "2.4.6", "Attrs": "25.1"}
NEW = {"torch": "2.13.0", "numpy": "2.4.6", "tqdm": "4.70"}


def test_packages_are_lines_in_a_file_of_the_environments_name(tmp_path: Path) -> None:
    assert packages_file(tmp_path, "lab", "", NEW) == "lab.packages.txt"
    text = "torch==2.13.0\nnumpy==2.4.6\ntqdm==4.70\n"
    assert (tmp_path / "lab.packages.txt").read_text() == text
    assert (tmp_path / "lab.packages.txt").stat().st_mode & 0o777 == 0o644
    (tmp_path / "own.txt").write_text("old")
    (tmp_path / "own.txt").chmod(0o600)
    assert packages_file(tmp_path, "lab", "own.txt", NEW) == "own.txt"
    assert (tmp_path / "own.txt").read_text() == text
    assert (tmp_path / "own.txt").stat().st_mode & 0o777 == 0o600


def test_changes_name_what_is_new_gone_and_other() -> None:
    assert changes(OLD, NEW) == ["Attrs 25.1 is gone", "torch 2.12.0 → 2.13.0", "tqdm 4.70 is new"]
    assert changes(NEW, NEW) == []


def test_the_newest_changes_come_first_and_the_oldest_go(tmp_path: Path) -> None:
    lab = Environment(slug="lab", display_name="Lab")
    assert changes_file(tmp_path, lab, NEW, NEW, DAY) == "lab.changes.md"
    first = (tmp_path / "lab.changes.md").read_text(encoding="utf-8")
    assert first == f"## {DAY}\n\n* The same packages.\n"
    changes_file(tmp_path, lab, OLD, NEW, DAY)
    second = (tmp_path / "lab.changes.md").read_text(encoding="utf-8")
    assert second.startswith(f"## {DAY}\n\n* Attrs 25.1 is gone\n* torch 2.12.0 → 2.13.0\n")
    assert second.endswith(f"\n\n{first}")
    (tmp_path / "lab.changes.md").write_text("x" * MOST_CHANGES)
    changes_file(tmp_path, lab, OLD, NEW, DAY)
    assert len((tmp_path / "lab.changes.md").read_text(encoding="utf-8")) == MOST_CHANGES


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lab\.packages\.txt cannot be written: No such file"):
        packages_file(tmp_path / "nowhere", "lab", "", NEW)
