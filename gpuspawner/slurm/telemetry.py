"""What the devices of all nodes do, asked of the sampler of each.

All are asked at once, each by a thread of its own. Nobody waits for a node that does not answer:
its devices are silent, which says nothing of how they are, and those of the others are as ever.
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
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from ..monitoring.models import Sample
from .cluster import Cluster, Node
from .job_spec import devices_of
from .sampler import MOST_BYTES, Nonsense, Said, port_of, read

LOG = logging.getLogger(__name__)

WAIT = 0.5
"""Seconds that a look waits, for all nodes together that answered before."""
SILENT_AFTER = 5.0
"""Seconds without an answer after which a node is silent."""
SECONDS = 2.0
"""Seconds that a node may take for each step of an answer."""
LONGEST = 10.0
"""Seconds that it may take for all of it."""
MOST_APART = 30.0
"""Seconds that a node's clock may be from ours. What it tells is dated by ours; but Slurm gives up
a node that is further apart."""


class NodesSampler:
    """Samples of all nodes' devices; see :class:`gpuspawner.devices.source.Sampler`. For one
    thread."""

    def __init__(
        self,
        cluster: Cluster,
        log: logging.Logger | Any = LOG,
        resting: Callable[[str], str] = lambda name: "",
    ) -> None:
        """``resting`` says of a node why nobody is to expect an answer of it, such as ``off``;
        it may block."""
        self._log = log
        indices = {device.uuid: device.index for device in devices_of(cluster)}
        self._sources = [_Source(node, indices, resting) for node in cluster.nodes if node.sampler]

    def sample(self, now: datetime, monotonic: float) -> tuple[Sample, ...]:
        """What came since the last look, in the order in which it was seen, and a silent sample of
        each device that nobody could ask. ``monotonic`` is not needed."""
        for source in self._sources:
            source.ask()
        until = time.monotonic() + WAIT
        found: list[Sample] = []
        for source in self._sources:
            answer = source.take(until)
            if answer is not None:
                found += _told(source, answer, now)
            self._say(source)
            found += source.silent(now)
        return tuple(sorted(found, key=lambda sample: sample.at))

    def _say(self, source: _Source) -> None:
        ahead = source.ahead or 0.0
        apart = abs(ahead) > MOST_APART
        if apart and not source.clock_said:
            text = "the clock of the machine %s is %.0f s %s ours: let all keep their time by NTP"
            which = "ahead of" if ahead > 0 else "behind"
            self._log.warning(text, source.node.name, abs(ahead), which)
        source.clock_said = apart
        if source.why and not source.said:
            self._log.warning("%s", source.sentence)
        elif source.said and not source.why:
            self._log.info("the machine %s tells again what its GPUs do", source.node.name)
        source.said = source.why


@dataclass(frozen=True, slots=True)
class _SamplerAnswer:
    """What became of a question: the text of the answer, or why there is none."""

    body: bytes = b""
    why: str = ""
    resting: str = ""
    """Why nobody was to expect one."""


class _Source:
    """The sampler of one node."""

    def __init__(
        self, node: Node, indices: Mapping[str, int], resting: Callable[[str], str]
    ) -> None:
        self.node = node
        self.indices = {device.uuid: indices[device.uuid] for device in node.devices}
        self.said = ""
        """What was said of its silence last; empty when nothing."""
        self.ahead: float | None = None
        """Seconds that its clock is ahead of ours; None when it has not told."""
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
        return f"the machine {name} does not tell what its GPUs do: {why}"

    def ask(self) -> None:
        """Ask, unless an answer is still to come or to be taken."""
        if self._done.is_set() and self._answer is None:
            self._done.clear()
            threading.Thread(target=self._fetch, name="node-sampler", daemon=True).start()

    def take(self, until: float) -> _SamplerAnswer | None:
        """The answer, if there is one; waited for only where the last one came."""
        return self.answer(0.0 if self._why else max(0.0, until - time.monotonic()))

    def answer(self, seconds: float) -> _SamplerAnswer | None:
        """The answer, if it comes in so many seconds."""
        if not self._done.wait(seconds):
            return None
        answer, self._answer = self._answer, None
        return answer

    def heard(self, said: Said | None, why: str, resting: str = "") -> None:
        """It told ``said``; or there is a reason why it tells nothing."""
        self._why, self.resting = why, resting
        if resting:
            self._heard_at = time.monotonic()  # once it is up it has a moment to begin
        if said is None:
            return
        self.of, self.last = said.of, said.last
        self._why = said.trouble
        if not said.trouble:
            self._heard_at = time.monotonic()
        if said.newest is not None:
            self._missing = frozenset(self.indices) - said.newest

    def silent(self, now: datetime) -> list[Sample]:
        """A sample of each device of which it does not tell."""
        why, missing = self.sentence, frozenset(self.indices)
        if not self.why and not self.resting:
            why, missing = f"the machine {self.node.name} does not list it", self._missing
        off = bool(self.resting)
        return [
            Sample(uuid=uuid, index=self.indices[uuid], at=now, silent=why, resting=off)
            for uuid in sorted(missing)
        ]

    # In the thread of a question.

    def _fetch(self) -> None:
        try:
            self._answer = _SamplerAnswer(body=self._asked())
        except (OSError, http.client.HTTPException, Nonsense) as error:
            self._close()
            self._answer = _SamplerAnswer(
                why=_in_words(error), resting=self._is_resting(self.node.name)
            )
        except Exception as error:  # whatever a node says, it costs its own devices only
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
                    raise Nonsense(f"it says more than {MOST_BYTES} bytes")
                if time.monotonic() > end:
                    raise Nonsense(f"it takes longer than {LONGEST:.0f} s to say anything")
        if response.status != 200:
            raise Nonsense(f"it says {response.status} where samples should be")
        return body

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _told(source: _Source, answer: _SamplerAnswer, now: datetime) -> tuple[Sample, ...]:
    if answer.why:
        source.heard(None, answer.why, answer.resting)
        return ()
    try:
        said = read(answer.body, now, source.indices)
    except Nonsense as error:
        source.heard(None, str(error))
        source.of = ""  # from the newest on: what made no sense once never will
        return ()
    source.heard(said, "")
    return said.samples


def _in_words(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not to be trusted ({error.verify_message})"
    if isinstance(error, ssl.SSLError) and "CERTIFICATE_EXPIRED" in str(error.reason):
        return "it holds our certificate for expired: make new ones, or set its clock right"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or error})"
    if isinstance(error, TimeoutError):
        return "nothing came in time"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__


def trouble_of(node: Node, now: datetime) -> str:
    """Ask a node's sampler once: why it tells nothing of a device, as the end of a sentence; empty
    when it tells of all. Blocks for seconds."""
    indices = {device.uuid: n for n, device in enumerate(node.devices)}
    source = _Source(node, indices, lambda name: "")
    source.ask()
    answer = source.answer(LONGEST)
    if answer is None:
        return "nothing came in time"
    if answer.why:
        return answer.why
    try:
        said = read(answer.body, now, source.indices)
    except Nonsense as error:
        return str(error)
    missing = [device.uuid for device in node.devices if device.uuid not in (said.newest or ())]
    return said.trouble or ("it does not list " + ", ".join(missing) if missing else "")


def seconds_ahead(node: Node) -> float | None:
    """Ask a node's sampler how far its clock is ahead of ours; None when it does not tell. Blocks
    for seconds."""
    source = _Source(node, {device.uuid: 0 for device in node.devices}, lambda name: "")
    source.ask()
    source.answer(LONGEST)
    return source.ahead


def _ahead(date: str) -> float | None:
    try:
        return (parsedate_to_datetime(date) - datetime.now(timezone.utc)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None  # it says none, or one that is none


# How a node is reached.


def _connection(node: Node) -> http.client.HTTPConnection:
    """A connection that is not open yet. Proxies of the environment are for the internet."""
    parts = urlsplit(node.sampler)
    if parts.scheme == "unix":
        return _SamplerConnection(parts.path)
    host = parts.hostname or ""
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port_of(parts), timeout=SECONDS)
    if node.tls is None:
        raise Nonsense("cluster.yaml names no certificates for it")
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


class SamplesNodes:
    """A source of the devices of a cluster that also tells what they do; see
    :class:`gpuspawner.devices.source.Sampled`."""

    cluster: Cluster
    _log: logging.Logger | Any

    if TYPE_CHECKING:

        def resting(self, machine: str) -> str: ...

    def sampler(self, processes_every: float = 60.0) -> NodesSampler:
        """What tells it. How often processes are listed, each node's own sampler knows."""
        return NodesSampler(self.cluster, self._log, self.resting)
