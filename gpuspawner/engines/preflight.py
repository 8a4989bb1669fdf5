"""What a Docker Engine can prove about itself before any member is there.

Each check asks the engine, most of them by a real container that ends at once, and says what
it found as a :class:`Finding`. Containers are removed again, whatever happens; one that a
killed check left behind is removed by the next.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from .injection import gpu_environment, gpu_host_config

LABEL_CHECK = "gpuspawner.check"
"""On containers and volumes of a check. Its value is when it was made, in seconds of Unix time."""

PATIENCE = 30
"""Seconds after which a check's container has failed."""

LEFTOVER_AFTER = 600
"""Seconds after which a check's container belongs to a check that was killed."""

Connect = Callable[[], docker.APIClient]


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


# The engine itself.


def check_engine(connect: Connect, where: str) -> tuple[Finding, docker.APIClient | None]:
    """Whether the engine answers, and a client for the checks that follow."""
    name = "engine"
    try:
        client = connect()
        version = client.version()
    except (DockerException, requests.RequestException, OSError, ValueError, TypeError) as error:
        text = f"The Docker Engine at {where} does not answer: {_why(error)}."
        return Finding(name, Status.FAIL, text, _no_engine_remedy(str(error))), None
    text = f"Docker Engine {version['Version']} (API {version['ApiVersion']}) at {where}"
    return Finding(name, Status.OK, text), client


def check_image(client: docker.APIClient, image: str) -> Finding:
    """Whether the engine has the image, so that nobody's first start waits for a pull."""
    try:
        found = client.inspect_image(image)
    except ImageNotFound:
        text = f"The image {image} is not on this engine: the first start would wait for a pull."
        return Finding("image", Status.FAIL, text, f"docker pull {image}")
    except (DockerException, requests.RequestException) as error:
        return _no_answer("image", error)
    return Finding("image", Status.OK, f"{image} ({found['Size'] / 1e9:.1f} GB)")


def check_volume(client: docker.APIClient, driver: str = "local") -> Finding:
    """Whether a member's workspace volume could be created. The one created here goes again."""
    name = f"gpuspawner-check-{secrets.token_hex(6)}"
    label = {LABEL_CHECK: str(int(time.time()))}
    try:
        try:
            client.create_volume(name, driver=driver, labels=label)
        finally:
            with suppress(NotFound):
                client.remove_volume(name, force=True)
    except (DockerException, requests.RequestException) as error:
        text = f"The engine cannot create a volume with the driver {driver!r}: {_why(error)}."
        remedy = "Make room on the engine's disk, or set another volume driver."
        return Finding("workspace", Status.FAIL, text, remedy)
    return Finding("workspace", Status.OK, f"Volumes can be created (driver {driver})")


# GPU injection.


def prove_injection(client: docker.APIClient, image: str, mode: str, uuid: str) -> Finding:
    """Whether ``mode`` gives a container exactly the device ``uuid``, and none when none is asked.

    Two short containers of ``image`` run at once and say what they see.
    """
    name = "GPU injection"
    remove_leftovers(client)
    with_device, without = _look_config(image, mode, [uuid]), _look_config(image, mode, [])
    try:
        with _container(client, with_device) as one, _container(client, without) as other:
            client.start(one)
            client.start(other)
            seen, seen_without = _Seen.of(_output(client, one)), _Seen.of(_output(client, other))
    except (DockerException, requests.RequestException) as error:
        if _lacks_shell(str(error)):
            text = f"The image {image} has no shell to look around with."
            return Finding(name, Status.UNCHECKED, text, "Name an image with sh.")
        why = _why(error)
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
    kind = uuid.partition("-")[0]  # a MIG instance is listed below the GPU that it is part of
    named = {u for u in seen.uuids if u.startswith(kind)}
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
    return _config(image, _LOOK, environment, host)


def _injection_remedy(why: str, mode: str) -> str:
    if "unknown device" in why or "unresolvable CDI" in why:
        return (
            "Compare with nvidia-smi -L on the engine's machine. After a change of GPUs or driver: "
            "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, and restart Docker."
        )
    if "without GPUs sees" in why:
        return (
            "Take a default GPU away from every container: no 'default-runtime: nvidia' in Docker's "
            "daemon.json together with accept-nvidia-visible-devices-envvar-when-unprivileged."
        )
    return (
        "Install the NVIDIA Container Toolkit on the engine's machine, then: sudo nvidia-ctk "
        "runtime configure --runtime=docker && sudo systemctl restart docker."
    )


# The Hub, seen from where servers run.


def check_hub_reachable(
    client: docker.APIClient,
    image: str,
    network: str,
    url: str,
    extra_hosts: Mapping[str, str] | None = None,
) -> Finding:
    """Whether a container on the servers' network reaches the Hub's API at ``url``."""
    name = "hub API"
    remove_leftovers(client)
    found = re.fullmatch(r"https?://(\[[^]]+\]|[^:/]+):(\d+)(/.*)", url)
    if not found:
        return Finding(name, Status.UNCHECKED, f"{url} is no URL that a container could open.")
    host, port, path = found.groups()
    environment = {"URL": url, "HOST": host.strip("[]"), "PORT": port, "PATH_": path}
    hosts = [f"{alias}:{address}" for alias, address in (extra_hosts or {}).items()]
    config = _config(image, _FETCH, environment, {"NetworkMode": network, "ExtraHosts": hosts})
    try:
        with _container(client, config) as container:
            client.start(container)
            answer = _output(client, container)
    except (DockerException, requests.RequestException) as error:
        return _unreached(client, network, url, _why(error))
    if '"version"' in answer:
        return Finding(name, Status.OK, f"A container on the network {network} reaches {url}")
    if _NO_TOOL in answer:
        text = f"The image {image} has neither python3 nor curl nor bash to ask {url} with."
        return Finding(name, Status.UNCHECKED, text)
    said = answer.strip().splitlines()
    return _unreached(client, network, url, said[-1][:200] if said else "no answer")


_NO_TOOL = "gpuspawner: no tool"
_FETCH = f"""
if command -v python3 >/dev/null 2>&1; then
    exec python3 -c '
import os, urllib.request
plain = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
try:
    print(plain.open(os.environ["URL"], timeout=8).read(300).decode(errors="replace"))
except Exception as error:
    print(getattr(error, "reason", None) or error)
'
elif command -v curl >/dev/null 2>&1; then
    exec curl --silent --show-error --max-time 8 --noproxy "*" "$URL" 2>&1
elif command -v bash >/dev/null 2>&1; then
    exec bash -c 'exec 3<>"/dev/tcp/$HOST/$PORT" || exit 1
        printf "GET %s HTTP/1.0\\r\\nHost: %s\\r\\n\\r\\n" "$PATH_" "$HOST" >&3
        while read -r -t 8 line <&3 || [ -n "$line" ]; do echo "$line"; done' 2>&1
fi
echo "{_NO_TOOL}"
"""


def _unreached(client: docker.APIClient, network: str, url: str, why: str) -> Finding:
    text = f"A container on the network {network} does not reach the Hub's API at {url}: {why}."
    if "network" in why.lower() and "not found" in why.lower():
        return Finding("hub API", Status.FAIL, text, f"docker network create {network}")
    gateway = network_gateway(client, network)
    such_as = f", such as {gateway}, this network's gateway" if gateway else ""
    remedy = (
        f"Set c.JupyterHub.hub_ip to an address that containers reach{such_as}, and let the "
        "firewall of this machine pass that port."
    )
    return Finding("hub API", Status.FAIL, text, remedy)


def network_gateway(client: docker.APIClient, network: str) -> str:
    """The engine's machine as containers of this network see it; empty when nobody can say."""
    try:
        pools = client.inspect_network(network)["IPAM"].get("Config") or []
    except (DockerException, requests.RequestException, KeyError):
        return ""
    return next((str(pool["Gateway"]) for pool in pools if pool.get("Gateway")), "")


# Containers of a check.


def remove_leftovers(client: docker.APIClient) -> None:
    """Remove what checks left that were killed. Says nothing: the check itself will."""
    with suppress(DockerException, requests.RequestException):
        for listed in client.containers(all=True, filters={"label": LABEL_CHECK}):
            made = str((listed.get("Labels") or {}).get(LABEL_CHECK, ""))
            if made.isdigit() and time.time() - int(made) > LEFTOVER_AFTER:
                with suppress(APIError):
                    client.remove_container(listed["Id"], force=True, v=True)


def _config(
    image: str, script: str, environment: Mapping[str, str], host: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "Image": image,
        "Entrypoint": ["sh", "-c"],
        "Cmd": [script],
        "Env": [f"{name}={value}" for name, value in environment.items()],
        "Labels": {LABEL_CHECK: str(int(time.time()))},
        "HostConfig": dict(host),
    }


@contextmanager
def _container(client: docker.APIClient, config: Mapping[str, Any]) -> Iterator[str]:
    """A container that is there inside the block only, also when that is interrupted."""
    name = f"gpuspawner-check-{secrets.token_hex(6)}"
    try:
        client.create_container_from_config(dict(config), name)
        yield name
    finally:
        with suppress(NotFound):
            client.remove_container(name, force=True, v=True)


def _output(client: docker.APIClient, container: str) -> str:
    """What the container printed, once it ended."""
    try:
        client.wait(container, timeout=PATIENCE)
    except requests.RequestException:
        return f"It did not end within {PATIENCE} seconds."
    text: str = client.logs(container).decode(errors="replace")
    return text


# Words.


def _why(error: Exception) -> str:
    """The engine's own words, on one line and without the parts that tell nothing."""
    if isinstance(error, APIError) and error.explanation:
        text = str(error.explanation)
    else:
        text = str(error) or type(error).__name__
    text = re.sub(r"OCI runtime create failed: (?:.*?: )?(?=error running|nvidia|exec)", "", text)
    return " ".join(text.split()).rstrip(".")[:400]


def _lacks_shell(text: str) -> bool:
    return '"sh"' in text and "not found" in text


def _no_answer(name: str, error: Exception) -> Finding:
    text = f"The Docker Engine did not answer: {_why(error)}."
    return Finding(name, Status.FAIL, text, "Try again; see: journalctl -u docker")


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
