"""``gpuspawner catalog``: the environments that members choose from, and whether they are right."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from typing import Any

from ..cli.config import Settings, catalog_file
from ..cli.output import count, show, table
from ..devices.placement import format_memory
from . import image_commands
from .json_schema import schema
from .loader import Catalog, load
from .models import Environment

_FILE = "the catalog (default: the one of the hub's configuration)"


def grammar(command: argparse.ArgumentParser, common: Callable[..., Any]) -> None:
    """``gpuspawner catalog`` alone lists, as ``list`` does."""
    actions = command.add_subparsers(title="actions", metavar="ACTION")

    def add(name: str, work: Callable[..., int], what: str) -> argparse.ArgumentParser:
        after = common(argument_default=argparse.SUPPRESS)
        sub: argparse.ArgumentParser = actions.add_parser(
            name, help=what, description=what, parents=[after]
        )
        sub.set_defaults(command=work)
        return sub

    command.set_defaults(file=None)
    listing = add("list", catalog, "List the environments.")
    checking = add("check", check_catalog, "Read the catalog and the files that it names.")
    for sub in (listing, checking):
        sub.add_argument("file", nargs="?", metavar="FILE", help=_FILE)
    checking.add_argument(
        "--images", action="store_true", help="also the images: here, as pinned, the newest?"
    )
    image_commands.grammar(add)
    add("schema", print_schema, "Print the catalog's JSON Schema, for editors.")


def catalog(arguments: argparse.Namespace, settings: Settings) -> int:
    """List the environments."""
    found = load(catalog_file(arguments, settings))
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
    show(arguments.json, {"environments": plain}, table(headers, rows))
    return 0


def check_catalog(arguments: argparse.Namespace, settings: Settings) -> int:
    """Read everything. A mistake is a ConfigError with its line and what to do."""
    path = catalog_file(arguments, settings)
    found = load(path)
    if arguments.images:
        return image_commands.check_images(arguments, settings)
    counts = {
        "environments": len(found.environments),
        "datasets": len(found.datasets),
        "shared_folders": len(found.shared_folders),
    }
    show(arguments.json, {"file": str(path), **counts}, f"{path} is right: {_counted(found)}.")
    return 0


def print_schema(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print the JSON Schema of catalogs."""
    print(json.dumps(schema(), indent=2))
    return 0


def _counted(found: Catalog) -> str:
    parts = (
        count(len(found.environments), "environment"),
        count(len(found.datasets), "dataset"),
        count(len(found.shared_folders), "shared folder"),
    )
    return f"{parts[0]}, {parts[1]} and {parts[2]}"


def _gpus(environment: Environment) -> str:
    """``0-4``, and what they have to be."""
    least = 0 if environment.cpu_variant else 1
    most = environment.devices.max
    words = [f"{least}-{most}" if most > least else str(most), " or ".join(environment.models)]
    if environment.min_memory:
        words.append(f"from {format_memory(environment.min_memory)}")
    return " ".join(filter(None, words))


def _plain(environment: Environment) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, frozenset):
            return sorted(value)
        return value.isoformat() if isinstance(value, date) else value

    found = {key: plain(value) for key, value in asdict(environment).items()}
    named = {"frameworks": ("name", "version"), "links": ("title", "url")}
    for key, names in named.items():
        found[key] = [dict(zip(names, pair, strict=True)) for pair in found[key]]
    return found
