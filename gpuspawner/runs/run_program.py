"""Carries out a run in its container: a command, or a notebook from the top.

The hub passes this text to the container's own ``python3`` (3.8 or newer), so it imports nothing of
ours. The output goes to ``run.log`` in the run's folder, and to the container's log. Papermill
writes a notebook's output as it comes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, BinaryIO, cast

WARNING_SECONDS = 120
"""How long before its time limit a program gets SIGUSR1."""

YIELD = signal.SIGUSR2
"""What the hub sends when others get the run's GPUs."""

CELL = re.compile(r'Exception encountered at "In \[(\d+)\]"')
"""How papermill says which cell failed."""

EXECUTING = re.compile(rb"Executing Cell (\d+)-")
"""How papermill says which cell it executes."""

OLD_SECONDS = 60
"""Seconds after which the files are listed again when something is printed."""

MOST_FILES = 1000
"""How many files of its folder a run lists."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")

PAPERMILL = """
import os, sys
# jsonschema's check of addresses takes half a second to import, and notebooks have none.
sys.modules["rfc3987_syntax"] = None
from papermill.cli import papermill
from papermill.iorw import LocalHandler, papermill_io

class WholeFiles(LocalHandler):
    def write(self, text, path):
        part = path + ".part"
        try:
            super().write(text, part)
            os.replace(part, path)
        except OSError:
            if os.path.exists(part):
                os.remove(part)
            raise

papermill_io.register(os.path.dirname(sys.argv[2]), WholeFiles())
papermill(prog_name="papermill")
"""
"""Papermill, with an output file that is replaced only by a complete one. If it is killed in the
middle of a write, or the disk is full, every cell that was saved before is still there."""

INTERRUPTED = 143
"""Exit status after the engine stopped the container."""

RESERVED = (INTERRUPTED, 255)
"""Exit statuses that tell the hub of an interruption; 255 is the engine's after a crash."""


REPORT = "gpuspawner-use "
"""How the last line in the container's log begins: what was used, for the accounting service.

When the container has ended, its engine has no figures. Not in ``run.log``, which is the member's.
"""

CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees its own cgroup, of either version."""


def main() -> int:
    """Carry out ``GPUSPAWNER_RUN_WORK``, and return its exit status."""
    work = json.loads(os.environ["GPUSPAWNER_RUN_WORK"])
    home = Path(os.environ.get("GPUSPAWNER_WORKSPACE") or Path.home())
    folder = home / work["folder"]
    folder.mkdir(parents=True, exist_ok=True)
    seconds = int(os.environ.get("GPUSPAWNER_RUN_SECONDS") or 0)
    started = datetime.now(timezone.utc)
    environment = {**os.environ, "GPUSPAWNER_RUN_FOLDER": str(folder)}
    if seconds:
        environment["GPUSPAWNER_STOP_AT"] = _text(started + timedelta(seconds=seconds))
    record = Record(folder, {"id": os.environ["GPUSPAWNER_RUN_ID"], **work})
    record.write(started_at=_text(started))
    with (folder / "run.log").open("ab", buffering=0) as log:
        status = _carry_out(work, home, folder, environment, log, seconds, record)
    record.write_end(exit_status=status, ended_at=_text(datetime.now(timezone.utc)))
    with contextlib.suppress(OSError):
        print(f"\n{REPORT}{json.dumps(measure())}", flush=True)
    return status


def measure(cgroup: Path = CGROUP) -> dict[str, Any]:
    """Return the container's CPU time in seconds, and the most memory of one process in bytes.

    Without a cgroup that says more, the time of the program and of those that it waited for.
    """
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    with contextlib.suppress(OSError, ValueError):
        if (cgroup / "cgroup.events").exists():  # v2, and not the cgroup of the whole machine
            words = (cgroup / "cpu.stat").read_text().split()
            seconds = max(seconds, int(words[words.index("usage_usec") + 1]) / 1e6)
        else:
            seconds = max(seconds, int((cgroup / "cpuacct/cpuacct.usage").read_text()) / 1e9)
    return {"cpu_seconds": seconds, "memory_bytes": 1024 * max(each.ru_maxrss for each in used)}


class Record:
    """``run.json``: what was run, how far it is, and the files in its folder."""

    def __init__(self, folder: Path, told: dict[str, Any]) -> None:
        self.folder = folder
        self.told = told
        self.written_at = 0.0

    def write(self, **more: Any) -> None:
        """Rewrite it atomically. A full disk does not end the run."""
        try:
            self._write(more)
        except OSError as error:
            print(f"run.json was not written: {error.strerror}", flush=True)

    def write_end(self, **more: Any) -> None:
        """Write it for the last time, without a message: the log ends with the program's own."""
        with contextlib.suppress(OSError):
            self._write(more)

    def _write(self, more: dict[str, Any]) -> None:
        self.written_at = time.monotonic()
        self.told.update(more, files=self._files())
        part = self.folder / ".run.json.part"
        part.write_text(json.dumps(self.told, indent=2) + "\n", encoding="utf-8")
        part.replace(self.folder / "run.json")

    def note(self, said: bytes) -> None:
        """Write it if papermill says that the next cell begins, or if it is old."""
        found = EXECUTING.findall(said) if self.told["notebook"] else []
        if found and int(found[-1]) != self.told.get("cell"):
            self.write(cell=int(found[-1]), cells=self.told.get("cells") or self._count_cells())
        elif time.monotonic() - self.written_at > OLD_SECONDS:
            self.write()

    def _count_cells(self) -> int:
        """Count the cells that papermill executes: it adds one for the parameters."""
        try:
            return len(json.loads((self.folder / "output.ipynb").read_bytes())["cells"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _files(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for place, folders, names in os.walk(self.folder):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                path = Path(place, name)
                try:
                    state = path.lstat()
                except OSError:
                    continue
                if stat.S_ISREG(state.st_mode):
                    told = {"path": path.relative_to(self.folder).as_posix(), "size": state.st_size}
                    found.append(told)
                if len(found) == MOST_FILES:
                    return found
        return found


def _text(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")


def _carry_out(
    work: dict[str, Any],
    home: Path,
    folder: Path,
    environment: dict[str, str],
    log: BinaryIO,
    seconds: int,
    record: Record,
) -> int:
    command = work["command"]
    # By default SIGUSR1 kills a program, so a program without a handler starts out ignoring it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(YIELD, signal.SIG_IGN)
    try:
        command = command or _notebook_command(work, home, folder)
        if not work["command"] and importlib.util.find_spec("papermill") is None:
            raise OSError(0, "the image lacks papermill, which gpuspawner-lab installs")
        process = subprocess.Popen(
            command,
            cwd=home / work["directory"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        what = error.filename or work["notebook"] or command[0]
        _write(log, f"{what} cannot start: {error.strerror}\n".encode())
        return 127
    was_ended = []

    def pass_on(number: int, _frame: object) -> None:
        # SIGTERM is how the engine stops a container: the program may still save what it has.
        if number == signal.SIGTERM:
            was_ended.append(number)
            number = signal.SIGINT
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.killpg(process.pid, number)
        if was_ended:
            record.write()  # there may be no time for it later

    def make_room(number: int, frame: object) -> None:
        # A program that does not handle the warning gains nothing from two more minutes.
        ready = _handles(process.pid, signal.SIGUSR1)
        pass_on(signal.SIGUSR1 if ready else signal.SIGTERM, frame)

    signal.signal(YIELD, make_room)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    if seconds > WARNING_SECONDS:
        warn = threading.Timer(seconds - WARNING_SECONDS, os.kill, (os.getpid(), signal.SIGUSR1))
        warn.daemon = True
        warn.start()
    output, tail = cast("BinaryIO", process.stdout).fileno(), b""
    for part in iter(lambda: os.read(output, 65536), b""):
        _write(log, part)
        tail = (tail + part)[-65536:]
        record.note(tail)
    status = process.wait()
    if was_ended:
        return INTERRUPTED
    if status and work["notebook"]:
        _write(log, _failure(tail.decode(errors="replace")).encode())
    status = 128 - status if status < 0 else status
    if status in RESERVED:
        with contextlib.suppress(OSError):
            log.write(f"Its own exit status was {status}; it is reported as 1.\n".encode())
        return 1
    return status


def _handles(group: int, number: int) -> bool:
    """Return True if a process of the group handles a signal itself."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if os.getpgid(int(status.parent.name)) != group:
                continue
            lines = status.read_text().splitlines()
        except OSError:  # it has ended
            continue
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
        if caught >> (number - 1) & 1:
            return True
    return False


def _failure(said: str) -> str:
    """Return the last line of the log: which cell failed, and why."""
    lines = [line.strip() for line in COLOURS.sub("", said).splitlines() if line.strip()]
    cell = CELL.search(said)
    return f"{f'cell {cell[1]}: ' if cell else ''}{lines[-1] if lines else 'it failed'}\n"


def _notebook_command(work: dict[str, Any], home: Path, folder: Path) -> list[str]:
    snapshot = folder / "input.ipynb"
    if not snapshot.exists():  # else it begins again, or was copied when it was submitted
        part = folder / ".input.ipynb.part"
        shutil.copyfile(home / work["notebook"], part)
        part.replace(snapshot)
    words = [sys.executable, "-c", PAPERMILL, str(snapshot)]
    words += [str(folder / "output.ipynb"), "--log-output", "--no-progress-bar"]
    words += ["--autosave-cell-every", "30", "--cwd", str(home / work["directory"])]
    for name, value in work["parameters"].items():
        words += ["-y", json.dumps({name: value})]  # JSON is YAML
    return words


def _write(log: BinaryIO, part: bytes) -> None:
    with contextlib.suppress(OSError):  # the workspace is full; the container's log has it, too
        log.write(part)
    sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
