"""Check ``spawner_override``: the spawner's traits that an environment sets.

The lease decides devices, and other keys of the catalog decide images and mounts. An override of
these would bypass them silently, so it is rejected.
"""

from __future__ import annotations

from typing import Any

from ..core.config_models import Schema, mistake

OWN_KEYS = ("image", "environment", "mem_limit", "cpu_limit", "shm_size", "default_url")
"""Traits that an environment sets with a key of the same name."""

OWNED_TRAITS = {
    "allowed_images": "the catalog decides which images there are",
    "image_whitelist": "the catalog decides which images there are",
    "device_requests": "the lease decides which devices a server gets",
    "volumes": "mounts come from 'datasets' and 'shared_folders'",
    "read_only_volumes": "mounts come from 'datasets' and 'shared_folders'",
    "mounts": "mounts come from 'datasets' and 'shared_folders'",
    "volume_driver": "mounts come from 'datasets' and 'shared_folders'",
    "user_options": "they are what the member asked for",
    "options_form": "gpuspawner shows its own form",
    "options_from_form": "gpuspawner shows its own form",
    "services": "it is the hub's own",
}
"""Traits that no environment may set, and the reason."""

OWNED_INSIDE = {
    "extra_host_config": {
        "device_requests": "the lease decides which devices a server gets",
        "devices": "the lease decides which devices a server gets",
        "device_cgroup_rules": "the lease decides which devices a server gets",
        "runtime": "the spawner's configuration decides how GPUs get into servers",
        "privileged": "a privileged server would see every device",
        "binds": "mounts come from 'datasets' and 'shared_folders'",
        "mounts": "mounts come from 'datasets' and 'shared_folders'",
        "volumes_from": "mounts come from 'datasets' and 'shared_folders'",
        "volume_driver": "mounts come from 'datasets' and 'shared_folders'",
        "shm_size": "the environment has a key of that name",
        "mem_limit": "the environment has a key of that name",
    },
    "extra_create_kwargs": {
        "image": "the environment has a key of that name",
        "environment": "the environment has a key of that name",
        "labels": "the lease is found again by its labels",
        "host_config": "the lease decides which devices a server gets",
        "runtime": "the spawner's configuration decides how GPUs get into servers",
        "volumes": "mounts come from 'datasets' and 'shared_folders'",
    },
}
"""Keys that no environment may set in traits that it may set, and the reason."""


def check_override(override: dict[str, Any]) -> dict[str, Any]:
    """Return the override. Raises PydanticCustomError if it sets a forbidden trait or key."""
    for trait, value in override.items():
        why = OWNED_TRAITS.get(trait, "")
        if trait in OWN_KEYS:
            why = "the environment has a key of that name"
        elif trait.startswith("gpu_"):
            why = "the spawner's configuration decides how GPUs get into servers"
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
