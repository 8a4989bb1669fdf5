"""Whether one device does its work: tried in a container that gets it, as a server would, or by a
process of this host where servers are processes."""

from __future__ import annotations

import importlib.resources
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import docker
import requests
from docker.errors import DockerException

from ..core.errors import EngineUnavailable
from .images import local_images
from .injection import candidates, gpu_environment, gpu_host_config
from .preflight import (
    Status,
    lacks_shell,
    output_of,
    prove_injection,
    scratch_config,
    scratch_container,
    words_of,
)

PATIENCE = 60.0
"""Seconds that a process may take."""

_WORDS = ("ok", "failed", "untried")


class Untried(Exception):
    """Whether the device is well cannot be tried just now. The text says why."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found."""

    failure: str = ""
    """Why the device is not well, in words; empty when it is."""
    text: str = ""
    """What was tried."""


def probe_in_container(
    client: docker.APIClient, images: Sequence[str], mode: str, uuid: str
) -> Probed:
    """Give a container the device. It must see exactly this one; and where the image has Python
    and CUDA's library came with the device, its memory is tried.

    ``images``: the first that is on the engine serves. ``mode`` as in :mod:`.injection`, or
    ``auto``. Raises Untried when that says nothing about the device.
    """
    try:
        image = next((image for image in images if image and local_images(client, image)), "")
        if not image:
            raise Untried("none of the images of this hub is on the engine")
        if mode == "auto":
            mode = candidates(client.info())[0]
        found = prove_injection(client, image, mode, uuid)
        if found.status is Status.UNCHECKED:
            raise Untried(found.text.rstrip("."))
        if found.status is Status.FAIL:
            return Probed(found.text.rstrip("."))
        tried = _try_in_container(client, image, mode, uuid)
    except (DockerException, requests.RequestException, OSError, EngineUnavailable) as error:
        raise Untried(f"the engine did not answer: {words_of(error)}") from error
    return tried if tried.failure else Probed(text=f"{found.text}; {tried.text}")


def probe_by_process(uuid: str) -> Probed:
    """Try the device by a process of this host. Raises Untried."""
    environment = os.environ | gpu_environment("none", [uuid]) | {"CUDA_VISIBLE_DEVICES": uuid}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _source(), uuid],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return Probed(f"a program on it did not end within {PATIENCE:.0f} s")
    except OSError as error:
        raise Untried(f"no process could be started: {error}") from error
    return _told(done.stdout, done.stderr)


def _try_in_container(client: docker.APIClient, image: str, mode: str, uuid: str) -> Probed:
    program = f"python3 -c {shlex.quote(_source())} {shlex.quote(uuid)}"
    script = f"command -v python3 >/dev/null || {{ echo untried no Python; exit; }}; {program}"
    environment = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility", **gpu_environment(mode, [uuid])}
    host = {"NetworkMode": "none", **gpu_host_config(mode, [uuid])}
    try:
        config = scratch_config(image, script, environment, host)
        with scratch_container(client, config) as container:
            client.start(container)
            return _told(output_of(client, container))
    except DockerException as error:
        if lacks_shell(str(error)):
            return Probed(text="its memory was not tried: the image has no shell")
        raise


def _told(output: str, errors: str = "") -> Probed:
    """By the program's last word: one that dies on a device says none."""
    lines = [line.partition(" ") for line in output.splitlines()]
    word, _, text = next((line for line in reversed(lines) if line[0] in _WORDS), ("", "", ""))
    if word == "ok":
        return Probed(text=text)
    if word == "untried":
        return Probed(text=f"its memory was not tried: {text}")
    last = (errors or output).strip().splitlines()[-1:] or ["it said nothing"]
    return Probed(text if word else f"a program on it broke: {last[0][:200]}")


def _source() -> str:
    return (importlib.resources.files(__package__) / "device_probe_program.py").read_text(
        encoding="utf-8"
    )
