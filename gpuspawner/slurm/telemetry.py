"""Samples of the devices of all nodes, from the sampler of each.

All are queried at once, each by its own thread. A node that is not responding is not waited for:
its devices are silent, which says nothing about them, and those of the others are not affected.
"""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlencode, urlsplit

from ..monitoring.models import Sample
from .cluster import Cluster, Node
from .job_spec import devices_of
from .sampler import MOST_BYTES, InvalidAnswer, port_of, read

LOG = logging.getLogger(__name__)

WAIT = 0.5
"""Seconds that a round waits, for all nodes together that answered before."""
SILENT_AFTER = 5.0
"""Seconds without an answer after which a node is silent."""
SECONDS = 2.0
"""Seconds that a node may take for each step of an answer."""
LONGEST = 10.0
"""Seconds that it may take for all of it."""
MOST_APART = 30.0
"""Maximum seconds by which a node's clock may differ from ours.

Its samples are dated by our clock, but Slurm gives up a node that differs more.
"""


class NodesSampler:
    """Samples of all nodes' devices; see :class:`gpuspawner.devices.source.Sampler`.

    For one thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        log: logging.Logger | Any = LOG,
        resting: Callable[[str], str] = lambda name: "",
    ) -> None:
        """Create it; ``resting``, which may block, returns why a node needs not answer: ``off``."""
        self._log = log
        indices = {device.uuid: device.index for device in devices_of(cluster)}
        self._sources = [_Source(node, indices, resting) for node in cluster.nodes if node.sampler]

    def sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        """Return the samples since the last round, in order, and a silent one of each other device.

        ``monotonic`` is not needed.
        """
        began = time.monotonic()
        for source in self._sources:
            source.ask()
        until = time.monotonic() + WAIT
        found: list[Sample] = []
        for source in self._sources:
            if (answer := source.take(until)) is not None:
                # Ages count from the arrival: a late answer waited for this round.
                found += source.heard(answer, now + timedelta(seconds=answer.arrived - began))
            self._say(source)
            found += source.silent(now)
        return tuple(sorted(found, key=lambda sample: sample.at))

    def _say(self, source: _Source) -> None:
        ahead = source.ahead or 0.0
        apart = abs(ahead) > MOST_APART
        if apart and not source.clock_said:
            text = "the clock of the machine %s is %.0f s %s ours: synchronize both by NTP"
            which = "ahead of" if ahead > 0 else "behind"
            self._log.warning(text, source.node.name, abs(ahead), which)
        source.clock_said = apart
        if source.why and not source.said:
            self._log.warning("%s", source.sentence)
        elif source.said and not source.why:
            self._log.info("the machine %s reports its GPUs again", source.node.name)
        source.said = source.why


@dataclass(frozen=True, slots=True)
class _SamplerAnswer:
    """The result of a query: the text of the answer, or why there is none."""

    body: bytes = b""
    why: str = ""
    resting: str = ""
    """Why none was expected."""
    arrived: float = field(default_factory=time.monotonic)


class _Source:
    def __init__(
        self, node: Node, indices: Mapping[str, int], resting: Callable[[str], str]
    ) -> None:
        self.node = node
        self.indices = {device.uuid: indices[device.uuid] for device in node.devices}
        self.said = ""
        """The last logged reason of its silence; empty if none."""
        self.ahead: float | None = None
        """Seconds by which its clock is ahead of ours; None if unknown."""
        self.clock_said = False
        self.of, self.last = "", 0
        self.resting = ""
        self._is_resting = resting
        self._why = "it has not answered yet"
        self._heard_at = time.monotonic()
        self._missing: frozenset[str] = frozenset()
        self._answer: _SamplerAnswer | None = None
        self._done = threading.Event()
        self._done.set()
        self._connection: http.client.HTTPConnection | None = None

    @property
    def why(self) -> str:
        """Why it is silent; empty while it is not, and for the first few seconds."""
        return self._why if time.monotonic() - self._heard_at >= SILENT_AFTER else ""

    @property
    def sentence(self) -> str:
        """The same, with its name."""
        name, why = self.node.name, self.why.rstrip(".")
        if self.resting:
            return f"the machine {name} is {self.resting}"
        return f"the machine {name} does not report the use of its GPUs: {why}"

    def ask(self) -> None:
        """Query, unless an answer is still to come or to be taken."""
        if self._done.is_set() and self._answer is None:
            self._done.clear()
            threading.Thread(target=self._fetch, name="node-sampler", daemon=True).start()

    def take(self, until: float) -> _SamplerAnswer | None:
        """Return the answer, if there is one; waits only if the last one came."""
        if not self._done.wait(0.0 if self._why else max(0.0, until - time.monotonic())):
            return None
        answer, self._answer = self._answer, None
        return answer

    def fetch(self) -> _SamplerAnswer:
        """Query once, and wait for the answer."""
        self.ask()
        self._done.wait(LONGEST)
        return self._answer or _SamplerAnswer(why="it did not answer in time")

    def heard(self, answer: _SamplerAnswer, at: datetime) -> tuple[Sample, ...]:
        """Process an answer that arrived then, and return its samples."""
        self._why, self.resting = answer.why, answer.resting
        if answer.resting:
            self._heard_at = time.monotonic()  # once it is up, it has a moment to start
        if answer.why:
            return ()
        try:
            said = read(answer.body, at, self.indices)
        except InvalidAnswer as error:
            self._why = str(error)
            self.of = ""  # from the newest on: a nonsensical answer never becomes valid
            return ()
        self.of, self.last, self._why = said.of, said.last, said.trouble
        if not said.trouble:
            self._heard_at = time.monotonic()
        if said.newest is not None:
            self._missing = frozenset(self.indices) - said.newest
        return said.samples

    def silent(self, now: datetime) -> list[Sample]:
        """Return a sample of each device that it does not report."""
        off = bool(self.resting)
        why, missing = self.sentence, frozenset(self.indices)
        if not self.why and not off:
            why, missing = f"the machine {self.node.name} does not list it", self._missing
        return [
            Sample(uuid=uuid, index=self.indices[uuid], at=now, silent=why, resting=off)
            for uuid in sorted(missing)
        ]

    # In the thread of a query.

    def _fetch(self) -> None:
        try:
            self._answer = _SamplerAnswer(body=self._asked())
        except (OSError, http.client.HTTPException, InvalidAnswer) as error:
            self._close()
            resting = self._is_resting(self.node.name)
            self._answer = _SamplerAnswer(why=_in_words(error), resting=resting)
        except Exception as error:  # whatever a node answers, only its own devices are affected
            LOG.exception("Asking the sampler of %s failed", self.node.name)
            self._answer = _SamplerAnswer(why=f"{error!r:.200}")
            self._close()
        finally:
            self._done.set()

    def _asked(self) -> bytes:
        end = time.monotonic() + LONGEST
        if self._connection is None:
            self._connection = _connection(self.node)
        words = urlencode({"of": self.of, "after": self.last})
        self._connection.request("GET", f"/samples?{words}")
        body = b""
        with closing(self._connection.getresponse()) as response:
            self.ahead = _ahead(response.headers.get("Date", ""))
            while chunk := response.read1(65_536):
                body += chunk
                if len(body) > MOST_BYTES:
                    raise InvalidAnswer(f"its answer is longer than {MOST_BYTES} bytes")
                if time.monotonic() > end:
                    raise InvalidAnswer(f"its answer takes longer than {LONGEST:.0f} s")
        if response.status != 200:
            raise InvalidAnswer(f"it answered with status {response.status} instead of samples")
        return body

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _in_words(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, ssl.SSLError) and "CERTIFICATE_EXPIRED" in str(error.reason):
        return "it rejects our certificate as expired: make new ones, or set its clock right"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or error})"
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__


def trouble_of(node: Node, now: datetime) -> str:
    """Query a node's sampler once, and return why it does not report all devices, or "".

    The reason is the end of a sentence. Blocks for seconds.
    """
    source = _single(node)
    if why := (answer := source.fetch()).why:
        return why
    try:
        said = read(answer.body, now, source.indices)
    except InvalidAnswer as error:
        return str(error)
    missing = [device.uuid for device in node.devices if device.uuid not in (said.newest or ())]
    return said.trouble or ("it does not list " + ", ".join(missing) if missing else "")


def seconds_ahead(node: Node) -> float | None:
    """Query how far a node's clock is ahead of ours; None if unknown. Blocks for seconds."""
    source = _single(node)
    source.fetch()
    return source.ahead


def _single(node: Node) -> _Source:
    indices = {device.uuid: n for n, device in enumerate(node.devices)}
    return _Source(node, indices, lambda name: "")


def _ahead(date: str) -> float | None:
    try:
        return (parsedate_to_datetime(date) - datetime.now(timezone.utc)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None  # it has no date, or an invalid one


# How a node is reached.


def _connection(node: Node) -> http.client.HTTPConnection:
    """Return a connection that is not open yet, without the environment's proxies."""
    parts = urlsplit(node.sampler)
    if parts.scheme == "unix":
        return _SamplerConnection(parts.path)
    host = parts.hostname or ""
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port_of(parts), timeout=SECONDS)
    if node.tls is None:
        raise InvalidAnswer("cluster.yaml names no certificates for it")
    context = ssl.create_default_context(cafile=node.tls.ca)
    context.load_cert_chain(node.tls.certificate, node.tls.key)
    return http.client.HTTPSConnection(host, port_of(parts), timeout=SECONDS, context=context)


class _SamplerConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SECONDS)
        self.sock.connect(self._path)
