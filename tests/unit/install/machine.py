"""A machine that notes what is run on it, and `gpuspawner` in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
from click.testing import CliRunner

from gpuspawner.cli.app import application
from gpuspawner.cli.command import Invocation
from gpuspawner.install.models import Machine, ProgramResult
from gpuspawner.install.rules import PROXY

BIN = "/opt/gpuspawner/bin"
MACHINE = Machine(
    has_systemd=True,
    programs={"docker": "/usr/bin/docker", "node": "/usr/bin/node", PROXY: f"{BIN}/{PROXY}"},
    groups=frozenset({"docker"}),
    users=frozenset(),
    ports_in_use=frozenset(),
    missing_modules=frozenset(),
    bin_folder=BIN,
)


@dataclass
class FakeHost:
    """Does what the programs would do, as far as ``init`` sees it, below ``root``."""

    root: Path
    machine: Machine = MACHINE
    is_root: bool = True
    runs: bool = True
    check_code: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    """Exit codes of other programs of the hub's user, by the word after the program."""
    enabled: set[str] = field(default_factory=set)
    commands: list[str] = field(default_factory=list)
    """What was run to change something."""
    checks: list[tuple[list[str], dict[str, str], str]] = field(default_factory=list)
    networks: dict[str, str] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    failing: str = ""
    """Programs whose command contains this fail."""

    def inspect(self, gateway: str) -> Machine:
        return self.machine

    def run(self, *command: str) -> ProgramResult:
        is_question = command[1:3] in (("network", "ls"), ("network", "inspect"))
        if not is_question and not command[1].startswith("is-"):
            self.commands.append(" ".join(command))
        if self.failing and self.failing in " ".join(command):
            return ProgramResult(1, "it failed")
        if command[:3] == ("docker", "network", "ls"):
            return ProgramResult(0, "\n".join(self.networks))
        if command[:3] == ("docker", "network", "inspect"):
            return ProgramResult(0, self.networks[command[-1]] + " ")
        if command[:2] == ("systemctl", "is-active"):
            return ProgramResult(0 if command[-1] in self.active else 3)
        if command[:2] == ("systemctl", "is-enabled"):
            return ProgramResult(0 if command[-1] in self.enabled else 1)
        if command[0] == "useradd":
            self.machine = replace(self.machine, users=frozenset({command[-1]}))
        elif command[0] == "install":
            (self.root / command[-1].lstrip("/")).mkdir(parents=True)
        elif command[:3] == ("docker", "network", "create"):
            self.networks[command[-1]] = command[command.index("--subnet") + 1]
        elif command[:3] == ("docker", "network", "rm"):
            del self.networks[command[-1]]
        elif command[:2] == ("systemctl", "enable"):
            self.active.add(command[-1])
            self.enabled.add(command[-1])
        elif command[:2] == ("systemctl", "disable"):
            self.active.discard(command[-1])
        return ProgramResult(0)

    def run_as_hub(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> int:
        self.checks.append((list(command), dict(environment), folder))
        return self.codes.get(command[1], self.check_code)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    output: str
    stdout: str = ""


def run(*arguments: str, answers: str = "", **environment: str) -> Done:
    """Run `gpuspawner` with these arguments; errors are in its output."""
    done = CliRunner().invoke(
        application,
        arguments,
        input=answers,
        env=environment,
        obj=Invocation(),
        standalone_mode=False,
    )
    if isinstance(done.exception, click.ClickException):
        return Done(done.exception.exit_code, done.output + done.exception.format_message())
    if done.exception is not None:
        raise done.exception
    return Done(done.return_value or 0, done.output, done.stdout)


def texts_below(folder: Path) -> dict[str, str]:
    """Every file below a folder, by its path there."""
    return {
        f"/{path.relative_to(folder)}": path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def modes_below(folder: Path) -> dict[str, int]:
    """The permissions of every file below a folder."""
    return {
        f"/{path.relative_to(folder)}": os.stat(path).st_mode & 0o777
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
