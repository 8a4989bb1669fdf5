"""Whether the quotas of workspaces and of shared folders are kept by anything."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ..broker.files import FileSettings
from ..engines.probe import Finding, Status
from ..workspaces import Quotas
from .hub import Hub

_Settings = type("Broker", (FileSettings,), {})
"""A class's name says which section it reads."""


def check_quotas(hub: Hub) -> Iterator[Finding]:
    """A finding for each kind of quota that is set; none when there is none."""
    settings = _Settings(config=hub.app.config)
    quotas = Quotas(settings.xfs_quota)
    if getattr(hub.spawner, "workspace_quota", 0):
        yield _check("quota", str(hub.spawner.workspace), "c.GPUDockerSpawner.workspace", quotas)
    if settings.folder_quota and settings.folder_source:
        yield _check("folder quota", settings.folder_source, "c.Broker.folder_source", quotas)


def _check(name: str, template: str, setting: str, quotas: Quotas) -> Finding:
    root = os.path.dirname(template.partition("{")[0]) if "{" in template else template
    if not template.startswith("/"):
        text = "A quota is set, and nothing keeps it: a volume takes what is written into it."
        remedy = f'Keep files in a directory of XFS: {setting} = "/srv/.../{{...}}".'
        return Finding(name, Status.FAIL, text, remedy)
    if problem := quotas.problem(root):
        remedy = "Make an XFS, mount it with the option prjquota (in /etc/fstab), and let "
        remedy += "xfs_quota run as root; until then a full workspace is only noticed."
        return Finding(name, Status.FAIL, problem, remedy)
    return Finding(name, Status.OK, f"{root}: the file system keeps quotas")
