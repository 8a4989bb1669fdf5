"""``gpuspawner catalog add|pull|smoke|update|prune``: the images behind the environments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import date
from typing import Any

import docker
from docker.errors import DockerException
from requests import RequestException

from ..cli.check import line_of
from ..cli.config import Settings, catalog_file
from ..cli.output import count, follow, note, show
from ..core.errors import ConfigError, EngineUnavailable, ImageUnavailable
from ..engines.images import (
    Connect,
    LocalImage,
    local_images,
    offered_digest,
    packages_of_image,
    pinned_image,
    pull,
    removable,
    remove,
)
from ..engines.preflight import CheckFinding, Status, words_of
from ..engines.smoke_test import passed, smoke
from ..slurm.cluster import read_cluster
from ..slurm.images import reach
from .editor import CatalogFile, changes_file, entry_of, entry_text, packages_file
from .loader import Catalog, load
from .models import Environment

Add = Callable[[str, Callable[..., int], str], argparse.ArgumentParser]

REMOVAL_SECONDS = 600.0
"""How long the engine may take to remove a large image."""

ENGINE_SECONDS = 20.0
"""How long an engine may take to say whether it has an image."""

_CATALOG = "the catalog (default: the one of the hub's configuration)"


def grammar(add: Add) -> None:
    """The words after ``gpuspawner catalog`` that are about images."""
    adding = add("add", add_entry, "Make an entry for an image, from what the image says.")
    adding.add_argument("image", metavar="IMAGE", help="its name; it is pulled if it is not here")
    adding.add_argument("--slug", metavar="NAME", help="of the entry (default: as the image says)")
    adding.add_argument(
        "--write", action="store_true", help="append it to the catalog (default: print it)"
    )
    pulling = add("pull", pull_images, "Pull the images that are not here, with progress.")
    pulling.add_argument("slugs", nargs="*", metavar="SLUG", help="these only (default: all)")
    trying = add("smoke", smoke_image, "Try an image: imports, devices, files, a server.")
    trying.add_argument("image", metavar="IMAGE", help="an image, or the slug of an environment")
    updating = add("update", update, "Take an environment's newest image, once it passes its test.")
    updating.add_argument("slug", metavar="SLUG", help="the environment")
    updating.add_argument(
        "--keep-as", metavar="NAME", help="keep the image that it has as an environment of its own"
    )
    pruning = add("prune", prune, "Show the images that nothing needs any more.")
    pruning.add_argument("--yes", action="store_true", help="remove them")
    for sub in (adding, pulling, trying, updating, pruning):
        sub.add_argument("--file", metavar="FILE", help=_CATALOG)


# add


def add_entry(arguments: argparse.Namespace, settings: Settings) -> int:
    """Make a catalog entry from an image's labels, and print or append it."""
    client, hub = _engine(settings)
    image = _present(client, hub, arguments.image)
    packages = packages_of_image(client, arguments.image)
    entry = entry_of(arguments.image, image.labels, packages, arguments.slug)
    Catalog.from_mapping({"environments": [entry]}, f"the entry of {arguments.image}")
    if not arguments.write:
        show(arguments.json, entry, entry_text(entry).rstrip())
        note("Put it under 'environments' of the catalog, or say --write.")
        return 0
    file = CatalogFile(catalog_file(arguments, settings))
    _check_slug(file, str(entry["slug"]))
    if packages:
        folder = file.path.parent
        entry["packages"] = packages_file(folder, str(entry["slug"]), "", packages)
    file.add(entry)
    show(arguments.json, entry, f"{file.path} has an environment {entry['slug']!r} now.")
    return 0


# pull


def pull_images(arguments: argparse.Namespace, settings: Settings) -> int:
    """Pull the images of environments, one after the other, onto this machine and every node."""
    chosen = _chosen(load(catalog_file(arguments, settings)), arguments.slugs)
    images = dict.fromkeys(image for each in chosen for image in each.images)
    _, hub = _engine(settings)
    told = [_pulled(image, node, connect) for node, connect in _engines(hub) for image in images]
    lines = [each["why"] or f"{_on(each['image'], each)}: {each['state']}" for each in told]
    show(arguments.json, told, "\n".join(lines))
    return int(any(each["state"] == "failed" for each in told))


def _engines(hub: Any) -> list[tuple[str, Connect]]:
    """Every engine that servers run on: the hub's own, and each node's with its name."""
    nodes = read_cluster(hub.cluster_file).nodes if hub.cluster_file else ()
    return [("", hub.connect), *((node.name, reach(node)) for node in nodes)]


def _pulled(image: str, node: str, connect: Connect) -> dict[str, str]:
    """What became of an image on one engine."""
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
        why = f"{node}: its Docker Engine does not answer: {words_of(error)}."
        told |= {"state": "failed", "why": why}
    return told


def _on(image: str, told: dict[str, str]) -> str:
    return f"{image} on {told['node']}" if "node" in told else image


# smoke


def smoke_image(arguments: argparse.Namespace, settings: Settings) -> int:
    """Try an image, without a GPU."""
    client, _ = _engine(settings)
    image, first_page = arguments.image, ""
    environment = _named(arguments, settings)
    if environment is not None:
        image, first_page = environment.image, environment.default_url
    found = smoke(client, image, first_page=first_page)
    _print(arguments, found)
    return int(not passed(found))


def _named(arguments: argparse.Namespace, settings: Settings) -> Environment | None:
    """The environment of that slug; None when it is the name of an image."""
    try:
        found = load(catalog_file(arguments, settings)).environments
    except ConfigError:
        if arguments.file:
            raise
        return None
    return next((e for e in found if e.slug == arguments.image), None)


# check --images


def check_images(arguments: argparse.Namespace, settings: Settings) -> int:
    """Whether each environment's image is here, as pinned, and the newest."""
    found = load(catalog_file(arguments, settings))
    client, _ = _engine(settings)
    findings = [_look(client, e.slug, image) for e in found.environments for image in e.images]
    _print(arguments, findings)
    return int(any(finding.status is Status.FAIL for finding in findings))


def _look(client: docker.APIClient, name: str, image: str) -> CheckFinding:
    here = local_images(client, image)
    if here is None:
        text = f"{image} is not here: the first start would wait for a pull."
        return CheckFinding(name, Status.FAIL, text, f"gpuspawner catalog pull {name}")
    has = image.partition("@")[2] or here.digest_in(image)
    if not has:
        return CheckFinding(name, Status.OK, f"{image} is here; it was built on this machine.")
    try:
        newest = offered_digest(client, image)
    except ImageUnavailable as error:
        text = f"{image} is here; whether there is a newer one is not known: {error.fields['why']}."
        return CheckFinding(name, Status.UNCHECKED, text)
    if newest != has:
        text = f"{image} is here; its registry offers a newer one ({newest[:19]}...)."
        return CheckFinding(name, Status.OK, text, f"gpuspawner catalog update {name}")
    return CheckFinding(name, Status.OK, f"{image} is here, and the newest.")


# update


def update(arguments: argparse.Namespace, settings: Settings) -> int:
    """Pull the newest image, try it, and only then write its digest into the catalog."""
    file = CatalogFile(catalog_file(arguments, settings))
    environment = file.catalog.get(arguments.slug)
    if arguments.keep_as:
        _check_slug(file, arguments.keep_as)
    client, hub = _engine(settings)
    old = _old(client, environment)
    digest = offered_digest(client, environment.image)
    if digest == environment.image_digest:
        show(arguments.json, _plain(environment, digest, []), "It has the newest image.")
        return 0
    image = pinned_image(environment.image, digest)
    if not local_images(client, image):
        # By its digest only: members go on with the image that has the tag here.
        follow(image, pull(hub.connect, image))
    found = smoke(client, image, first_page=environment.default_url)
    if not passed(found):
        _print(arguments, found)
        note(f"{environment.slug} keeps the image that it has: {environment.image}")
        return 1
    if arguments.keep_as:
        file.add(_kept_entry(client, file, environment, old, arguments.keep_as))
    keys = {"image": image, "tested_on": date.today().isoformat()}
    file.set_keys(environment.slug, keys | _told(client, file, environment, image))
    text = f"{environment.slug} has {image} now. Servers that run keep theirs until they end."
    show(arguments.json, _plain(environment, digest, found), text)
    return 0


def _told(
    client: docker.APIClient, file: CatalogFile, environment: Environment, image: str
) -> dict[str, str]:
    """What is inside the new image, and what is new in it, in files beside the catalog."""
    after = packages_of_image(client, image)
    if not after:
        return {}
    folder, slug = file.path.parent, environment.slug
    keys = {}
    if before := packages_of_image(client, environment.image):
        keys["changes"] = changes_file(folder, environment, before, after, date.today())
    keys["packages"] = packages_file(folder, slug, environment.packages, after)
    return keys


def _old(client: docker.APIClient, environment: Environment) -> str:
    """The image that the environment has, pinned so that it stays what it is."""
    here = local_images(client, environment.image)
    digest = environment.image_digest or (here.digest_in(environment.image) if here else "")
    return pinned_image(environment.image, digest) if digest else environment.image


def _check_slug(file: CatalogFile, slug: str) -> None:
    """Raises ConfigError unless a new environment can be called so."""
    Catalog.from_mapping({"environments": [{"slug": slug, "image": "any"}]}, "The new environment")
    if any(e.slug == slug for e in file.catalog.environments):
        raise ConfigError(
            f"{file.path} has an environment {slug!r} already. Give the new one another name, or "
            "say `gpuspawner catalog update` for a newer image."
        )


def _kept_entry(
    client: docker.APIClient, file: CatalogFile, environment: Environment, image: str, slug: str
) -> dict[str, Any]:
    """The entry as it is in the file, under another slug and with the old image."""
    entry = file.plain_entry(environment.slug)
    for key in ("default", "packages", "changes"):
        entry.pop(key, None)
    if packages := packages_of_image(client, environment.image):
        entry["packages"] = packages_file(file.path.parent, slug, "", packages)
    name = f"{environment.display_name} (older)"
    return {**entry, "slug": slug, "display_name": name, "image": image}


def _plain(environment: Environment, digest: str, found: Sequence[CheckFinding]) -> dict[str, Any]:
    return {
        "slug": environment.slug,
        "image": pinned_image(environment.image, digest),
        "findings": [asdict(finding) for finding in found],
    }


# prune


def prune(arguments: argparse.Namespace, settings: Settings) -> int:
    """Show, or remove, images of environments that are environments no more."""
    found = load(catalog_file(arguments, settings))
    client, hub = _engine(settings, REMOVAL_SECONDS)
    named = [image for each in found.environments for image in each.images]
    named += [str(getattr(hub.spawner, "image", ""))] if hub.uses_docker else []
    told = []
    for each in removable(client, list(filter(None, named))):
        kept = remove(client, each.image) if arguments.yes else ""
        told.append(
            {
                "image": each.image.name,
                "bytes": each.image.size,
                "why": each.why,
                "removed": arguments.yes and not kept,
                "kept": kept,
            }
        )
    show(arguments.json, told, _pruned(told, arguments.yes))
    return int(any(each["kept"] for each in told))


def _pruned(told: Sequence[dict[str, Any]], removed: bool) -> str:
    if not told:
        return "Nothing to remove: every image is needed."
    lines = []
    for each in told:
        state = "removed" if each["removed"] else f"kept: {each['kept']}" if removed else "can go"
        lines.append(f"{each['image']} ({each['bytes'] / 1e9:.1f} GB, {each['why']}): {state}")
    if not removed:
        lines.append(f"{count(len(told), 'image')} can go. Say --yes to remove them.")
    return "\n".join(lines)


# What they share.


def _engine(settings: Settings, *timeout: float) -> tuple[docker.APIClient, Any]:
    """A client, for answers within ``timeout`` seconds, and the hub as it is configured.

    Raises EngineUnavailable.
    """
    from ..cli.hub import open_hub

    hub = open_hub(settings.config)
    try:
        return hub.connect(*timeout), hub
    except (docker.errors.DockerException, OSError) as error:
        raise EngineUnavailable(
            f"The Docker Engine at {hub.engine_address} does not answer. Start it (sudo systemctl "
            "start docker), or say where it is with DOCKER_HOST."
        ) from error


def _present(client: docker.APIClient, hub: Any, image: str) -> LocalImage:
    """The image, pulled if it is not here. Raises ImageUnavailable."""
    found = local_images(client, image)
    if found is None:
        follow(image, pull(hub.connect, image))
        found = local_images(client, image)
    if found is None:
        raise ImageUnavailable(image=image, why="it went again", remedy="Try again in a moment.")
    return found


def _chosen(found: Catalog, slugs: Sequence[str]) -> list[Environment]:
    return [found.get(slug) for slug in slugs] if slugs else list(found.environments)


def _print(arguments: argparse.Namespace, found: Sequence[CheckFinding]) -> None:
    plain = [{**asdict(finding), "status": finding.status.value} for finding in found]
    show(arguments.json, plain, "\n".join(line_of(finding) for finding in found))
