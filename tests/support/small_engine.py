"""A Docker Engine whose disk is small, and which does not try a broken download again."""

from __future__ import annotations

from pathlib import Path

import docker

from tests.support import processes
from tests.support.engine import PrivateEngine
from tests.support.processes import as_root


class SmallEngine(PrivateEngine):
    """As its parent, with all images and containers on ``megabytes`` of memory."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.megabytes = megabytes

    @property
    def data(self) -> Path:
        return self.directory / "small"

    def connect(self, timeout: float) -> docker.APIClient:
        """A client of its own."""
        return docker.APIClient(base_url=self.url, version="auto", timeout=timeout)

    def _launch(self) -> None:
        self.data.mkdir(exist_ok=True)
        if not self.data.is_mount():
            disk = ["tmpfs", "-o", f"size={self.megabytes}m", "gpuspawner-small", str(self.data)]
            processes.run(as_root(["mount", "-t", *disk]))
        super()._launch()

    def _dockerd(self) -> list[str]:
        return [*super()._dockerd(), "--max-download-attempts=1"]
