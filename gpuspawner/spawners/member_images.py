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
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import docker
from docker.errors import ImageNotFound

from ..core.errors import ConfigError, InvalidRequest, NotAllowed
from ..engines.base import LABEL_ENVIRONMENT, LABELS
from ..engines.images import KEPT, LocalImage, local_images, offered_digest, remove
from .form import templates

LONGEST = 255

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]{1,5})?"
_REFERENCE = re.compile(
    rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    r"(?:@sha256:[0-9a-f]{64})?"
)
_SIZE = re.compile(r"([1-9][0-9]{0,5})([MGT])", re.IGNORECASE)
_UNITS = {"M": 2**20, "G": 2**30, "T": 2**40}
_KEYS = ("images", "most", "labels")


@dataclass(frozen=True, slots=True)
class OwnImages:
    """The rule on the images that members of one group may use."""

    images: tuple[str, ...]
    """Patterns of references: ``*`` matches anything but a slash, ``**`` also slashes."""
    most: int | None = None
    """Maximum size in bytes on the engine's disk; None for any."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that an image must have, such as those of a scanner."""

    def allows(self, reference: str) -> bool:
        """Return True if a pattern matches; a reference without a tag means ``latest``."""
        name, at, _ = reference.partition("@")
        tagged = name if ":" in name.rpartition("/")[2] or at else f"{name}:latest"
        return any(_pattern(some).fullmatch(tagged) for some in self.images)


def own_images(settings: Mapping[str, Any], groups: Collection[str]) -> list[OwnImages]:
    """Return the rules for a member of these groups or of ``*`` (all). Raises ConfigError."""
    rules = {group: _rule(str(group), rule) for group, rule in settings.items()}
    return [rule for group, rule in rules.items() if group == "*" or group in groups]


def check_own_image(reference: str, rules: Sequence[OwnImages]) -> list[OwnImages]:
    """Return the rules that allow a reference. Raises InvalidRequest, or NotAllowed."""
    if len(reference) > LONGEST or not _REFERENCE.fullmatch(reference):
        raise InvalidRequest(
            f"The field 'own_image' is {reference[:60]!r}: write an image as for docker pull, "
            "such as lab/tools:1.2.",
            field="own_image",
        )
    if not rules:
        raise NotAllowed(
            "You cannot use your own image: choose an environment, or ask your admin.",
            field="own_image",
        )
    allowing = [rule for rule in rules if rule.allows(reference)]
    if not allowing:
        patterns = ", ".join(sorted({some for rule in rules for some in rule.images}))
        raise NotAllowed(
            f"You may not use the image {reference}. Allowed images: {patterns}.", field="own_image"
        )
    return allowing


def check_contents(
    reference: str, size: int, labels: Mapping[str, str], rules: Sequence[OwnImages]
) -> None:
    """Raise NotAllowed unless a pulled image meets one of the rules on size and labels."""
    wrong = [_wrong(size, labels, rule) for rule in rules]
    if all(wrong):
        raise NotAllowed(f"You may not use the image {reference}: {wrong[0]}.", field="own_image")


def _wrong(size: int, labels: Mapping[str, str], rule: OwnImages) -> str:
    if rule.most is not None and size > rule.most:
        return f"it takes {size / 2**30:.1f} GB, and {rule.most / 2**30:.1f} GB is the most"
    for name, value in rule.labels.items():
        if name not in labels:
            return f"it does not carry the label {name}"
        if labels[name] != value:
            return f"its label {name} is {labels[name][:60]!r}, and has to be {value!r}"
    return ""


def _pattern(text: str) -> re.Pattern[str]:
    """Convert an admin's pattern to a regular expression. Without a tag it matches any tag."""
    parts = re.split(r"(\*\*|\*)", text)
    expression = "".join({"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)
    if ":" not in text.rpartition("/")[2] and not text.endswith("*"):
        expression += "(?::[^/]*)?"
    return re.compile(expression)


def _rule(group: str, rule: Any) -> OwnImages:
    where = f"c.GPUDockerSpawner.own_images[{group!r}]"
    if not isinstance(rule, Mapping) or not set(rule) <= set(_KEYS):
        raise ConfigError(what=f"{where} holds {', '.join(_KEYS)}, and nothing else")
    images, labels = rule.get("images"), rule.get("labels", {})
    if not _texts(images) or not images:
        raise ConfigError(what=f"{where}['images'] is a list of patterns, such as ['lab/**']")
    if not isinstance(labels, Mapping) or not _texts([*labels, *labels.values()]):
        raise ConfigError(what=f"{where}['labels'] is a dictionary of texts")
    most, size = rule.get("most"), None
    if most is not None:
        found = _SIZE.fullmatch(str(most))
        if not found:
            raise ConfigError(what=f"{where}['most'] is a size, such as '20G'")
        size = int(found[1]) * _UNITS[found[2].upper()]
    return OwnImages(tuple(images), size, dict(labels))


def _texts(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(x, str) and x for x in values)


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
    return f"{KEPT}:{readable}-{mark}"


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
