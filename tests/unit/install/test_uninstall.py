"""`gpuspawner uninstall` on a machine's files. Real: files. Stand-in: programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpuspawner.install import commands
from tests.unit.install.machine import FakeHost, run, texts_below

CONFIG = "/etc/gpuspawner/jupyterhub_config.py"
HUB_UNIT = "/etc/systemd/system/gpuspawner.service"
KEPT = {
    "/var/lib/gpuspawner/gpuspawner.sqlite": "the database",
    "/var/lib/gpuspawner/backups/before.sqlite": "a backup",
    "/var/lib/docker/volumes/gpuspawner-work-ada/_data/notes.txt": "ada's notes",
}


@pytest.fixture
def installed(root: Path, host: FakeHost) -> FakeHost:
    """A machine with a hub, a database, a backup and a member's workspace."""
    done = run("init", "--prefix", str(root), "--defaults", "--domain", "gpu.lab.example")
    assert done.code == 0, done.output
    for path, text in KEPT.items():
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (root / path[1:]).write_text(text)
    host.commands.clear()
    return host


def uninstall(root: Path, *words: str, answers: str = "") -> tuple[int, str]:
    done = run("uninstall", "--prefix", str(root), *words, answers=answers)
    return done.code, done.output


def test_everything_of_init_goes_and_members_files_stay(root: Path, installed: FakeHost) -> None:
    code, said = uninstall(root, "--yes")
    assert code == 0, said
    assert texts_below(root) == KEPT
    assert not (root / "etc/gpuspawner").exists()
    assert installed.commands == [
        "systemctl disable --now gpuspawner.service",
        "systemctl disable --now gpuspawner-proxy.service",
        "systemctl daemon-reload",
        "docker network rm gpuspawner",
    ]
    left = said.partition("What is left:")[2]
    assert "/var/lib/gpuspawner: the hub's databases, backups" in left
    assert "members' workspaces: docker volume ls" in left and "the user gpuspawner" in left
    assert "PostgreSQL" not in left


def test_edited_files_stay_and_are_named(root: Path, installed: FakeHost) -> None:
    file = root / CONFIG[1:]
    file.write_text(file.read_text() + "# edited\n")
    environment = root / "etc/gpuspawner/environment"
    environment.write_text(environment.read_text() + "TZ=Europe/Berlin\n")
    own = root / "etc/gpuspawner/own.py"
    own.write_text("# mine")
    # Another init keeps the edits, and does not take them for its own.
    assert run("init", "--prefix", str(root), "--defaults").code == 0
    _, said = uninstall(root, "--yes")
    assert texts_below(root).keys() - KEPT.keys() == {
        CONFIG,
        "/etc/gpuspawner/environment",
        "/etc/gpuspawner/own.py",
    }
    left = said.partition("What is left:")[2]
    assert f"{CONFIG}, which was edited" in left
    assert "`gpuspawner init` did not write: /etc/gpuspawner/own.py" in left
    assert "/etc/gpuspawner/environment, which was edited" in left


def test_network_in_use_and_network_of_the_admin_stay(root: Path, installed: FakeHost) -> None:
    installed.failing = "network rm"
    code, said = uninstall(root, "--yes")
    assert code == 0 and "The Docker network gpuspawner stays" in said
    assert "Later: docker network rm gpuspawner. Docker says: it failed" in said

    installed.failing = ""
    assert installed.networks, "it was there before this init"
    run("init", "--prefix", str(root), "--defaults")
    installed.commands.clear()
    uninstall(root, "--yes")
    assert not any("network rm" in command for command in installed.commands)


@pytest.mark.parametrize(("answer", "removed"), [("y", True), ("n", False), ("", False)])
def test_terminal_is_asked_first(
    answer: str,
    removed: bool,
    root: Path,
    installed: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "is_terminal", lambda: True)
    code, _ = uninstall(root, answers=f"{answer}\n")
    assert code == (0 if removed else 1)
    assert (HUB_UNIT not in texts_below(root)) is removed
    assert bool(installed.commands) is removed


def test_without_a_terminal_it_has_to_be_confirmed(root: Path, installed: FakeHost) -> None:
    before = texts_below(root)
    code, said = uninstall(root)
    assert code == 1 and "confirm with --yes" in said
    assert texts_below(root) == before and installed.commands == []


def test_hub_that_cannot_be_stopped_keeps_its_files(root: Path, installed: FakeHost) -> None:
    before = texts_below(root)
    installed.failing = "disable --now gpuspawner.service"
    code, said = uninstall(root, "--yes")
    assert code == 1 and "gpuspawner.service cannot be stopped" in said
    assert texts_below(root) == before

    installed.failing = ""
    assert uninstall(root, "--yes")[0] == 0
    assert texts_below(root) == KEPT


def test_killed_run_can_be_repeated(
    root: Path, installed: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = 0
    really = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        nonlocal removed
        removed += 1
        if removed == 3:
            raise KeyboardInterrupt
        really(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        assert uninstall(root, "--yes")[0] == 130
    assert len(texts_below(root)) > len(KEPT)
    assert uninstall(root, "--yes")[0] == 0
    assert texts_below(root) == KEPT


def test_machine_without_systemd_stops_nothing(root: Path, installed: FakeHost) -> None:
    installed.machine = replace(installed.machine, has_systemd=False)
    assert uninstall(root, "--yes")[0] == 0
    assert installed.commands == ["docker network rm gpuspawner"]


def test_machine_without_a_hub_is_refused(root: Path, host: FakeHost) -> None:
    code, said = uninstall(root, "--yes")
    assert code == 1 and "`gpuspawner init` wrote nothing in /etc/gpuspawner" in said
    host.is_root = False
    assert "You are not root" in uninstall(root, "--yes")[1]
