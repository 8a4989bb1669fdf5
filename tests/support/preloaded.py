"""Runs the command line in processes that have its imports behind them.

Each command is a process of its own, with its own folder, environment, files and exit code, as
typed in a shell; but it is forked from one that has imported gpuspawner, which takes a second
otherwise, for hundreds of commands. Run as a module, this file is that process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tests.support.processes import PATIENCE, REPO

TIMEOUT = 60.0 * PATIENCE
ROOMS = ("gpuspawner.cli", "gpuspawner.store", "gpuspawner.broker", "gpuspawner.catalog")


class Preloaded:
    """The process to fork from; started when a command first asks, ended with its stdin."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], answer: str
    ) -> subprocess.CompletedProcess[str]:
        """``python -m gpuspawner ARGUMENTS`` in a folder, with ``answer`` as its input."""
        if any(name.startswith("LD_") for name in environment):  # read when a process begins
            return subprocess.run(
                [sys.executable, "-m", "gpuspawner", *arguments],
                cwd=folder,
                env=dict(environment),
                input=answer,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                cwd=REPO,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "TZ": "UTC"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        with tempfile.TemporaryDirectory() as files:
            streams = [os.path.join(files, name) for name in ("in", "out", "err")]
            Path(streams[0]).write_text(answer, encoding="utf-8")
            asked = (list(arguments), str(folder), dict(environment), streams)
            assert self._process.stdin and self._process.stdout
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            said = self._process.stdout.readline()
            if not said.strip():
                raise RuntimeError("the process that commands are forked from has ended")
            out, err = (Path(name).read_text(encoding="utf-8") for name in streams[1:])
        return subprocess.CompletedProcess(list(arguments), int(said), out, err)


PRELOADED = Preloaded()


def _wait(child: int) -> int:
    """Its exit code; one that hangs is killed."""
    end = time.monotonic() + TIMEOUT
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, 9)
        time.sleep(0.005)


def _become(
    arguments: list[str], folder: str, environment: dict[str, str], streams: list[str]
) -> NoReturn:
    """Be the command from here on."""
    for number, (name, flags) in enumerate(
        zip(streams, (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT), strict=True)
    ):
        file = os.open(name, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.path[0] = folder
    sys.argv = ["gpuspawner", *arguments]
    code: object = 1
    try:
        runpy.run_module("gpuspawner", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        traceback.print_exc()
    # As Python ends, but for taking everything apart that was imported: that takes longest.
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main() -> None:
    for room in ROOMS:
        for module in pkgutil.walk_packages(importlib.import_module(room).__path__, f"{room}."):
            if ".versions." not in module.name and not module.name.endswith(".env"):
                importlib.import_module(module.name)
    gc.freeze()  # what a child does not look at is not copied for it
    while line := os.read(0, 1 << 20):
        child = os.fork()
        if not child:
            _become(*json.loads(line))
        os.write(1, f"{_wait(child)}\n".encode())


if __name__ == "__main__":
    main()
