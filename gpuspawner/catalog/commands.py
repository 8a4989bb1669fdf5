"""``gpuspawner catalog``: the environments that members choose from, and whether they are right."""

from __future__ import annotations

import json
from typing import Any

from ..cli.command import group
from ..cli.config import Settings, catalog_file
from ..cli.output import count, show, table
from ..cli.parameters import argument, flag
from ..devices.placement import format_memory
from . import image_commands
from .loader import Catalog, load
from .models import Environment, ProfileChoice
from .parser import NOUNS, schema

file_argument = argument(
    "file", "[FILE]", "the catalog file (default: from the hub's configuration)", required=False
)


@group()
def catalog(settings: Settings) -> None:
    """List the environments of the hub's own catalog."""
    _show_environments(load(catalog_file(None, settings)))


@catalog.command("list")
@file_argument
def list_environments(settings: Settings, file: str | None) -> None:
    """List the environments."""
    _show_environments(load(catalog_file(file, settings)))


def _show_environments(found: Catalog) -> None:
    headers = ("SLUG", "NAME", "GPUS", "GROUPS", "TESTED", "IMAGE")
    rows = [
        (
            environment.slug,
            environment.display_name,
            _gpus(environment),
            ", ".join(sorted(environment.allowed_groups or ())) or "all",
            str(environment.tested_on or "-"),
            environment.image,
        )
        for environment in found.environments
    ]
    plain = [_plain(environment) for environment in found.environments]
    show({"environments": plain}, table(headers, rows))


@catalog.command("check")
@file_argument
@flag("--images", "also check that the images are present, as pinned and up to date")
def check_catalog(settings: Settings, file: str | None, images: bool) -> int:
    """Validate the catalog and the files that it refers to."""
    path = catalog_file(file, settings)
    found = load(path)
    if images:
        return image_commands.check_images(settings, found)
    counts = {
        "environments": len(found.environments),
        "datasets": len(found.datasets),
        "shared_folders": len(found.shared_folders),
    }
    *parts, last = (count(number, NOUNS[key]) for key, number in counts.items())
    show({"file": str(path), **counts}, f"{path} is valid: {', '.join(parts)} and {last}.")
    return 0


for each in image_commands.COMMANDS:
    catalog.add_command(each)


@catalog.command("schema")
def print_schema(settings: Settings) -> None:
    """Print the catalog's JSON Schema, for editors."""
    print(json.dumps(schema(), indent=2))


def _gpus(environment: Environment) -> str:
    """Return the number of GPUs, such as ``0-4``, and what they must be."""
    least = 0 if environment.cpu_variant else 1
    most = environment.devices.max
    words = [f"{least}-{most}" if most > least else str(most), " or ".join(environment.models)]
    if environment.min_memory:
        words.append(f"from {format_memory(environment.min_memory)}")
    return " ".join(filter(None, words))


def _plain(environment: Environment) -> dict[str, Any]:
    found = environment.model_dump(mode="json", exclude={"first_page"})
    if environment.allowed_groups is not None:
        found["allowed_groups"] = sorted(environment.allowed_groups)
    named = {"frameworks": ("name", "version"), "links": ("title", "url")}
    for key, names in named.items():
        found[key] = [dict(zip(names, pair, strict=True)) for pair in found[key].items()]
    found["profile_options"] = [
        {
            "name": name,
            "display_name": option.display_name or name,
            "choices": [_plain_choice(*each) for each in option.choices.items()],
        }
        for name, option in environment.profile_options.items()
    ]
    return found


def _plain_choice(name: str, choice: ProfileChoice) -> dict[str, Any]:
    shown = {"display_name": choice.display_name or name, "default": choice.default}
    return {"name": name, **shown, "changes": choice.changes}
