"""Carries out a run in its container: a command, or a notebook from the top.

Its output goes to ``run.log`` in the run's folder, as well as to the container's own log. A
notebook's output is written as it comes, by papermill.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

WORKSPACE = "work"
"""The workspace, in the home directory."""


def main() -> int:
    """Carry out ``GPUSPAWNER_RUN_WORK``, and return its exit status."""
    work = json.loads(os.environ["GPUSPAWNER_RUN_WORK"])
    home = Path.home() / WORKSPACE
    folder = home / work["folder"]
    folder.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if seconds := environment.get("GPUSPAWNER_RUN_SECONDS"):
        ends = datetime.now(timezone.utc) + timedelta(seconds=int(seconds))
        environment["GPUSPAWNER_STOP_AT"] = ends.isoformat(timespec="seconds")
    environment["GPUSPAWNER_RUN_FOLDER"] = str(folder)
    started = datetime.now(timezone.utc)
    with (folder / "run.log").open("ab", buffering=0) as log:
        status = _carry_out(_command(work, folder), home, environment, log)
    told = {
        "id": os.environ["GPUSPAWNER_RUN_ID"],
        "exit_status": status,
        "started_at": started.isoformat(timespec="seconds"),
        "ended_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **work,
    }
    (folder / "run.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return status


def _command(work: dict, folder: Path) -> list[str]:
    if work["command"]:
        return list(work["command"])
    words = [sys.executable, "-m", "papermill", work["notebook"], str(folder / "output.ipynb")]
    words += ["--log-output", "--autosave-cell-every", "30", "--cwd", str(folder)]
    for name, value in work["parameters"].items():
        words += ["-y", json.dumps({name: value})]  # JSON is YAML
    return words


def _carry_out(command: list[str], home: Path, environment: dict, log) -> int:
    try:
        process = subprocess.Popen(
            command,
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        sentence = f"{command[0]} cannot be started: {error.strerror}\n".encode()
        log.write(sentence)
        sys.stderr.buffer.write(sentence)
        return 127

    def pass_on(number: int, _frame: object) -> None:
        # SIGTERM is how the engine stops a container: the program may still save what it has.
        sent = signal.SIGINT if number == signal.SIGTERM else number
        os.killpg(process.pid, sent)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    for part in iter(lambda: process.stdout.read1(65536), b""):
        log.write(part)
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
    status = process.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
