"""Findings, and the short-lived containers that they come from.

A check's container is removed again, whatever happens; one that a killed check left behind
is removed by the next.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

LABEL_CHECK = "gpuspawner.check"
"""On containers and volumes of a check. Its value is when it was made, in seconds of Unix time."""

PATIENCE = 30
"""Seconds after which a check's container has failed."""

LEFTOVER_AFTER = 600
"""Seconds after which a check's container belongs to a check that was killed."""

_SYSTEM_ERROR = re.compile(r"\b\w*Error\(\d+, ['\"]([^'\"]+)['\"]\)")


class Status(str, Enum):
    """What a check found. What was not checked is never counted as good."""

    OK = "ok"
    FAIL = "fail"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check."""

    name: str
    status: Status
    text: str
    remedy: str = ""
    """What to do, when something is to be done."""


def remove_leftovers(client: docker.APIClient) -> None:
    """Remove what checks left that were killed. Says nothing: the check itself will."""
    with suppress(DockerException, requests.RequestException):
        for listed in client.containers(all=True, filters={"label": LABEL_CHECK}):
            made = str((listed.get("Labels") or {}).get(LABEL_CHECK, ""))
            if made.isdigit() and time.time() - int(made) > LEFTOVER_AFTER:
                with suppress(APIError):
                    client.remove_container(listed["Id"], force=True, v=True)


def scratch_config(
    image: str, script: str, environment: Mapping[str, str], host: Mapping[str, Any]
) -> dict[str, Any]:
    """The Engine API's words for a container that runs a shell script; ``host`` is HostConfig."""
    return {
        "Image": image,
        "Entrypoint": ["sh", "-c"],
        "Cmd": [script],
        "Env": [f"{name}={value}" for name, value in environment.items()],
        "Labels": {LABEL_CHECK: str(int(time.time()))},
        "HostConfig": dict(host),
    }


@contextmanager
def scratch_container(client: docker.APIClient, config: Mapping[str, Any]) -> Iterator[str]:
    """A container that is there inside the block only, also when that is interrupted."""
    name = f"gpuspawner-check-{secrets.token_hex(6)}"
    answered = False
    try:
        try:
            client.create_container_from_config(dict(config), name)
            answered = True
        except APIError:
            answered = True
            raise
        yield name
    finally:
        # Interrupted before the engine answered, the container may appear a moment later.
        _remove(client, name, patience=0.0 if answered else 5.0)


def _remove(client: docker.APIClient, name: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            client.remove_container(name, force=True, v=True)
            return
        except NotFound:
            if time.monotonic() >= deadline:
                return
        except APIError as error:
            if error.status_code == 409:  # it is going by itself
                return
            raise
        time.sleep(0.1)


def output_of(client: docker.APIClient, container: str) -> str:
    """What the container printed, once it ended."""
    try:
        client.wait(container, timeout=PATIENCE)
    except requests.RequestException:
        return f"It did not end within {PATIENCE} seconds."
    text: str = client.logs(container).decode(errors="replace")
    return text


def words_of(error: Exception) -> str:
    """The engine's own words, on one line and without the parts that tell nothing."""
    if isinstance(error, APIError) and error.explanation:
        text = str(error.explanation)
    else:
        text = str(error) or type(error).__name__
    if system := _SYSTEM_ERROR.search(text):
        return system[1]  # the rest is the library's own stack of errors
    text = re.sub(r"OCI runtime create failed: (?:.*?: )?(?=error running|nvidia|exec)", "", text)
    return " ".join(text.split()).rstrip(".")[:400]


def lacks_shell(text: str) -> bool:
    """Whether a start failed because the image has no ``sh``."""
    return '"sh"' in text and "not found" in text


def no_answer(name: str, error: Exception) -> Finding:
    """The finding of a check whose question the engine did not answer."""
    text = f"The Docker Engine did not answer: {words_of(error)}."
    return Finding(name, Status.FAIL, text, "Try again; see: journalctl -u docker")
