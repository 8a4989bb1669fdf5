"""Real: Slurm with two nodes and their Docker Engines, a registry, JupyterHub, proxy, accounting
service. Stand-in: the GPUs."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from docker.errors import ImageNotFound

from gpuspawner.queue.models import Ticket
from tests.support.hub import ADMIN
from tests.support.images import INSTANT
from tests.support.processes import wait_for
from tests.support.registry import SlowRegistry
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import SlurmHub
from tests.support.slurm_node import Node

ENVIRONMENTS = """  - slug: ahead
    display_name: Ahead
    description: Its image is on the first node, and nobody asks for it.
    image: {repository}:ahead
    devices: {{default: 1, max: 8}}
  - slug: later
    display_name: Later
    description: Its image is on no node yet.
    image: {repository}:later
    devices: {{default: 1, max: 8}}
  - slug: missing
    display_name: Missing
    description: Its image is nowhere.
    image: {repository}:missing
    devices: {{default: 1, max: 8}}
"""

TAGS = ("ahead", "later", "own")

OWN = 'c.GPUDockerSpawner.own_images = {{"*": {{"images": ["{repository}"], "most": "1G"}}}}'


@pytest.fixture(scope="module")
def registry(shared_cluster: SlurmCluster) -> Iterator[SlowRegistry]:
    """Images that answer at once, of which none goes out whole until it is told to; the first
    node has one of them."""
    client = shared_cluster.nodes[0].engine.client
    saved = io.BytesIO(b"".join(client.get_image(INSTANT)))
    with SlowRegistry(size=300_000, host=shared_cluster.address) as registry:
        for tag in TAGS:
            saved.seek(0)
            registry.add_saved(tag, saved, {"Labels": {"tag": tag}})
        client.pull(registry.repository, "ahead")
        registry.hang()
        yield registry


@pytest.fixture(scope="module")
def hub(
    hubs: None,
    shared_cluster: SlurmCluster,
    registry: SlowRegistry,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SlurmHub]:
    folder = tmp_path_factory.mktemp("images") / "hub"
    config = OWN.format(repository=f"{registry.repository}:own")
    environments = ENVIRONMENTS.format(repository=registry.repository)
    with SlurmHub(folder, shared_cluster, config, environments=environments) as hub:
        yield hub
    for node in shared_cluster.nodes:
        for tag in TAGS:
            if has(node, f"{registry.repository}:{tag}"):
                node.engine.client.remove_image(f"{registry.repository}:{tag}", force=True)


def has(node: Node, image: str) -> bool:
    try:
        node.engine.client.inspect_image(image)
    except ImageNotFound:
        return False
    return True


def told(hub: SlurmHub, user: str, part: str) -> str:
    """What the pending page of a member says as soon as there is this part in it."""
    return next(e["message"] for e in hub.events(user) if part in e["message"])


def waits(hub: SlurmHub, ticket: Ticket) -> str:
    """What the service says that a ticket waits for."""
    line = hub.call(ADMIN, "GET", "queue").json()
    return next(str(each["waits_for"]) for each in line["tickets"] if each["id"] == ticket.id)


def test_ticket_waits_for_its_image_without_holding_gpus(
    hub: SlurmHub, cluster: SlurmCluster, registry: SlowRegistry
) -> None:
    image = f"{registry.repository}:later"
    hub.ask("ann", environment="later", gpus=1)
    said = told(hub, "ann", "is being fetched to")
    one, other = (node.name for node in cluster.nodes)
    assert image in said and one in said and other in said
    assert not cluster.run("squeue", "-h"), "no GPU waits for a pull"
    # The same words in the service, which fetches nothing for her: it sees who lacks the image.
    (ticket,) = hub.services.queue.waiting()
    waits_for = f"its image {image} is being fetched to {one} and {other}"
    assert waits_for in said and waits_for in waits(hub, ticket)
    assert not has(cluster.nodes[1], f"{registry.repository}:ahead")
    registry.go_on()
    hub.wait_lease("ann")
    wait_for(lambda: all(has(node, image) for node in cluster.nodes), "the image everywhere")
    hub.stop_server("ann")


def test_unrequested_image_is_prefetched_to_the_node_lacking_it(
    hub: SlurmHub, cluster: SlurmCluster, registry: SlowRegistry
) -> None:
    image, (first, second) = f"{registry.repository}:ahead", cluster.nodes
    registry.go_on()
    wait_for(lambda: has(second, image), "the image on the second node")
    told = f"{image} is on {second.name} after"
    wait_for(lambda: told in hub.log_text(), "the service's word")
    assert f"{image} is on {first.name} after" not in hub.log_text(), "it was there"
    asked = {
        t.request.environment
        for user in ("ann", "bob")
        for t in hub.services.queue.tickets_of(user)
    }
    assert "ahead" not in asked


def test_node_without_the_image_is_not_chosen_until_pulled(
    hub: SlurmHub, cluster: SlurmCluster, registry: SlowRegistry
) -> None:
    """The image of a member's own, which nobody pulls ahead."""
    image = f"{registry.repository}:own"
    first, second = cluster.nodes
    registry.hangs_after = None
    second.engine.client.pull(registry.repository, "own")
    registry.hang()
    lease = hub.begin("ann", environment="instant", own_image=image, gpus=1)
    assert hub.node_of(lease) is second, "the other one has two GPUs free, and no image"
    assert not has(first, image)
    hub.queue_up("bob", environment="instant", own_image=image, gpus=1)
    registry.go_on()
    assert hub.node_of(hub.wait_lease("bob", timeout=90)) is first
    hub.stop_servers("ann", "bob")


def test_image_that_cannot_be_pulled_ends_the_ticket(
    hub: SlurmHub, cluster: SlurmCluster, registry: SlowRegistry
) -> None:
    hub.ask("cara", environment="missing", gpus=1)
    wait_for(lambda: not hub.services.queue.waiting() and hub.server("cara") is None, "the refusal")
    (ticket,) = hub.services.queue.tickets_of("cara")
    assert f"{registry.repository}:missing could not be pulled" in ticket.end_reason
    assert not cluster.run("squeue", "-h")
