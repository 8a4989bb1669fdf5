"""Real: Docker Engine, containers, device requests and runtime. Stand-in: NVIDIA's hook."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any

import docker
import docker.errors
import pytest

from gpuspawner.engines.device_probe import ProbeNotPossible, probe_in_container
from gpuspawner.engines.preflight import (
    LABEL_CHECK,
    LEFTOVER_AFTER,
    Status,
    check_image,
    prove_injection,
    remove_leftovers,
)
from tests.engines.test_check import left
from tests.support.cdi import write_specification
from tests.support.engine import DEVICES, PrivateEngine
from tests.support.images import INSTANT


@pytest.mark.parametrize("mode", ["device_requests", "runtime"])
def test_working_injection_is_proved_with_the_exact_device(
    clean_engine: PrivateEngine, images: Any, mode: str
) -> None:
    finding = prove_injection(clean_engine.client, images.INSTANT, mode, DEVICES[2])
    assert finding.status is Status.OK, finding
    assert f"exactly {DEVICES[2]} (and NVML names it)" in finding.text
    assert "one without GPUs sees none" in finding.text
    assert left(clean_engine) == []


TWO_NODES = "2 device nodes (/dev/nvidia0 /dev/nvidia1) instead of one"


@pytest.mark.parametrize(
    ("there", "mode", "wanted", "text", "remedy"),
    [
        (DEVICES, "device_requests", "GPU-gone", "GPU-gone: unknown device", "nvidia-smi -L"),
        # NVIDIA's hook takes an index too; what comes then is not what was named.
        (DEVICES, "device_requests", "1", f"given 1 sees {DEVICES[1]}", ""),
        (DEVICES[:1] * 2, "device_requests", DEVICES[0], TWO_NODES, ""),
        (DEVICES, "cdi", DEVICES[0], "by cdi does not start", "nvidia-ctk"),
    ],
    ids=["unknown device", "different device", "several devices", "unsupported mode"],
)
def test_injection_of_anything_else_fails_with_its_reason(
    clean_engine: PrivateEngine,
    images: Any,
    there: Sequence[str],
    mode: str,
    wanted: str,
    text: str,
    remedy: str,
) -> None:
    clean_engine.set_devices(there)
    finding = prove_injection(clean_engine.client, images.INSTANT, mode, wanted)
    assert finding.status is Status.FAIL
    assert text in finding.text and remedy in finding.remedy
    assert left(clean_engine) == []
    none = prove_injection(clean_engine.client, images.INSTANT, "none", wanted)
    assert none.status is Status.UNCHECKED


def test_probe_tests_one_device_in_a_container(clean_engine: PrivateEngine, images: Any) -> None:
    client, several = clean_engine.client, ["gpuspawner/nowhere:1", images.INSTANT]
    found = probe_in_container(client, several, "device_requests", DEVICES[1])
    assert found.failure == ""
    assert f"exactly {DEVICES[1]}" in found.text
    assert "its memory was not tried" in found.text  # nobody's container has CUDA here
    found = probe_in_container(client, several, "device_requests", "GPU-gone")
    assert "GPU-gone: unknown device" in found.failure
    with pytest.raises(ProbeNotPossible, match="none of the images"):
        probe_in_container(client, several[:1], "auto", DEVICES[1])
    assert left(clean_engine) == []


def test_probe_takes_the_first_way_that_works(cdi_engine: PrivateEngine) -> None:
    # Only the specification knows the second one, as on an engine with CDI and without the hook:
    # before Docker Engine 28, what comes first is a device request.
    there = [{"uuid": uuid, "minor": n, "model": "T4"} for n, uuid in enumerate(DEVICES[:2])]
    cdi_engine.set_devices(DEVICES[:1])
    write_specification(cdi_engine.directory / "cdi", there)
    try:
        found = probe_in_container(cdi_engine.client, [INSTANT], "auto", DEVICES[1])
        assert found.failure == ""
        assert f"By cdi: a container sees exactly {DEVICES[1]}" in found.text
        found = probe_in_container(cdi_engine.client, [INSTANT], "auto", "GPU-gone")
        assert "GPU-gone" in found.failure
    finally:
        cdi_engine.set_devices(DEVICES)


LEAK = r"""
printf '#!/bin/sh\necho "GPU 0: Leaky (UUID: GPU-leaks)"\n' > /usr/bin/nvidia-smi
chmod 755 /usr/bin/nvidia-smi
"""


def test_device_visible_without_a_request_fails(clean_engine: PrivateEngine, images: Any) -> None:
    # An image whose nvidia-smi always lists a device: as on an engine that gives it to all.
    client = clean_engine.client
    tag = "gpuspawner/leaks:test"
    helper = client.create_container(images.INSTANT, ["sh", "-c", LEAK])["Id"]
    try:
        client.start(helper)
        client.wait(helper)
        client.commit(helper, *tag.split(":"))
        finding = prove_injection(client, tag, "device_requests", DEVICES[0])
    finally:
        client.remove_container(helper, force=True)
        client.remove_image(tag, force=True)
    assert finding.status is Status.FAIL
    assert "a container without GPUs sees GPU-leaks" in finding.text
    assert "daemon.json" in finding.remedy


def test_missing_image_fails_with_the_pull_command(clean_engine: PrivateEngine) -> None:
    for finding in (
        check_image(clean_engine.client, "gpuspawner/nowhere:1"),
        prove_injection(clean_engine.client, "gpuspawner/nowhere:1", "runtime", DEVICES[0]),
    ):
        assert finding.status is Status.FAIL
        assert finding.remedy == "docker pull gpuspawner/nowhere:1"


def test_unreachable_engine_fails_the_proof(images: Any) -> None:
    client = docker.APIClient(base_url="unix:///nowhere/docker.sock", version="1.41", timeout=5)
    finding = prove_injection(client, images.INSTANT, "runtime", DEVICES[0])
    assert finding.status is Status.FAIL
    assert finding.text.endswith("No such file or directory.")


def test_interrupted_proof_leaves_no_container(
    clean_engine: PrivateEngine, images: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = docker.APIClient(base_url=clean_engine.url, version="auto", timeout=60)
    wait = client.wait

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        """Ctrl-C while the containers run."""
        signal.raise_signal(signal.SIGINT)
        return wait(*args, **kwargs)

    monkeypatch.setattr(client, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prove_injection(client, images.INSTANT, "device_requests", DEVICES[0])
    assert left(clean_engine) == []


def test_old_check_leftovers_are_removed_and_recent_ones_kept(
    clean_engine: PrivateEngine, images: Any
) -> None:
    client = clean_engine.client
    made = {"old": time.time() - LEFTOVER_AFTER - 60, "new": time.time()}
    for name, at in made.items():
        label = {LABEL_CHECK: str(int(at))}
        client.create_container(images.INSTANT, ["sleep", "600"], name=name, labels=label)
    client.create_container(images.INSTANT, ["sleep", "600"], name="a-members")
    remove_leftovers(client)
    assert left(clean_engine) == ["/new"], "a check that runs now keeps its container"
    assert client.inspect_container("a-members")
