"""What the GPUs of all nodes do. Real: Slurm with two nodes in networks of their own, a sampler on
each, hub, accounting service, Chromium. Stand-in: NVML's library, the GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from playwright.sync_api import Browser, Page

from gpuspawner.services import Services, utcnow
from tests.support import axe
from tests.support.brokers import make_services
from tests.support.browser import screenshot
from tests.support.hub import ADMIN
from tests.support.node_sampler import NodeSampler
from tests.support.nvml.nvml_library import GIB, GPU
from tests.support.pages import sign_in
from tests.support.processes import wait_for
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_hub import SlurmHub
from tests.support.slurm_node import Node, NodeDevice

CONFIG = 'service_constants["gpuspawner.monitoring.health_service.QUIET_MINUTES"] = 0.02'
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def hub(
    hubs: None,
    shared_cluster: SlurmCluster,
    sampler_urls: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SlurmHub]:
    folder = tmp_path_factory.mktemp("slurm") / "hub"
    with SlurmHub(folder, shared_cluster, CONFIG, samplers=sampler_urls) as hub:
        yield hub


@pytest.fixture(autouse=True)
def work(cluster: SlurmCluster, samplers: list[NodeSampler]) -> None:
    """The devices of the first node work at 31 and 32 %, that of the second at 81 %."""
    for node, sampler in zip(cluster.nodes, samplers, strict=True):
        sampler.show(*works(node))


def works(node: Node, less: int = 0) -> list[GPU]:
    """The devices of a node, each so much less than :func:`used` says."""
    return [
        GPU(
            uuid=device.uuid,
            bus=f"00000000:{use:02X}:00.0",
            name=device.model,
            memory_bytes=device.memory_bytes,
            use=(use - less, 0),
            used_bytes=use * GIB // 4,
            celsius=use,
        )
        for device, use in used(node)
    ]


def used(node: Node) -> Iterator[tuple[NodeDevice, int]]:
    """Each device with the percentage that it is used."""
    first = 31 if len(node.devices) > 1 else 81
    return zip(node.devices, itertools.count(first), strict=False)


def shows(page: Page, uuid: str, text: str) -> None:
    """Wait until the live page says so of a device."""
    page.wait_for_selector(f".tile[data-uuid='{uuid}']:has-text('{text}')", timeout=90_000)


def test_live_page_shows_the_devices_of_all_nodes(
    hub: SlurmHub, cluster: SlurmCluster, browser: Browser
) -> None:
    (one, two), (other,) = (node.devices for node in cluster.nodes)
    lease = hub.begin("ann", gpus=1, gpu_model="H100")
    assert lease.uuids == (other.uuid,)
    for user, size in (("ann", PHONE), (ADMIN, WIDE)):
        page = browser.new_page(viewport=size)
        sign_in(page, hub, user, "cluster")
        for device, use in ((one, 31), (two, 32), (other, 81)):
            shows(page, device.uuid, f"{use} %")
            shows(page, device.uuid, f"{use / 4:.1f} of")
        shows(page, other.uuid, "yours" if user == "ann" else "ann")
        shows(page, other.uuid, "81 °C")
        assert axe.troubles(page) == []
        screenshot(page, f"cluster-nodes-{size['width']}")
        page.close()
    hub.stop_server("ann")


def test_sick_gpu_drains_its_node_until_the_probe_passes(
    hub: SlurmHub, cluster: SlurmCluster, samplers: list[NodeSampler]
) -> None:
    (gpu,) = works(cluster.nodes[1])

    def verdict() -> str:
        known = hub.services.health.device_states().get(gpu.uuid)
        return known.state.verdict if known else ""

    def fall_sick() -> bool:
        """Again and again: nobody hears of it before the hub has asked for the first time."""
        if verdict() == "sick":
            return True
        samplers[1].show(replace(gpu, xids=[(next(errors), 79)]))
        return False

    errors = itertools.count(1)
    wait_for(fall_sick, "the verdict", timeout=30, interval=2)
    machine = cluster.nodes[1]
    wait_for(lambda: "drain" in cluster.node_state(machine), "Slurm to be told", timeout=30)
    samplers[1].show(gpu)
    wait_for(lambda: verdict() == "watch", "a probe that passes", timeout=30)
    given = f"Device {gpu.uuid} is back in service"
    wait_for(lambda: given in hub.log_text(), "the cluster to be told", timeout=30)
    wait_for(lambda: cluster.node_state(machine) == "idle", "it to take jobs", timeout=30)


def test_silent_node_is_named_without_affecting_others(
    hub: SlurmHub, cluster: SlurmCluster, samplers: list[NodeSampler], browser: Browser
) -> None:
    first, second = cluster.nodes
    one, other = first.devices[0], second.devices[0]
    page = browser.new_page(viewport=WIDE)
    sign_in(page, hub, ADMIN, "cluster")
    shows(page, one.uuid, "31 %")
    samplers[0].kill()
    shows(page, one.uuid, f"the machine {first.name} does not report the use of its GPUs")
    screenshot(page, "cluster-silent-1280")
    phone = browser.new_page(viewport=PHONE)
    sign_in(phone, hub, "ann", "cluster")
    shows(phone, one.uuid, "no measurements from its machine")
    assert "refused" not in phone.content(), "why, admins are told"
    screenshot(phone, "cluster-silent-390")
    phone.close()
    samplers[1].show(*works(second, less=10))
    shows(page, other.uuid, "71 %")
    samplers[0].start()
    shows(page, one.uuid, "31 %")
    cluster.cut(second)
    shows(page, other.uuid, f"the machine {second.name} does not report the use of its GPUs")
    samplers[0].show(*works(first, less=10))
    shows(page, one.uuid, "21 %")
    cluster.heal(second)
    shows(page, other.uuid, "71 %")
    page.close()
    # Nobody was blamed for the silence, and what was told is remembered.
    assert {known.state.verdict for known in hub.services.health.device_states().values()} <= {
        "fine",
        "watch",
    }
    hub.shut_down()
    since = utcnow() - timedelta(hours=1)
    services = make_services(database_url=hub.database_url)
    uses = {device.uuid: use for node in cluster.nodes for device, use in used(node)}
    try:
        wait_for(lambda: remembered(services, since).keys() == uses.keys(), "all that was told")
        assert remembered(services, since) == uses
    finally:
        services.store.close()


def remembered(services: Services, since: datetime) -> dict[str, int]:
    """The most that each device was used, in percent."""
    minutes = services.monitoring.use_between(since, utcnow() + timedelta(minutes=1))
    assert not any(minute.error or minute.strangers for minute in minutes)
    found: dict[str, int] = {}
    for minute in minutes:
        found[minute.uuid] = max(found.get(minute.uuid, 0), minute.use_max)
    return found
