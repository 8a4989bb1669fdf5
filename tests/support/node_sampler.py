"""``gpuspawner slurm sampler`` as a process, with a fleet of its own that NVML's stand-in shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.nvml import nvml_library as nvml
from tests.support.nvml.nvml_library import GPU
from tests.support.processes import REPO, as_root, die_with_us, end_process, signal_pid


class NodeSampler:
    """``with NodeSampler(folder, library, url, *words) as sampler``; ``around`` puts it into a
    node's network."""

    def __init__(
        self,
        folder: Path,
        library: Path,
        url: str,
        *words: str,
        fleet: Sequence[GPU] = (),
        around: Any = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.url = url
        self.fleet = folder / "fleet"
        self.log = folder / "log"
        self.folder = folder
        self.show(*fleet)
        variables = nvml.environment(library, self.fleet) | {"PYTHONPATH": str(REPO)}
        command = ["env", *(f"{name}={value}" for name, value in variables.items())]
        command += [sys.executable, "-m", "gpuspawner", "slurm", "sampler", "--listen", url]
        command += words
        self._command = as_root(around(command)) if around else command
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NodeSampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def show(self, *fleet: GPU) -> None:
        """What its GPUs do from now on."""
        nvml.write_fleet(self.fleet, fleet)

    def start(self) -> None:
        """Begin; it does not answer at once."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                die_with_us(self._command), cwd=self.folder, stdout=log, stderr=log, env=os.environ
            )

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        signal_pid(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(30)

    def end(self) -> int:
        """SIGTERM; its exit status."""
        if self._process is None or self._process.poll() is not None:
            return -1
        end_process(self._process.pid)
        return self._process.wait(30)
