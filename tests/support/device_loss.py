"""A running container loses the devices that a hook gave it, as at a ``daemon-reload``."""

from __future__ import annotations

from pathlib import Path

from tests.support import processes
from tests.support.engine import PrivateEngine
from tests.support.processes import as_root


def take_devices(engine: PrivateEngine, container: str) -> None:
    """Take NVIDIA's devices out of the rules of a container's cgroup; the nodes stay in it.

    systemd does that when it writes the rules of all its units anew and knows nothing of what a
    hook added. Where tests run there is no systemd, so what it would write is written here: the
    kernel's own rules of cgroup version 1, which then refuse to open the devices. In version 2
    they are a program that the kernel runs, the stand-in's hook never gets a device into it, and
    so a container has lost them from its start: there is nothing to take away.
    """
    pid = engine.client.inspect_container(container)["State"]["Pid"]
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if "devices" not in controllers.split(","):
            continue
        folder = f"/sys/fs/cgroup/devices{path}"
        rules = Path(folder, "devices.list").read_text(encoding="utf-8").splitlines()
        for rule in rules:
            kind, numbers, _ = rule.split()
            if kind == "c" and numbers.startswith("195:"):
                deny = f"echo 'c {numbers} rwm' > {folder}/devices.deny"
                processes.run(as_root(["sh", "-c", deny]))
