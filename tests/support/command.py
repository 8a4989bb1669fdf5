"""The command line as a process, in a hub's working directory, with the hub's services."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from gpuspawner.cli.config import sqlite_path
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.services import Services
from tests.support.preloaded import PRELOADED, PYTHONPATH

FLEET = "simulated:2xA100-80GB,1xT4"
ADA = ServerRef("ada")
GRACE = ServerRef("grace", "night")


class Command:
    """``gpuspawner`` in a hub's working directory, on its database."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        self.database_url = database_url
        self.environment = {"PATH": os.environ["PATH"], "PYTHONPATH": PYTHONPATH, "TZ": "UTC"}
        self.hub_said = ""
        """What the last command said on stderr about its hub, when that was this one."""
        self.environment |= {"HOME": str(folder), "LC_ALL": "C.UTF-8", "USER": "root"}
        (folder / "jupyterhub_config.py").write_text(
            "c = get_config()\n"
            f"c.GPUDatabase.url = {database_url!r}\n"
            f"c.GPUDevices.source = {FLEET!r}\n"
            "c.GPURates.by_model = {'*': 1, 'A100': '3.6'}\n"
            "c.JupyterHub.services.append({'name': 'x'})\n"
        )

    @property
    def database(self) -> str:
        """The database as the command names it: a file by its path."""
        return str(sqlite_path(self.database_url) or self.database_url)

    @property
    def hub_line(self) -> str:
        """What a command says on stderr about the hub that it used."""
        file = (self.folder / "jupyterhub_config.py").resolve()
        return f"hub: {file} (database {self.database})"

    def __call__(
        self, *arguments: str, code: int = 0, answer: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        done = PRELOADED.run(arguments, self.folder, self.environment | environment, answer)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == code, done.stdout + done.stderr
        line = f"{self.hub_line}\n"
        self.hub_said = line if done.stderr.startswith(line) else ""
        done.stderr = done.stderr.removeprefix(line)
        return done

    def json(self, *arguments: str, **kwargs: Any) -> Any:
        return json.loads(self(*arguments, "--json", **kwargs).stdout)


def grant(
    services: Services, server: ServerRef, engine: str = "local", ref: str = "", **request: Any
) -> Lease:
    """A lease whose server is up."""
    lease = services.leases.grant(server, Request(**request), engine=engine)
    return services.leases.confirm(lease.id, ref)
