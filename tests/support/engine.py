"""A private Docker Engine with a stand-in for NVIDIA's hook, so that device requests are real.

The images that tests build stay in the cache between runs. Everything else (containers,
volumes, networks, the daemon itself) is gone after :meth:`PrivateEngine.stop`, and whatever
a killed run left behind is cleared away by the next :meth:`PrivateEngine.start`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import docker
import docker.errors
import psutil
from docker.types import DeviceRequest

from gpuspawner.engines.base import LABEL_LEASE
from gpuspawner.engines.docker import DockerEngine
from tests.support import parts, processes
from tests.support.cdi import programs_with_cdi, write_specification
from tests.support.processes import (
    LIVE,
    PATIENCE,
    alive,
    as_root,
    end_process,
    take_slot,
    wait_for,
)

HOOKS = Path(__file__).parent / "bin"
SLOTS = 16
"""How many private engines one machine can run at once: each has a slot of its own."""
DEVICES = tuple(f"GPU-0000000{i}-5eed-4000-8000-00000000000{i}" for i in range(4))
"""The machine's devices unless a test sets others."""


def open_engine(url: str) -> DockerEngine:
    """The engine as the accounting service asks it."""
    return DockerEngine(lambda: docker.APIClient(base_url=url, version="auto", timeout=20))


class PrivateEngine:
    """``with PrivateEngine() as engine``: a dockerd of our own, reached at ``engine.url``.

    Its containers have no way out (no firewall rules are touched), reach this machine at
    ``engine.gateway``, and are reached by published ports on 127.0.0.1 or by their address.
    """

    def __init__(self, *, cdi: bool = False) -> None:
        """``cdi``: an Engine that knows CDI, with a specification of the machine's devices beside
        the hook.
        """
        self.cdi = cdi
        self.programs: Path | None = None
        self.name = "engine"
        self._lock: IO[str] | None = None
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrivateEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Where things are.

    @property
    def url(self) -> str:
        """For ``DOCKER_HOST``."""
        return f"unix://{self.directory}/docker.sock"

    @property
    def gateway(self) -> str:
        """This machine's address as the containers see it: a hub's ``hub_ip``."""
        return f"10.231.{self.slot}.1"

    @property
    def bridge(self) -> str:
        """The network interface of the default network."""
        return f"gpsp{self.slot}"

    @property
    def data(self) -> Path:
        """The data-root: images survive in it, for runs of other checkouts too."""
        version = f"-{self.programs.name}" if self.programs else ""
        return processes.kept_dir() / "docker" / f"{self.slot}{version}"

    # Starting and ending.

    def start(self) -> None:
        """Bring the daemon up with images only; also the way back after :meth:`kill9`."""
        parts.require("docker")
        if self._lock is None:
            self.programs = programs_with_cdi() if self.cdi else None
            self._take_slot()
            self._end_leftovers()
            self.set_devices(DEVICES)
            self._launch()
            self.clean()
        else:
            self._launch()
        if self not in LIVE:
            LIVE.append(self)

    def stop(self) -> None:
        """End the daemon and all of its containers; give the slot back."""
        if self in LIVE:
            LIVE.remove(self)
        if self._lock is None:
            return
        if self._running():
            self.clean()
        self._end_daemon()
        self._end_leftovers()
        self._remove_bridge()
        self._lock.close()
        self._lock = None

    def restart(self) -> None:
        """Restart the daemon, as an admin would; its containers end with it."""
        self._end_daemon()
        self._launch()

    def kill9(self) -> None:
        """Kill the daemon on the spot. Containers live on until :meth:`start`."""
        daemon = self._pid()
        if daemon:
            processes.signal_pid(daemon, signal.SIGKILL)
        if self._daemon:
            self._daemon.wait(timeout=20 * PATIENCE)
            self._daemon = None

    @contextmanager
    def hung(self) -> Iterator[None]:
        """The daemon answers nothing meanwhile; its containers go on."""
        daemon = self._pid()
        assert daemon
        processes.signal_pid(daemon, signal.SIGSTOP)
        try:
            yield
        finally:
            processes.signal_pid(daemon, signal.SIGCONT)

    def clean(self) -> None:
        """Remove every container, volume and network; images stay, but for members' own."""
        client = self.client
        self.remove_containers()
        for image in client.images("gpuspawner-kept"):
            client.remove_image(image["Id"], force=True)
        for volume in client.volumes().get("Volumes") or []:
            client.remove_volume(volume["Name"], force=True)
        for network in client.networks():
            if network["Name"] not in ("bridge", "host", "none"):
                client.remove_network(network["Id"])

    # What tests do with it.

    def lifetimes(self, since: float) -> dict[str, float]:
        """Seconds from start to death of each container that died since then (seconds since
        1970), by its lease's id: as the engine's own events have it."""
        at: dict[str, dict[str, int]] = {}
        filters = {"label": LABEL_LEASE, "event": ["start", "die"]}
        times = {"since": f"{since:.6f}", "until": f"{time.time():.6f}"}
        for event in self.client.events(**times, filters=filters, decode=True):
            lease_id = event["Actor"]["Attributes"][LABEL_LEASE]
            at.setdefault(lease_id, {})[event["Action"]] = event["timeNano"]
        both = {lease_id: it for lease_id, it in at.items() if it.keys() == {"start", "die"}}
        return {lease_id: (it["die"] - it["start"]) / 1e9 for lease_id, it in both.items()}

    def remove_containers(self) -> None:
        """Remove every container, and wait until they are gone; others may be removing some."""

        def are_gone() -> bool:
            left = self.client.containers(all=True)
            for container in left:
                try:
                    self.client.remove_container(container["Id"], force=True, v=True)
                except docker.errors.APIError as error:
                    if error.status_code not in (404, 409):  # gone meanwhile, or being removed
                        raise
            return not left

        wait_for(are_gone, "the containers to be gone")

    def set_devices(self, uuids: Iterable[str], model: str = "Simulated GPU") -> None:
        """Say which devices the machine has; ``/dev/nvidiaN`` follows the order given."""
        machine = [{"uuid": u, "minor": n, "model": model} for n, u in enumerate(uuids)]
        (self.directory / "devices.json").write_text(json.dumps(machine), encoding="utf-8")
        if self.cdi:
            write_specification(self.directory / "cdi", machine)

    def execute(self, container: str, words: Sequence[str], **options: Any) -> tuple[int, str]:
        """Run a command in a container: its exit code, and what it said."""
        made = self.client.exec_create(container, list(words), **options)
        said = self.client.exec_start(made["Id"]).decode(errors="replace").strip()
        return int(self.client.exec_inspect(made["Id"])["ExitCode"]), said

    def run(
        self,
        image: str,
        command: str | Sequence[str],
        devices: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> tuple[int, str]:
        """Run a container to its end and remove it: its exit code and what it printed.

        ``devices`` become a device request; other arguments go to ``create_host_config``.
        """
        client = self.client
        if devices:
            request = DeviceRequest(device_ids=list(devices), capabilities=[["gpu"]])
            kwargs["device_requests"] = [request]
        host = client.create_host_config(**kwargs)
        made = client.create_container(image, command, host_config=host, environment=environment)
        container = made["Id"]
        try:
            client.start(container)
            code = int(client.wait(container, timeout=120)["StatusCode"])
            return code, client.logs(container).decode(errors="replace")
        finally:
            client.remove_container(container, force=True, v=True)

    def log_text(self) -> str:
        """The containers' last lines, then the daemon's."""
        parts = []
        if self._running():
            for c in self.client.containers(all=True):
                log = self.client.logs(c["Id"], tail=40).decode(errors="replace")
                parts.append(f"--- container {c['Names'][0]} ({c['Status']})\n{log}")
        daemon = (self.directory / "dockerd.log").read_text(errors="replace").splitlines()
        return "\n".join([*parts, "--- dockerd", *daemon[-40:]])

    # Below here: how.

    def _take_slot(self) -> None:
        self.slot, self.directory, self._lock = take_slot("gpuspawner-engine", SLOTS)
        self.name = f"engine {self.slot}"

    def _launch(self) -> None:
        self._make_bridge()
        self.data.mkdir(parents=True, exist_ok=True)
        # Pidfiles of a killed daemon: their numbers may be a zombie's, or someone else's by now.
        stale = [self.directory / "docker.pid", self.directory / "exec/containerd/containerd.pid"]
        processes.run(as_root(["rm", "-f", *map(str, stale)]))
        folders = {"features": {"cdi": True}, "cdi-spec-dirs": [str(self.directory / "cdi")]}
        settings = json.dumps(folders if self.cdi else {})
        (self.directory / "daemon.json").write_text(settings, encoding="utf-8")
        environment = [
            f"PATH={processes.system_path(*([self.programs] if self.programs else []), HOOKS)}",
            f"GPUSPAWNER_TEST_DEVICES={self.directory}/devices.json",
        ]
        command = ["env", *environment, *self._dockerd()]
        with open(self.directory / "dockerd.log", "ab") as log:
            self._daemon = subprocess.Popen(
                processes.die_with_us(as_root(self._around(command))),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C ends it through stop(), not by itself
            )
        wait_for(self._answers, "dockerd to answer", timeout=60)

    def _around(self, command: list[str]) -> list[str]:
        """The command as this engine's machine would run it: here it is this machine."""
        return command

    def _dockerd(self) -> list[str]:
        words = {
            "--config-file": self.directory / "daemon.json",
            "--host": self.url,
            "--group": os.getegid(),
            "--data-root": self.data,
            "--exec-root": self.directory / "exec",
            "--pidfile": self.directory / "docker.pid",
            # Only used where the system's own containerd is running: not to meet its containers.
            "--containerd-namespace": f"gpuspawner-{self.slot}",
            "--containerd-plugins-namespace": f"gpuspawner-{self.slot}-plugins",
            "--bridge": self.bridge,
            "--default-address-pool": f"base=10.231.{128 + 8 * self.slot}.0/21,size=26",
            "--add-runtime": f"nvidia={HOOKS / 'nvidia-container-runtime'}",
            # By systemd, containers could lose what the hook gave them in the middle of a test.
            "--exec-opt": "native.cgroupdriver=cgroupfs",
        }
        # The firewall and routing of this machine stay as they are.
        switches = ["--iptables=false", "--ip-masq=false", "--ip-forward=false"]
        return ["dockerd", *switches, *(str(w) for pair in words.items() for w in pair)]

    def _make_bridge(self) -> None:
        if Path("/sys/class/net", self.bridge).exists():
            return
        processes.run(as_root(["ip", "link", "add", self.bridge, "type", "bridge"]))
        processes.run(as_root(["ip", "addr", "add", f"{self.gateway}/24", "dev", self.bridge]))
        processes.run(as_root(["ip", "link", "set", self.bridge, "up"]))

    def _remove_bridge(self) -> None:
        subprocess.run(as_root(["ip", "link", "del", self.bridge]), check=False)

    def _answers(self) -> bool:
        if self._daemon is not None and self._daemon.poll() is not None:
            log = (self.directory / "dockerd.log").read_text(errors="replace")
            raise RuntimeError(f"dockerd ended with {self._daemon.returncode}:\n{log[-3000:]}")
        try:
            self.client = docker.APIClient(base_url=self.url, version="auto", timeout=60 * PATIENCE)
        except docker.errors.DockerException:
            return False
        return True

    def _pid(self) -> int | None:
        """The daemon's process, by its pidfile, when that really is ours."""
        try:
            pid = int((self.directory / "docker.pid").read_text())
            ours = str(self.directory) in " ".join(psutil.Process(pid).cmdline())
        except (OSError, ValueError, psutil.NoSuchProcess):
            return None
        return pid if ours else None

    def _running(self) -> bool:
        return self._daemon is not None and self._daemon.poll() is None

    def _end_daemon(self) -> None:
        if pid := self._pid():
            end_process(pid, timeout=40)
        if self._daemon:
            self._daemon.wait(timeout=40 * PATIENCE)
            self._daemon = None

    def _end_leftovers(self) -> None:
        """End what a killed daemon of this slot left: itself, containers, mounts, sockets."""
        if pid := self._pid():
            end_process(pid, timeout=40)
        ours = [p.pid for p in psutil.process_iter(["cmdline"]) if self._is_ours(p)]
        for pid in list(processes.with_descendants(ours)):
            if alive(pid):
                processes.signal_pid(pid, signal.SIGKILL)
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
        for point in sorted((m.split()[1] for m in mounts), reverse=True):
            if f"{point}/".startswith((f"{self.directory}/", f"{self.data}/")):
                subprocess.run(as_root(["umount", "-l", point]), check=False)
        leftovers = [str(self.directory / n) for n in ("exec", "docker.sock", "docker.pid")]
        processes.run(as_root(["rm", "-rf", *leftovers]))
        (self.directory / "dockerd.log").write_bytes(b"")

    def _is_ours(self, process: psutil.Process) -> bool:
        words = process.info["cmdline"] or []
        return bool(words) and any(f"{self.directory}/exec" in w for w in words)
