"""The commands ``gpuspawner catalog``: environments, their images, and whether they are right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import docker
from docker.errors import DockerException
from requests import RequestException

from ..cli.check import line_of
from ..cli.command import command, group
from ..cli.config import Settings, catalog_file
from ..cli.output import count, follow, note, show, table
from ..cli.parameters import argument, flag, option
from ..core.errors import ConfigError, EngineUnavailable, ImageUnavailable
from ..core.units import format_memory
from ..engines.images import (
    Connect,
    image_state,
    local_images,
    packages_of_image,
    pull,
    removable,
    remove,
)
from ..engines.preflight import CheckFinding, Status, words_of
from ..engines.smoke_test import passed, smoke
from ..slurm.cluster import read_cluster
from ..slurm.images import reach
from .editor import CatalogFile, entry_of, entry_text, packages_file
from .image_updates import ImageUpdate, ImageUpdater, check_slug
from .loader import Catalog, load
from .models import Environment, ProfileChoice
from .parser import NOUNS, schema

REMOVAL_SECONDS = 600.0
"""Timeout for removing an image, because large ones take long."""

ENGINE_SECONDS = 20.0
"""Timeout for asking an engine whether it has an image."""

catalog_option = option(
    "--file", "FILE", "the catalog file (default: from the hub's configuration)"
)


# add


@command("add")
@argument("image_name", "IMAGE", "the image's name; it is pulled if it is missing")
@option("--slug", "NAME", "slug of the entry (default: from the image's label or name)")
@flag("--write", "append the entry to the catalog (default: only print it)")
@catalog_option
def add_entry(
    settings: Settings, image_name: str, slug: str | None, write: bool, file: str | None
) -> None:
    """Create a catalog entry for an image from its labels and packages."""
    client, hub = _engine(settings)
    if local_images(client, image_name) is None:
        follow(image_name, pull(hub.connect, image_name))
    image = local_images(client, image_name)
    if image is None:
        why, remedy = "it was removed meanwhile", "Try again in a moment."
        raise ImageUnavailable(image=image_name, why=why, remedy=remedy)
    packages = packages_of_image(client, image_name)
    entry = entry_of(image_name, image.labels, packages, slug)
    Catalog.from_mapping({"environments": [entry]}, f"the entry of {image_name}")
    if not write:
        show(entry, entry_text(entry).rstrip())
        note("Put it under 'environments' of the catalog, or use --write.")
        return
    catalog = CatalogFile(catalog_file(file, settings))
    instead = ", or use `gpuspawner catalog update` for a newer image"
    check_slug(catalog, str(entry["slug"]), instead)
    if packages:
        folder = catalog.path.parent
        entry["packages"] = packages_file(folder, str(entry["slug"]), "", packages)
    catalog.add(entry)
    show(entry, f"{catalog.path} now has an environment {entry['slug']!r}.")


# pull


@command("pull")
@argument("slugs", "[SLUG]...", "only these environments (default: all)", nargs=-1)
@catalog_option
def pull_images(settings: Settings, slugs: Sequence[str], file: str | None) -> int:
    """Pull the missing images and show the progress."""
    catalog = load(catalog_file(file, settings))
    chosen = [catalog.get(slug) for slug in slugs] or catalog.environments
    images = dict.fromkeys(image for each in chosen for image in each.images)
    _, hub = _engine(settings)
    told = [_pulled(image, node, connect) for node, connect in _engines(hub) for image in images]
    lines = [each["why"] or f"{_on(each['image'], each)}: {each['state']}" for each in told]
    show(told, "\n".join(lines))
    return int(any(each["state"] == "failed" for each in told))


def _engines(hub: Any) -> list[tuple[str, Connect]]:
    """Return all engines that run servers: the hub's own (without a name) and each node's."""
    nodes = read_cluster(hub.cluster_file).nodes if hub.cluster_file else ()
    return [("", hub.connect), *((node.name, reach(node)) for node in nodes)]


def _pulled(image: str, node: str, connect: Connect) -> dict[str, str]:
    """Pull an image on one engine if it is missing, and return the result."""
    told = {"image": image, "state": "here", "why": ""} | ({"node": node} if node else {})
    try:
        with closing(connect(ENGINE_SECONDS)) as client:
            here = local_images(client, image)
        if not here:
            follow(_on(image, told), pull(connect, image))
            told["state"] = "pulled"
    except (ImageUnavailable, EngineUnavailable) as error:
        told |= {"state": "failed", "why": f"{node}: {error.message}" if node else error.message}
    except (DockerException, RequestException, OSError) as error:
        why = f"{node}: its Docker Engine is not responding: {words_of(error)}."
        told |= {"state": "failed", "why": why}
    return told


def _on(image: str, told: dict[str, str]) -> str:
    return f"{image} on {told['node']}" if "node" in told else image


# smoke


@command("smoke")
@argument("name", "IMAGE", "an image, or the slug of an environment")
@catalog_option
def smoke_image(settings: Settings, name: str, file: str | None) -> int:
    """Run the smoke test of an image: imports, devices, files, a server."""
    client, _ = _engine(settings)
    image, first_page = name, ""
    environment = _named(settings, name, file)
    if environment is not None:
        image, first_page = environment.image, environment.default_url
    found = smoke(client, image, first_page=first_page)
    _print(found)
    return int(not passed(found))


def _named(settings: Settings, name: str, file: str | None) -> Environment | None:
    """Return the environment with this slug; None if ``name`` is not a slug."""
    try:
        found = load(catalog_file(file, settings)).environments
    except ConfigError:
        if file:
            raise
        return None
    return next((e for e in found if e.slug == name), None)


# check --images


def check_images(settings: Settings, found: Catalog) -> int:
    """Check if each environment's image is here, as pinned, and the newest. Returns 0 or 1."""
    client, _ = _engine(settings)
    findings = [_look(client, e.slug, image) for e in found.environments for image in e.images]
    _print(findings)
    return int(any(finding.status is Status.FAIL for finding in findings))


def _look(client: docker.APIClient, name: str, image: str) -> CheckFinding:
    state = image_state(client, image, ask_registry=True)
    if state.size is None:
        text = f"{image} is not here: the first start would wait for a pull."
        return CheckFinding(name, Status.FAIL, text, f"gpuspawner catalog pull {name}")
    if not state.digest:
        return CheckFinding(name, Status.OK, f"{image} is here; it was built on this machine.")
    if state.why:
        text = f"{image} is here; it is not known whether there is a newer one: {state.why}."
        return CheckFinding(name, Status.UNCHECKED, text)
    if state.is_outdated:
        text = f"{image} is here; its registry offers a newer one ({state.offered[:19]}...)."
        return CheckFinding(name, Status.OK, text, f"gpuspawner catalog update {name}")
    return CheckFinding(name, Status.OK, f"{image} is here and up to date.")


# update


@command()
@argument("slug", "SLUG", "the environment's slug")
@option("--keep-as", "NAME", "keep the current image as a separate environment with this slug")
@catalog_option
def update(settings: Settings, slug: str, keep_as: str | None, file: str | None) -> int:
    """Update an environment to its newest image if it passes its test."""
    _, hub = _engine(settings)
    updater = ImageUpdater(catalog_file(file, settings), hub.connect)
    done = updater.update(slug, keep_as=keep_as or "", follow=follow)
    environment, found = done.offer.environment, done.findings
    if not found:
        show(_plain_image(done), "It has the newest image.")
        return 0
    if not done.is_done:
        _print(found)
        note(f"{slug} keeps its image: {environment.image}")
        return 1
    text = f"{slug} now has {done.offer.new}. Running servers keep their image until they end."
    show(_plain_image(done), text)
    return 0


def _plain_image(done: ImageUpdate) -> dict[str, Any]:
    return {
        "slug": done.offer.environment.slug,
        "image": done.offer.new,
        "findings": [asdict(finding) for finding in done.findings],
    }


# prune


@command()
@flag("--yes", "remove the images")
@catalog_option
def prune(settings: Settings, yes: bool, file: str | None) -> int:
    """List the images that are no longer needed, or remove them."""
    found = load(catalog_file(file, settings))
    client, hub = _engine(settings, REMOVAL_SECONDS)
    named = [image for each in found.environments for image in each.images]
    named += [str(getattr(hub.spawner, "image", ""))] if hub.uses_docker else []
    told = []
    for each in removable(client, list(filter(None, named))):
        kept = remove(client, each.image) if yes else ""
        told.append(
            {
                "image": each.image.name,
                "bytes": each.image.size,
                "why": each.why,
                "removed": yes and not kept,
                "kept": kept,
            }
        )
    show(told, _pruned(told, yes))
    return int(any(each["kept"] for each in told))


def _pruned(told: Sequence[dict[str, Any]], removed: bool) -> str:
    if not told:
        return "Nothing to remove: every image is needed."
    lines = []
    for each in told:
        state = "removed" if each["removed"] else f"kept: {each['kept']}" if removed else "can go"
        lines.append(f"{each['image']} ({each['bytes'] / 1e9:.1f} GB, {each['why']}): {state}")
    if not removed:
        lines.append(f"{count(len(told), 'image')} can go. Use --yes to remove them.")
    return "\n".join(lines)


COMMANDS = (add_entry, pull_images, smoke_image, update, prune)

# Helpers.


def _engine(settings: Settings, *timeout: float) -> tuple[docker.APIClient, Any]:
    """Return a client and the configured hub. Raises EngineUnavailable."""
    from ..cli.hub import open_hub

    hub = open_hub(settings.config)
    try:
        return hub.connect(*timeout), hub
    except (docker.errors.DockerException, OSError) as error:
        raise EngineUnavailable(
            f"The Docker Engine at {hub.engine_address} is not responding. Start it (sudo "
            "systemctl start docker), or set its address with DOCKER_HOST."
        ) from error


def _print(found: Sequence[CheckFinding]) -> None:
    plain = [{**asdict(finding), "status": finding.status.value} for finding in found]
    show(plain, "\n".join(line_of(finding) for finding in found))


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
        return check_images(settings, found)
    counts = {
        "environments": len(found.environments),
        "datasets": len(found.datasets),
        "shared_folders": len(found.shared_folders),
    }
    *parts, last = (count(number, NOUNS[key]) for key, number in counts.items())
    show({"file": str(path), **counts}, f"{path} is valid: {', '.join(parts)} and {last}.")
    return 0


for each in COMMANDS:
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
