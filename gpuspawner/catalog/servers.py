"""What an environment, or a choice within it, says of its servers: from plain values."""

from __future__ import annotations

import re
from typing import Any

from ..reading.origin import shown
from ..reading.section import Section, mapping, positive, size
from . import kinds
from .overrides import read_override

_KINDS = {
    "image": kinds.image,
    "mem_limit": size,
    "cpu_limit": positive,
    "shm_size": size,
}

_REFUSED_VARIABLES = ("NVIDIA_", "CUDA_", "GPUSPAWNER_", "JUPYTERHUB_")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read_servers(section: Section) -> dict[str, Any]:
    """The keys that are there, by the names of :class:`~gpuspawner.catalog.Environment`."""
    found: dict[str, Any] = {key: section.take(key, kind, None) for key, kind in _KINDS.items()}
    found["default_url"] = _default_url(section)
    found["environment"] = _variables(section)
    found["spawner_override"] = read_override(section)
    return {key: value for key, value in found.items() if value}


def _default_url(section: Section) -> str:
    """``default_url`` as it is, or what ``first_page`` means; empty when there is neither."""
    page = section.take("first_page", kinds.first_page, "")
    url = section.take("default_url", kinds.server_path, "")
    if page and url:
        raise section.error(
            "first_page", f"{section.label} has both 'first_page' and 'default_url'. Keep one."
        )
    return page or url


def _variables(section: Section) -> dict[str, str]:
    empty: dict[str, Any] = {}
    variables = section.take("environment", mapping, empty)
    for name, value in variables.items():
        problem = ""
        if not _VARIABLE.fullmatch(name):
            problem = "is no name of an environment variable. Use letters, digits and '_'."
        elif name.upper().startswith(_REFUSED_VARIABLES):
            problem = "is set by gpuspawner for every server, and cannot be set here. Leave it out."
        elif not isinstance(value, str):
            problem = f"is {shown(value)}, not text. Put it in quotes."
        elif "\0" in value:
            problem = "holds a character that ends a text. Take it out."
        if problem:
            raise section.origin.error(
                (*section.path, "environment", name),
                f"the variable {name!r} of {section.label} {problem}",
            )
    return variables
