"""Real: a Docker Engine with a disk of 96 MB, and a registry that misbehaves in every way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuspawner.catalog.loader import WatchedCatalog
from gpuspawner.core.errors import ImageUnavailable, StartFailed
from gpuspawner.engines.images import PullProgress, local_images, offered_digest, pinned_image, pull
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.service import image_prefetch
from gpuspawner.service.image_prefetch import PullAhead
from gpuspawner.spawners import progress
from gpuspawner.spawners.progress import Pulls
from tests.support.brokers import make_services
from tests.support.processes import free_port, wait_for
from tests.support.registry import SlowRegistry
from tests.support.small_engine import SmallEngine

SIZE = 8_000_000
SETTINGS = {"Cmd": ["/program"]}


@pytest.fixture(scope="module")
def small(engines: None) -> Iterator[SmallEngine]:
    with SmallEngine(96) as engine:
        yield engine


@pytest.fixture
def registry(small: SmallEngine) -> Iterator[SlowRegistry]:
    with SlowRegistry(size=SIZE) as registry:
        registry.add("lab", {"program": b"x"}, SETTINGS)
        yield registry
        for listed in small.client.images():
            small.client.remove_image(listed["Id"], force=True)


def refusal(engine: SmallEngine, image: str, silent: float = 60.0) -> str:
    with pytest.raises(ImageUnavailable) as refused:
        list(pull(engine.connect, image, silent))
    assert local_images(engine.client, image) is None
    return refused.value.message


def test_image_pull_reports_its_progress(small: SmallEngine, registry: SlowRegistry) -> None:
    registry.hangs_after = SIZE // 4  # until the engine has told of a part of the large layer
    seen = []
    for each in pull(small.connect, f"{registry.repository}:lab"):
        seen.append(each)
        if each.got >= SIZE // 100:
            registry.go_on()
    assert seen[-1].done == seen[-1].layers == 2
    halves = [each for each in seen if 0 < each.got < SIZE / 2]
    assert halves and all(isinstance(each, PullProgress) for each in seen)
    here = local_images(small.client, f"{registry.repository}:lab")
    assert here and here.digest_in(f"{registry.repository}:lab") == registry.digest("lab")


def test_image_missing_in_the_registry_is_reported(
    small: SmallEngine, registry: SlowRegistry
) -> None:
    image = f"{registry.repository}:lab"
    digest = offered_digest(small.client, image)
    assert digest == registry.digest("lab")
    registry.forget("lab")
    for name in (image, pinned_image(image, digest)):
        message = refusal(small, name)
        assert f"The image {name} could not be pulled: its registry has no such image" in message
    with pytest.raises(ImageUnavailable, match="no such image"):
        offered_digest(small.client, image)


def test_unreachable_registry_is_reported(small: SmallEngine) -> None:
    image = f"127.0.0.1:{free_port()}/large:lab"
    assert "its registry is not responding" in refusal(small, image)
    with pytest.raises(ImageUnavailable, match="is not responding"):
        offered_digest(small.client, image)


@pytest.mark.parametrize(
    ("fault", "value", "said"),
    [
        ("lies", True, "is not what the digest says"),
        ("stops_after", SIZE // 2, "stopped in the middle"),
        ("hangs_after", SIZE // 2, "nothing came from its registry for 3 seconds"),
    ],
)
def test_failed_pull_is_reported_and_can_be_retried(
    small: SmallEngine, registry: SlowRegistry, fault: str, value: int, said: str
) -> None:
    healthy = getattr(registry, fault)
    setattr(registry, fault, value)
    silent = 3.0 if fault == "hangs_after" else 60.0
    assert said in refusal(small, f"{registry.repository}:lab", silent)
    setattr(registry, fault, healthy)
    registry.go_on()
    list(pull(small.connect, f"{registry.repository}:lab"))


def test_different_image_under_a_pinned_digest_is_rejected(
    small: SmallEngine, registry: SlowRegistry
) -> None:
    registry.add("other", {"program": b"y"}, SETTINGS)
    image = pinned_image(f"{registry.repository}:lab", registry.digest("lab"))
    registry.moved[registry.digest("lab")] = registry.digest("other")
    assert "is not what the digest says" in refusal(small, image)
    registry.moved.clear()
    list(pull(small.connect, image))
    here = local_images(small.client, image)
    assert here and not here.tags, "by its digest only: no tag of this engine has moved"


def test_pull_on_a_full_disk_fails_with_a_remedy(
    small: SmallEngine, registry: SlowRegistry
) -> None:
    registry.size = 120_000_000
    registry.add("large", {"program": b"x"}, SETTINGS)
    message = refusal(small, f"{registry.repository}:large")
    assert "the engine's disk is full. Make room: `gpuspawner catalog prune`" in message
    list(pull(small.connect, f"{registry.repository}:lab"))


async def test_member_sees_pull_progress_and_failures(
    small: SmallEngine, registry: SlowRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a waiting spawn gets, and how far the pull is meanwhile."""
    monkeypatch.setattr(progress, "SAY_EVERY", 0.0)  # also what comes late, with the next one
    pulls = Pulls(small.connect)
    said: list[str] = []
    image = f"{registry.repository}:nowhere"
    with pytest.raises(StartFailed, match=f"{image} could not be pulled .its registry has no such"):
        await pulls.pull(image, said.append)
    await pulls.pull(f"{registry.repository}:lab", said.append)
    assert said[-1] == f"The image {registry.repository}:lab is here"
    assert any("of 2 layers, " in message for message in said)


# Ahead of members.


class Service:
    """The part of the accounting service that pulls ahead, with a real catalog and store."""

    def __init__(self, folder: Path, engine: SmallEngine, images: dict[str, str]) -> None:
        entries = "".join(f"- {{slug: {slug}, image: '{x}'}}\n" for slug, x in images.items())
        entries += "- {slug: never, image: never, spawner_override: {pull_policy: never}}\n"
        file = folder / "catalog.yaml"
        file.write_text(f"environments:\n{entries}")
        self.services = make_services(
            database_url=f"sqlite:///{folder}/hub.sqlite", device_source="simulated:2xT4"
        )
        self.pulling = PullAhead(
            WatchedCatalog(file), self.services, logging.getLogger("ahead"), engine.connect
        )


def test_catalog_images_are_prefetched_and_failures_are_deferred(
    small: SmallEngine, registry: SlowRegistry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    registry.add("two", {"program": b"2"}, SETTINGS)
    names = {slug: f"{registry.repository}:{slug}" for slug in ("lab", "gone", "two")}
    service = Service(tmp_path, small, names)
    service.pulling.look()
    assert local_images(small.client, names["lab"]) and local_images(small.client, names["two"])
    assert "no such image" in caplog.text and "tried again in 5 minutes" in caplog.text
    caplog.clear()
    service.pulling.look()
    assert not caplog.text, "what failed is not tried at once again, what is here is left alone"


def test_newer_image_is_announced_but_not_pulled(
    small: SmallEngine,
    registry: SlowRegistry,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image_prefetch, "OFFERS_EVERY", 0.0)
    caplog.set_level(logging.INFO)
    image = f"{registry.repository}:lab"
    list(pull(small.connect, image))
    service = Service(tmp_path, small, {"lab": image})
    service.pulling.look()
    assert not caplog.text
    registry.add("new", {"program": b"new"}, SETTINGS)
    registry.retag("lab", "new")
    service.pulling.look()
    assert "There is a newer image for lab" in caplog.text
    assert "gpuspawner catalog update lab" in caplog.text
    here = local_images(small.client, image)
    assert here and here.digest_in(image) != registry.digest("new")


def test_prefetch_stops_while_a_member_waits_for_an_image(
    small: SmallEngine, registry: SlowRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own pull is given up while theirs is not here, and goes on from there afterwards."""
    monkeypatch.setattr(image_prefetch, "LOOK_AROUND", 0.1)
    registry.add("mine", {"program": b"m"}, SETTINGS)
    names = {slug: f"{registry.repository}:{slug}" for slug in ("lab", "mine")}
    service = Service(tmp_path, small, names)
    service.services.ledger.open_account("ada")
    registry.rate = 50_000  # it takes minutes, and the engine tells each few seconds how far it is
    looking = threading.Thread(target=service.pulling.look)
    looking.start()
    wait_for(lambda: registry.sent > 0, "our pull to be under way", timeout=60)
    lease = service.services.leases.grant(
        ServerRef("ada"), Request(devices=1, environment="mine"), engine="docker"
    )
    looking.join(timeout=60)
    assert not looking.is_alive()
    assert local_images(small.client, names["lab"]) is None
    wait_for(lambda: not registry.sending, "the engine to stop too")
    assert registry.sent < SIZE
    registry.rate = 100_000_000
    list(pull(small.connect, names["mine"]))
    service.services.leases.confirm(lease.id, "a container")
    service.pulling.look()
    assert local_images(small.client, names["lab"])
