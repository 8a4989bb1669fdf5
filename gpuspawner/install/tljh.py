"""A plugin for The Littlest JupyterHub (TLJH), whose installer calls these hooks.

The settings are in a file that TLJH reads, not in the hook ``tljh_custom_jupyterhub_config``: TLJH
calls that hook before it reads the admin's own files, and the accounting service would miss those.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pluggy

from ..core.errors import Refused
from .documents import tljh_files
from .files import FileTree
from .host import Host, LocalHost
from .models import NETWORK, SUBNET
from .service import has_network, network_command, run_program

hookimpl = pluggy.HookimplMarker("tljh")

IDLE_SECONDS = 4 * 3600
"""Seconds without activity after which TLJH stops a server, unless the admin set a time."""


@hookimpl
def tljh_extra_apt_packages() -> list[str]:
    """Return Debian's Docker Engine, unless a ``docker`` command is installed already."""
    return [] if shutil.which("docker") else ["docker.io"]


@hookimpl
def tljh_config_post_install(config: dict[str, Any]) -> None:
    """Raise TLJH's idle limit of ten minutes: a server that trains a model looks idle to it."""
    culler = config.setdefault("services", {}).setdefault("cull", {})
    culler.setdefault("timeout", IDLE_SECONDS)


@hookimpl
def tljh_post_install() -> None:
    """Write configuration, catalog, drop-in and command, make the network, restart the hub."""
    try:
        for sentence in set_up(FileTree(Path("/")), LocalHost()):
            logging.getLogger("tljh").info(sentence)
    except Refused as refusal:
        sys.exit(f"gpuspawner is not set up. {refusal}")


def set_up(files: FileTree, host: Host) -> Iterator[str]:
    """Set up leases of GPUs in TLJH, and yield a sentence for each step. Raises Refused."""
    config = getattr(find_spec("tljh.jupyterhub_config"), "origin", None)
    if not config:
        raise Refused(
            "This version of TLJH has no module tljh.jupyterhub_config, which the plugin needs. "
            "Install another version of TLJH or of gpuspawner."
        )
    prefix = os.environ.get("TLJH_INSTALL_PREFIX", "/opt/tljh")
    if not has_network(host, SUBNET):
        run_program(host, *network_command(SUBNET))
        yield f"Made the Docker network {NETWORK} ({SUBNET})."
    edited, others = tljh_files(prefix, str(Path(sys.executable).parent), config)
    missing = [file for file in edited if files.read(file.path) is None]
    for file in (*missing, *others):
        files.write(file)
        yield f"Wrote {file.path}."
    run_program(host, "systemctl", "daemon-reload")
    run_program(host, "systemctl", "restart", "jupyterhub.service")
    yield "Restarted the hub. `gpuspawner check` says what is missing."
