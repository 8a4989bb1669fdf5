"""Containers that were started before anybody asked: what becomes of one.

A warm container waits with a server's modules imported and knows no member. What it lacks comes
at the grant: the workspace, as a mount that propagates into it, and the member's environment,
token and arguments at its standard input. Docker cannot change the labels of a container that
runs: whose it is then stands in a file of the hub's.

The hub keeps the other end of the standard input. When the hub goes, what still waits reads the
end of it and goes as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from docker.errors import APIError, DockerException, NotFound

from ..errors import EngineUnavailable
from .attached import Channel, NotWarm
from .base import LABEL_LEASE
from .mounting import Mounter

LABEL_WARM = "gpuspawner.warm"
"""On a warm container: its folder."""

LABEL_ABLE = "gpuspawner.image.warm"
"""On an image whose server can wait, and which has nothing of its own in the workspace."""

VARIABLE = "GPUSPAWNER_WARM"
"""Tells a server to wait for its member, and where the workspace will be."""

NAME = "gpuspawner-warm-"
"""What the names of those begin with that wait."""

WAITING, TAKEN, REFUSED = "gpuspawner: waiting", "gpuspawner: taken", "gpuspawner: refused"
"""What a warm container says."""

WORKSPACE = "workspace"
_GIVEN = "given.json"

STARTS_WITHIN = 120.0
"""Seconds that a container has until it waits."""

TAKES_WITHIN = 5.0
"""Seconds that it has to take what it is given."""

# Whose a container is.


def labels_of(container: Mapping[str, Any]) -> dict[str, str]:
    """A container's labels; those of its lease too when it is a warm one that was given.

    ``container``: as the engine inspects it. Raises EngineUnavailable for one that is somebody's
    when it cannot be read whose.
    """
    labels = dict(container["Config"].get("Labels") or {})
    if place := labels.get(LABEL_WARM):
        labels.update(given(Path(place)).get("labels", {}))
        is_somebodys = not container["Name"].lstrip("/").startswith(NAME)
        if is_somebodys and not labels.get(LABEL_LEASE) and container["State"].get("Running"):
            raise EngineUnavailable()
    return labels


def given_at(container: Mapping[str, Any]) -> datetime | None:
    """Since when a warm container is somebody's; None for every other. Raises EngineUnavailable."""
    place = (container["Config"].get("Labels") or {}).get(LABEL_WARM)
    at = given(Path(place)).get("at") if place else None
    return datetime.fromtimestamp(at, tz=timezone.utc) if at else None


def given(place: Path) -> dict[str, Any]:
    """What a warm container was given: ``labels``, and ``at`` in seconds of the epoch. Nothing
    when it waits. Raises EngineUnavailable."""
    try:
        found: dict[str, Any] = json.loads((place / _GIVEN).read_text(encoding="utf-8"))
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise EngineUnavailable() from error


def _note_given(place: Path, labels: Mapping[str, str]) -> None:
    """On disk before it has anything of the member's."""
    text = json.dumps({"labels": dict(labels), "at": time.time()})
    new = place / (_GIVEN + ".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(place / _GIVEN)


# One container's life.


@dataclass(frozen=True, slots=True)
class Warm:
    """A container that waits."""

    ref: str
    """Its id at the engine."""
    place: Path
    image: str
    """The id of its image."""
    key: str
    """What it was made after: a recipe's key."""
    channel: Channel


@dataclass(frozen=True, slots=True)
class Gift:
    """What makes a warm container a member's."""

    name: str
    """The container's, from now on."""
    labels: Mapping[str, str]
    source: str
    """The workspace's folder on the engine's machine."""
    environment: Mapping[str, str]
    arguments: tuple[str, ...]


def ready_folder(folder: Path) -> None:
    """The folder for all warm containers of a hub, which is its own. Raises NotWarm."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    except OSError as error:
        raise NotWarm(f"the hub cannot make the folder {folder}: {error.strerror}") from error


def start_waiting(client: Any, create: dict[str, Any], place: Path, key: str) -> Warm:
    """Make a warm container and start it, until it waits. Blocks. Raises NotWarm."""
    ref, channel = "", None
    try:
        place.mkdir(mode=0o700)
        (place / WORKSPACE).mkdir()
        ref = client.create_container(**create)["Id"]
        image = client.inspect_container(ref)["Image"]
        streams = {"stdin": 1, "stdout": 1, "stream": 1}
        channel = Channel(client.attach_socket(ref, params=streams))
        client.start(ref)
        channel.hear(WAITING, timeout=STARTS_WITHIN)
    except (NotWarm, DockerException, OSError) as error:
        if channel:
            channel.close()
        said = _last_words(client, ref)
        with contextlib.suppress(DockerException, OSError):
            remove(client, ref)
            clear(place, None)
        raise NotWarm(f"{_why(error)}{said}") from error
    return Warm(ref, place, image, key, channel)


def give(client: Any, mounter: Mounter, warm: Warm, gift: Gift) -> None:
    """Give a warm container to a member. Blocks. Raises NotWarm: it is of no use then.

    The hub may be killed after each step: until the last one the container ends with the hub,
    and before it has anything of a member's it is known whose it is.
    """
    try:
        _note_given(warm.place, gift.labels)
        client.rename(warm.ref, gift.name)
        device, inode = mounter.mount(gift.source, str(warm.place / WORKSPACE))
        order = {
            "environment": dict(gift.environment),
            "arguments": list(gift.arguments),
            "workspace": {"device": device, "inode": inode},
        }
        warm.channel.say(json.dumps(order))
        answer = warm.channel.hear(TAKEN, REFUSED, timeout=TAKES_WITHIN)
    except (DockerException, OSError) as error:
        raise NotWarm(_why(error)) from error
    finally:
        warm.channel.close()
    if answer != TAKEN:
        raise NotWarm(answer.partition(": ")[2])


def remove(client: Any, ref: str) -> None:
    """End a container at once. Blocks. Raises DockerException."""
    if ref:
        with contextlib.suppress(NotFound):
            client.remove_container(ref, v=True, force=True)


def clear(place: Path, mounter: Mounter | None) -> None:
    """Take away the folder of a container that is gone, and never what is mounted there.

    Blocks. Raises OSError or NotWarm while it cannot be done.
    """
    if mounter and (place / _GIVEN).exists():
        with contextlib.suppress(NotWarm):  # it had not come so far: then the next line works
            mounter.unmount(str(place / WORKSPACE))
    with contextlib.suppress(FileNotFoundError):
        (place / WORKSPACE).rmdir()  # refuses where a workspace is mounted still
    for name in (_GIVEN, _GIVEN + ".new"):
        (place / name).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        place.rmdir()


def containers(client: Any, folder: Path) -> Iterator[tuple[str, Path, bool]]:
    """The warm containers of a folder: id, place, and whether it runs. Blocks."""
    for listed in client.containers(all=True, filters={"label": LABEL_WARM}):
        place = Path(listed["Labels"][LABEL_WARM])
        if place.parent == folder:
            yield listed["Id"], place, listed["State"] == "running"


def _last_words(client: Any, ref: str) -> str:
    try:
        words = client.logs(ref, tail=5).decode(errors="replace") if ref else ""
    except DockerException:
        return ""
    return f" ({' '.join(words.split())[-300:]})" if words.strip() else ""


def _why(error: Exception) -> str:
    if isinstance(error, APIError):
        return str(error.explanation or error)
    return str(error)
