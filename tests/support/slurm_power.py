"""A cluster whose last nodes are off until Slurm's power saving asks for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.slurm_cluster import A100, H100, NodePlan, SlurmCluster
from tests.support.slurm_daemons import folder_of

SPARE = NodePlan(H100.model, H100.gres, H100.devices, H100.memory_bytes, spare=True)

ASK = """#!/bin/sh
# As Slurm's user: asks whoever owns the machines to switch these on (or off).
export SLURM_CONF=FOLDER/etc/slurm.conf PATH=/usr/bin:/bin
for node in $(scontrol show hostnames "$1"); do
    COMMAND "FOLDER/power/$node"
done
"""


BOOT_SECONDS = 3.0
"""From the request until a machine's daemon starts. Slurm counts in whole seconds and overlooks a
machine that says it booted before it was asked for: one that comes at once could be down for good.
"""


class PoweredCluster(SlurmCluster):
    """As its parent. Who owns the machines looks four times a second at what Slurm asked for."""

    def __init__(self, plans: Sequence[NodePlan] = (A100, SPARE), **settings: object) -> None:
        """``settings`` as in slurm.conf; a booting node has ``ResumeTimeout`` seconds."""
        super().__init__(plans, settings)
        self.delivers = True
        """False: machines that are asked for never come."""
        self._ended = threading.Event()

    def start(self) -> None:
        self._ended.clear()
        super().start()
        self._threads.submit(self._own)

    def stop(self) -> None:
        self._ended.set()
        super().stop()

    def _write_files(self) -> None:
        f = self.directory
        saving = {
            "ResumeProgram": f / "bin/resume",
            "SuspendProgram": f / "bin/suspend",
            "ResumeTimeout": 15,
            "SuspendTimeout": 2,
            "SuspendTime": 1,
            "ResumeRate": 0,
            "SuspendRate": 0,
            "SuspendExcNodes": ",".join(n.name for n in self.nodes if not n.machine.spare),
            "PrivateData": "cloud",  # nodes that are off are shown
        }
        self.settings = {**saving, **self.settings}
        super()._write_files()
        folder_of("slurm", f / "power")
        for name, command in (("resume", "touch"), ("suspend", "rm -f")):
            path = f / "bin" / name
            path.write_text(ASK.replace("FOLDER", str(f)).replace("COMMAND", command))
            path.chmod(0o755)

    def _own(self) -> None:
        while not self._ended.wait(0.25):
            for node in self.spare:
                daemon = self._daemons[f"slurmd of {node.name}"]
                asked = self.directory / "power" / node.name
                wanted = asked.exists() and self.delivers
                if wanted and not daemon.running:
                    if _age_seconds(asked) > BOOT_SECONDS:
                        daemon.start()
                elif daemon.running and not wanted:
                    daemon.end()


def _age_seconds(file: Path) -> float:
    """Seconds since the file was written; 0 when it is gone."""
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
