"""Whether the demo's servers can run in Docker, found out by doing what they will do.

Whatever does not work is a sentence, and the demo goes on with local processes. Nothing
here waits without a limit.
"""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import docker
import jupyterhub
import requests
from docker.errors import DockerException, ImageNotFound, NotFound
from docker.utils import kwargs_from_env

from gpuspawner.engines.injection import candidates
from gpuspawner.engines.preflight import (
    Status,
    check_hub_reachable,
    network_gateway,
    prove_injection,
    words_of,
)

NETWORK = "bridge"
BASE = "gpuspawner/base:latest"
PYTORCH = "gpuspawner/pytorch:latest"
LABEL = "gpuspawner.demo"
"""On what the demo owns in an engine; the value is the demo's name."""

ANSWER_SECONDS = 30
"""Longest wait for one answer of the engine."""
IMAGE_SECONDS = 90
"""Longest wait for the image."""

ENGINE_ERRORS = (DockerException, requests.RequestException, OSError)

Say = Callable[[str], None]


class NoDocker(Exception):
    """Servers cannot run in Docker; the text is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Containers:
    """What the hub needs to know for servers in containers."""

    address: str
    """This machine, as containers see it."""
    image: str
    pytorch: str
    """An image with PyTorch; empty when there is none."""
    datasets: str
    """The volume with the sample dataset."""


class ImageMaker(threading.Thread):
    """Pulls or builds the image beside everything else; the demo's end ends it too."""

    def __init__(self, image: str, folder: Path) -> None:
        super().__init__(daemon=True, name="image")
        self.image = image
        self.folder = folder
        self.step = ""
        """The step that a build is at, in the engine's words."""
        self.error = ""

    @property
    def done(self) -> bool:
        """Whether it ended well."""
        return not self.is_alive() and not self.error

    def run(self) -> None:
        try:
            client = connect(timeout=900)
            for line in self._lines(client):
                text = " ".join(str(line.get("stream", "")).split())
                self.step = text if text.startswith("Step ") else self.step
                if "error" in line:
                    self.error = " ".join(str(line["error"]).split())
        except ENGINE_ERRORS as error:
            self.error = words_of(error)

    def _lines(self, client: docker.APIClient) -> Any:
        if self.image != BASE:
            return client.pull(self.image, stream=True, decode=True)
        hub = f"jupyterhub=={jupyterhub.__version__}"
        return client.build(
            path=str(self.folder),
            dockerfile="base/Dockerfile",
            tag=self.image,
            rm=True,
            decode=True,
            buildargs={"JUPYTERHUB_REQUIREMENT": hub},
            use_config_proxy=True,
        )


def connect(timeout: float = ANSWER_SECONDS) -> docker.APIClient:
    """A client of the engine that DOCKER_HOST names, else of this machine's."""
    return docker.APIClient(version="auto", timeout=timeout, **kwargs_from_env())


def find_engine() -> docker.APIClient:
    """The engine, once it answered. Raises NoDocker."""
    try:
        client = connect()
        client.ping()
        if client.info().get("OSType") != "linux":
            raise NoDocker("The container engine here runs no Linux containers.")
        return client
    except ENGINE_ERRORS as error:
        if "Permission denied" in str(error):
            raise NoDocker(
                "There is a Docker Engine, but this user may not use it "
                "(sudo usermod -aG docker $USER, then sign in anew)."
            ) from None
        raise NoDocker("No Docker Engine answers here.") from None


def find_image(client: docker.APIClient, image: str, folder: Path) -> ImageMaker | None:
    """None when the engine has the image; else who is making it now. Raises NoDocker."""
    try:
        if has(client, image):
            return None
    except ENGINE_ERRORS as error:
        raise NoDocker(f"The container engine is not responding: {words_of(error)}.") from None
    maker = ImageMaker(image, folder)
    maker.start()
    return maker


def has(client: docker.APIClient, image: str) -> bool:
    """Whether the engine has an image."""
    try:
        client.inspect_image(image)
        return True
    except ImageNotFound:
        return False


def wait_for_image(maker: ImageMaker, say: Say) -> None:
    """Wait for the image, within limits, and say how far it is. Raises NoDocker."""
    said = ""
    for _ in range(IMAGE_SECONDS):
        maker.join(1)
        if maker.error:
            raise NoDocker(f"The image {maker.image} cannot be had ({maker.error[:200]}).")
        if not maker.is_alive():
            return
        if maker.step != said:
            said = maker.step
            say(f"    {said[:80]}")
    raise NoDocker(
        f"The image {maker.image} is not ready within {IMAGE_SECONDS} seconds. It goes on being "
        "made while this demo runs, and is there for the next one."
    )


def prove(
    client: docker.APIClient,
    name: str,
    image: str,
    *,
    port: int,
    sample: Mapping[str, str],
    uuids: Sequence[str],
) -> Containers:
    """Try everything that servers need with short-lived containers. Raises NoDocker.

    ``port`` is where the hub will listen, ``uuids`` are real GPUs (none when simulated).
    """
    try:
        address = network_gateway(client, NETWORK)
        if not address:
            raise NoDocker(f"The engine's network {NETWORK!r} does not say its gateway.")
        with _answering(address, port):
            reached = check_hub_reachable(
                client, image, NETWORK, f"http://{address}:{port}/hub/api"
            )
        if reached.status is not Status.OK:
            raise NoDocker(f"{reached.text} {reached.remedy}".strip())
        if uuids:
            _prove_gpus(client, image, uuids[0])
        pytorch = PYTORCH if has(client, PYTORCH) else ""
        return Containers(address, image, pytorch, _fill_volume(client, name, image, sample))
    except ENGINE_ERRORS as error:
        raise NoDocker(f"The container engine refused a trial: {words_of(error)}.") from None


def _prove_gpus(client: docker.APIClient, image: str, uuid: str) -> None:
    findings = []
    for mode in candidates(client.info()):
        findings.append(prove_injection(client, image, mode, uuid))
        if findings[-1].status is Status.OK:
            return
    remedy = findings[0].remedy if findings else ""
    raise NoDocker(f"The container engine cannot hand GPUs to containers. {remedy}".strip())


@contextmanager
def _answering(address: str, port: int) -> Iterator[None]:
    """Answer as the hub will, at its address, while the block runs. Raises NoDocker."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"version": "trial"}')

        def log_message(self, *_: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer((address, port), Answer)
    except OSError as error:
        raise NoDocker(
            f"{address}, the containers' way to this machine, is not an address of it "
            f"({error.strerror}): the engine seems to run elsewhere."
        ) from None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _fill_volume(client: docker.APIClient, name: str, image: str, sample: Mapping[str, str]) -> str:
    """A volume with the sample dataset, filled through a container that never starts."""
    volume = f"{name}-datasets"
    client.create_volume(volume, labels={LABEL: name})
    host = client.create_host_config(binds=[f"{volume}:/datasets:rw"], network_mode="none")
    made = client.create_container(image, ["true"], host_config=host, labels={LABEL: name})
    try:
        client.put_archive(made["Id"], "/datasets", _tar(sample))
    finally:
        client.remove_container(made["Id"], force=True)
    return volume


def _tar(files: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o444
            tar.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def remove_containers(name: str) -> int:
    """Remove what a hub of this demo left running; volumes, and files in them, stay."""
    client = connect()
    left = client.containers(all=True, filters={"label": f"{LABEL}={name}"})
    for container in left:
        with suppress(NotFound):
            client.remove_container(container["Id"], force=True)
    return len(left)
