"""Slurm's programs, counted: what a hub and its service call, whichever process of theirs does."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from tests.support import processes

CONTROLLER = ("squeue", "sinfo", "sdiag")
"""Programs that ask the controller."""
DATABASE = ("sacct", "sacctmgr")
"""Programs that ask the accounting database, or tell it something."""
TELLS = ("sbatch", "scancel", "scontrol")
"""Programs that tell the controller something."""

BY_NAME = "scancel by name"
"""It asks for everybody's jobs to find the one."""

SCRIPT = """#!/bin/sh
case "{name} $*" in
    "scancel "*--name=*) echo "scancel by name" ;;
    *) echo {name} ;;
esac >> {calls}
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
        return Counter(self._calls.read_text(encoding="ascii").splitlines())
