"""The command line in a hub's working directory, with the hub's services."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gpuspawner.cli.app import main
from gpuspawner.cli.config import sqlite_path
from gpuspawner.db.engine import Store
from gpuspawner.leases.models import Lease, Request, ServerRef
from gpuspawner.services import Services
from tests.support.preloaded import PRELOADED, PYTHONPATH

FLEET = "simulated:2xA100-80GB,1xT4"
ADA = ServerRef("ada")
GRACE = ServerRef("grace", "night")


class Command:
    """``gpuspawner`` in a hub's working directory, on its database."""

    def __init__(self, folder: Path, database_url: str, *, is_process: bool = True) -> None:
        self.folder = folder
        self.is_process = is_process
        """If False, commands run in this process, which is much faster."""
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
        run = PRELOADED.run if self.is_process else run_here
        done = run(arguments, self.folder, self.environment | environment, answer)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == code, done.stdout + done.stderr
        line = f"{self.hub_line}\n"
        self.hub_said = line if done.stderr.startswith(line) else ""
        done.stderr = done.stderr.removeprefix(line)
        return done

    def json(self, *arguments: str, **kwargs: Any) -> Any:
        return json.loads(self(*arguments, "--json", **kwargs).stdout)


def run_here(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], answer: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, with this folder, environment and input."""
    stdin, stdout, stderr = (
        io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8") for text in (answer, "", "")
    )
    known = set(Store._open)
    try:
        with (
            mock.patch.dict(os.environ, environment, clear=True),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.chdir(folder)
            for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
                patch.setattr(sys, name, stream)
            time.tzset()
            code = main(arguments)
    finally:
        time.tzset()
        for url in set(Store._open) - known:
            Store._open[url].close()
    said = []
    for stream in (stdout, stderr):
        stream.flush()
        stream.seek(0)
        said.append(stream.read())
    return subprocess.CompletedProcess(list(arguments), code, *said)


def grant(
    services: Services, server: ServerRef, engine: str = "local", ref: str = "", **request: Any
) -> Lease:
    """A lease whose server is up."""
    lease = services.leases.grant(server, Request(**request), engine=engine)
    return services.leases.confirm(lease.id, ref)
