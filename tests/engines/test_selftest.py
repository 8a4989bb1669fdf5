"""Real: Docker Engine, containers, device requests and runtime. Stand-in: NVIDIA's hook."""

from __future__ import annotations

import signal
import time
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
from tests.support.engine import DEVICES, PrivateEngine


def left(engine: PrivateEngine) -> list[str]:
    """The names of the containers that checks left."""
    found = engine.client.containers(all=True, filters={"label": LABEL_CHECK})
    return [container["Names"][0] for container in found]


@pytest.mark.parametrize("mode", ["device_requests", "runtime"])
def test_working_injection_is_proved_with_the_exact_device(
    clean_engine: PrivateEngine, images: Any, mode: str
) -> None:
    finding = prove_injection(clean_engine.client, images.INSTANT, mode, DEVICES[2])
    assert finding.status is Status.OK, finding
    assert f"exactly {DEVICES[2]} (and NVML names it)" in finding.text
    assert "one without GPUs sees none" in finding.text
    assert left(clean_engine) == []


def test_unknown_device_fails_with_the_engine_message(
    clean_engine: PrivateEngine, images: Any
) -> None:
    finding = prove_injection(clean_engine.client, images.INSTANT, "device_requests", "GPU-gone")
    assert finding.status is Status.FAIL
    assert "GPU-gone: unknown device" in finding.text
    assert "nvidia-smi -L" in finding.remedy
    assert left(clean_engine) == []


def test_different_device_than_requested_fails(clean_engine: PrivateEngine, images: Any) -> None:
    # NVIDIA's hook takes an index too; what comes then is not what was named.
    finding = prove_injection(clean_engine.client, images.INSTANT, "device_requests", "1")
    assert finding.status is Status.FAIL
    assert f"given 1 sees {DEVICES[1]}" in finding.text


def test_more_devices_than_requested_fail(clean_engine: PrivateEngine, images: Any) -> None:
    clean_engine.set_devices([DEVICES[0], DEVICES[0]])
    finding = prove_injection(clean_engine.client, images.INSTANT, "device_requests", DEVICES[0])
    assert finding.status is Status.FAIL
    assert "2 device nodes (/dev/nvidia0 /dev/nvidia1) where one is right" in finding.text


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


def test_unsupported_injection_mode_fails_with_a_remedy(
    clean_engine: PrivateEngine, images: Any
) -> None:
    finding = prove_injection(clean_engine.client, images.INSTANT, "cdi", DEVICES[0])
    assert finding.status is Status.FAIL
    assert "by cdi does not start" in finding.text
    assert "nvidia-ctk" in finding.remedy
    assert left(clean_engine) == []


def test_missing_image_fails_with_the_pull_command(clean_engine: PrivateEngine) -> None:
    for finding in (
        check_image(clean_engine.client, "gpuspawner/nowhere:1"),
        prove_injection(clean_engine.client, "gpuspawner/nowhere:1", "runtime", DEVICES[0]),
    ):
        assert finding.status is Status.FAIL
        assert finding.remedy == "docker pull gpuspawner/nowhere:1"


def test_disabled_injection_is_unchecked(clean_engine: PrivateEngine, images: Any) -> None:
    finding = prove_injection(clean_engine.client, images.INSTANT, "none", DEVICES[0])
    assert finding.status is Status.UNCHECKED


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
