"""Releases of what is committed, made in clones. Real: git, the builds, pip, every Python here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import REPO


def clone(folder: Path) -> Path:
    subprocess.run(["git", "clone", "-q", "--no-tags", REPO, folder], check=True)
    return folder


def run(folder: Path, *command: str | Path, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    """Run a program in the clone, with the Python of these tests."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PYTHON": sys.executable, "GIT_COMMITTER_NAME": "t", "GIT_AUTHOR_NAME": "t"}
    environment |= {"GIT_COMMITTER_EMAIL": "t@lab.example", "GIT_AUTHOR_EMAIL": "t@lab.example"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, umask=umask
    )


def refusal(folder: Path) -> str:
    done = run(folder, "scripts/release.sh")
    assert done.returncode == 1, done.stdout + done.stderr
    assert not (folder / "dist").exists()
    return done.stderr.strip()


def build(folder: Path, umask: int) -> dict[str, str]:
    """Return the hash of each file that the clone builds."""
    out = folder / "dist"
    out.mkdir()
    done = run(folder, "scripts/build_dists.sh", out, umask=umask)
    assert done.returncode == 0, done.stderr
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}


def test_release_refuses_what_is_not_committed_and_what_is_tagged_elsewhere(
    processes: None, tmp_path: Path
) -> None:
    folder = clone(tmp_path / "clone")
    (folder / "new").touch()
    assert refusal(folder).startswith("There are changes that are not committed")
    (folder / "new").unlink()
    version = run(folder, sys.executable, "-c", "import gpuspawner as g; print(g.__version__)")
    tag = f"v{version.stdout.strip()}"
    assert run(folder, "git", "tag", tag).returncode == 0
    if list((folder / "changes").glob("*.md")):
        assert f"The tag {tag} is on a commit that still has fragments" in refusal(folder)
    assert run(folder, "git", "commit", "-q", "--allow-empty", "-m", "later").returncode == 0
    assert f"has a tag, {tag}, on another commit" in refusal(folder)


def test_two_checkouts_build_the_same_bytes(soak: None, tmp_path: Path) -> None:
    first = build(clone(tmp_path / "first"), 0o022)
    second = build(clone(tmp_path / "a longer path" / "second"), 0o077)
    assert len(first) == 4 and first == second
    # The sdists hold all that the wheels are made of, and need no network.
    sources = tmp_path / "sources"
    sources.mkdir()
    for sdist in (tmp_path / "first" / "dist").glob("*.tar.gz"):
        subprocess.run(["tar", "-xf", sdist, "-C", sources], check=True)
    for source in sources.iterdir():
        stamp = str(int((source / "PKG-INFO").stat().st_mtime))
        command = ["env", f"SOURCE_DATE_EPOCH={stamp}", "unshare", "--map-root-user", "--net"]
        command += [sys.executable, "-m", "build", "--no-isolation", "--wheel", "-o", "wheels", "."]
        done = run(source, *command)
        assert done.returncode == 0, done.stdout + done.stderr
        [wheel] = (source / "wheels").glob("*.whl")
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == first[wheel.name]


def test_release_tries_its_wheels_with_each_python(soak: None, tmp_path: Path) -> None:
    folder = clone(tmp_path / "clone")
    done = run(folder, "scripts/release.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Both wheels work with Python 3." in done.stdout
    assert run(folder / "dist", "sha256sum", "--check", "SHA256SUMS").returncode == 0
    assert not run(folder, "git", "status", "--porcelain").stdout
    for name in ("gpuspawner", "gpuspawner_lab"):
        [file] = (folder / "dist").glob(f"{name}-*.cdx.json")
        text = file.read_text(encoding="utf-8")
        assert str(tmp_path) not in text and "file://" not in text
        parts = {part["name"].replace("-", "_") for part in json.loads(text)["components"]}
        assert name in parts and len(parts) > 10 and "pip" not in parts
