"""The smoke test of an image: can members work in it? Seen from inside a container."""

from __future__ import annotations

import importlib.resources
import json
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound

from .injection import Hardening, gpu_environment, gpu_host_config, harden
from .preflight import (
    LABEL_CHECK,
    CheckFinding,
    Status,
    no_answer,
    remove_leftovers,
    scratch_container,
    words_of,
)

SMOKE = "gpuspawner.smoke."
"""Prefix of the labels by which an image says what to try.

``imports``, ``gpu_imports``, ``counts``, ``programs`` and ``pages``, each with words separated by
spaces.
"""

WORKSPACE = "/home/jovyan/work"
DATASET = "/datasets/smoke"
PATIENCE = 120.0
"""Maximum seconds for a server to start, or for one of its pages."""
LONGEST = 900
"""Seconds after which the whole test has failed."""

_TRY_AGAIN = "Look at the image's Dockerfile; then build it again."


def smoke(
    client: docker.APIClient,
    image: str,
    *,
    mode: str = "none",
    uuids: Sequence[str] = (),
    first_page: str = "",
) -> list[CheckFinding]:
    """Start a container of ``image`` and try everything in it; one finding per step.

    It gets the devices ``uuids`` by ``mode``, like a server. ``first_page`` is where the
    environment opens, such as ``/lab``. The container, its volumes and what it wrote are removed
    afterwards. A good image has no failed finding.
    """
    remove_leftovers(client)
    try:
        settings = client.inspect_image(image)["Config"]
        with ExitStack() as rooms:
            volumes = [rooms.enter_context(_volume(client)) for _ in range(2)]
            config = _config(image, settings, mode, uuids, first_page, volumes)
            container = rooms.enter_context(scratch_container(client, config))
            client.start(container)
            return _findings(_output(client, container))
    except ImageNotFound:
        text = f"The image {image} is not on this engine."
        return [CheckFinding("smoke", Status.FAIL, text, f"gpuspawner catalog pull {image}")]
    except APIError as error:
        text = f"A container of {image} does not start: {words_of(error)}."
        remedy = "The image needs python3 on its PATH." if "python3" in text else _TRY_AGAIN
        return [CheckFinding("smoke", Status.FAIL, text, remedy)]
    except (DockerException, requests.RequestException) as error:
        return [no_answer("smoke", error)]


@contextmanager
def _volume(client: docker.APIClient) -> Iterator[str]:
    """Create a volume that exists inside the block only."""
    name = f"gpuspawner-check-{secrets.token_hex(6)}"
    client.create_volume(name, labels={LABEL_CHECK: str(int(time.time()))})
    try:
        yield name
    finally:
        with suppress(DockerException, requests.RequestException):
            client.remove_volume(name, force=True)


def _config(
    image: str,
    settings: Mapping[str, Any],
    mode: str,
    uuids: Sequence[str],
    first_page: str,
    volumes: Sequence[str],
) -> dict[str, Any]:
    labels = settings.get("Labels") or {}

    def words(name: str) -> list[str]:
        return shlex.split(str(labels.get(SMOKE + name, "")))

    told = {
        "imports": words("imports") + (words("gpu_imports") if uuids else []),
        "programs": words("programs"),
        "counts": words("counts"),
        "pages": list(dict.fromkeys(filter(None, [first_page.lstrip("/"), *words("pages")]))),
        "devices": len(uuids),
        "workspace": WORKSPACE,
        "dataset": DATASET,
        "command": settings.get("Cmd") or ["jupyterhub-singleuser"],
        "patience": PATIENCE,
    }
    program = importlib.resources.files(__package__) / "smoke_test_program.py"
    host = {
        "NetworkMode": "none",
        "Binds": [f"{volumes[0]}:{WORKSPACE}", f"{volumes[1]}:{DATASET}:ro"],
        **gpu_host_config(mode, uuids),
    }
    return {
        "Image": image,
        "Entrypoint": ["python3", "-c", program.read_text("utf-8")],
        "Cmd": [json.dumps(told)],
        "Env": [f"{name}={value}" for name, value in gpu_environment(uuids).items()],
        "Labels": {LABEL_CHECK: str(int(time.time()))},
        "HostConfig": harden(host, Hardening()),
    }


def _output(client: docker.APIClient, container: str) -> str:
    """Return what the container printed after it ended."""
    try:
        client.wait(container, timeout=LONGEST)
    except requests.RequestException:
        return json.dumps({"name": "smoke", "ok": False, "text": f"not done in {LONGEST} s"})
    text: str = client.logs(container).decode(errors="replace")
    return text


def _findings(printed: str) -> list[CheckFinding]:
    found = []
    for line in printed.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            told = json.loads(line)
            status = Status.OK if told["ok"] else Status.FAIL
            remedy = "" if told["ok"] else _TRY_AGAIN
            found.append(CheckFinding(str(told["name"]), status, str(told["text"]), remedy))
    if not any(finding.name in ("server", "smoke") for finding in found):
        words = printed.strip()[-300:] or "it printed nothing"
        text = f"The test ended too early: {words}"
        found.append(CheckFinding("smoke", Status.FAIL, text, _TRY_AGAIN))
    return found


def passed(findings: Sequence[CheckFinding]) -> bool:
    """Return True if members can be given the image."""
    return all(finding.status is Status.OK for finding in findings)
