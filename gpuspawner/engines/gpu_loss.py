"""Checks that running containers still reach their GPUs.

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

import time
from collections.abc import Iterable, Sequence
from typing import Any

import docker
from docker.errors import APIError, NotFound

from ..leases.models import Lease
from .docker import DockerEngine
from .injection import CDI_KIND
from .preflight import CheckFinding, Status, nothing_injected

AT_ONCE = 8
"""How many containers are checked at the same time."""
PATIENCE = 10.0
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

    def __init__(self, engine: DockerEngine, patience: float = PATIENCE) -> None:
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
        """Start a check. Return its id, or "" if the container cannot be checked now."""
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
