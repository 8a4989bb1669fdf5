"""The machine that runs the tests, as `gpuspawner init` looks at it. Real: short programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuspawner.core.errors import Refused
from gpuspawner.install import host
from gpuspawner.install.host import LocalHost, OfflineHost


def test_program_output_and_code_are_returned() -> None:
    done = LocalHost().run("sh", "-c", "echo out; echo problem >&2; exit 3")
    assert (done.code, done.output) == (3, "out\nproblem")


def test_missing_program_is_named() -> None:
    with pytest.raises(Refused, match="There is no command no-such-program"):
        LocalHost().run("no-such-program")


def test_programs_get_no_secrets_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_CLIENT_SECRET", "hush")
    monkeypatch.setenv("DOCKER_HOST", "unix:///elsewhere")
    said = LocalHost().run("env").output
    assert "hush" not in said and "DOCKER_HOST=unix:///elsewhere" in said


def test_programs_do_not_wait_for_input() -> None:
    assert LocalHost().run("cat").output == ""


def test_missing_user_of_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "USER", "no-such-user")
    with pytest.raises(Refused, match="does not run as the user no-such-user"):
        LocalHost().run_as_hub(["true"], {}, "/")


def test_program_of_the_hub_is_in_a_session_of_its_own(tmp_path: Path) -> None:
    said = tmp_path / "session"
    program = f"import os; open({str(said)!r}, 'w').write(str(os.getsid(0) == os.getpid()))"
    assert host.run_apart([sys.executable, "-c", program]) == 0
    assert said.read_text() == "True"
    assert host.run_apart(["sh", "-c", "exit 3"]) == 3


class Interrupted(subprocess.Popen[str]):
    """A program, and Ctrl-C as soon as it says that it is ready."""

    was_ready = False

    def wait(self, timeout: float | None = None) -> int:
        if not self.was_ready:
            assert self.stdout is not None
            self.was_ready = self.stdout.readline() == "ready\n"
            raise KeyboardInterrupt
        return super().wait(timeout)


def test_interrupted_program_of_the_hub_may_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tmp_path / "done"
    trap = f"trap 'sleep 0.5; echo put back > {done}; exit 1' INT"
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.run_apart(
            ["sh", "-c", f"{trap}; echo ready; while :; do sleep 0.1; done"],
            stdout=subprocess.PIPE,
            text=True,
        )
    assert done.read_text() == "put back\n"


def test_facts_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text("  0: 0100007F:1F40 00000000:0000 0A 0\n")
    monkeypatch.setattr(host, "SOCKET_TABLES", (str(table), str(tmp_path / "none")))
    monkeypatch.setattr(host, "MODULES", ("json", "no_such_module"))
    monkeypatch.setattr(host, "USER", "root")
    monkeypatch.setattr(host, "ENGINE_GROUP", "no-such-group")
    found = LocalHost().inspect("172.30.0.1")
    assert found.bin_folder == str(Path(sys.executable).parent)
    assert found.ports_in_use == {8000} and found.missing_modules == {"no_such_module"}
    assert found.users == {"root"} and found.groups == frozenset()


def test_image_has_its_own_path_of_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert OfflineHost(tmp_path).bin_folder == "/opt/gpuspawner/bin"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "srv/hub/bin/python"))
    assert OfflineHost(tmp_path).bin_folder == "/srv/hub/bin"
    with pytest.raises(Refused, match="not a running machine"):
        OfflineHost(tmp_path).run("useradd")
