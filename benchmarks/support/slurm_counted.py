"""Slurm's programs, counted: what a hub and its service call, whichever process of theirs does."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

from tests.support import processes
from tests.support.slurm_cluster import SlurmCluster

CONTROLLER = ("squeue", "sinfo", "sdiag")
"""Programs that ask the controller."""
DATABASE = ("sacct", "sacctmgr")
"""Programs that ask the accounting database, or tell it something."""
TELLS = ("sbatch", "scancel", "scontrol")
"""Programs that tell the controller something; what jobs they ask for, it counts itself."""

SCRIPT = """#!/bin/sh
echo {name} >> {calls}
exec {program} "$@"
"""


class Counted:
    """A folder with a program of each name that writes down that it was called, and becomes the
    real one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._calls = folder / "calls"
        self._calls.touch()
        for name in (*CONTROLLER, *DATABASE, *TELLS):
            program = shutil.which(name, path=processes.system_path())
            file = folder / name
            file.write_text(SCRIPT.format(name=name, calls=self._calls, program=program))
            file.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """Of a hub that is to be counted."""
        return {"PATH": processes.system_path(self.folder, processes.BIN)}

    def calls(self) -> Counter[str]:
        """How often each program was called so far."""
        return Counter(self._calls.read_text(encoding="ascii").split())


def requests_for_jobs(cluster: SlurmCluster) -> int:
    """How often the controller was asked for its jobs, by anybody: ``scancel --name`` does, too."""
    said = cluster.run("sdiag")
    if "by message type" not in said:
        raise RuntimeError(f"sdiag does not say what the controller was asked:\n{said}")
    found = re.search(r"REQUEST_JOB_INFO\s.*?count:(\d+)", said)
    return int(found[1]) if found else 0
