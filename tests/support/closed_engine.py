"""A Docker Engine that keeps the rules of a firewall, in a network of its own.

The private engine of the other tests touches no firewall of this machine, so that what needs one
is not kept there. This one has a network namespace, and in it a firewall, to itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import images, processes
from tests.support.engine import PrivateEngine
from tests.support.processes import as_root, system_path, wait_for

IMAGE = "gpuspawner/closed:test"

CONNECT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3):
    pass
"""


class ClosedEngine(PrivateEngine):
    """As its parent, with iptables, in a network namespace of its own."""

    @property
    def data(self) -> Path:
        return self.directory / "closed"

    def start(self) -> None:
        """Also an image that answers on port 8888, and nothing else in it."""
        super().start()
        self.machine("ip", "link", "set", "lo", "up")
        program = images._compile((images.HERE / "instant" / "instant.c").read_bytes())
        self.client.import_image_from_data(
            images._tar({"instant": program}).getvalue(),
            repository=IMAGE.split(":")[0],
            tag=IMAGE.split(":")[1],
            changes=['CMD ["/instant"]'],
        )

    def stop(self) -> None:
        super().stop()
        processes.run(as_root(["rm", "-rf", str(self.data)]))

    def within(self, pid: int, command: list[str]) -> int:
        """Run a command in the network of a process; its exit code."""
        entered = as_root(["nsenter", "-t", str(pid), "-n", "env", f"PATH={system_path()}"])
        return subprocess.run([*entered, *command], capture_output=True, timeout=60).returncode

    def machine(self, *command: str) -> None:
        """Run a command in the network where this engine is "the machine"."""
        code = self.within(self._daemon_pid(), list(command))
        assert code == 0, f"{' '.join(command)} ended with {code}"

    def listen(self, address: str, port: int) -> None:
        """A program of the machine that listens; it ends with the engine's network."""
        entered = as_root(["nsenter", "-t", str(self._daemon_pid()), "-n"])
        server = [sys.executable, "-m", "http.server", "--bind", address, str(port)]
        self._listening.append(
            subprocess.Popen(
                processes.die_with_us([*entered, *server]),
                cwd=self.directory / "exec",
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        here = self._daemon_pid()
        wait_for(lambda: self.connects(here, address, port), f"port {port} to answer")

    def server(self, network: str) -> tuple[int, str]:
        """A container on a network that answers on port 8888: its process, its address."""
        host = self.client.create_host_config(network_mode=network)
        made = self.client.create_container(IMAGE, host_config=host)
        self.client.start(made["Id"])
        seen: dict[str, Any] = self.client.inspect_container(made["Id"])
        address = str(seen["NetworkSettings"]["Networks"][network]["IPAddress"])
        here = self._daemon_pid()
        wait_for(lambda: self.connects(here, address, 8888), "the container to answer")
        return int(seen["State"]["Pid"]), address

    def connects(self, pid: int, address: str, port: int) -> bool:
        """Whether a program in the network of this process opens a connection."""
        return self.within(pid, [sys.executable, "-c", CONNECT, address, str(port)]) == 0

    # Below here: how.

    def __init__(self) -> None:
        super().__init__()
        self._listening: list[subprocess.Popen[bytes]] = []

    def _make_bridge(self) -> None:
        """It makes its own."""

    def _daemon_pid(self) -> int:
        pid = self._pid()
        assert pid, "the engine does not run"
        return pid

    def _end_daemon(self) -> None:
        for each in self._listening:
            processes.end_process(each.pid)
            each.wait()
        self._listening.clear()
        super()._end_daemon()

    def _dockerd(self) -> list[str]:
        usual = super()._dockerd()
        bridge = usual.index("--bridge")
        left = usual[:bridge] + usual[bridge + 2 :]
        kept = [word for word in left if word not in ("--iptables=false", "--ip-masq=false")]
        kept.remove("--ip-forward=false")
        return ["unshare", "--net", "--", *kept]
