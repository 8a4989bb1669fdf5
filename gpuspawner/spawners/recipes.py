"""What two containers have in common that differ only in their member and their device. Pure.

A warm container is made after one that a member got, and given only to a member whose own would
have been made the same way. So every setting of DockerSpawner keeps its meaning: what makes one
member's container another than the next one's makes it a container that no other gets.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engines.base import LABEL_LEASE, LABELS
from ..engines.warm import LABEL_WARM, NAME, VARIABLE, WORKSPACE

PROGRAM = "jupyterhub-singleuser"

_DEVICE, _PLACE = "\N{SYMBOL FOR SUBSTITUTE}device", "\N{SYMBOL FOR SUBSTITUTE}place"
_LATER = re.compile(r"(JUPYTERHUB_(?!SINGLEUSER)|JPY_|GPUSPAWNER_(?!READY))\w*")
"""The variables that JupyterHub and the lease set anew each time, read when a server begins."""


class NoRecipe(Exception):
    """Nothing can be started ahead after this container; why, for the admin."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How such a container is made, and what its member gets at the grant."""

    text: str = field(repr=False)
    """The arguments of ``create_container`` as JSON, without device, folder and member."""
    environment: Mapping[str, str] = field(repr=False)
    """All variables of this member's server."""
    arguments: tuple[str, ...]

    @property
    def key(self) -> str:
        """The same for all that are made the same way."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def create(self, uuid: str, place: Path) -> dict[str, Any]:
        """The arguments of ``create_container`` for one that waits with this device."""
        text = self.text.replace(_DEVICE, uuid).replace(_PLACE, json.dumps(str(place))[1:-1])
        made: dict[str, Any] = json.loads(text)
        made["name"] = NAME + place.name
        made["labels"] |= {LABEL_LEASE: "", LABEL_WARM: str(place)}
        return made


def recipe_of(
    create: Mapping[str, Any], *, uuid: str, source: str, target: str, members: tuple[str, ...]
) -> Recipe:
    """The recipe of a container that is about to be made. Raises NoRecipe.

    ``create``: the arguments of ``create_container`` with one lease applied. ``source`` and
    ``target``: of the workspace. ``members``: the member's name, as it may be written.
    """
    named = re.compile("|".join(rf"(?<![\w.-]){re.escape(m)}(?![\w-])" for m in members))
    environment = {name: str(value) for name, value in dict(create["environment"]).items()}
    command = list(create.get("command") or [])
    if [Path(str(word)).name for word in command[:1]] != [PROGRAM]:
        raise NoRecipe(f"its command is {command[:1]}, and only {PROGRAM} can wait")
    if create.get("tty"):
        raise NoRecipe("it has a terminal (tty)")
    host = dict(create["host_config"])
    own = f"{source}:{target}:rw"
    if not source or own not in (host.get("Binds") or []):
        raise NoRecipe("it has no workspace")
    place = f"{_PLACE}/{WORKSPACE}:{target}:rw,rslave"
    host["Binds"] = [place if bind == own else bind for bind in host["Binds"]]
    labels = {k: v for k, v in (create.get("labels") or {}).items() if k not in LABELS}
    later = {k for k, v in environment.items() if _LATER.fullmatch(k) or named.search(v)}
    first = {k: v for k, v in sorted(environment.items()) if k not in later}
    made = {
        **{key: value for key, value in create.items() if key != "name"},
        "command": command[:1],
        "environment": {**first, VARIABLE: target},
        "host_config": host,
        "labels": labels,
        "stdin_open": True,
    }
    try:
        text = json.dumps(made, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise NoRecipe(f"it cannot be written down ({error})") from error
    if found := next((p for p, said in _texts(made) if named.search(said)), None):
        raise NoRecipe(f"its {found} names the member")
    return Recipe(text.replace(uuid, _DEVICE), environment, tuple(map(str, command[1:])))


def _texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every text in it, and where it is."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield where or "settings", str(key)
            yield from _texts(inner, f"{where}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner, where)
    elif isinstance(value, str):
        yield where, value
