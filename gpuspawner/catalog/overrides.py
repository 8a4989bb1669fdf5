"""Check ``spawner_override``: the spawner's traits that an environment sets.

The lease decides devices, and other keys of the catalog decide images and mounts. An override of
these would bypass them silently, so it is rejected.
"""

from __future__ import annotations

from typing import Any

from ..core.config_models import Schema, mistake

OWN_KEYS = ("image", "environment", "mem_limit", "cpu_limit", "shm_size", "default_url")
"""Traits that an environment sets with a key of the same name."""

_DEVICES = "the lease decides which devices a server gets"
_INJECTION = "the spawner's configuration decides how GPUs get into servers"
_MOUNTS = "mounts come from 'datasets' and 'shared_folders'"
_OWN_KEY = "the environment has a key of that name"

OWNED_TRAITS = {
    **dict.fromkeys(
        ("allowed_images", "image_whitelist"), "the catalog decides which images there are"
    ),
    "device_requests": _DEVICES,
    **dict.fromkeys(("volumes", "read_only_volumes", "mounts", "volume_driver"), _MOUNTS),
    "user_options": "they are what the member asked for",
    **dict.fromkeys(("options_form", "options_from_form"), "gpuspawner shows its own form"),
    "services": "it is the hub's own",
}
"""Traits that no environment may set, and the reason."""

OWNED_INSIDE = {
    "extra_host_config": {
        **dict.fromkeys(("device_requests", "devices", "device_cgroup_rules"), _DEVICES),
        "runtime": _INJECTION,
        "privileged": "a privileged server would see every device",
        **dict.fromkeys(("binds", "mounts", "volumes_from", "volume_driver"), _MOUNTS),
        **dict.fromkeys(("shm_size", "mem_limit"), _OWN_KEY),
    },
    "extra_create_kwargs": {
        **dict.fromkeys(("image", "environment"), _OWN_KEY),
        "labels": "the lease is found again by its labels",
        "host_config": _DEVICES,
        "runtime": _INJECTION,
        "volumes": _MOUNTS,
    },
}
"""Keys that no environment may set in traits that it may set, and the reason."""


def check_override(override: dict[str, Any]) -> dict[str, Any]:
    """Return the override. Raises PydanticCustomError if it sets a forbidden trait or key."""
    for trait, value in override.items():
        why = OWNED_TRAITS.get(trait, "")
        if trait in OWN_KEYS:
            why = _OWN_KEY
        elif trait.startswith("gpu_"):
            why = _INJECTION
        if why:
            raise mistake(f"may not set {trait!r}: {why}. Leave it out.", trait)
        owned = OWNED_INSIDE.get(trait, {})
        for key in owned.keys() & (value.keys() if isinstance(value, dict) else ()):
            raise mistake(
                f"may not set {key!r} in {trait!r}: {owned[key]}. Leave it out.", trait, key
            )
    return override


OVERRIDE_SCHEMA: Schema = {
    "type": "object",
    "propertyNames": {
        "not": {"anyOf": [{"enum": sorted({*OWN_KEYS, *OWNED_TRAITS})}, {"pattern": "^gpu_"}]}
    },
    "properties": {
        trait: {"propertyNames": {"not": {"enum": sorted(keys)}}}
        for trait, keys in OWNED_INSIDE.items()
    },
}
