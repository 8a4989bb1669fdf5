"""Probes of devices: does one work, and do running containers still reach theirs?

The probe of a device runs in a container that gets it like a server, or as a process of this host
where servers are processes.

NVIDIA's hook gives a container its devices without the engine's knowledge. Whatever rewrites the
rules of the container's cgroup later (systemd at a ``daemon-reload``, ``docker update``) does not
know them: the nodes in ``/dev`` stay, opening them fails with "Operation not permitted", and NVML
reports "Unknown Error" inside until the container is replaced.

Only a process inside is subject to that rule, so one is started there: a shell that opens each node
and exits. The result is its exit status, so nothing that a container could print is read. It runs
as the container's own user. If it hangs, in a driver or because of its member, it is left alone,
and no second one starts before it is gone.
"""

from __future__ import annotations

import importlib.resources
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from ..core.errors import EngineUnavailable
from ..leases.models import Lease
from .docker import DockerEngine
from .images import local_images
from .injection import CDI_KIND, candidates, gpu_environment, gpu_host_config
from .preflight import (
    CheckFinding,
    Status,
    lacks_shell,
    nothing_injected,
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


# Containers that lose their devices.

AT_ONCE = 8
"""How many containers are checked at the same time."""
LOOK_SECONDS = 10.0
"""Seconds after which an unanswered check is no longer waited for."""

MOST_KNOWN = 10_000
"""For how many leases the injection mode is remembered."""

FINE, LOST = 0, 77
"""Exit statuses; any other one means unknown."""

_LOOK = f"""
export LC_ALL=C
for node in /dev/nvidia[0-9]* /dev/nvidiactl; do
    [ -c "$node" ] || continue
    said=$( (: < "$node") 2>&1 ) && continue
    case $said in *"not permitted"*) exit {LOST} ;; esac
done
exit {FINE}
"""
# Without a driver, as in our tests, a node that may be opened reports "No such device": that is
# fine.


class LostDevices:
    """Checks containers. Blocks, for a bounded time: use a thread."""

    def __init__(self, engine: DockerEngine, patience: float = LOOK_SECONDS) -> None:
        self._engine = engine
        self._patience = patience
        self._hanging: dict[str, str] = {}
        """The check that has not ended, by lease id."""
        self._cdi: dict[str, bool] = {}
        """True if the devices of a lease came by CDI: its container keeps them."""

    def look(self, leases: Iterable[Lease]) -> dict[str, bool]:
        """Return True for each container that lost its devices, by lease id.

        Containers without an answer are left out, and so are those that got devices by CDI, which
        the engine itself knows. Raises EngineUnavailable.
        """
        leases = list(leases)
        open_ids = {lease.id for lease in leases}
        self._hanging = {k: v for k, v in self._hanging.items() if k in open_ids}
        leases = [lease for lease in leases if not self._is_by_cdi(lease)]
        found: dict[str, bool] = {}
        for first in range(0, len(leases), AT_ONCE):
            found |= self._look_into(leases[first : first + AT_ONCE])
        return found

    def surely(self, leases: Iterable[Lease]) -> dict[str, bool]:
        """Check like :meth:`look`, and check losses twice.

        Rules that are being rewritten are stricter for a moment. Raises EngineUnavailable.
        """
        leases = list(leases)
        found = self.look(leases)
        if doubted := [lease for lease in leases if found.get(lease.id)]:
            time.sleep(1.0)
            again = self.look(doubted)
            for lease in doubted:
                if not again.get(lease.id):
                    del found[lease.id]
        return found

    def _look_into(self, leases: Sequence[Lease]) -> dict[str, bool]:
        looks = {lease.id: look for lease in leases if (look := self._begin(lease))}
        found: dict[str, bool] = {}
        deadline, pause = time.monotonic() + self._patience, 0.05
        while looks and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(1.0, 2 * pause)
            for lease_id, look in list(looks.items()):
                code = self._exit_of(look)
                if code is None:
                    continue
                del looks[lease_id]
                if code in (FINE, LOST):
                    found[lease_id] = code == LOST
        self._hanging |= looks
        return found

    def _is_by_cdi(self, lease: Lease) -> bool:
        if lease.id not in self._cdi:
            container = self._engine.inspect(lease.engine_ref)
            if container is None:
                return False
            if len(self._cdi) > MOST_KNOWN:
                self._cdi.clear()
            self._cdi[lease.id] = injected_by(container) == "CDI"
        return self._cdi[lease.id]

    def _begin(self, lease: Lease) -> str:
        """Start a check; returns its id, or "" if there can be none."""
        if before := self._hanging.get(lease.id):
            if self._exit_of(before) is None:
                return ""
            del self._hanging[lease.id]

        def start(client: docker.APIClient) -> str:
            command = ["/bin/sh", "-c", _LOOK]
            try:
                made = client.exec_create(lease.engine_ref, command, stdout=False, stderr=False)
                client.exec_start(made["Id"], detach=True)
            except APIError:  # it is gone or paused, or has no shell
                return ""
            return str(made["Id"])

        return self._engine.call(start)

    def _exit_of(self, look: str) -> int | None:
        """Return a check's exit status, -1 if it is no longer known; None while it runs."""

        def inspect(client: docker.APIClient) -> int | None:
            told = client.exec_inspect(look)
            return None if told["Running"] or told["ExitCode"] is None else int(told["ExitCode"])

        try:
            return self._engine.call(inspect)
        except NotFound:
            return -1


# The cause, and what to do about it.

REMEDY = (
    "Use CDI, which the engine knows of (Engine 25 or later): sudo nvidia-ctk cdi generate "
    '--output=/etc/cdi/nvidia.yaml, and c.GPUDockerSpawner.gpu_injection = "cdi". Or keep '
    'systemd out of cgroups: "exec-opts": ["native.cgroupdriver=cgroupfs"] in Docker\'s '
    "/etc/docker/daemon.json, and restart Docker."
)


def cause_and_remedy(engine: DockerEngine, ref: str) -> str:
    """Explain to admins how a container lost its devices. Raises EngineUnavailable."""
    container = engine.inspect(ref) or {}
    info: dict[str, Any] = engine.call(lambda client: client.info())
    return (
        f"They came by {injected_by(container)}; {cgroups_of(info)}. A systemctl daemon-reload "
        "or a docker update can take from running containers what NVIDIA's hook gave them. The "
        f"member can restart the server with the same GPUs. {REMEDY}"
    )


def injected_by(container: dict[str, Any]) -> str:
    """Describe how an inspected container got its devices."""
    host = container.get("HostConfig") or {}
    for request in host.get("DeviceRequests") or []:
        names = [str(name) for name in request.get("DeviceIDs") or []]
        if request.get("Driver") == "cdi" or any(name.startswith(CDI_KIND) for name in names):
            return "CDI"
        return "NVIDIA's hook"
    return "NVIDIA's runtime" if host.get("Runtime") == "nvidia" else "another way"


def cgroups_of(info: dict[str, Any]) -> str:
    """Describe who manages the cgroups of containers, from the engine's ``/info``."""
    driver, version = info.get("CgroupDriver") or "unknown", info.get("CgroupVersion") or "1"
    return f"the engine's cgroup driver is {driver} (cgroup version {version})"


def check_cgroups(info: dict[str, Any], mode: str) -> CheckFinding:
    """Check if running containers keep the devices that they get by ``mode``."""
    name = "GPUs stay"
    if mode == "none":
        return nothing_injected(name)
    if mode == "cdi":
        text = "The engine knows the devices that CDI gives a container"
        return CheckFinding(name, Status.OK, text)
    if info.get("CgroupDriver") != "systemd":
        text = f"systemd does not write over them: {cgroups_of(info)}"
        return CheckFinding(name, Status.OK, text)
    text = (
        "The next systemctl daemon-reload takes the GPUs from all running containers (“Failed to "
        f"initialize NVML: Unknown Error”): they come by {mode}, and {cgroups_of(info)}."
    )
    if mode == "runtime":  # newer runtimes of NVIDIA write CDI into the container's configuration
        text = f"It depends on NVIDIA's runtime. In its legacy mode: {text[0].lower()}{text[1:]}"
        return CheckFinding(name, Status.UNCHECKED, text, REMEDY)
    return CheckFinding(name, Status.FAIL, text, REMEDY)
