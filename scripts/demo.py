"""`make demo`: a whole hub on this machine, to try out. Ctrl-C ends everything it started.

Environment: GPUSPAWNER_DEMO_PORT (8000), GPUSPAWNER_DEMO_PASSWORD (a generated one),
GPUSPAWNER_DEMO_DIR (.demo), GPUSPAWNER_DEMO_IMAGE (for servers in Docker).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import demo_docker
import demo_processes
from demo_docker import Containers, ImageMaker, NoDocker
from demo_state import ADMIN, MEMBERS, SAMPLE, State, Stop, demo_catalog
from traitlets.config import Config

from gpuspawner.core.errors import GPUSpawnerError
from gpuspawner.devices.discovery import open_source
from gpuspawner.devices.models import Device, DeviceStatus
from gpuspawner.engines.base import Engine
from gpuspawner.engines.docker import DockerEngine
from gpuspawner.engines.local import LocalEngine
from gpuspawner.leases.reconciliation import Remove
from gpuspawner.services import Services

REPO = Path(__file__).resolve().parents[1]
SIMULATED = "simulated:2xA100-80GB,2xT4"
START_SECONDS = 90
"""Longest wait for the hub to answer."""
SERVICE_SECONDS = 20
"""Longest wait for the accounting service; the hub starts it again when it fails."""
END_SECONDS = 30
"""Longest wait for the hub to end its servers and itself."""

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

started = time.monotonic()


def say(text: str) -> None:
    """A line with the seconds since the start."""
    tell(f"[{time.monotonic() - started:3.0f} s] {text}")


def tell(text: str) -> None:
    """Print, if anybody still listens: a closed terminal must not keep us from cleaning up."""
    with suppress(OSError):
        print(text, flush=True)


class Demo:
    """One run, from nothing to sign-in instructions, and back to nothing."""

    def __init__(self) -> None:
        self.port = _port(os.environ.get("GPUSPAWNER_DEMO_PORT") or "8000")
        folder = os.environ.get("GPUSPAWNER_DEMO_DIR") or REPO / ".demo"
        self.state = State(Path(folder).resolve())
        self.hub: subprocess.Popen[bytes] | None = None
        self.containers: Containers | None = None
        self.maker: ImageMaker | None = None
        self.gpus = SIMULATED
        self.devices: list[Device] = []
        self.internal: dict[str, str] = {}

    # Up.

    def start(self) -> None:
        """Everything until the hub answers. Raises Stop."""
        self.state.open()
        _check_free(self.port)
        names = ("HUB_PORT", "PROXY_PORT", "SERVICE_PORT")
        self.internal = dict(zip(names, map(str, _free_ports(len(names))), strict=True))
        self.passwords = self.state.passwords()
        self.state.datasets()
        say(f"{'Making' if self.state.new else 'Found'} {self.state.folder}")
        self._find_gpus()
        self._find_docker()
        self._start_hub()

    def _find_gpus(self) -> None:
        inventory = open_source("auto").observe(datetime.now(timezone.utc))
        real = [d for d in inventory.devices if d.status is not DeviceStatus.PARENT]
        if real:
            self.gpus, self.devices = "auto", real
            say(f"GPUs: {_count(real)} (driver {inventory.driver_version})")
            return
        found = open_source(SIMULATED).observe(datetime.now(timezone.utc))
        self.devices = list(found.devices)
        say(inventory.error or "The NVIDIA driver here names no GPU.")
        say(f"GPUs: simulating {len(self.devices)} ({_count(self.devices)})")

    def _find_docker(self) -> None:
        try:
            self.containers = self._try_docker()
        except NoDocker as reason:
            say(str(reason))
            say("Servers: as local processes. Nothing keeps members apart then: for trying out")
        else:
            say(f"Servers: in Docker, from the image {self.containers.image}")

    def _try_docker(self) -> Containers:
        client = demo_docker.find_engine()
        image = os.environ.get("GPUSPAWNER_DEMO_IMAGE") or demo_docker.BASE
        self.maker = demo_docker.find_image(client, image, REPO / "images")
        if self.maker:
            how = "building" if image == demo_docker.BASE else "pulling"
            say(f"Docker answers; {how} the image {image} (first time only)")
            demo_docker.wait_for_image(self.maker, say)
        self.maker = None
        say("Docker answers; trying with a container what servers will need")
        return demo_docker.prove(
            client,
            self.owner,
            image,
            port=int(self.internal["HUB_PORT"]),
            sample=SAMPLE,
            uuids=[d.uuid for d in self.devices] if self.gpus == "auto" else [],
        )

    @property
    def url(self) -> str:
        """The hub's address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def owner(self) -> str:
        """The name of what this demo owns in an engine; try_out.py makes the same."""
        return f"gpuspawner-demo-{self.state.name()}"

    def _start_hub(self) -> None:
        say("Starting hub, proxy, accounting service and idle culler")
        configuration = self.state.write_configuration(
            REPO / "hub_config" / "try_out.py", self._variables()
        )
        self.hub = demo_processes.start(
            [sys.executable, "-m", "jupyterhub", "-f", str(configuration)],
            folder=self.state.folder,
            environment=self._environment(),
            log=self.state.log,
        )
        if not self._wait_for("/hub/api", START_SECONDS):
            raise Stop(f"The hub is not responding. {self._last_words()}")
        if not self._wait_for("/services/gpu/", SERVICE_SECONDS):
            say(f"The accounting service is not responding yet; see {self.state.log}")

    def _variables(self) -> dict[str, str]:
        ours = {
            **self.internal,
            "DIR": str(self.state.folder),
            "NAME": self.state.name(),
            "PORT": str(self.port),
            "PASSWORD": self.passwords.members,
            "ADMIN_PASSWORD": self.passwords.admin,
            "GPUS": self.gpus,
            "CATALOG": str(self._write_catalog()),
            "DOCKER_ADDRESS": self.containers.address if self.containers else "",
        }
        return {f"GPUSPAWNER_DEMO_{name}": value for name, value in ours.items()}

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTERHUB_")}
        programs = str(Path(sys.executable).parent)
        kept["PATH"] = os.pathsep.join([programs, kept.get("PATH", os.defpath)])
        return kept

    def _write_catalog(self) -> Path:
        models = Counter(device.model for device in self.devices)
        memory = {device.model: device.memory_bytes for device in self.devices}
        best = max(models, key=lambda model: (models[model] > 1, memory[model]))
        where = self.containers
        catalog = demo_catalog(
            image=where.image if where else demo_docker.BASE,
            pytorch=where.pytorch if where else "",
            several=models[best],
            several_of=best if len(models) > 1 else "",
            datasets=where.datasets if where else "",
        )
        return self.state.write_catalog(catalog)

    def _wait_for(self, path: str, seconds: float) -> bool:
        """Whether something answers there in time. Raises Stop when the hub ends."""
        deadline = time.monotonic() + seconds
        while not _answers(f"{self.url}{path}"):
            if self.hub is None or self.hub.poll() is not None:
                raise Stop(f"The hub ended at once. {self._last_words()}")
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def _last_words(self) -> str:
        lines = self.state.log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([f"The end of {self.state.log}:", *(f"    {line}" for line in lines)])

    # While it runs.

    def wait(self) -> None:
        """Until a signal comes. Raises Stop when the hub ends by itself."""
        while self.hub is not None and self.hub.poll() is None:
            time.sleep(0.5)
            if self.maker is not None and not self.maker.is_alive():
                if self.maker.done:
                    say(f"The image {self.maker.image} is ready: the next demo uses Docker")
                self.maker = None
        raise Stop(f"The hub ended. {self._last_words()}")

    def instructions(self) -> str:
        """How to sign in, and what to try."""
        members = f"{MEMBERS[0]} to {MEMBERS[-1]}"
        work = "~/work keeps your files. "
        if self.containers:
            data = "/datasets/sample can be read only."
        else:
            data = "~/datasets/sample is for reading (local processes: not enforced)."
        return f"""
  Sign in at      {self.url}
  as a member     {members:20} password  {self.passwords.members}
  as the admin    {ADMIN:20} password  {self.passwords.admin}

  From another machine:  ssh -L {self.port}:127.0.0.1:{self.port} THIS-MACHINE

  Try: choose an environment, start it, and run  !env | grep GPUSPAWNER  in a notebook.
       {work}{data}
       Sign in as a second member in another browser, and take all GPUs.
       In another shell, from here:  .venv/bin/gpuspawner queue
       Stop your server, and see what it cost: {self.url}/services/gpu/

  Log: {self.state.log}
  Ctrl-C ends the demo; members, balances and files stay for the next one.
"""

    # Down.

    def end(self) -> None:
        """End hub, proxy, services and servers, and settle what they leave."""
        if self.hub is None:
            return
        say("Stopping servers, hub and proxy")
        if not demo_processes.end(self.hub, END_SECONDS):
            say("The hub did not end by itself: ended it")
        left = demo_processes.end_descendants()
        if self.containers:
            demo_docker.remove_containers(self.owner)
        self._settle()
        if left:
            say(f"Could not be ended: process {', '.join(map(str, sorted(left)))}")
        else:
            say("Everything is stopped.")

    def _settle(self) -> None:
        """Settle leases that the hub had no time for, and end what still holds one."""
        config = Config()
        config.GPUDatabase.url, config.GPUDevices.source = self.state.database_url, self.gpus
        services = Services(config)
        try:
            if not services.leases.open_leases():
                return
            engines: dict[str, Engine] = {LocalEngine.name: LocalEngine()}
            if self.containers:
                engines[DockerEngine.name] = DockerEngine()
            for _ in range(2):
                seen = {name: engine.sightings() for name, engine in engines.items()}
                left_over = [
                    action
                    for action in services.leases.reconcile(seen, {}, grace_seconds=0)
                    if isinstance(action, Remove)
                ]
                if not left_over:
                    break
                for action in left_over:
                    engines[action.engine].end(action.sighting)
            left = len(services.leases.open_leases())
            if left:
                say(f"{left} lease(s) are still open; the next demo settles them")
        except GPUSpawnerError as error:
            say(f"Leases are settled at the next start: {error.message}")
        finally:
            services.store.close()


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise Stop(f"GPUSPAWNER_DEMO_PORT is {text!r}: write a port between 1 and 65535.")
    return int(text)


def _check_free(port: int) -> None:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            raise Stop(
                f"Port {port} cannot be used ({error.strerror}). Choose another one: "
                f"GPUSPAWNER_DEMO_PORT={port + 100 if port < 65000 else 8000} make demo"
            ) from None


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, on any address of this machine."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _answers(url: str) -> bool:
    """Whether a page comes from there; the proxy says 404 or 503 for whom it does not know yet."""
    plain = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        plain.open(url, timeout=5).close()
        return True
    except OSError:
        return False


def _count(devices: list[Device]) -> str:
    counts = Counter(device.model for device in devices)
    return ", ".join(f"{count} x {model}" for model, count in counts.items())


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the demo; the exit status is 0 when it was ended by a signal."""
    ends = [n for n in ENDS if n is signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
    for number in ends:  # nohup ignores SIGHUP, and means it
        signal.signal(number, _interrupt)
    os.umask(0o077)
    demo_processes.adopt_descendants()
    demo = None
    try:
        demo = Demo()
        demo.start()
        say("The demo is ready.")
        tell(demo.instructions())
        demo.wait()
    except Stop as reason:
        tell(f"\n{reason}\n")
        return 1
    except KeyboardInterrupt:
        tell("")
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_IGN)
        if demo is not None:
            demo.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
