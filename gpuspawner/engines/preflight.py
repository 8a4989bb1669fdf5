"""Whether a Docker Engine is ready for members: it answers, has the images, injects GPUs.

What it can prove about GPUs it proves by a real container that ends at once. The spawner's
own self-test asks the same question in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import docker
import requests
from docker.errors import DockerException, ImageNotFound

from .injection import gpu_environment, gpu_host_config
from .probe import (
    Finding,
    Status,
    lacks_shell,
    no_answer,
    output_of,
    remove_leftovers,
    scratch_config,
    scratch_container,
    words_of,
)

__all__ = ["Finding", "Status", "check_engine", "check_image", "prove_injection"]

Connect = Callable[[], docker.APIClient]


def check_engine(connect: Connect, where: str) -> tuple[Finding, docker.APIClient | None]:
    """Whether the engine answers, and a client for the checks that follow."""
    name = "engine"
    try:
        client = connect()
        version = client.version()
    except (DockerException, requests.RequestException, OSError, ValueError, TypeError) as error:
        text = f"The Docker Engine at {where} does not answer: {words_of(error)}."
        return Finding(name, Status.FAIL, text, _no_engine_remedy(str(error))), None
    text = f"Docker Engine {version['Version']} (API {version['ApiVersion']}) at {where}"
    return Finding(name, Status.OK, text), client


def check_image(client: docker.APIClient, image: str, name: str = "image") -> Finding:
    """Whether the engine has the image, so that nobody's first start waits for a pull."""
    try:
        found = client.inspect_image(image)
    except ImageNotFound:
        text = f"The image {image} is not on this engine: the first start would wait for a pull."
        return Finding(name, Status.FAIL, text, f"docker pull {image}")
    except (DockerException, requests.RequestException) as error:
        return no_answer(name, error)
    return Finding(name, Status.OK, f"{image} ({found['Size'] / 1e9:.1f} GB)")


def prove_injection(client: docker.APIClient, image: str, mode: str, uuid: str) -> Finding:
    """Whether ``mode`` gives a container exactly the device ``uuid``, and none when none is asked.

    Two short containers of ``image`` run at once and say what they see.
    """
    name = "GPU injection"
    if mode == "none":
        return Finding(name, Status.UNCHECKED, "No GPUs are injected (gpu_injection is 'none').")
    remove_leftovers(client)
    with_device, without = _look_config(image, mode, [uuid]), _look_config(image, mode, [])
    try:
        with (
            scratch_container(client, with_device) as one,
            scratch_container(client, without) as other,
        ):
            client.start(one)
            client.start(other)
            seen = _Seen.of(output_of(client, one))
            seen_without = _Seen.of(output_of(client, other))
    except ImageNotFound:
        return check_image(client, image, name)
    except (DockerException, requests.RequestException) as error:
        if lacks_shell(str(error)):
            text = f"The image {image} has no shell to look around with."
            return Finding(name, Status.UNCHECKED, text, "Name an image with sh.")
        why = words_of(error)
        text = f"A container with {uuid} by {mode} does not start: {why}."
        return Finding(name, Status.FAIL, text, _injection_remedy(why, mode))
    if wrong := _judge(seen, uuid) or _judge_without(seen_without):
        return Finding(name, Status.FAIL, f"By {mode}: {wrong}.", _injection_remedy(wrong, mode))
    proof = "and NVML names it" if seen.uuids else "by its device node; no nvidia-smi to name it"
    text = f"By {mode}: a container sees exactly {uuid} ({proof}); one without GPUs sees none"
    return Finding(name, Status.OK, text)


_LOOK = """
for node in /dev/nvidia[0-9]*; do [ -e "$node" ] && echo "node $node"; done
echo "visible ${NVIDIA_VISIBLE_DEVICES-}"
if command -v nvidia-smi >/dev/null 2>&1; then
    nvidia-smi -L 2>&1 | while read -r line; do echo "smi $line"; done
fi
echo done
"""
_UUID = re.compile(r"UUID: ([^\s)]+)")


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a container said it sees."""

    nodes: tuple[str, ...]
    uuids: tuple[str, ...]
    visible: str
    complete: bool

    @classmethod
    def of(cls, text: str) -> _Seen:
        lines = [line.partition(" ") for line in text.splitlines()]
        return cls(
            nodes=tuple(rest for word, _, rest in lines if word == "node"),
            uuids=tuple(u for word, _, rest in lines if word == "smi" for u in _UUID.findall(rest)),
            visible=next((rest.strip() for word, _, rest in lines if word == "visible"), ""),
            complete=any(word == "done" for word, _, _ in lines),
        )


def _judge(seen: _Seen, uuid: str) -> str:
    """What is wrong with a container that was given one device; nothing when all is well."""
    # A MIG instance is listed below the GPU that it is part of.
    instance = uuid.startswith("MIG-")
    named = {u for u in seen.uuids if u.startswith("MIG-") or not instance}
    if not seen.complete:
        return "the container ended before it had looked around"
    if seen.uuids and named != {uuid}:
        return f"a container that was given {uuid} sees {', '.join(sorted(named)) or 'no device'}"
    if len(seen.nodes) > 1 or not (seen.nodes or named):
        return (
            f"a container that was given {uuid} has {len(seen.nodes)} device nodes "
            f"({' '.join(seen.nodes) or 'none'}) where one is right"
        )
    if seen.visible not in ("", "void", "none", uuid):
        return f"NVIDIA_VISIBLE_DEVICES is {seen.visible!r} inside, not {uuid}"
    return ""


def _judge_without(seen: _Seen) -> str:
    """What is wrong with a container that was given no device."""
    if not seen.complete:
        return "the container without GPUs ended before it had looked around"
    if seen.nodes or seen.uuids:
        return f"a container without GPUs sees {', '.join(seen.uuids or seen.nodes)}"
    return ""


def _look_config(image: str, mode: str, uuids: Sequence[str]) -> dict[str, Any]:
    environment = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility", **gpu_environment(mode, uuids)}
    host = {"NetworkMode": "none", **gpu_host_config(mode, uuids)}
    return scratch_config(image, _LOOK, environment, host)


def _injection_remedy(why: str, mode: str) -> str:
    if "unknown device" in why or "unresolvable CDI" in why:
        return (
            "Compare with nvidia-smi -L on the engine's machine. After a change of GPUs or driver: "
            "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, and restart Docker."
        )
    if "without GPUs sees" in why:
        return (
            "Something hands GPUs to every container: look for a default runtime or default "
            "devices in Docker's /etc/docker/daemon.json, and take them out."
        )
    return (
        "Install the NVIDIA Container Toolkit on the engine's machine, then: sudo nvidia-ctk "
        "runtime configure --runtime=docker && sudo systemctl restart docker."
    )


def _no_engine_remedy(why: str) -> str:
    if "PermissionError" in why or "Permission denied" in why:
        return (
            "Let the hub's user ask it: sudo usermod -aG docker USER, then sign in anew. "
            "That user is then as mighty as root."
        )
    return (
        "Install Docker if it is not there, start it (sudo systemctl start docker), or say where "
        "it is with DOCKER_HOST or c.DockerSpawner.client_kwargs."
    )
