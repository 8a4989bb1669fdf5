"""Files beside the catalog, on a real file system: none is read from outside of its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuspawner.catalog import parser
from gpuspawner.catalog.loader import Catalog, load
from gpuspawner.core.errors import ConfigError

KEYS = {
    "logo": "logo.svg",
    "packages": "packages.txt",
    "sample_notebook": "first.ipynb",
    "changes": "changes.md",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A catalog's folder, with files of every kind in the one above it."""
    for name in KEYS.values():
        (tmp_path / name).write_text("secret")
    (tmp_path / "inner").mkdir()
    return tmp_path / "inner"


def write(folder: Path, key: str, name: str) -> Path:
    path = folder / "catalog.yaml"
    path.write_text(f"environments:\n  - slug: base\n    image: base\n    {key}: {name!r}\n")
    return path


@pytest.mark.parametrize("key", KEYS)
def test_file_beside_the_catalog_is_found(tmp_path: Path, key: str) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / KEYS[key]).write_text("content ü", encoding="utf-8")
    read = load(write(tmp_path, key, f"more/./{KEYS[key]}"))
    assert getattr(read.get("base"), key) == f"more/{KEYS[key]}"
    assert read.folder == tmp_path
    assert parser.read_text(tmp_path, key, f"more/{KEYS[key]}") == "content ü"


@pytest.mark.parametrize("key", KEYS)
def test_file_paths_cannot_escape_the_catalog_folder(folder: Path, key: str) -> None:
    for prefix in ("../", "a/../../", "..\\", "a/..\\"):
        with pytest.raises(ConfigError) as caught:
            load(write(folder, key, prefix + KEYS[key]))
        assert f"catalog.yaml, line 4: '{key}' of environment 'base'" in caught.value.message
        assert "Write a file's name without '..' and a first '/'" in caught.value.message
        with pytest.raises(ValueError, match="without"):
            parser.read(folder, key, prefix + KEYS[key])

    (folder / KEYS[key]).symlink_to(folder.parent / KEYS[key])
    (folder / "out").symlink_to(folder.parent)
    for name in (KEYS[key], f"out/{KEYS[key]}"):
        with pytest.raises(ConfigError, match="a link that leads out of the catalog's folder"):
            load(write(folder, key, name))


def test_symlink_within_the_catalog_folder_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "changes.md").write_text("* new")
    (tmp_path / "changes.md").symlink_to("..data/changes.md")
    assert load(write(tmp_path, "changes", "changes.md")).get("base").changes == "changes.md"


@pytest.mark.parametrize("key", KEYS)
def test_missing_irregular_or_oversized_file_is_rejected(tmp_path: Path, key: str) -> None:
    path, file = write(tmp_path, key, KEYS[key]), tmp_path / KEYS[key]
    with pytest.raises(ConfigError, match="cannot be read beside the catalog: No such file"):
        load(path)
    os.mkfifo(file)  # whoever opened it would wait for ever
    with pytest.raises(ConfigError, match="not a regular file"):
        load(path)
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        load(path)
    file.rmdir()
    file.symlink_to(file.name)
    with pytest.raises(ConfigError, match=r"line 4: .* cannot be read beside the catalog"):
        load(path)
    file.unlink()
    most = parser.MOST_BYTES[key]
    with open(file, "wb") as large:
        large.truncate(most + 1)
    with pytest.raises(
        ConfigError, match=f"a file of {most + 1} bytes; at most {most} are allowed"
    ):
        load(path)


@pytest.mark.parametrize("key", ["packages", "sample_notebook", "changes"])
def test_text_file_must_be_utf_8(tmp_path: Path, key: str) -> None:
    (tmp_path / KEYS[key]).write_bytes("ü".encode("latin-1"))
    with pytest.raises(ConfigError, match="which is not text in UTF-8"):
        load(write(tmp_path, key, KEYS[key]))


def test_logo_accepts_hub_paths_and_rejects_external_urls(tmp_path: Path) -> None:
    read = load(write(tmp_path, "logo", "/hub/static/images/jupyter.png"))
    assert read.get("base").logo == "/hub/static/images/jupyter.png"
    for logo in ("https://example.org/a.png", "//example.org/a.png", "data:x"):
        with pytest.raises(ConfigError, match="'logo' of environment 'base'"):
            load(write(tmp_path, "logo", logo))


def test_oversized_catalog_is_rejected_and_fifo_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "catalog.yaml"
    path.write_bytes(b"\xef\xbb\xbfenvironments: [{slug: a, image: b}]\n")  # with its mark
    assert load(path).get("a").image == "b"
    with open(path, "wb") as file:
        file.truncate(16_000_001)
    with pytest.raises(ConfigError, match="more than 16000000 bytes"):
        load(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="the catalog has no 'environments'"):
        load(path)
    text = "environments: [{slug: a, image: b, changes: new.md}]"
    assert Catalog.from_text(text).get("a").changes == "new.md", "nowhere to look for it"
