"""Scratch directories: a volume of the engine for each session, deleted with its container.

The volume has no name of its own: the engine creates it with the container, and deletes it when
the container is removed with its volumes. If a process was killed in between, the volume is left
unused, and :func:`remove_unused` deletes it.
"""

from __future__ import annotations

import io
import tarfile
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from .disk_usage import room, size
from .preflight import LABEL_CHECK, CheckFinding, Status, no_answer

LABEL_SCRATCH = "gpuspawner.scratch"
"""Label of a scratch volume: the id of its lease."""

README = "DELETED-AT-THE-END.txt"

NOTE = """\
This is your scratch directory: fast local disk of the machine that you are on now.

It is deleted when this session or run ends, with everything in it. Keep what you need in {kept}.
"""

REMEDY = (
    "Keep the engine's data (/var/lib/docker) on XFS mounted with pquota: the engine then limits "
    "each scratch directory."
)


@dataclass(frozen=True, slots=True)
class Scratch:
    """The scratch directory of one session."""

    target: str
    """Its path in the container."""
    limit_bytes: int
    is_enforced: bool
    """True if the engine limits it to ``limit_bytes``."""

    def mount(self, lease_id: str) -> dict[str, Any]:
        """Return the entry of the Engine API's ``HostConfig.Mounts``."""
        options: dict[str, Any] = {"Labels": {LABEL_SCRATCH: lease_id}}
        if self.is_enforced:
            sizes = {"size": str(self.limit_bytes)}
            options["DriverConfig"] = {"Name": "local", "Options": sizes}
        return {"Type": "volume", "Target": self.target, "VolumeOptions": options}


def archive_of(target: str, kept: str) -> tuple[str, bytes]:
    """Return a folder, and the tar archive to unpack in it, which makes the directory writable.

    Every user of the container can write there, as in /tmp, because images have different users.
    The archive also has a note that the directory will be deleted, and that files in the folder
    ``kept`` will not.
    """
    parent, _, name = target.rstrip("/").rpartition("/")
    note = NOTE.format(kept=kept or "a place that is kept").encode()
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        folder = tarfile.TarInfo(name)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(folder)
        file = tarfile.TarInfo(f"{name}/{README}")
        file.size, file.mode = len(note), 0o444
        tar.addfile(file, io.BytesIO(note))
    return parent or "/", written.getvalue()


def refusal(client: docker.APIClient, limit_bytes: int) -> str:
    """Return the engine's reason for not limiting volumes, or "" if it limits them.

    Creates and removes a volume. Blocks. Raises DockerException or RequestException if the engine
    does not respond.
    """
    try:
        made = client.create_volume(
            driver="local", driver_opts={"size": str(limit_bytes)}, labels={LABEL_CHECK: "scratch"}
        )
    except APIError as error:
        if error.status_code is not None and error.status_code >= 400:
            return " ".join(str(error.explanation or error).split())[:300]
        raise
    client.remove_volume(made["Name"])
    return ""


def remove_unused(client: docker.APIClient) -> list[str]:
    """Delete the scratch volumes that no container uses, and return the ids of their leases.

    The engine refuses to delete a volume of a container, even of one that was just created. Blocks.
    """
    wanted = {"label": LABEL_SCRATCH, "dangling": True}
    removed = []
    for volume in client.volumes(filters=wanted).get("Volumes") or []:
        with suppress(NotFound):
            try:
                client.remove_volume(volume["Name"])
            except APIError as error:
                if error.status_code != 409:  # a container uses it after all
                    raise
                continue
            removed.append(str((volume.get("Labels") or {}).get(LABEL_SCRATCH, "")))
    return removed


def check_scratch(
    client: docker.APIClient, limit_bytes: int, *, is_local: bool, is_removed: bool
) -> CheckFinding | None:
    """Check that scratch directories are deleted and limited; None if the hub has none.

    ``is_local``: the engine runs on this machine. ``is_removed``: containers are removed when they
    stop.
    """
    name = "scratch"
    if not limit_bytes:
        return None
    if not is_removed:
        text = "Servers get no scratch directory, because their containers are kept."
        remedy = "Set c.DockerSpawner.remove = True, or c.GPUDockerSpawner.scratch_size = 0."
        return CheckFinding(name, Status.FAIL, text, remedy)
    try:
        root = str(client.info().get("DockerRootDir", ""))
        said = refusal(client, limit_bytes)
    except (DockerException, requests.RequestException) as error:
        return no_answer(name, error)
    found = room(root) if is_local else None
    if found and found[0] < limit_bytes:
        text = f"The engine's disk has {size(found[0])} left, and one scratch directory may hold "
        remedy = "Make room (docker system df), or set a lower c.GPUDockerSpawner.scratch_size."
        return CheckFinding(name, Status.FAIL, f"{text}{size(limit_bytes)}.", remedy)
    may = f"Each session has a scratch directory of {size(limit_bytes)}"
    if not said:
        return CheckFinding(name, Status.OK, f"{may}; the engine itself refuses more.")
    text = f"{may}, but nothing keeps a session from writing more ({said})"
    return CheckFinding(name, Status.FAIL, text, REMEDY)
