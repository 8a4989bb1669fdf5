"""Servers as local processes, for trying out gpuspawner on a machine without Docker."""

from __future__ import annotations

import asyncio
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jupyterhub.spawner import SimpleLocalProcessSpawner
from traitlets import Unicode, default

from ..core.processes import lives, process_ref
from ..engines.local import LocalEngine, started_at
from ..leases.models import Sighting
from .mixin import ExitStatus, GPUSpawnerMixin


class GPULocalSpawner(GPUSpawnerMixin, SimpleLocalProcessSpawner):
    """Spawner that leases GPUs to processes of the hub's own user. For trying out only.

    Nothing isolates members from each other: a lease says which GPUs to use, but no container
    enforces it.
    """

    engine_name = "local"

    workspace = Unicode(
        "workspaces/{username}",
        config=True,
        help="""
        The home directory of a member, which contains their ``work`` folder.

        A relative path begins at the hub's working directory. Example::

            c.GPULocalSpawner.workspace = "/srv/trying-out/{username}"
        """,
    )

    @default("home_dir")
    def _default_home_dir(self) -> str:
        name = self.user.escaped_name if self.user else ""
        return os.path.abspath(self.workspace.format(username=name))

    @default("notebook_dir")
    def _default_notebook_dir(self) -> str:
        # JupyterLab then lists ``work`` beside what else is there, such as ``datasets``.
        return self.home_dir

    async def start(self) -> Any:
        """Start as JupyterHub's own spawner does, and explain every failure in words."""
        with self.in_words():
            return await super().start()

    _noted = ""
    """The reference of the last process whose exit is or was watched."""

    def engine(self) -> LocalEngine:
        """Return the engine for local processes."""
        return LocalEngine()

    def engine_ref(self) -> str:
        """Return the reference of the server's process; empty if there is none."""
        return process_ref(self.pid) if self.pid else ""

    async def engine_started_at(self) -> datetime | None:
        """Return when the process was started, and watch for its exit."""
        self._note_exit()
        ref = self.engine_ref()
        return started_at(ref) if ref else None

    async def poll(self) -> Any:
        """Return the exit status, or None while the process lives."""
        status = await super().poll()
        if status is None:
            self._note_exit()
        return status

    def _note_exit(self) -> None:
        """Watch the process, to record its end when it happens and not at the next poll."""
        ref = self.engine_ref()
        if not ref or ref == self._noted:
            return  # already watched, or a zombie, which still polls as alive
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return  # it has already ended
        loop, self._noted = asyncio.get_running_loop(), ref

        def ended() -> None:
            self.finished_at = datetime.now(timezone.utc)
            loop.remove_reader(descriptor)
            os.close(descriptor)

        loop.add_reader(descriptor, ended)

    def with_lease_environment(self, env: dict[str, str]) -> dict[str, str]:
        """Add ``CUDA_VISIBLE_DEVICES``, as no container hides other GPUs; empty means no GPU."""
        env = super().with_lease_environment(env)
        env["CUDA_VISIBLE_DEVICES"] = ",".join(self.lease.uuids) if self.lease else ""
        return env

    def get_args(self) -> list[str]:
        """Add ``--allow-root``, which Jupyter requires if the hub and its servers run as root."""
        args = list(super().get_args())
        return [*args, "--allow-root"] if os.geteuid() == 0 else args

    def make_preexec_fn(self, name: str) -> Any:
        """Return a function that makes the process start in the member's ``work`` folder.

        The folder is created before the fork, where errors can be reported.
        """
        work = self._make_work()
        return lambda: os.chdir(work)

    def _make_work(self) -> Path:
        work = Path(self.home_dir) / "work"
        work.mkdir(parents=True, exist_ok=True, mode=0o700)
        return work

    async def open_workspace(self) -> None:
        """Create ``work`` in the member's home directory."""
        self._make_work()

    async def prove_gone(self) -> ExitStatus:
        """Check whether the server is gone.

        It is gone if no process has the lease in its environment, and the recorded process has
        ended, whatever its environment.
        """
        recorded = lives(self.lease.engine_ref) if self.lease else False
        return ExitStatus(gone=not recorded and not await self._mine())

    async def _mine(self) -> list[Sighting]:
        found = await self.services.run_outside(LocalEngine().sightings)
        return [sighting for sighting in found if sighting.lease_id == self.lease_id]

    async def end_leftover(self) -> None:
        """End the processes of the lease, or the recorded one if none has the lease."""
        engine = LocalEngine()
        mine = await self._mine()
        if not mine and self.lease is not None:
            mine = engine.removed([self.lease], [])
        for sighting in mine:
            await self.services.run_outside(engine.end, sighting)

    async def failure_detail(self) -> str:
        """Return a hint to the hub's log, which contains the output of the process."""
        return "the process ended at once; the hub's log has its output"
