"""Images that members bring themselves. Real: a hub, a Docker Engine, a registry of this test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import docker.errors
import pytest

from tests.support.engine import PrivateEngine
from tests.support.gpu_hub import GPUHub, message_of
from tests.support.images import INSTANT, ensure_images
from tests.support.registry import SlowRegistry

CONFIG = """
c.GPUDockerSpawner.own_images = {{
    "lab": {{"images": ["{repository}", "lab/*"], "most": "4G", "labels": {{"scanned": "yes"}}}},
}}
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 50}}
c.JupyterHub.load_groups = {{"lab": {{"users": ["anna"]}}}}
"""


@pytest.fixture(scope="module")
def registry(engine: PrivateEngine) -> Iterator[SlowRegistry]:
    """Images of which one is scanned, and one is not."""
    ensure_images(engine, [INSTANT])
    with SlowRegistry(size=1000) as registry, tempfile.TemporaryFile() as saved:
        saved.writelines(engine.client.get_image(INSTANT))
        saved.seek(0)
        registry.add_saved("good", saved, {"Labels": {"scanned": "yes"}})
        registry.add("bad", {"program": b"x"}, {"Labels": {"scanned": "no"}})
        yield registry


@pytest.fixture(scope="module")
def hub(
    hubs: None,
    engine: PrivateEngine,
    registry: SlowRegistry,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GPUHub]:
    config = CONFIG.format(repository=registry.repository)
    with GPUHub(tmp_path_factory.mktemp("own") / "hub", engine, config) as hub:
        for user in ("anna", "bert"):
            hub.browser_of(user)
        yield hub
    engine.clean()
    for tag in ("good", "bad"):
        try:
            engine.client.remove_image(f"{registry.repository}:{tag}", force=True)
        except docker.errors.ImageNotFound:
            continue


def test_an_image_of_ones_own_takes_the_place_of_the_environments(
    hub: GPUHub, registry: SlowRegistry
) -> None:
    own = f"{registry.repository}:good"
    assert hub.spawn("anna", {"environment": "instant", "gpus": 1, "own_image": own}).ok
    hub.wait_server("anna", timeout=90)
    [container] = hub.containers()
    assert container["Image"] == own
    assert container["Labels"]["gpuspawner.environment"] == "instant"
    assert len(hub.device_nodes("anna")) == 1
    hub.stop_server("anna")
    # The next start without it is the environment's own again.
    assert hub.spawn("anna", {"environment": "instant", "gpus": 0}).ok
    hub.wait_server("anna")
    assert hub.containers()[0]["Image"] == INSTANT
    hub.stop_server("anna")


def test_what_is_not_there_is_said_before_anything_is_leased(
    hub: GPUHub, registry: SlowRegistry
) -> None:
    before = hub.records()
    refused = hub.spawn("anna", {"gpus": 1, "own_image": f"{registry.repository}:missing"})
    assert refused.status_code == 503
    assert message_of(refused).startswith(
        f"The image {registry.repository}:missing could not be pulled: "
    )
    assert hub.records() == before and hub.containers() == []


def test_what_is_not_scanned_does_not_start_and_does_not_stay(
    hub: GPUHub, engine: PrivateEngine, registry: SlowRegistry
) -> None:
    own = f"{registry.repository}:bad"
    refused = hub.spawn("anna", {"gpus": 1, "own_image": own})
    assert refused.status_code == 403
    assert message_of(refused) == (
        f"You may not use the image {own}: its label scanned is 'no', and has to be 'yes'."
    )
    with pytest.raises(docker.errors.ImageNotFound):
        engine.client.inspect_image(own)
    assert hub.open_leases() == [] and hub.containers() == []
    assert hub.balance("anna") <= 100_000_000


@pytest.mark.parametrize(
    ("user", "image", "status", "says"),
    [
        ("anna", "other/tools:1", 403, "You may not use the image other/tools:1. Yours may be: "),
        ("bert", "lab/tools:1", 403, "You may not bring an image of your own"),
        ("anna", "lab/tools; rm -rf /", 400, "write an image as for docker pull"),
        ("anna", "../../etc", 400, "write an image as for docker pull"),
    ],
)
def test_what_may_not_be_brought(
    hub: GPUHub, user: str, image: str, status: int, says: str
) -> None:
    before = hub.records()
    refused = hub.spawn(user, {"gpus": 0, "own_image": image})
    assert (refused.status_code, says in message_of(refused)) == (status, True)
    assert hub.records() == before


def test_the_form_has_the_field_for_those_who_may(hub: GPUHub) -> None:
    assert 'name="own_image"' in hub.open_page("anna", "/hub/spawn").text
    assert 'name="own_image"' not in hub.open_page("bert", "/hub/spawn").text
