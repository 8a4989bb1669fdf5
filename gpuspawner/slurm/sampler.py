"""The sampler of a node, and the JSON of its samples.

A look is what was seen at one moment. Looks have consecutive numbers, so that each is sent once,
and an age instead of a time, because the clocks of nodes differ.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import re
import secrets
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tornado import web
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets, bind_unix_socket

from ..core.errors import ConfigError
from ..devices.models import DeviceProcess
from ..devices.source import DevicesUnavailable, Sampler
from ..engines.base import container_in
from ..monitoring.models import Condition, RemoteProcess, Sample

VERSION = 1
"""The version of the format: a sampler and a hub with different ones refuse each other."""

MOST_BYTES = 2_000_000
"""The maximum size of an answer."""
MOST_LOOKS = 60
"""Maximum looks in one answer: a minute without network is made up for."""
OLDEST = 600.0
"""Maximum age of a look in seconds for the hub to accept it."""
TOLD = OLDEST - 60.0
"""Seconds after which a look is no longer sent, because an answer may take a while."""
_MOST_PROCESSES = 200
_MOST_XIDS = 64
_MOST_XID = 100_000
_MOST_WORDS = 300

_NUMBERS: Mapping[str, int] = {
    "use": 100,
    "memory_activity": 100,
    "used_bytes": 2**50,
    "total_bytes": 2**50,
    "milliwatts": 10_000_000,
    "celsius": 200,
    "sm_mhz": 100_000,
    "memory_mhz": 100_000,
    "throttle": 2**32,
    "ecc_errors": 2**63 - 1,
}
"""The numbers of a sample, with the largest plausible value."""
_FLAGS = ("remap_pending", "remap_failed", "pages_pending")
_SIZES = ("link_width", "link_most", "limit_milliwatts", "usual_milliwatts")


def port_of(parts: SplitResult) -> int:
    """Return the port where a sampler listens, which the address need not contain."""
    return parts.port or (80 if parts.scheme == "http" else 443)


class InvalidAnswer(Exception):
    """A nonsensical answer. The message is the end of a sentence that says why."""


@dataclass(frozen=True, slots=True)
class SamplerReport:
    """An answer of a sampler."""

    of: str
    """The run of the sampler: its numbers restart with each."""
    last: int
    """The number of its newest look; 0 before there is one."""
    samples: tuple[Sample, ...]
    """Oldest first."""
    newest: frozenset[str] | None
    """The devices of the newest look in the answer; None if there was no new one."""
    trouble: str
    """Why it currently sees nothing; empty if it does."""


# What a node sends.


def packed(samples: Iterable[Sample], strange: Callable[[DeviceProcess], bool]) -> str:
    """Return one look as JSON, without unknown values.

    ``strange`` returns True for a process without an owner.
    """
    return json.dumps([_packed(sample, strange) for sample in samples], separators=(",", ":"))


def _packed(sample: Sample, strange: Callable[[DeviceProcess], bool]) -> dict[str, Any]:
    # Values that a hub would refuse are left out: one wrong value costs a whole answer.
    xids = [xid for xid in sample.xids if 0 <= xid <= _MOST_XID][-_MOST_XIDS:]
    said: dict[str, Any] = {"uuid": sample.uuid, "error": sample.error, "xids": xids}
    said |= {name: getattr(sample, name) for name in _NUMBERS}
    if sample.condition is not None:
        condition = {name: getattr(sample.condition, name) for name in (*_FLAGS, *_SIZES)}
        said["condition"] = _known(condition)
    if sample.processes is not None:
        said["processes"] = [
            [p.pid, p.used_memory_bytes, p.kind, p.name, p.kind == "compute" and strange(p)]
            for p in sample.processes[:_MOST_PROCESSES]
        ]
    return _known(said)


def _known(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if value not in (None, "", [])}


# What the hub accepts.


def read(body: bytes, now: datetime, indices: Mapping[str, int]) -> SamplerReport:
    """Parse a sampler's answer, without devices that ``indices`` does not name.

    ``now`` is the hub's time, from which ages are counted. Raises InvalidAnswer.
    """
    try:
        told: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidAnswer("its answer is not JSON") from None
    if not isinstance(told, dict) or "version" not in told:
        raise InvalidAnswer("it is not a gpuspawner sampler")
    if told["version"] != VERSION:
        raise InvalidAnswer(
            f"its version is {told['version']!r:.20} and must be {VERSION}: "
            "install the same gpuspawner there as here"
        )
    try:
        looks = [_look(look, now, indices) for look in _listed(told["looks"], MOST_LOOKS)]
        return SamplerReport(
            of=_word(told["of"]),
            last=_number(told["last"], 2**53),
            samples=tuple(sample for look in looks for sample in look.values()),
            newest=frozenset(looks[-1]) if looks else None,
            trouble=_word(told["trouble"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidAnswer(f"its answer is not valid ({error!r:.80})") from None


def _look(look: Any, now: datetime, indices: Mapping[str, int]) -> dict[str, Sample]:
    age = look["age"]
    if isinstance(age, bool) or not isinstance(age, int | float) or not math.isfinite(age):
        raise ValueError("an age that is not a number")
    if not 0 <= age <= OLDEST:
        raise ValueError(f"a sample that is {age:g} seconds old")
    at = now - timedelta(seconds=age)
    found: dict[str, Sample] = {}
    for said in _listed(look["devices"], 1000):
        uuid = _word(said["uuid"])
        if uuid in indices:
            found[uuid] = _sample(said, uuid, indices[uuid], at)
    return found


def _sample(said: Mapping[str, Any], uuid: str, index: int, at: datetime) -> Sample:
    xids = tuple(_number(xid, _MOST_XID) for xid in _listed(said.get("xids", []), _MOST_XIDS))
    if error := _word(said.get("error", "")):
        return Sample(uuid=uuid, index=index, at=at, xids=xids, error=error)
    more: dict[str, Any] = {
        name: _number(said[name], most) for name, most in _NUMBERS.items() if name in said
    }
    if "processes" in said:
        listed = _listed(said["processes"], _MOST_PROCESSES)
        more["processes"] = tuple(_process(*each) for each in listed)
    if "condition" in said:
        more["condition"] = _condition(said["condition"])
    return Sample(uuid=uuid, index=index, at=at, xids=xids, **more)


def _process(pid: Any, used: Any, kind: Any, name: Any, strange: Any) -> RemoteProcess:
    if kind not in ("compute", "graphics"):
        raise ValueError("a process of unknown kind")
    held = None if used is None else _number(used, 2**50)
    return RemoteProcess(_number(pid, 2**31), held, kind, _word(name), _flag(strange))


def _condition(said: Mapping[str, Any]) -> Condition:
    flags: dict[str, Any] = {name: _flag(said[name]) for name in _FLAGS if name in said}
    sizes: dict[str, Any] = {name: _number(said[name], 2**40) for name in _SIZES if name in said}
    return Condition(**flags, **sizes)


def _number(value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{value!r:.30} instead of a number up to {most}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.30} instead of true or false")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.30} instead of text")
    return "".join(letter for letter in value[:_MOST_WORDS] if letter.isprintable())


def _listed(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"not a list of up to {most} entries")
    return value


LOG = logging.getLogger(__name__)

KEPT = 300
"""How many looks are kept."""
AGAIN = 60.0
"""Seconds until it is tried again after nothing could be seen."""
SILENT = 10.0
"""Seconds without an answer of the driver after which that is reported."""

_JOB = re.compile(r"/job_\d+(?:/|$)", re.MULTILINE)


class Recorder:
    """Samples the devices in a thread, and keeps the looks. For other threads."""

    def __init__(
        self,
        sampler: Sampler,
        seconds: float = 1.0,
        monotonic: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """``chance`` as for :class:`gpuspawner.service.device_monitor.Sampling`."""
        self._sampler = sampler
        self._seconds = seconds
        self._monotonic = monotonic
        self._chance = chance
        self._of = secrets.token_hex(8)
        self._looks: deque[tuple[int, float, str]] = deque(maxlen=KEPT)
        """Number, moment and devices of each."""
        self._last = 0
        self._trouble = ""
        self._answered_at = monotonic()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the thread, which does not keep the process alive: it may hang in the driver."""
        threading.Thread(target=self._run, name="sampling", daemon=True).start()

    def since(self, of: str = "", number: int = 0) -> str:
        """Return the looks after this number as JSON.

        A caller that knows another run of this program, or none, gets only the newest.
        """
        now = self._monotonic()
        with self._lock:
            after = number if of == self._of else self._last - 1
            looks = [look for look in self._looks if look[0] > after and now - look[1] < TOLD]
            trouble, silent, last = self._trouble, now - self._answered_at, self._last
        if not trouble and silent > SILENT:
            trouble = f"the driver has not answered for {silent:.0f} s"
        told = {"version": VERSION, "of": self._of, "last": last, "trouble": trouble}
        # Each look was serialized once, and is not serialized again per request.
        parts = [
            f'{{"age":{now - at:.3f},"devices":{devices}}}'
            for _, at, devices in looks[-MOST_LOOKS:]
        ]
        return f'{json.dumps(told)[:-1]}, "looks": [{", ".join(parts)}]}}'

    def look(self) -> bool:
        """Take one look; returns True if anything could be seen."""
        at = self._monotonic()
        said = trouble = ""
        try:
            said = packed(self._sampler.sample(datetime.now(timezone.utc), at), is_strange)
        except DevicesUnavailable as lost:
            trouble = str(lost)
        except Exception as error:  # whatever a driver does, the next look follows
            LOG.exception("Sampling the GPUs failed")
            trouble = f"the use of GPUs cannot be read: {error!r:.200}"
        with self._lock:
            if said:
                self._last += 1
                self._looks.append((self._last, at, said))
            self._trouble, self._answered_at = trouble, self._monotonic()
        return bool(said)

    def _run(self) -> None:
        due = self._monotonic()
        while True:
            pause = self._seconds if self.look() else AGAIN
            due = max(due + pause, self._monotonic())
            at = due + self._chance() * self._seconds
            time.sleep(max(0.0, at - self._monotonic()))


def is_strange(process: DeviceProcess, proc: Path = Path("/proc")) -> bool:
    """Return True if a process belongs to no container and no job; False if it is gone."""
    try:
        groups = (proc / str(process.pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return False
    return not container_in(groups) and not _JOB.search(groups)


# Serving.


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
    """Return the application that answers the hub."""
    routes = [("/samples", _Looks, {"recorder": recorder})]
    return web.Application(routes, log_function=lambda handler: None)


def tls_context(folder: Path) -> ssl.SSLContext:
    """Return the TLS context from ``ca.pem``, ``server-cert.pem`` and ``server-key.pem``.

    The node's engine uses the same files. Clients without a certificate of this authority get no
    answer. Raises ConfigError.
    """
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
            "the folder with the certificates of the node's engine: --tls."
        ) from None
    return context


@contextmanager
def listening(recorder: Recorder, url: str, tls: Path) -> Iterator[HTTPServer]:
    """Serve at ``url``, the node's ``sampler`` in cluster.yaml. Raises ConfigError."""
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
            f"The sampler cannot listen at {url}: {error.strerror or error}. Name an address of "
            "this machine and a free port with --listen."
        ) from None
    try:
        yield server
    finally:
        server.stop()


async def serve(recorder: Recorder, url: str, tls: Path, stop: asyncio.Event) -> None:
    """Sample and answer until ``stop``. Raises ConfigError."""
    with listening(recorder, url, tls):
        recorder.start()
        LOG.info("Reporting the use of this machine's GPUs at %s", url)
        await stop.wait()
