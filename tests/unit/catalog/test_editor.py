"""Edits of an admin's catalog and the files beside it: what was written stays, to the letter, but
for what was asked. Real: files."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import pytest

from gpuspawner.catalog.editor import (
    MOST_CHANGES,
    CatalogFile,
    changes,
    changes_file,
    entry_of,
    packages_file,
)
from gpuspawner.catalog.loader import load
from gpuspawner.catalog.models import Environment
from gpuspawner.core.errors import ConfigError
from gpuspawner.engines.images import ENTRY

DIGEST = "sha256:" + "0123456789abcdef" * 4
NEW = f"lab:2@{DIGEST}"


def catalog(tmp_path: Path, text: str) -> CatalogFile:
    path = tmp_path / "catalog.yaml"
    path.write_text(text, encoding="utf-8")
    return CatalogFile(path)


@pytest.mark.parametrize(
    "before, after",
    [
        ("- slug: a\n  image: lab:1", "- slug: a\n  image: NEW"),
        ("- slug: a\n  image: 'lab:1'   # ours\n", "- slug: a\n  image: 'NEW'   # ours\n"),
        ('-   image: "lab:1"\n    slug: a\n\n# end', '-   image: "NEW"\n    slug: a\n\n# end'),
        ("- {slug: a, image: lab:1, default: true}\n", "- {slug: a, image: NEW, default: true}\n"),
        (
            "- slug: ü\n".replace("ü", "b")
            + "  display_name: Ünï 日本\n  image: lab:1\n- slug: a\n"
            "  image: lab:1\n",
            "- slug: b\n  display_name: Ünï 日本\n  image: lab:1\n- slug: a\n  image: NEW\n",
        ),
    ],
)
def test_image_edit_preserves_the_rest_of_the_file(tmp_path: Path, before: str, after: str) -> None:
    file = catalog(tmp_path, f"environments:\n{before}")
    file.set_keys("a", {"image": NEW})
    assert file.path.read_text(encoding="utf-8") == f"environments:\n{after}".replace("NEW", NEW)
    assert load(file.path).get("a").image == NEW


def test_missing_keys_are_added_to_the_entry(tmp_path: Path) -> None:
    file = catalog(
        tmp_path, "environments:\n- image: lab:1\n  slug: a # first\n\n- slug: b\n  image: x"
    )
    file.set_keys("a", {"image": NEW, "tested_on": "2026-11-22"})
    assert file.path.read_text(encoding="utf-8") == (
        f"environments:\n- image: {NEW}\n  slug: a # first\n  tested_on: 2026-11-22\n\n"
        "- slug: b\n  image: x"
    )
    file.set_keys("a", {"tested_on": "2026-11-23"})
    assert str(load(file.path).get("a").tested_on) == "2026-11-23"


def test_change_and_new_entry_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    before = "environments:\n- slug: a # ours\n  image: lab:1\n# end\n"
    file = catalog(tmp_path, before)
    for slug in ("a", "b c"):
        with pytest.raises(ConfigError):
            file.set_keys("a", {"image": NEW}, beside={"slug": slug, "image": "lab:1"})
        assert file.path.read_text(encoding="utf-8") == before
    file.set_keys("a", {"image": NEW}, beside={"slug": "old", "image": "lab:1"})
    found = load(file.path)
    assert [(e.slug, e.image) for e in found.environments] == [("a", NEW), ("old", "lab:1")]
    assert "- slug: a # ours\n" in file.path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text, why",
    [
        ("environments:\n- &a\n  slug: a\n  image: x\n- <<: *a\n  slug: b\n", "share"),
        ("environments:\n- slug: b\n  image: &i x\n- slug: a\n  image: *i\n", "share"),
        ("environments:\n- slug: a\n  image: >-\n    x\n", "not plain text"),
        ("environments:\n- {slug: a, image: x}\n", "braces"),
    ],
)
def test_unsafe_edit_is_rejected_and_file_stays_unchanged(
    tmp_path: Path, text: str, why: str
) -> None:
    file = catalog(tmp_path, text)
    with pytest.raises(ConfigError, match=f"was not changed: .*{why}.* Edit it by hand."):
        file.set_keys("a", {"image": NEW, "tested_on": "2026-11-22"})
    assert file.path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "before, after",
    [
        ("environments:\n- slug: a\n  image: x", "\n\nNEW"),
        ("environments:\n  - slug: a\n    image: x # its own\n  # the end\n", None),
        ("environments:\n- slug: a\n  image: x\n  description: |\n    One.\n\n    Two.\n", None),
        ("environments:\n- slug: a\n  image: x\n  devices: {max: 2}\n\n\ndatasets: {}\n", None),
    ],
)
def test_new_entry_is_appended_after_the_last_one(
    tmp_path: Path, before: str, after: str | None
) -> None:
    file = catalog(tmp_path, before)
    file.add({"slug": "new", "display_name": "日本: 2.10", "image": NEW, "devices": {"max": 0}})
    text = file.path.read_text(encoding="utf-8")
    assert [e.slug for e in load(file.path).environments] == ["a", "new"]
    made = load(file.path).get("new")
    assert (made.display_name, made.image, made.cpu_only) == ("日本: 2.10", NEW, True)
    kept = [line for line in before.splitlines() if line]
    assert [line for line in text.splitlines() if line in kept] == kept
    if after is not None:
        assert text.startswith(before + after.replace("NEW", "- slug: new"))


def test_invalid_new_entry_leaves_the_file_unchanged(tmp_path: Path) -> None:
    text = "environments:\n- slug: a\n  image: x\n"
    file = catalog(tmp_path, text)
    for entry in ({"slug": "a", "image": "y"}, {"slug": "../b", "image": "y"}, {"slug": "b"}):
        with pytest.raises(ConfigError):
            file.add(entry)
    assert file.path.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["catalog.yaml"]
    file = catalog(tmp_path, "environments: [{slug: a, image: x}]\n")
    with pytest.raises(ConfigError, match=r"in brackets\. Edit it by hand"):
        file.add({"slug": "b", "image": "y"})


def test_edit_keeps_file_mode_and_symlink(tmp_path: Path) -> None:
    file = catalog(tmp_path, "environments:\n- slug: a\n  image: x\n")
    file.path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(file.path)
    CatalogFile(link).set_keys("a", {"image": NEW})
    assert link.is_symlink() and load(link).get("a").image == NEW
    assert file.path.stat().st_mode & 0o777 == 0o640


# Entries from labels.


def test_unlabelled_image_gets_an_entry_from_its_name() -> None:
    entry = entry_of("registry.example.org:5000/team/My_Image:2.1", {}, {"numpy": "2.0"})
    assert entry == {
        "slug": "my-image",
        "display_name": "my-image",
        "image": "registry.example.org:5000/team/My_Image:2.1",
    }
    assert entry_of("___", {}, {})["slug"] == "image"


def test_image_labels_become_a_catalog_entry() -> None:
    labels = {
        "org.opencontainers.image.title": "  PyTorch\n2 ",
        "org.opencontainers.image.documentation": "https://example.org/docs",
        "org.opencontainers.image.source": "javascript:alert(1)",
        "org.opencontainers.image.vendor": "The lab",
        ENTRY + "packages": "torch ruamel.yaml not-there",
        ENTRY + "devices": "1-4",
        ENTRY + "shm_size": "8G",
    }
    packages = {"torch": "2.13.0+cpu", "ruamel-yaml": "0.19", "torchvision": "1"}
    assert entry_of("x/torch:1", labels, packages, "pytorch") == {
        "slug": "pytorch",
        "display_name": "PyTorch 2",
        "image": "x/torch:1",
        "frameworks": {"torch": "2.13.0+cpu", "ruamel.yaml": "0.19"},
        "devices": {"default": 1, "max": 4},
        "shm_size": "8G",
        "links": {"Documentation": "https://example.org/docs"},
        "maintainer": "The lab",
    }


@pytest.mark.parametrize("text", ["4", "4-1", "-1-2", "1-4000", "one-two"])
def test_invalid_devices_label_is_named_in_the_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"label gpuspawner\.catalog\.devices of x"):
        entry_of("x", {ENTRY + "devices": text}, {})


# What is inside an image, and what is new in it.


DAY = date(2026, 11, 22)
OLD_PACKAGES = {"torch": "2.12.0", "numpy": "2.4.6", "Attrs": "25.1"}
NEW_PACKAGES = {"torch": "2.13.0", "numpy": "2.4.6", "tqdm": "4.70"}


def test_packages_file_lists_pinned_versions_and_keeps_mode(tmp_path: Path) -> None:
    assert packages_file(tmp_path, "lab", "", NEW_PACKAGES) == "lab.packages.txt"
    text = "torch==2.13.0\nnumpy==2.4.6\ntqdm==4.70\n"
    assert (tmp_path / "lab.packages.txt").read_text() == text
    assert (tmp_path / "lab.packages.txt").stat().st_mode & 0o777 == 0o644
    (tmp_path / "own.txt").write_text("old")
    (tmp_path / "own.txt").chmod(0o600)
    assert packages_file(tmp_path, "lab", "own.txt", NEW_PACKAGES) == "own.txt"
    assert (tmp_path / "own.txt").read_text() == text
    assert (tmp_path / "own.txt").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"lab\.packages\.txt cannot be written: No such file"):
        packages_file(tmp_path / "nowhere", "lab", "", NEW_PACKAGES)


def test_changes_file_puts_newest_first_and_is_truncated(tmp_path: Path) -> None:
    lab = Environment(slug="lab", display_name="Lab", image="lab")
    assert changes_file(tmp_path, lab, NEW_PACKAGES, NEW_PACKAGES, DAY) == "lab.changes.md"
    first = (tmp_path / "lab.changes.md").read_text(encoding="utf-8")
    assert first == f"## {DAY}\n\n* The same packages.\n"
    told = ["Attrs 25.1 is gone", "torch 2.12.0 → 2.13.0", "tqdm 4.70 is new"]
    assert changes(OLD_PACKAGES, NEW_PACKAGES) == told
    changes_file(tmp_path, lab, OLD_PACKAGES, NEW_PACKAGES, DAY)
    second = (tmp_path / "lab.changes.md").read_text(encoding="utf-8")
    assert second == f"## {DAY}\n\n" + "".join(f"* {each}\n" for each in told) + f"\n{first}"
    (tmp_path / "lab.changes.md").write_text("x" * MOST_CHANGES)
    changes_file(tmp_path, lab, OLD_PACKAGES, NEW_PACKAGES, DAY)
    assert len((tmp_path / "lab.changes.md").read_text(encoding="utf-8")) == MOST_CHANGES
