"""A machine as somebody has it who begins with the tutorial: Debian or Ubuntu, with systemd as its
first process, its own Docker Engine and firewall, and a way out to the packages.

It is a container of a private engine. Its network is its own; slirp4netns carries connections out,
and no rule of this machine's firewall is touched. It has this machine's kernel. It has no GPU,
but for simulated ones that :meth:`Box.add_gpus` gives it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support import cdi, images, processes
from tests.support.engine import HOOKS, PrivateEngine
from tests.support.images import HERE, Recipe
from tests.support.nvml import nvml_library
from tests.support.processes import (
    LIVE,
    REPO,
    as_root,
    die_with_us,
    kept_dir,
    system_path,
    wait_for,
)

MACHINES = {
    system: Recipe(f"gpuspawner/machine:{system}", HERE / "machine", base=base, keep=True)
    for system, base in images.SYSTEMS.items()
}
MACHINE = MACHINES["debian-12"]
DOCKER_MACHINE = Recipe(
    "gpuspawner/docker-machine:test", HERE / "docker-machine", base=MACHINE.tag, keep=True
)
PROXY = Recipe("gpuspawner/proxy:test", HERE / "proxy", arguments={"VERSION": "5.2.0"}, keep=True)
POSTGRES = Recipe("gpuspawner/postgres:test", HERE / "postgres", keep=True)

COPY = "/srv/copy"
"""The checkout in the box, as a repository that can be cloned."""
NAMESERVER = "10.0.2.3"
"""slirp4netns' own, which asks this machine's."""

CAPABILITIES = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
    NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO
    SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME
    SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG
    WAKE_ALARM BLOCK_SUSPEND AUDIT_READ
"""
"""By their numbers. A test machine may lack some, and "privileged" would ask for those too."""

PREPARE = f"""
mount --make-rshared /    # as on a machine: systemd puts a service's credentials there by it
echo nameserver {NAMESERVER} > /etc/resolv.conf
printf '[safe]\\n\\tdirectory = *\\n' > /etc/gitconfig
for folder in /sys $(awk '$2 ~ "^/sys/fs/cgroup" {{print $2}}' /proc/mounts); do
    mount -o remount,bind,rw "$folder"
done
"""


class Box:
    """``with Box(engine, folder) as box``: its commands are run by :meth:`run`."""

    name = "box"

    def __init__(self, engine: PrivateEngine, folder: Path, recipe: Recipe = MACHINE) -> None:
        """``folder`` gets the copy of the checkout that the box can clone."""
        self.engine = engine
        self.folder = folder
        self.recipe = recipe
        self._beside: list[subprocess.Popen[bytes]] = []
        self._ports: list[tuple[int, int, bool]] = []
        """Ports that lead from one network to the other, and whether from here into the box."""
        self._id = ""

    def __enter__(self) -> Box:
        prepare_images(self.engine, MACHINE, self.recipe)
        copy_checkout(self.folder)
        client = self.engine.client
        host = client.create_host_config(
            cap_drop=["ALL"],
            cap_add=_capabilities(),
            security_opt=["seccomp=unconfined", "apparmor=unconfined"],
            device_cgroup_rules=["a *:* rwm"],
            network_mode="none",
            tmpfs={"/run": "", "/run/lock": "", "/tmp": "exec"},
            binds={str(self.folder): {"bind": COPY, "mode": "ro"}},
        )
        host |= {"CgroupnsMode": "private", "MaskedPaths": [], "ReadonlyPaths": []}
        # Its engine's files cannot be layers of layers.
        made = client.create_container(
            self.recipe.tag, hostname="box", host_config=host, volumes=["/var/lib/docker"]
        )
        self._id = made["Id"]
        LIVE.append(self)
        try:
            client.start(self._id)
            self._settle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        LIVE.remove(self)
        self._disconnect()
        self.engine.client.remove_container(self._id, force=True, v=True)

    def reboot(self) -> None:
        """Shut the machine down, and start it again."""
        self._disconnect()
        self.engine.client.restart(self._id, timeout=60)
        self._settle()

    def run(self, script: str, *, typed: str = "", timeout: float = 300.0) -> str:
        """Run commands as root in the box, in the folder where the last ones ended.

        ``typed`` is what they read. Returns what they printed; a failure raises with it.
        """
        went = 'cd "$(cat /run/folder 2> /dev/null || echo /root)"; trap "pwd > /run/folder" EXIT\n'
        settings = [w for k, v in images._proxies().items() for w in ("--env", f"{k}={v}")]
        done = subprocess.run(
            [
                *("docker", "--host", self.engine.url, "exec", "--interactive", *settings),
                *("--env", "DEBIAN_FRONTEND=noninteractive", self._id),
                *("bash", "-euo", "pipefail", "-c", went + script),
            ],
            input=typed.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout * processes.PATIENCE,
            check=False,
        )
        printed = done.stdout.decode(errors="replace")
        assert done.returncode == 0, f"in the box, {done.returncode}:\n{script}\n{printed[-6000:]}"
        return printed

    def write(self, path: str, text: str) -> None:
        """Edit a file: its new text."""
        self.run(f"cat > {path}", typed=text)

    def load(self, image: str, name: str) -> None:
        """Give the box's engine an image of ours, by the name of one that a registry would have."""
        save = subprocess.Popen(
            ["docker", "--host", self.engine.url, "save", image], stdout=subprocess.PIPE
        )
        subprocess.run(
            ["docker", "--host", self.engine.url, "exec", "-i", self._id, "docker", "load"],
            stdin=save.stdout,
            capture_output=True,
            check=True,
        )
        assert save.wait() == 0
        self.run(f"docker tag {image} {name}")

    def install(self, program: Path, folder: str) -> None:
        """Put a program of this machine into a folder of the box."""
        path = f"{folder}/{program.name}"
        with program.open("rb") as content:
            words = ("exec", "-i", self._id, "sh", "-c", f"mkdir -p {folder}; cat > {path}")
            subprocess.run(["docker", "--host", self.engine.url, *words], stdin=content, check=True)
        self.run(f"chmod 755 {path}")

    def add_gpus(self, count: int) -> None:
        """Give it simulated GPUs, and stand-ins for their driver and for NVIDIA's toolkit."""
        made = self.folder.with_name(f"{self.folder.name}-gpus")
        made.mkdir()
        fleet = nvml_library.gpus(count)
        self.install(nvml_library.build_nvml_library(made), "/usr/lib")
        nvml_library.write_fleet(made / "fleet", fleet)
        devices = [{"uuid": g.uuid, "minor": n, "model": g.name} for n, g in enumerate(fleet)]
        (made / "devices.json").write_text(json.dumps(devices))
        for name in ("fleet", "devices.json"):
            self.install(made / name, "/etc/gpuspawner-test")
        for program in HOOKS.iterdir():
            self.install(program, "/usr/bin")

    def reach(self, port: int, of_box: int) -> None:
        """Let 127.0.0.1:``port`` of this machine lead to ``of_box`` there."""
        self._lead(port, of_box, True)

    def let_reach(self, port: int) -> None:
        """Let 127.0.0.1:``port`` of the box lead to the same address here."""
        self._lead(port, port, False)

    @property
    def pid(self) -> int:
        """Its first process, as this machine numbers it."""
        return int(self.engine.client.inspect_container(self._id)["State"]["Pid"])

    def log_text(self) -> str:
        return self.run(
            "journalctl --no-pager --lines 60 --priority warning;"
            " journalctl --no-pager --lines 150 --unit 'gpuspawner*';"
            " for each in $(docker ps --quiet --filter label=com.docker.compose.project); do"
            " docker logs --tail 60 $each 2>&1; done; docker ps --all || true"
        )

    def _is_up(self) -> bool:
        state = self.run("systemctl is-system-running || true").strip()
        return state in ("running", "degraded")

    def _settle(self) -> None:
        """Connect it, and wait until it has come up."""
        slirp = [
            *("slirp4netns", "--configure", "--mtu=65520", "--disable-host-loopback"),
            *("--ready-fd=1", str(self.pid), "tap0"),
        ]
        self._start(slirp, ready=b"1")
        self.run(PREPARE)
        for port in self._ports:
            self._relay(*port)
        wait_for(self._is_up, "systemd in the box")

    def _disconnect(self) -> None:
        while self._beside:
            process = self._beside.pop()
            processes.end_process(process.pid)
            process.wait()

    def _lead(self, port: int, to: int, inwards: bool) -> None:
        self._ports.append((port, to, inwards))
        self._relay(port, to, inwards)

    def _relay(self, port: int, to: int, inwards: bool) -> None:
        pids = (os.getpid(), self.pid) if inwards else (self.pid, os.getpid())
        words = map(str, (pids[0], port, pids[1], to))
        self._start([sys.executable, "-m", "tests.support.relay", *words], ready=b"listening\n")

    def _start(self, command: list[str], ready: bytes) -> None:
        """Start a program that lasts as long as the box does, and wait for its first words."""
        process = subprocess.Popen(
            die_with_us(as_root(["env", f"PATH={system_path()}", *command])),
            cwd=REPO,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._beside.append(process)
        assert process.stdout
        assert process.stdout.read(len(ready)) == ready, f"{command[0]} did not start"


def prepare_images(engine: PrivateEngine, *recipes: Recipe) -> None:
    """Build what the engine does not have yet."""
    images.ensure_images(engine, ())
    with processes.one_at_a_time("images"):
        for recipe in recipes:
            images.build(engine, recipe)


def copy_checkout(folder: Path) -> None:
    """Make a repository of the checkout as it is now, with what is not committed yet."""
    listed = processes.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=REPO)
    for name in filter(None, listed.split("\0")):
        source, target = REPO / name, folder / name
        if source.is_file() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    git: list[str | Path] = ["git", "-c", "user.name=tests", "-c", "user.email=tests@lab.example"]
    processes.run(["git", "init", "-q", folder])
    processes.run([*git, "add", "-A"], cwd=folder)
    processes.run([*git, "commit", "-q", "-m", "The checkout"], cwd=folder)


def compose_plugin() -> Path:
    """Docker's compose plugin, version 2, which Debian 12 does not have: Debian 13's runs on it."""
    folder = kept_dir() / f"compose-{cdi.SUITE}"
    with processes.one_at_a_time(folder.name):
        if not (folder / "docker-compose").exists():
            shutil.rmtree(folder, ignore_errors=True)
            cdi.unpack(folder, ("docker-compose",))
    return folder / "docker-compose"


def _capabilities() -> list[str]:
    """All that this machine lets its root have."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (bounding,) = (int(line.split()[1], 16) for line in status if line.startswith("CapBnd"))
    return [name for bit, name in enumerate(CAPABILITIES.split()) if bounding >> bit & 1]
