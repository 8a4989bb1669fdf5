"""The sampler of a node: what its devices do, kept for minutes and told to the hub.

It asks the driver as the hub does on one machine, has no store, and needs nothing of Slurm. Over
TLS it answers who shows a certificate of the same authority as the hub's; without TLS it listens
where no other machine reaches it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import urlsplit

from tornado import web
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets, bind_unix_socket

from ..devices.base import LooksLost, Sampler
from ..engines.owners import container_in
from ..errors import ConfigError
from ..model import DeviceProcess
from .samples import MOST_LOOKS, TOLD, VERSION, packed, port_of

LOG = logging.getLogger(__name__)

KEPT = 300
"""How many looks are kept."""
AGAIN = 60.0
"""Seconds until it is tried again after nothing could be seen."""
SILENT = 10.0
"""Seconds without an answer of the driver after which it is said that there is none."""

_JOB = re.compile(r"/job_\d+(?:/|$)", re.MULTILINE)


class Recorder:
    """Looks at the devices in a thread, and keeps what it saw. For other threads."""

    def __init__(
        self,
        sampler: Sampler,
        seconds: float = 1.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sampler = sampler
        self._seconds = seconds
        self._monotonic = monotonic
        self._of = secrets.token_hex(8)
        self._looks: deque[tuple[int, float, str]] = deque(maxlen=KEPT)
        """Number, moment and devices of each."""
        self._last = 0
        self._trouble = ""
        self._answered_at = monotonic()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin. The thread does not keep the process alive: it may hang in the driver."""
        threading.Thread(target=self._run, name="sampling", daemon=True).start()

    def since(self, of: str = "", number: int = 0) -> str:
        """The looks after the one of this number, as JSON; to who knows another run of this
        program, or none, the newest alone."""
        now = self._monotonic()
        with self._lock:
            after = number if of == self._of else self._last - 1
            looks = [look for look in self._looks if look[0] > after and now - look[1] < TOLD]
            trouble = self._trouble
            silent = now - self._answered_at
            last = self._last
        if not trouble and silent > SILENT:
            trouble = f"the driver has not answered for {silent:.0f} s"
        told = {"version": VERSION, "of": self._of, "last": last, "trouble": trouble}
        # What was packed once, when it was seen, is not packed again for who asks.
        parts = [
            f'{{"age":{now - at:.3f},"devices":{devices}}}'
            for _, at, devices in looks[-MOST_LOOKS:]
        ]
        return f'{json.dumps(told)[:-1]}, "looks": [{", ".join(parts)}]}}'

    def look(self) -> bool:
        """Look once; whether anything could be seen."""
        at = self._monotonic()
        try:
            samples = self._sampler.sample(datetime.now(timezone.utc), at)
            said = packed(samples, is_strange)
        except LooksLost as lost:
            self._failed(str(lost))
            return False
        except Exception as error:  # whatever a driver does, the next look comes
            LOG.exception("Sampling the GPUs failed")
            self._failed(f"what GPUs do cannot be seen: {error!r:.200}")
            return False
        with self._lock:
            self._last += 1
            self._looks.append((self._last, at, said))
            self._trouble, self._answered_at = "", self._monotonic()
        return True

    def _failed(self, why: str) -> None:
        with self._lock:
            self._trouble, self._answered_at = why, self._monotonic()

    def _run(self) -> None:
        while True:
            began = self._monotonic()
            pause = self._seconds if self.look() else AGAIN
            time.sleep(max(0.0, pause - (self._monotonic() - began)))


def is_strange(process: DeviceProcess, proc: Path = Path("/proc")) -> bool:
    """Whether a process is of no container and of no job; not one that is gone meanwhile."""
    try:
        groups = (proc / str(process.pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return False
    return not container_in(groups) and not _JOB.search(groups)


# Telling it.


class _Looks(web.RequestHandler):
    """``/samples``, and ``?of=RUN&after=NUMBER`` for what came since."""

    def initialize(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def get(self) -> None:
        after = self.get_argument("after", "0")
        number = int(after) if after.isascii() and after.isdigit() and len(after) < 16 else 0
        self.set_header("Content-Type", "application/json")
        self.finish(self._recorder.since(self.get_argument("of", ""), number))


def application(recorder: Recorder) -> web.Application:
    """What answers the hub."""
    routes = [("/samples", _Looks, {"recorder": recorder})]
    return web.Application(routes, log_function=lambda handler: None)


def tls_context(folder: Path) -> ssl.SSLContext:
    """Of ``ca.pem``, ``server-cert.pem`` and ``server-key.pem``, which the node's engine has, too.
    Who shows no certificate of this authority is not answered. Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(folder / "ca.pem")
        context.load_cert_chain(folder / "server-cert.pem", folder / "server-key.pem")
    except OSError as error:
        why = error.strerror or getattr(error, "reason", "") or str(error)
        raise ConfigError(
            f"ca.pem, server-cert.pem and server-key.pem of {folder} cannot be used: {why}. Name "
            "the folder that the node's engine has them in with --tls."
        ) from None
    return context


@contextmanager
def listening(recorder: Recorder, url: str, tls: Path) -> Iterator[HTTPServer]:
    """A server at ``url``, which is as ``sampler`` in cluster.yaml. Raises ConfigError."""
    parts = urlsplit(url)
    context = tls_context(tls) if parts.scheme == "https" else None
    server = HTTPServer(
        application(recorder),
        ssl_options=context,
        idle_connection_timeout=60,
        max_header_size=16_384,
        max_body_size=0,
    )
    try:
        if parts.scheme == "unix":
            server.add_socket(bind_unix_socket(parts.path, mode=0o666))
        else:
            server.add_sockets(bind_sockets(port_of(parts), parts.hostname))
    except OSError as error:
        raise ConfigError(
            f"{url} cannot be listened at: {error.strerror or error}. Give an address of this "
            "machine with --listen, and a port that nobody else has."
        ) from None
    try:
        yield server
    finally:
        server.stop()


async def serve(recorder: Recorder, url: str, tls: Path, stop: asyncio.Event) -> None:
    """Sample and answer until ``stop``. Raises ConfigError."""
    with listening(recorder, url, tls):
        recorder.start()
        LOG.info("Telling at %s what the GPUs of this machine do", url)
        await stop.wait()
