"""Mounts on the machine of the Docker Engine, for a hub that may not mount anything itself.

Whoever may talk to Docker may do so through a container. One is kept per hub, with the machine's
own files and tools, without network, and with the one capability that mounting needs; it takes
orders at its standard input alone, and ends when that does: with the hub.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from docker.errors import APIError, DockerException

from .attached import Channel, NotWarm

PLACE = "/host"

SCRIPT = r"""
set -f
tab=$(printf '\t')
echo 'gpuspawner: mounts'
while IFS="$tab" read -r what source target; do
  case "$what" in
    mount) said=$({ [ -d "$source" ] && mount --bind -- "$source" "$target" \
             && stat -c '%d %i' "$target"; } 2>&1) ;;
    umount) said=$(umount --lazy -- "$target" 2>&1) ;;
  esac && word=done || word=failed
  printf 'gpuspawner: %s %s\n' "$word" "$(printf %s "$said" | tr '\n' ' ')"
done
"""

HOST_CONFIG = {
    "Binds": [f"/:{PLACE}:rshared"],
    "AutoRemove": True,
    "NetworkMode": "none",
    "ReadonlyRootfs": True,
    "CapDrop": ["ALL"],
    "CapAdd": ["SYS_ADMIN", "SYS_CHROOT", "DAC_READ_SEARCH"],
    "SecurityOpt": ["no-new-privileges", "apparmor=unconfined", "label=disable"],
    "PidsLimit": 32,
    "Memory": 64 * 2**20,
}

BEGINS_WITHIN = 30.0
ANSWERS_WITHIN = 5.0
"""Seconds."""


class Mounter:
    """Mounts folders of the engine's machine; thread-safe."""

    def __init__(self, client: Any, image: str) -> None:
        """``image``: any with a shell's ``chroot`` that the engine has. Raises NotWarm."""
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        try:
            self._begin(client, image)
        except (DockerException, OSError) as error:
            raise NotWarm(_why(error)) from error

    def _begin(self, client: Any, image: str) -> None:
        made = client.create_container(
            image,
            entrypoint=["chroot", PLACE, "/bin/sh", "-c", SCRIPT],
            command=[],
            user="0",
            stdin_open=True,
            environment={
                "NVIDIA_VISIBLE_DEVICES": "void",
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                "LC_ALL": "C",
            },
            labels={"gpuspawner.mounter": "1"},
            host_config=HOST_CONFIG,
        )
        streams = {"stdin": 1, "stdout": 1, "stream": 1}
        self._channel = Channel(client.attach_socket(made["Id"], params=streams))
        try:
            client.start(made["Id"])
            self._channel.hear("gpuspawner: mounts", timeout=BEGINS_WITHIN)
        except BaseException:
            self._channel.close()
            with contextlib.suppress(DockerException):  # it may have gone by itself
                client.remove_container(made["Id"], force=True)
            raise

    def mount(self, source: str, target: str) -> tuple[int, int]:
        """Mount a folder at another; its device and inode, by which to know it. Raises NotWarm."""
        device, inode = self._order("mount", source, target).split()
        return int(device), int(inode)

    def unmount(self, target: str) -> None:
        """Take away what was mounted last at a folder. Raises NotWarm."""
        self._order("umount", "-", target)

    @property
    def alive(self) -> bool:
        return self._channel is not None and self._channel.quiet()

    def close(self) -> None:
        if self._channel:
            self._channel.close()

    def _order(self, what: str, source: str, target: str) -> str:
        if any(sign in source + target for sign in "\t\n\\"):
            raise NotWarm(f"a folder's name cannot be told to the mounter: {source!r}")
        with self._lock:
            if self._channel is None:
                raise NotWarm("nothing mounts any more")
            try:
                self._channel.say(f"{what}\t{source}\t{target}")
                said = self._channel.hear("gpuspawner: ", timeout=ANSWERS_WITHIN)
            except (OSError, NotWarm) as error:
                # An answer that comes late would be taken for that of the next order.
                self._channel.close()
                self._channel = None
                raise NotWarm(f"the mounter: {error}") from error
        word, _, rest = said.removeprefix("gpuspawner: ").partition(" ")
        if word != "done":
            raise NotWarm(f"{what} of {source} at {target}: {rest or 'it is no folder there'}")
        return rest


def _why(error: Exception) -> str:
    if not isinstance(error, APIError):
        return str(error)
    text = str(error.explanation or error)
    if "not a shared mount" in text:
        text += " (systemd shares all mounts; else: mount --make-rshared /)"
    return text
