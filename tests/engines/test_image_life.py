"""Real: the command, Docker Engine, images and their smoke tests; the registry is a
small one on this machine, which can be made to misbehave."""

from __future__ import annotations

import io
import json
import logging
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import ImageNotFound

from gpuspawner.catalog.image_updates import ImageUpdater
from gpuspawner.catalog.loader import load
from gpuspawner.cli.app import main
from gpuspawner.core.errors import ConfigError
from gpuspawner.engines.images import ENTRY
from gpuspawner.engines.smoke_test import SMOKE
from gpuspawner.hub_pages.catalog_images import ImageUpdates, UpdateJob, look_at_images
from tests.support.brokers import services_on
from tests.support.engine import PrivateEngine
from tests.support.images import BASE
from tests.support.processes import wait_for
from tests.support.registry import SlowRegistry
from tests.support.threads import at_once

CONFIG = """
c = get_config()
c.JupyterHub.spawner_class = "gpuspawner.spawners.docker.GPUDockerSpawner"
c.DockerSpawner.client_kwargs = {{"base_url": {engine!r}}}
c.DockerSpawner.image = "gpuspawner/instant:test"
c.GPUDockerSpawner.catalog = {catalog!r}
"""
CATALOG = """\
# Ours.
environments:
  - slug: lab   # what everybody takes
    image: {image}  # by its tag
    description: |
      Two lines,
      kept as they are.
    devices: {{default: 0, max: 1}}
  # The last one.

datasets: {{}}
"""
LABELS = {
    "org.opencontainers.image.title": "The lab",
    "org.opencontainers.image.description": "What everybody takes",
    ENTRY + "slug": "lab",
    ENTRY + "devices": "0-2",
    SMOKE + "imports": "json sqlite3",
}


class Site:
    """A hub's folder with its configuration and catalog, and ``gpuspawner`` in it."""

    def __init__(self, folder: Path, engine: PrivateEngine, registry: SlowRegistry) -> None:
        self.folder = folder
        self.engine = engine
        self.registry = registry
        self.image = f"{registry.repository}:lab"
        self.catalog = folder / "catalog.yaml"
        self.write(CATALOG.format(image=self.image))
        config = CONFIG.format(engine=engine.url, catalog=str(self.catalog))
        (folder / "jupyterhub_config.py").write_text(config)

    def write(self, text: str) -> None:
        self.catalog.write_text(text, encoding="utf-8")

    def __call__(self, *words: str, code: int = 0) -> str:
        """What ``gpuspawner catalog ...`` prints, errors too. In this process, to be quick."""
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(printed):
            ended = main(["catalog", *words, "-f", str(self.folder / "jupyterhub_config.py")])
        text = printed.getvalue()
        assert "Traceback" not in text, text
        assert ended == code, text
        return text if "--json" in words else " ".join(text.split())

    @property
    def here(self) -> set[str]:
        """The registry's images that the engine has, by tag and by digest."""
        names = set()
        for listed in self.engine.client.images():
            names |= {*(listed["RepoTags"] or []), *(listed["RepoDigests"] or [])}
        return {n.removeprefix(self.registry.repository) for n in names if "127.0.0.1" in n}


@pytest.fixture(scope="module")
def registry(engine: PrivateEngine, images: Any) -> Iterator[SlowRegistry]:
    """Two good images, and one whose smoke test fails; they differ by their labels."""
    images.ensure_images(engine, [images.TRIED])
    with tempfile.TemporaryFile() as saved, SlowRegistry(size=0) as registry:
        saved.writelines(engine.client.get_image(images.TRIED))
        bad = {**LABELS, SMOKE + "imports": "json no_such_module"}
        for tag, labels in (("old", LABELS), ("new", {**LABELS, "new": "yes"}), ("bad", bad)):
            saved.seek(0)
            registry.add_saved(tag, saved, {"Labels": labels})
        yield registry


@pytest.fixture
def site(clean_engine: PrivateEngine, registry: SlowRegistry, tmp_path: Path) -> Iterator[Site]:
    """The site of a test, on an engine that has none of the registry's images."""
    registry.retag("lab", "old")
    yield Site(tmp_path, clean_engine, registry)
    clean_engine.clean()
    for listed in clean_engine.client.images():
        names = [*(listed["RepoTags"] or []), *(listed["RepoDigests"] or [])]
        for name in names:
            if name.startswith("127.0.0.1"):
                with suppress(ImageNotFound):  # it went with its last tag
                    clean_engine.client.remove_image(name, force=True)


def test_new_image_is_added_to_the_catalog_and_tested(site: Site) -> None:
    """An image that nobody has yet: pulled, read, put into the catalog, tried."""
    site.write("# Mine.\nenvironments:\n- slug: other\n  image: gpuspawner/instant:test\n")
    printed = site("add", site.image)
    assert f"slug: lab display_name: The lab summary: What everybody takes image: {site.image}" in (
        printed
    )
    assert "devices: {default: 0, max: 2}" in printed and "use --write" in printed
    assert len(load(site.catalog).environments) == 1
    site("add", site.image, "--write")
    assert site.catalog.read_text().startswith("# Mine.\nenvironments:\n- slug: other\n")
    made = load(site.catalog).get("lab")
    assert (made.display_name, made.image, made.devices.max) == ("The lab", site.image, 2)
    assert "already has an environment 'lab'" in site("add", site.image, "--write", code=2)
    site("add", site.image, "--write", "--slug", "lab-two")
    assert [e.slug for e in load(site.catalog).environments] == ["other", "lab", "lab-two"]
    site("add", BASE, "--write")
    inside = site.folder / load(site.catalog).get("base").packages
    assert f"\njupyterhub=={version('jupyterhub')}\n" in inside.read_text()
    tried = site("smoke", "lab")
    assert "ok import sqlite3 " in tried and "ok server answers after" in tried
    assert "/home/jovyan/work can be written" in tried and "cannot be written" in tried


def test_catalog_images_are_checked_and_pulled(site: Site) -> None:
    missing = site("check", "--images", code=1)
    assert f"FAIL lab {site.image} is not here" in missing
    assert "-> gpuspawner catalog pull lab" in missing
    assert f"{site.image}: pulled" in site("pull")
    assert f"{site.image}: here" in site("pull", "lab")
    assert "is here and up to date" in site("check", "--images")
    assert "There is no environment 'labs'" in site("pull", "labs", code=1)
    site.registry.retag("lab", "new")
    offers = site("check", "--images")
    assert "its registry offers a newer one" in offers and "catalog update lab" in offers


def test_image_update_is_smoke_tested_and_only_unused_images_are_pruned(site: Site) -> None:
    site("pull")
    before = site.catalog.read_text()
    site.registry.retag("lab", "bad")
    refused = site("update", "lab", code=1)
    assert "import no_such_module" in refused and "keeps its image" in refused
    assert site.catalog.read_text() == before
    tagged = site.engine.client.inspect_image(site.image)
    assert f"{site.registry.repository}@{site.registry.digest('old')}" in tagged["RepoDigests"]

    site.registry.retag("lab", "new")
    assert "'../x'" in site("update", "lab", "--keep-as", "../x", code=2)
    assert "already has an environment 'lab'" in site("update", "lab", "--keep-as", "lab", code=2)
    assert site.catalog.read_text() == before
    assert "lab now has" in site("update", "lab", "--keep-as", "lab-older")
    new, old = (site.registry.digest(tag) for tag in ("new", "old"))
    text = site.catalog.read_text()
    assert f"    image: {site.image}@{new}  # by its tag\n" in text
    rest = text.replace(f"@{new}", "")
    assert rest.startswith("# Ours.\nenvironments:\n  - slug: lab   # what everybody takes\n")
    assert "    description: |\n      Two lines,\n      kept as they are.\n" in rest
    assert "  # The last one.\n" in rest
    catalog = load(site.catalog)
    kept = catalog.get("lab-older")
    assert (
        kept.image == f"{site.image}@{old}" and kept.description == "Two lines,\nkept as they are."
    )
    assert catalog.get("lab").tested_on is not None
    assert "It has the newest image" in site("update", "lab")
    assert "is here and up to date" in site("check", "--images")

    # Who pinned an old one keeps it, and its image is not pruned. (The bad one may be.)
    removed = site("prune", "--yes")
    assert old not in removed and new not in removed
    assert {f"@{old}", f"@{new}", ":lab"} <= site.here

    # Once nobody has it, it goes, unless a container or a member's own packages are on it.
    site.write(CATALOG.format(image=f"{site.image}@{new}"))
    client = site.engine.client
    others = {i["Id"] for i in client.images()}
    stopped = client.create_container(site.image)["Id"]
    assert "Nothing to remove" in site("prune", "--yes"), "a container has it"
    client.commit(
        stopped, repository="gpuspawner-kept", tag="lab-ada-0123", conf={"Labels": LABELS}
    )
    client.remove_container(stopped)
    assert "Nothing to remove" in site("prune", "--yes"), "a member's own packages are on it"
    client.remove_image("gpuspawner-kept:lab-ada-0123")
    told = json.loads(site("prune", "--json"))
    assert [(each["image"], each["removed"]) for each in told] == [(site.image, False)]
    assert f"@{old}" in site.here, "without --yes nothing is removed"
    assert re.search(r":lab \(0\.\d GB, an older version\): removed", site("prune", "--yes"))
    assert site.here == {f"@{new}"}
    gone = others - {i["Id"] for i in client.images()}
    assert len(gone) == 1, "images of others are not looked at"


def test_update_runs_once_and_refuses_another_offer(site: Site, tmp_path: Path) -> None:
    """One that goes well, and its line in the audit log, is in tests/hub/test_files.py."""
    may_connect = threading.Event()
    may_connect.set()

    def connect(timeout: float) -> docker.APIClient:
        may_connect.wait(60)
        return docker.APIClient(base_url=site.engine.url, version="auto", timeout=timeout)

    def ended(job: UpdateJob) -> UpdateJob:
        def look() -> UpdateJob | None:
            now = next(some for some in updates.jobs() if some.id == job.id)
            return None if now.is_open else now

        return wait_for(look, "the end of the update", timeout=120)

    site("pull")
    before = site.catalog.read_text()
    with services_on(f"sqlite:///{tmp_path}/gpuspawner.sqlite") as services:
        updates = ImageUpdates(services, logging.getLogger("updates"))
        updater = ImageUpdater(site.catalog, connect)
        assert not updater.offer("lab").is_newer
        site.registry.retag("lab", "bad")
        offer = updater.offer("lab")
        assert offer.old.endswith(site.registry.digest("old"))
        failed = ended(updates.start(updater, offer, "kim"))
        assert failed.state == "failed" and failed.error.startswith("It failed its test: ")
        assert "no_such_module" in failed.error

        site.registry.retag("lab", "new")
        may_connect.clear()  # so that the update lasts until all have asked for it
        found = at_once(8, lambda _: updates.start(updater, offer, "kim"))
        may_connect.set()
        [job] = [each for each in found if isinstance(each, UpdateJob)]
        assert sum("one is updated at a time" in str(each) for each in found) == 7
        stale = ended(job)
        assert stale.state == "failed" and "now offers another image" in stale.error
        assert site.catalog.read_text() == before and services.audit.trail() == []
        assert updater.offer("lab").spare_slug == "lab-older"
        entry = before[before.index("  - slug: lab") : before.index("  # The last one.")]
        site.write(before.replace(entry, entry + entry.replace("slug: lab ", "slug: lab-older ")))
        assert updater.offer("lab").spare_slug == "lab-older-2"


def test_update_keeps_what_was_written_into_the_file_meanwhile(site: Site) -> None:
    def connect(timeout: float) -> docker.APIClient:
        return docker.APIClient(base_url=site.engine.url, version="auto", timeout=timeout)

    def edit(before: str, after: str) -> None:
        text = site.catalog.read_text()
        assert before in text
        site.write(text.replace(before, after))

    site("pull")
    site.registry.retag("lab", "new")
    updater = ImageUpdater(site.catalog, connect)
    edit_more = partial(edit, "Two lines,", "Two edited lines,")
    done = updater.update("lab", follow=lambda _, progress: list(progress), test=edit_more)
    assert done.is_done and "Two edited lines," in site.catalog.read_text()
    site.registry.retag("lab", "old")
    new = done.offer.new
    with pytest.raises(ConfigError, match="was changed during the update"):
        updater.update("lab", follow=lambda _, p: list(p), test=partial(edit, new, site.image))
    assert load(site.catalog).get("lab").image == site.image


async def test_all_engines_are_asked_and_registries_through_one_that_has_the_image(
    site: Site,
) -> None:
    def gone(timeout: float) -> docker.APIClient:
        return docker.APIClient(base_url="unix:///nowhere/docker.sock", timeout=timeout)

    def connect(timeout: float) -> docker.APIClient:
        return docker.APIClient(base_url=site.engine.url, version="auto", timeout=timeout)

    site("pull")
    engines, missing = {"": gone, "one": connect, "two": connect}, "gpuspawner/nowhere:1"
    images = [site.image, BASE, missing]
    found = await look_at_images(engines, images, ask_registries=False)
    assert list(found) == ["one", "two"] and found["one"] == found["two"]
    old = site.registry.digest("old")
    assert found["one"][site.image].digest == old and not found["one"][site.image].is_outdated
    assert found["one"][missing].size is None and found["one"][BASE].digest == ""

    site.registry.retag("lab", "new")
    for states in (await look_at_images(engines, images, ask_registries=True)).values():
        assert states[site.image].is_outdated
        assert states[site.image].offered == site.registry.digest("new")
        assert not any(states[image].why for image in images)


def test_catalog_commands_report_a_missing_engine(site: Site) -> None:
    config = CONFIG.format(engine="unix:///nowhere/docker.sock", catalog=str(site.catalog))
    (site.folder / "jupyterhub_config.py").write_text(config)
    for words in (["pull"], ["prune"], ["check", "--images"], ["update", "lab"]):
        assert "The Docker Engine at unix:///nowhere/docker.sock is not responding." in (
            site(*words, code=1)
        )
