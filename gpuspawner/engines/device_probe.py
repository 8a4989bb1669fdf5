"""The probe of a device: is it working?

It runs in a container that gets the device like a server, or as a process of this host where
servers are processes.
"""

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
    prove_injection,
    run_script,
    scratch_config,
    words_of,
)

PATIENCE = 60.0
"""Maximum seconds of a probe process."""

_WORDS = ("ok", "failed", "untried")


class ProbeNotPossible(Exception):
    """The device cannot be probed at the moment. The message says why."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe."""

    failure: str = ""
    """Why the device is not healthy, in words; empty if it is."""
    text: str = ""
    """What was tried."""


def probe_in_container(
    client: docker.APIClient, images: Sequence[str], mode: str, uuid: str
) -> ProbeResult:
    """Probe a device in a container that gets it.

    The container must see exactly this device; if the image has Python and CUDA's library is
    injected, its memory is tested. ``images``: the first one on the engine is used. ``mode`` as in
    :mod:`.injection`, or ``auto``. Raises ProbeNotPossible if nothing about the device was learned.
    """
    try:
        image = next((image for image in images if image and local_images(client, image)), "")
        if not image:
            raise ProbeNotPossible("none of the images of this hub is on the engine")
        modes = candidates(client.info()) if mode == "auto" else [mode]
        findings = []
        for mode in modes:  # an engine does not say if its hook is there: see candidates
            findings.append(found := prove_injection(client, image, mode, uuid))
            if found.status is Status.OK:
                break
        else:
            found = next((each for each in findings if each.status is Status.FAIL), findings[0])
        if found.status is Status.UNCHECKED:
            raise ProbeNotPossible(found.text.rstrip("."))
        if found.status is Status.FAIL:
            return ProbeResult(found.text.rstrip("."))
        tried = _try_in_container(client, image, mode, uuid)
    except (DockerException, requests.RequestException, OSError, EngineUnavailable) as error:
        raise ProbeNotPossible(f"the engine did not respond: {words_of(error)}") from error
    return tried if tried.failure else ProbeResult(text=f"{found.text}; {tried.text}")


def probe_by_process(uuid: str) -> ProbeResult:
    """Probe the device with a process of this host. Raises ProbeNotPossible."""
    environment = os.environ | gpu_environment([uuid]) | {"CUDA_VISIBLE_DEVICES": uuid}
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
        return ProbeResult(f"a program on it did not end within {PATIENCE:.0f} s")
    except OSError as error:
        raise ProbeNotPossible(f"no process could be started: {error}") from error
    return _told(done.stdout, done.stderr)


def _try_in_container(client: docker.APIClient, image: str, mode: str, uuid: str) -> ProbeResult:
    program = f"python3 -c {shlex.quote(_source())} {shlex.quote(uuid)}"
    script = f"command -v python3 >/dev/null || {{ echo untried no Python; exit; }}; {program}"
    environment = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility", **gpu_environment([uuid])}
    host = {"NetworkMode": "none", **gpu_host_config(mode, [uuid])}
    try:
        return _told(run_script(client, scratch_config(image, script, environment, host)))
    except DockerException as error:
        if lacks_shell(str(error)):
            return ProbeResult(text="its memory was not tried: the image has no shell")
        raise


def _told(output: str, errors: str = "") -> ProbeResult:
    """Parse the probe's last output line; one killed by the device prints none and failed."""
    lines = [line.partition(" ") for line in output.splitlines()]
    word, _, text = next((line for line in reversed(lines) if line[0] in _WORDS), ("", "", ""))
    if word == "ok":
        return ProbeResult(text=text)
    if word == "untried":
        return ProbeResult(text=f"its memory was not tried: {text}")
    last = (errors or output).strip().splitlines()[-1:] or ["it printed nothing"]
    return ProbeResult(text if word else f"a program on it failed: {last[0][:200]}")


def _source() -> str:
    program = importlib.resources.files(__package__) / "device_probe_program.py"
    return program.read_text(encoding="utf-8")
