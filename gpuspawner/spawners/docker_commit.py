"""``remove = False``: what a member changed in the container itself is there next time.

DockerSpawner restarts the old container then, with the devices, labels and token that it
was once created with. A lease gives new ones every time, so here the old container's own
layer becomes an image, and the next container starts from it. Nothing of it is lost, and
nothing about GPUs is carried along.

Between two starts a container waits that was made from this image as DockerSpawner itself
would have made it: a hub that goes back to DockerSpawner finds what it knows, without a GPU.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import docker
from docker.errors import ImageNotFound

from ..engines.base import LABEL_ENVIRONMENT, LABELS

if TYPE_CHECKING:
    from .docker import GPUDockerSpawner


REPOSITORY = "gpuspawner-kept"
MAX_LAYERS = 100
"""Docker stacks 127 at most; a kept image gets one more each time, and is flattened here."""

_ANONYMOUS = re.compile(r"[0-9a-f]{64}")
_GPU = re.compile(r"(GPUSPAWNER|NVIDIA|CUDA)_\w+")
_OURS = re.compile(
    r"(JUPYTERHUB|JPY|GPUSPAWNER|NVIDIA_VISIBLE|CUDA_VISIBLE)\w*|\w*(TOKEN|SECRET|PASSWORD)\w*"
)


class Kept:
    """What the last container of this server left."""

    def __init__(self, image: str = "", binds: tuple[str, ...] = ()) -> None:
        self.image = image
        """The image to start from; empty when there is nothing kept."""
        self.binds = binds
        """The unnamed volumes of the old container, as binds."""


async def keep(spawner: GPUDockerSpawner) -> Kept:
    """Turn the server's old container into an image, and say what to start from."""
    environment = spawner.lease.environment if spawner.lease else ""
    wanted = image_name(spawner.object_name, environment)
    old = await spawner.get_object()
    binds: tuple[str, ...] = ()
    if old is not None:
        spawner.said.say("Keeping what you installed last time", 12)
        if old["State"]["Running"]:
            await spawner.stop_object()
        name = _name_of(spawner, old, environment)
        if old["State"]["Status"] != "created":  # else nobody has used it since it was made
            await asyncio.to_thread(_to_image, spawner, old, name)
        await spawner.docker("remove_container", old["Id"], v=False)
        binds = anonymous_binds(old) if name == wanted else ()
    try:
        await spawner.docker("inspect_image", wanted)
    except ImageNotFound:
        return Kept()
    return Kept(wanted, binds)


@dataclass(frozen=True, slots=True)
class Plain:
    """How a container is made that waits without a lease."""

    image: str
    environment: str
    variables: dict[str, str]
    """Those of the container that ended, the token too: DockerSpawner goes on with it."""
    binds: tuple[str, ...]

    def applied(self, create: dict[str, Any]) -> dict[str, Any]:
        """DockerSpawner's own arguments of ``create_container``, on the kept image."""
        host = dict(create.get("host_config") or {})
        host["Binds"] = [*(host.get("Binds") or []), *self.binds]
        labels = {**dict.fromkeys(LABELS, ""), LABEL_ENVIRONMENT: self.environment}
        labels |= create.get("labels") or {}
        # The Hub has forgotten the server's address by now, so most of the variables are
        # the old ones; what is said about GPUs is what the admin says.
        admins = {k: v for k, v in (create.get("environment") or {}).items() if _GPU.fullmatch(k)}
        others = {k: v for k, v in self.variables.items() if not _GPU.fullmatch(k)}
        return {
            **create,
            "image": self.image,
            "host_config": host,
            "labels": labels,
            "environment": others | admins,
        }


async def leave_plain(spawner: GPUDockerSpawner) -> None:
    """Put a container without GPUs in the place of the one that just ended."""
    old = await spawner.get_object()
    if old is None or old["State"]["Status"] == "created" or old["State"]["Running"]:
        return
    environment = (old["Config"].get("Labels") or {}).get(LABEL_ENVIRONMENT, "")
    variables = dict(item.split("=", 1) for item in old["Config"].get("Env") or [])
    name = _name_of(spawner, old, environment)
    await asyncio.to_thread(_to_image, spawner, old, name)
    plain = Plain(name, environment, variables, anonymous_binds(old))
    aside = f"{spawner.object_name}-{old['Id'][:12]}"
    await spawner.docker("rename", old["Id"], aside)
    try:
        await spawner.create_plain(plain)
    except BaseException:
        await spawner.docker("rename", old["Id"], spawner.object_name)
        raise
    await spawner.docker("remove_container", old["Id"], v=False)


def _name_of(spawner: GPUDockerSpawner, old: dict[str, Any], environment: str) -> str:
    labels = old["Config"].get("Labels") or {}
    return image_name(spawner.object_name, labels.get(LABEL_ENVIRONMENT) or environment)


def image_name(container: str, environment: str) -> str:
    """The image that keeps a server's own layer, for one environment."""
    readable = re.sub(r"[^a-z0-9_.-]+", "-", container.lower()).strip("-.")[:60]
    mark = hashlib.sha256(f"{container}\0{environment}".encode()).hexdigest()[:12]
    return f"{REPOSITORY}:{readable}-{mark}"


def anonymous_binds(container: dict[str, Any]) -> tuple[str, ...]:
    """The volumes that the image declared and nobody named: they hold files as well."""
    mounts = container.get("Mounts") or []
    return tuple(
        f"{mount['Name']}:{mount['Destination']}:rw"
        for mount in mounts
        if mount.get("Type") == "volume" and _ANONYMOUS.fullmatch(mount.get("Name", ""))
    )


def without_secrets(environment: list[str], image: list[str]) -> list[str]:
    """The variables to keep: tokens and leases emptied, or as the image had them.

    Docker has no way to take a variable out of an image again.
    """
    original = {item.partition("=")[0]: item for item in image}
    kept = []
    for item in environment:
        name = item.partition("=")[0]
        ours = _OURS.fullmatch(name)
        kept.append(original.get(name, f"{name}=") if ours else item)
    return kept


def _to_image(spawner: GPUDockerSpawner, old: dict[str, Any], name: str) -> None:
    """Commit the container; flatten it when it has become too deep. Blocks, maybe long."""
    repository, _, tag = name.partition(":")
    client = spawner.connect(timeout=3600)
    try:
        image = client.inspect_image(old["Image"])
        layers = image["RootFS"].get("Layers") or []
        variables = without_secrets(old["Config"].get("Env") or [], image["Config"]["Env"] or [])
        config = {
            "Env": variables,
            "Labels": dict.fromkeys(LABELS, ""),
        }
        if len(layers) < MAX_LAYERS:
            client.commit(old["Id"], repository=repository, tag=tag, conf=config)
        else:
            _flatten(client, old, variables, repository, tag)
    finally:
        client.close()


def _flatten(
    client: docker.APIClient, old: dict[str, Any], variables: list[str], repository: str, tag: str
) -> None:
    config = old["Config"]
    changes = [f"ENV {_env(item)}" for item in variables]
    changes += [f"{word} {config[key]}" for word, key in _PLAIN if config.get(key)]
    changes += [f"{word} {json.dumps(config[key])}" for word, key in _LISTS if config.get(key)]
    changes += [f"EXPOSE {port}" for port in config.get("ExposedPorts") or {}]
    client.import_image_from_stream(
        client.export(old["Id"]), repository=repository, tag=tag, changes=changes
    )


_PLAIN = (("WORKDIR", "WorkingDir"), ("USER", "User"))
_LISTS = (("ENTRYPOINT", "Entrypoint"), ("CMD", "Cmd"))


def _env(item: str) -> str:
    name, _, value = item.partition("=")
    return f"{name}={json.dumps(value).replace('$', chr(92) + '$')}"
