"""Checks of a Docker Engine and its surroundings, in short-lived containers.

A check removes its container, whatever happens; the next check removes what a killed one left.
What is said about GPUs was seen in a real container; the spawner's self-test uses the same check.
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
"""Label of a check's containers and volumes: when it was created, in seconds of Unix time."""

PATIENCE = 30
"""Seconds after which a check's container has failed."""

LEFTOVER_AFTER = 600
"""Seconds after which a check's container belongs to a check that was killed."""

_SYSTEM_ERROR = re.compile(r"\b\w*Error\(\d+, ['\"]([^'\"]+)['\"]\)")


class Status(str, Enum):
    """The result of a check. What was not checked never counts as good."""

    OK = "ok"
    FAIL = "fail"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One finding of a check."""

    name: str
    status: Status
    text: str
    remedy: str = ""
    """What to do, if anything."""


def remove_leftovers(client: docker.APIClient) -> None:
    """Remove what killed checks left. Errors are ignored: the check itself reports them."""
    with suppress(DockerException, requests.RequestException):
        for listed in client.containers(all=True, filters={"label": LABEL_CHECK}):
            made = str((listed.get("Labels") or {}).get(LABEL_CHECK, ""))
            if made.isdigit() and time.time() - int(made) > LEFTOVER_AFTER:
                with suppress(APIError):
                    client.remove_container(listed["Id"], force=True, v=True)


def scratch_config(
    image: str, script: str, environment: Mapping[str, str], host: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the Engine API's configuration of a script's container; ``host`` is HostConfig."""
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
    """Create a container that exists inside the block only, even if that is interrupted."""
    name = f"gpuspawner-check-{secrets.token_hex(6)}"
    answered = False
    try:
        try:
            client.create_container_from_config(dict(config), name)
        except APIError:
            answered = True
            raise
        answered = True
        yield name
    finally:
        # If interrupted before the engine answered, the container may appear a moment later.
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
            if error.status_code == 409:  # it is being removed
                return
            raise
        time.sleep(0.1)


def output_of(client: docker.APIClient, container: str) -> str:
    """Return what the container printed after it ended."""
    try:
        client.wait(container, timeout=PATIENCE)
    except requests.RequestException:
        return f"It did not end within {PATIENCE} seconds."
    text: str = client.logs(container).decode(errors="replace")
    return text


def run_script(client: docker.APIClient, config: Mapping[str, Any]) -> str:
    """Return what a container of this configuration printed; it exists only meanwhile."""
    with scratch_container(client, config) as container:
        client.start(container)
        return output_of(client, container)


def words_of(error: Exception) -> str:
    """Return the engine's message on one line, without meaningless parts."""
    if isinstance(error, APIError) and error.explanation:
        text = str(error.explanation)
    else:
        text = str(error) or type(error).__name__
    if system := _SYSTEM_ERROR.search(text):
        return system[1]  # the rest is the library's own stack of errors
    text = re.sub(r"OCI runtime create failed: (?:.*?: )?(?=error running|nvidia|exec)", "", text)
    return " ".join(text.split()).rstrip(".")[:400]


def lacks_shell(text: str) -> bool:
    """Return True if a start failed because the image has no ``sh``."""
    return '"sh"' in text and "not found" in text


def no_answer(name: str, error: Exception) -> CheckFinding:
    """Return the finding of a check that the engine did not respond."""
    text = f"The Docker Engine did not respond: {words_of(error)}."
    return CheckFinding(name, Status.FAIL, text, "Try again; see: journalctl -u docker")


def nothing_injected(name: str) -> CheckFinding:
    """Return the finding of a check of GPUs for ``gpu_injection = "none"``."""
    text = "No GPUs are injected (gpu_injection is 'none')."
    return CheckFinding(name, Status.UNCHECKED, text)


def check_hub_reachable(
    client: docker.APIClient,
    image: str,
    network: str,
    url: str,
    extra_hosts: Mapping[str, str] | None = None,
) -> CheckFinding:
    """Check that a container on the servers' network reaches the Hub's API at ``url``."""
    name = "hub API"
    remove_leftovers(client)
    found = re.fullmatch(r"https?://(\[[^]]+\]|[^:/]+):(\d+)(/.*)", url)
    if not found:
        text = f"{url} is not a URL that a container could open."
        return CheckFinding(name, Status.UNCHECKED, text)
    host, port, path = found.groups()
    environment = {"URL": url, "HOST": host.strip("[]"), "PORT": port, "PATH_": path}
    hosts = [f"{alias}:{address}" for alias, address in (extra_hosts or {}).items()]
    host_config = {"NetworkMode": network, "ExtraHosts": hosts}
    config = scratch_config(image, _FETCH, environment, host_config)
    try:
        answer = run_script(client, config)
    except (DockerException, requests.RequestException) as error:
        return _unreached(client, network, url, words_of(error))
    if '"version"' in answer:
        return CheckFinding(name, Status.OK, f"A container on the network {network} reaches {url}")
    if _NO_TOOL in answer:
        text = f"The image {image} has neither python3 nor curl nor bash to ask {url} with."
        return CheckFinding(name, Status.UNCHECKED, text)
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


def _unreached(client: docker.APIClient, network: str, url: str, why: str) -> CheckFinding:
    text = f"A container on the network {network} does not reach the Hub's API at {url}: {why}."
    if "network" in why.lower() and "not found" in why.lower():
        return CheckFinding("hub API", Status.FAIL, text, f"docker network create {network}")
    gateway = network_gateway(client, network)
    such_as = f", such as {gateway}, this network's gateway" if gateway else ""
    remedy = (
        f"Set c.JupyterHub.hub_ip to an address that containers reach{such_as}, and let the "
        "firewall of this machine pass that port."
    )
    return CheckFinding("hub API", Status.FAIL, text, remedy)


def network_gateway(client: docker.APIClient, network: str) -> str:
    """Return the engine's machine as containers of this network see it; empty if unknown."""
    try:
        pools = client.inspect_network(network)["IPAM"].get("Config") or []
    except (DockerException, requests.RequestException, KeyError):
        return ""
    return next((str(pool["Gateway"]) for pool in pools if pool.get("Gateway")), "")


def check_volume(client: docker.APIClient) -> CheckFinding:
    """Check that a member's workspace volume can be created; the trial volume is removed."""
    name = f"gpuspawner-check-{secrets.token_hex(6)}"
    label = {LABEL_CHECK: str(int(time.time()))}
    try:
        try:
            client.create_volume(name, driver="local", labels=label)
        finally:
            with suppress(NotFound):
                client.remove_volume(name, force=True)
    except (DockerException, requests.RequestException) as error:
        text = f"The engine cannot create a volume with the driver 'local': {words_of(error)}."
        remedy = "Make room on the engine's disk, or set another volume driver."
        return CheckFinding("workspace", Status.FAIL, text, remedy)
    return CheckFinding("workspace", Status.OK, "Volumes can be created (driver local)")


def check_directory(client: docker.APIClient, image: str, directory: str) -> CheckFinding:
    """Check that a member's workspace can be created below a directory of the engine's machine.

    A container creates a folder there as root, changes its owner as a start does, and removes it.
    """
    name = "workspace"
    trial = f".gpuspawner-check-{secrets.token_hex(6)}"
    script = f"cd /root-of-workspaces && mkdir {trial} && chown 1000 {trial}; e=$?; rmdir {trial}"
    mount = {"Type": "bind", "Source": directory, "Target": "/root-of-workspaces"}
    # Unlike Binds, Mounts never creates the directory.
    host = {"NetworkMode": "none", "Mounts": [mount]}
    config = scratch_config(image, f"{script} && [ $e = 0 ] && echo writable", {}, host)
    config["User"] = "0"
    try:
        answer = run_script(client, config).strip()
    except (DockerException, requests.RequestException) as error:
        if lacks_shell(str(error)):
            text = f"The image {image} has no shell to try with."
            return CheckFinding(name, Status.UNCHECKED, text)
        text = f"The directory {directory} cannot be mounted: {words_of(error)}."
        remedy = f"Make it on the engine's machine: sudo mkdir -p {directory}"
        return CheckFinding(name, Status.FAIL, text, remedy)
    if answer.endswith("writable"):
        return CheckFinding(name, Status.OK, f"{directory} takes members' directories")
    said = answer.splitlines()[0][:200] if answer else "no answer"
    text = f"Members' directories cannot be made in {directory}: {said}."
    remedy = "It has to be writable for root on the engine's machine: no read-only mount, and no "
    remedy += "root_squash on NFS."
    return CheckFinding(name, Status.FAIL, text, remedy)


def check_sees(
    client: docker.APIClient, image: str, directory: str, file: str, content: str
) -> str:
    """Return why a container does not read ``content`` in a file of the engine's machine, or ""."""
    mount = {"Type": "bind", "Source": directory, "Target": "/there", "ReadOnly": True}
    host = {"NetworkMode": "none", "Mounts": [mount]}
    config = scratch_config(image, 'cat "/there/$FILE" 2>&1', {"FILE": file}, host)
    config["User"] = "0"
    try:
        answer = run_script(client, config).strip()
    except (DockerException, requests.RequestException) as error:
        return words_of(error)
    if answer == content:
        return ""
    return answer.splitlines()[0][:200].rstrip(".") if answer else "no answer"


Connect = Callable[[], docker.APIClient]


def check_engine(connect: Connect, where: str) -> tuple[CheckFinding, docker.APIClient | None]:
    """Check that the engine answers, and return a client for the checks that follow."""
    name = "engine"
    try:
        client = connect()
        version = client.version()
    except (DockerException, requests.RequestException, OSError, ValueError, TypeError) as error:
        text = f"The Docker Engine at {where} is not responding: {words_of(error)}."
        return CheckFinding(name, Status.FAIL, text, _no_engine_remedy(str(error))), None
    text = f"Docker Engine {version['Version']} (API {version['ApiVersion']}) at {where}"
    return CheckFinding(name, Status.OK, text), client


def check_image(client: docker.APIClient, image: str, name: str = "image") -> CheckFinding:
    """Check that the engine has the image, so that nobody's first start waits for a pull."""
    try:
        found = client.inspect_image(image)
    except ImageNotFound:
        text = f"The image {image} is not on this engine: the first start would wait for a pull."
        return CheckFinding(name, Status.FAIL, text, f"docker pull {image}")
    except (DockerException, requests.RequestException) as error:
        return no_answer(name, error)
    return CheckFinding(name, Status.OK, f"{image} ({found['Size'] / 1e9:.1f} GB)")


def prove_injection(client: docker.APIClient, image: str, mode: str, uuid: str) -> CheckFinding:
    """Check that ``mode`` gives a container exactly the device ``uuid``, and none without it.

    Two short containers of ``image`` run at once and report what they see.
    """
    name = "GPU injection"
    if mode == "none":
        return nothing_injected(name)
    remove_leftovers(client)
    with_device, without = _look_config(image, mode, [uuid]), _look_config(image, mode, [])
    try:
        with (
            scratch_container(client, with_device) as one,
            scratch_container(client, without) as other,
        ):
            client.start(one)
            client.start(other)
            seen = _SeenDevices.of(output_of(client, one))
            seen_without = _SeenDevices.of(output_of(client, other))
    except ImageNotFound:
        return check_image(client, image, name)
    except (DockerException, requests.RequestException) as error:
        if lacks_shell(str(error)):
            text = f"The image {image} has no shell, so nothing could be checked."
            return CheckFinding(name, Status.UNCHECKED, text, "Name an image with sh.")
        why = words_of(error)
        text = f"A container with {uuid} by {mode} does not start: {why}."
        return CheckFinding(name, Status.FAIL, text, _injection_remedy(why))
    if wrong := _judge(seen, uuid) or _judge_without(seen_without):
        return CheckFinding(name, Status.FAIL, f"By {mode}: {wrong}.", _injection_remedy(wrong))
    proof = "and NVML names it" if seen.uuids else "by its device node; no nvidia-smi to name it"
    text = f"By {mode}: a container sees exactly {uuid} ({proof}); one without GPUs sees none"
    return CheckFinding(name, Status.OK, text)


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
class _SeenDevices:
    """What a container reported."""

    nodes: tuple[str, ...]
    uuids: tuple[str, ...]
    visible: str
    complete: bool

    @classmethod
    def of(cls, text: str) -> _SeenDevices:
        lines = [line.partition(" ") for line in text.splitlines()]
        return cls(
            nodes=tuple(rest for word, _, rest in lines if word == "node"),
            uuids=tuple(u for word, _, rest in lines if word == "smi" for u in _UUID.findall(rest)),
            visible=next((rest.strip() for word, _, rest in lines if word == "visible"), ""),
            complete=any(word == "done" for word, _, _ in lines),
        )


def _judge(seen: _SeenDevices, uuid: str) -> str:
    """Return what is wrong with a container that was given one device, or ""."""
    # A MIG instance is listed below its GPU.
    instance = uuid.startswith("MIG-")
    named = {u for u in seen.uuids if u.startswith("MIG-") or not instance}
    if not seen.complete:
        return "the container ended before it had reported"
    if seen.uuids and named != {uuid}:
        return f"a container that was given {uuid} sees {', '.join(sorted(named)) or 'no device'}"
    if len(seen.nodes) > 1 or not (seen.nodes or named):
        return (
            f"a container that was given {uuid} has {len(seen.nodes)} device nodes "
            f"({' '.join(seen.nodes) or 'none'}) instead of one"
        )
    if seen.visible not in ("", "void", "none", uuid):
        return f"NVIDIA_VISIBLE_DEVICES is {seen.visible!r} inside, not {uuid}"
    return ""


def _judge_without(seen: _SeenDevices) -> str:
    """Return what is wrong with a container that was given no device, or ""."""
    if not seen.complete:
        return "the container without GPUs ended before it had reported"
    if seen.nodes or seen.uuids:
        return f"a container without GPUs sees {', '.join(seen.uuids or seen.nodes)}"
    return ""


def _look_config(image: str, mode: str, uuids: Sequence[str]) -> dict[str, Any]:
    environment = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility", **gpu_environment(uuids)}
    host = {"NetworkMode": "none", **gpu_host_config(mode, uuids)}
    return scratch_config(image, _LOOK, environment, host)


def _injection_remedy(why: str) -> str:
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
            "That user is then as powerful as root."
        )
    return (
        "Install Docker if it is not there, start it (sudo systemctl start docker), or say where "
        "it is with DOCKER_HOST or c.DockerSpawner.client_kwargs."
    )
