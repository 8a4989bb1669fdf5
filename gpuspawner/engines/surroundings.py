"""What servers will find around them: a way to the Hub, and a place for their files.

Each question is answered from inside a container that ends at once.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress

import docker
import requests
from docker.errors import DockerException, NotFound

from .probe import (
    LABEL_CHECK,
    Finding,
    Status,
    lacks_shell,
    output_of,
    remove_leftovers,
    scratch_config,
    scratch_container,
    words_of,
)


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
    config = scratch_config(
        image, _FETCH, environment, {"NetworkMode": network, "ExtraHosts": hosts}
    )
    try:
        with scratch_container(client, config) as container:
            client.start(container)
            answer = output_of(client, container)
    except (DockerException, requests.RequestException) as error:
        return _unreached(client, network, url, words_of(error))
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
        text = f"The engine cannot create a volume with the driver {driver!r}: {words_of(error)}."
        remedy = "Make room on the engine's disk, or set another volume driver."
        return Finding("workspace", Status.FAIL, text, remedy)
    return Finding("workspace", Status.OK, f"Volumes can be created (driver {driver})")


def check_directory(client: docker.APIClient, image: str, directory: str) -> Finding:
    """Whether a member's workspace could be made below a directory of the engine's machine.

    A container makes a folder there as root, gives it away as a start does, and removes it.
    """
    name = "workspace"
    trial = f".gpuspawner-check-{secrets.token_hex(6)}"
    script = f"cd /root-of-workspaces && mkdir {trial} && chown 1000 {trial}; e=$?; rmdir {trial}"
    mount = {"Type": "bind", "Source": directory, "Target": "/root-of-workspaces"}
    config = scratch_config(
        image, f"{script} && [ $e = 0 ] && echo writable", {}, {"NetworkMode": "none"}
    )
    config["HostConfig"]["Mounts"] = [mount]  # unlike Binds, it never makes the directory
    config["User"] = "0"
    try:
        with scratch_container(client, config) as container:
            client.start(container)
            answer = output_of(client, container).strip()
    except (DockerException, requests.RequestException) as error:
        if lacks_shell(str(error)):
            return Finding(name, Status.UNCHECKED, f"The image {image} has no shell to try with.")
        text = f"The directory {directory} cannot be mounted: {words_of(error)}."
        remedy = f"Make it on the engine's machine: sudo mkdir -p {directory}"
        return Finding(name, Status.FAIL, text, remedy)
    if answer.endswith("writable"):
        return Finding(name, Status.OK, f"{directory} takes members' directories")
    said = answer.splitlines()[0][:200] if answer else "no answer"
    text = f"Members' directories cannot be made in {directory}: {said}."
    remedy = "It has to be writable for root on the engine's machine: no read-only mount, and no "
    remedy += "root_squash on NFS."
    return Finding(name, Status.FAIL, text, remedy)


def check_sees(
    client: docker.APIClient, image: str, directory: str, file: str, content: str
) -> str:
    """Why a container does not read ``content`` in a file of a directory of the engine's machine;
    empty when it does."""
    mount = {"Type": "bind", "Source": directory, "Target": "/there", "ReadOnly": True}
    script = 'cat "/there/$FILE" 2>&1'
    config = scratch_config(image, script, {"FILE": file}, {"NetworkMode": "none"})
    config["HostConfig"]["Mounts"] = [mount]
    config["User"] = "0"
    try:
        with scratch_container(client, config) as container:
            client.start(container)
            answer = output_of(client, container).strip()
    except (DockerException, requests.RequestException) as error:
        return words_of(error)
    if answer == content:
        return ""
    return answer.splitlines()[0][:200].rstrip(".") if answer else "no answer"
