"""Images of a member's own: those that they bring, and those kept from their containers.

With ``remove = False``, DockerSpawner restarts the old container with its old devices, labels and
token. A lease has new ones every time, so here the old container's own layer becomes an image, from
which the next container starts. Between two starts there is a container without a GPU from this
image, as DockerSpawner would have created it: a hub that switches back finds what it expects.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import ImageNotFound

from ..catalog.member_images import OwnImages, check_contents, check_own_image
from ..core.errors import NotAllowed
from ..engines.base import LABEL_ENVIRONMENT, LABELS
from ..engines.images import LocalImage, local_images, offered_digest, remove
from .form import templates

# Images that members bring.


def look_for(
    connect: Callable[[], docker.APIClient], reference: str, rules: Sequence[OwnImages]
) -> None:
    """Check that a registry has the image, or that the local one may be used. Blocks.

    Raises ImageUnavailable or NotAllowed.
    """
    client = connect()
    found = local_images(client, reference)
    if found is None:
        offered_digest(client, reference)
    else:
        _require_allowed(reference, found, rules)


def judge_here(
    connect: Callable[[], docker.APIClient], reference: str, rules: Sequence[OwnImages]
) -> None:
    """Check the size and labels of a pulled image, and remove it if it is not allowed. Blocks.

    Raises NotAllowed.
    """
    client = connect()
    found = local_images(client, reference)
    if found is None:
        return  # creating the container will fail with the reason
    try:
        _require_allowed(reference, found, rules)
    except NotAllowed:
        remove(client, found)
        raise


def _require_allowed(reference: str, found: LocalImage, rules: Sequence[OwnImages]) -> None:
    fitting = check_own_image(reference, rules)
    check_contents(reference, found.size, found.labels, fitting)


def own_image_field(rules: Sequence[OwnImages], last: str) -> str:
    """Return the form's field for an own image; empty if the member may not bring one."""
    if not rules:
        return ""
    patterns = sorted({some for rule in rules for some in rule.images})
    return templates.get_template("own_image.html").render(patterns=patterns, last=last)


# Images kept from containers.

REPOSITORY = "gpuspawner-kept"
MAX_LAYERS = 100
"""Layers at which a kept image is flattened; each start adds one, and Docker allows 127."""

_ANONYMOUS = re.compile(r"[0-9a-f]{64}")
_GPU = re.compile(r"(GPUSPAWNER|NVIDIA|CUDA)_\w+")
_OURS = re.compile(
    r"(JUPYTERHUB|JPY|GPUSPAWNER|NVIDIA_VISIBLE|CUDA_VISIBLE)\w*|\w*(TOKEN|SECRET|PASSWORD)\w*"
)


@dataclass(frozen=True, slots=True)
class SavedContainer:
    """What is kept from the last container of a server."""

    image: str = ""
    """The image to start from; empty if none was kept."""
    binds: tuple[str, ...] = ()
    """The anonymous volumes of the old container, as binds."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Arguments for the container that exists without a lease between two starts."""

    image: str
    environment: str
    variables: dict[str, str]
    """Those of the ended container, including the token, which DockerSpawner continues to use."""
    binds: tuple[str, ...]

    def applied(self, create: dict[str, Any]) -> dict[str, Any]:
        """Return DockerSpawner's own arguments of ``create_container``, with the kept image."""
        host = create.get("host_config") or {}
        host = {**host, "Binds": [*(host.get("Binds") or []), *self.binds]}
        labels = {**dict.fromkeys(LABELS, ""), LABEL_ENVIRONMENT: self.environment}
        labels |= create.get("labels") or {}
        # The Hub has already forgotten the server's address, so most variables are the old
        # ones. Variables about GPUs are only those that the admin configured.
        admins = {k: v for k, v in (create.get("environment") or {}).items() if _GPU.fullmatch(k)}
        others = {k: v for k, v in self.variables.items() if not _GPU.fullmatch(k)}
        return {
            **create,
            "image": self.image,
            "host_config": host,
            "labels": labels,
            "environment": others | admins,
        }


@dataclass(frozen=True, slots=True)
class KeptImages:
    """The images that keep the containers of one server, one per environment."""

    call: Callable[..., Awaitable[Any]]
    """The spawner's ``docker``."""
    connect: Callable[..., docker.APIClient]
    container_name: str

    async def keep(self, old: dict[str, Any] | None, environment: str) -> SavedContainer:
        """Turn the old container, which has ended, into an image; return what to start from."""
        wanted = image_name(self.container_name, environment)
        binds: tuple[str, ...] = ()
        if old is not None:
            name = self._name_of(old, environment)
            if old["State"]["Status"] != "created":  # a container that never ran has no changes
                await asyncio.to_thread(self._to_image, old, name)
            await self.call("remove_container", old["Id"], v=False)
            binds = anonymous_binds(old) if name == wanted else ()
        try:
            await self.call("inspect_image", wanted)
        except ImageNotFound:
            return SavedContainer()
        return SavedContainer(wanted, binds)

    async def leave_plain(
        self, old: dict[str, Any] | None, create: Callable[[Plain], Awaitable[None]]
    ) -> None:
        """Replace a container that ended with one without GPUs, which ``create`` creates."""
        if old is None or old["State"]["Status"] == "created" or old["State"]["Running"]:
            return
        environment = (old["Config"].get("Labels") or {}).get(LABEL_ENVIRONMENT, "")
        variables = dict(item.split("=", 1) for item in old["Config"].get("Env") or [])
        name = self._name_of(old, environment)
        await asyncio.to_thread(self._to_image, old, name)
        plain = Plain(name, environment, variables, anonymous_binds(old))
        await self.call("rename", old["Id"], f"{self.container_name}-{old['Id'][:12]}")
        try:
            await create(plain)
        except BaseException:
            await self.call("rename", old["Id"], self.container_name)
            raise
        await self.call("remove_container", old["Id"], v=False)

    def _name_of(self, old: dict[str, Any], environment: str) -> str:
        labels = old["Config"].get("Labels") or {}
        return image_name(self.container_name, labels.get(LABEL_ENVIRONMENT) or environment)

    def _to_image(self, old: dict[str, Any], name: str) -> None:
        """Commit the container, or flatten it if it has too many layers. Blocks, maybe for long."""
        repository, _, tag = name.partition(":")
        client = self.connect(timeout=3600)
        try:
            image = client.inspect_image(old["Image"])
            layers = image["RootFS"].get("Layers") or []
            original = image["Config"]["Env"] or []
            variables = without_secrets(old["Config"].get("Env") or [], original)
            config = {"Env": variables, "Labels": dict.fromkeys(LABELS, "")}
            if len(layers) < MAX_LAYERS:
                client.commit(old["Id"], repository=repository, tag=tag, conf=config)
            else:
                _flatten(client, old, variables, repository, tag)
        finally:
            client.close()


def image_name(container: str, environment: str) -> str:
    """Return the name of the image that keeps a server's own layer for one environment."""
    readable = re.sub(r"[^a-z0-9_.-]+", "-", container.lower()).strip("-.")[:60]
    mark = hashlib.sha256(f"{container}\0{environment}".encode()).hexdigest()[:12]
    return f"{REPOSITORY}:{readable}-{mark}"


def anonymous_binds(container: dict[str, Any]) -> tuple[str, ...]:
    """Return binds for the volumes that the image declared without a name: they have files, too."""
    mounts = container.get("Mounts") or []
    return tuple(
        f"{mount['Name']}:{mount['Destination']}:rw"
        for mount in mounts
        if mount.get("Type") == "volume" and _ANONYMOUS.fullmatch(mount.get("Name", ""))
    )


def without_secrets(environment: list[str], image: list[str]) -> list[str]:
    """Return the variables to keep, with tokens and leases emptied or reset to the image's value.

    Docker cannot remove a variable from an image.
    """
    original = {item.partition("=")[0]: item for item in image}
    named = ((item.partition("=")[0], item) for item in environment)
    return [
        original.get(name, f"{name}=") if _OURS.fullmatch(name) else item for name, item in named
    ]


def _flatten(
    client: docker.APIClient, old: dict[str, Any], variables: list[str], repository: str, tag: str
) -> None:
    config = old["Config"]
    texts = (("WORKDIR", "WorkingDir"), ("USER", "User"))
    lists = (("ENTRYPOINT", "Entrypoint"), ("CMD", "Cmd"))
    changes = [f"ENV {_env(item)}" for item in variables]
    changes += [f"{word} {config[key]}" for word, key in texts if config.get(key)]
    changes += [f"{word} {json.dumps(config[key])}" for word, key in lists if config.get(key)]
    changes += [f"EXPOSE {port}" for port in config.get("ExposedPorts") or {}]
    client.import_image_from_stream(
        client.export(old["Id"]), repository=repository, tag=tag, changes=changes
    )


def _env(item: str) -> str:
    name, _, value = item.partition("=")
    return f"{name}={json.dumps(value).replace('$', chr(92) + '$')}"
