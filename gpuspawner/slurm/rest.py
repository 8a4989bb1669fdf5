"""Slurm through slurmrestd, for a hub on a machine without Slurm.

The same calls as through the programs (:mod:`gpuspawner.slurm.programs`), with OpenAPI v0.0.38 of
Slurm 22.05. A token of Slurm's identifies the caller; that of SlurmUser may also act for members.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import os
import shutil
import socket
import ssl
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

from ..core.config_files import read_text, shown
from ..core.errors import ConfigError, SlurmRefused, SlurmUnavailable
from .jobs import jobs_of
from .programs import SCRIPT, Holder, Slurm, is_away

PORT = 6820
MOST_BYTES = 10_000
"""The maximum size of a token file."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token that identifies us to Slurm. Only Slurm can verify it."""

    text: str
    user: str
    ends_at: datetime | None

    def has_ended(self) -> bool:
        """Return True if it has expired."""
        return self.ends_at is not None and self.ends_at <= datetime.now(timezone.utc)


def read_token(path: str) -> Token:
    """Read the token in the file at ``path``.

    Raises ConfigError for a file without a token, or that others can read.
    """
    if not path:
        raise ConfigError(
            "c.GPUSlurm.rest_url needs a token: write c.GPUSlurm.rest_token_file, the file with "
            "what scontrol token username=slurm says."
        )
    text = read_text(path, MOST_BYTES, "token").strip().removeprefix("SLURM_JWT=")
    if os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"Others can read the token {path}, and be anybody in Slurm with it: chmod 600 {path}"
        )
    try:
        return token_of(text)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        raise ConfigError(
            f"{path} holds no token of Slurm's. Write there what scontrol token username=slurm "
            "says."
        ) from None


def token_of(text: str) -> Token:
    """Parse a token. Raises ValueError and similar errors if it is invalid."""
    _, claims, _ = text.split(".")
    found = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    user, ends = str(found["sun"]), found.get("exp")
    if not (text.isascii() and text.isprintable() and user.isascii() and user.isprintable()):
        raise ValueError("no header of HTTP can hold it")
    at = None if ends is None else datetime.fromtimestamp(int(ends), timezone.utc)
    return Token(text, user, at)


def must_be_safe(url: str) -> None:
    """Raise ConfigError for an invalid address, or one that others could listen on."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    good = not parts.query and not parts.fragment and parts.username is None and port != 0
    if parts.scheme == "unix":
        good = good and parts.path.startswith("/") and not parts.netloc
    else:
        good = good and parts.scheme in ("http", "https") and parts.path in ("", "/") and bool(host)
    if not good or not url.isprintable():
        raise ConfigError(
            f"c.GPUSlurm.rest_url is {shown(url)}. Write https://HOST:6820, or for this machine "
            "http://127.0.0.1:6820 or unix:///PATH."
        )
    if parts.scheme == "http" and host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(
            f"c.GPUSlurm.rest_url is {shown(url)}: without TLS everybody on the network could read "
            "the token, and be anybody in Slurm with it. Write https://, with a proxy for TLS in "
            "front of slurmrestd."
        )


def connection_to(url: str, ca: str, seconds: float) -> http.client.HTTPConnection:
    """Return a connection that is not open yet, without the environment's proxies."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or PORT
    if parts.scheme == "unix":
        return _RestConnection(parts.path, seconds)
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=seconds)
    context = ssl.create_default_context(cafile=ca or None)
    return http.client.HTTPSConnection(host, port, timeout=seconds, context=context)


def in_words(error: Exception) -> str:
    """Describe what went wrong on the way."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not to be trusted ({error.verify_message})"
    if isinstance(error, TimeoutError):
        return "nothing came in time"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__


class _RestConnection(http.client.HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


PREFIX = "/slurm/v0.0.38/"

_ANSWERS = range(2000, 3000)
"""The error numbers of the controller's own refusals; any other error is no answer."""
_UNLIMITED = 2**32 - 2
"""From this many minutes on there is no limit."""
_ENVIRONMENT = {"LC_ALL": "C", "PATH": "/usr/local/bin:/usr/bin:/bin"}
"""slurmrestd requires an environment; none of our variables is passed on."""


@dataclass(frozen=True, slots=True)
class Rest:
    """A :class:`gpuspawner.slurm.programs.Controller` behind slurmrestd.

    Every call blocks: use a thread.
    """

    notes: ClassVar[str] = "comment"
    """v0.0.38 writes no other."""
    owner_writes_notes: ClassVar[bool] = True

    url: str
    """``https://``, or ``http://`` on this machine, or ``unix://``."""
    token_file: str
    """Read at each call: a new token needs no restart."""
    ca: str = ""
    """The CA of an ``https://`` address; empty for those that this machine trusts."""
    seconds: float = 20.0
    """How long slurmrestd may be silent."""
    programs: Slurm = field(default_factory=Slurm)
    """For what slurmrestd cannot do, if they are installed."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises ConfigError for an address on which others could listen, and for a token that others
        can read.
        """
        must_be_safe(self.url)
        if self.ca and not os.path.isfile(self.ca):
            raise ConfigError(f"c.GPUSlurm.rest_ca_file: there is no file {self.ca}.")
        self.token()

    # The controller.

    def jobs(self) -> str:
        return self._read("jobs")

    def nodes(self) -> str:
        return self._read("nodes")

    def longest(self, partition: str) -> float:
        found = json.loads(self._read(f"partition/{quote(partition, safe='')}"))
        try:
            limits = [each["max_time_limit"] for each in found["partitions"]]
            known = [limit for limit in limits if 0 <= int(limit) < _UNLIMITED]
        except (KeyError, TypeError, ValueError) as error:
            raise _strange(error) from None
        return min(known, default=math.inf)

    def submit(self, holder: Holder) -> None:
        found = self._tell("POST", "job/submit", job_submission(holder), user=holder.user)
        if holder.nice < 0:  # a job's owner cannot set it
            with suppress(SlurmRefused):  # and we may be no more than that
                self.change(_number(found), nice=holder.nice)

    def cancel(self, *jobs: int) -> None:
        _each(jobs, lambda job: self._tell("DELETE", f"job/{job}"))

    def cancel_named(self, name: str) -> None:
        self.cancel(*(job.id for job in jobs_of(self.jobs()) if job.name == name and job.lives))

    def change(
        self,
        job: int,
        *,
        minutes: int | None = None,
        priority: int | None = None,
        nice: int | None = None,
        excluded: Collection[str] | None = None,
    ) -> None:
        nodes = None if excluded is None else ",".join(excluded)
        # v0.0.38 requires priorities as text.
        rank = None if priority is None else str(priority)
        told = {"time_limit": minutes, "priority": rank, "nice": nice, "exclude_nodes": nodes}
        self._change(job, {key: value for key, value in told.items() if value is not None})

    def hold(self, jobs: Collection[int], note: str | None = None) -> None:
        what: dict[str, object] = (
            {"hold": True} if note is None else {"hold": True, "comment": note}
        )
        _each(sorted(jobs), lambda job: self._change(job, what))

    def note(self, jobs: Collection[int], note: str) -> None:
        _each(sorted(jobs), lambda job: self._change(job, {"comment": note}))

    def release(self, jobs: Collection[int]) -> None:
        _each(sorted(jobs), lambda job: self._change(job, {"hold": False}))

    def close(self, node: str, reason: str) -> None:
        self._program(f"NodeName={node} State=DRAIN Reason='why'").close(node, reason)

    def reopen(self, node: str) -> None:
        self._program(f"NodeName={node} State=RESUME").reopen(node)

    # Other calls.

    def ping(self, user: str = "") -> tuple[str, bool]:
        """Return Slurm's version, and True if a controller answers.

        For a user for whom we act, or for us. Raises SlurmUnavailable.
        """
        found = json.loads(self._read("ping", user=user))
        try:
            up = any(each["ping"] == "UP" for each in found["pings"])
            return str(found["meta"]["Slurm"]["release"]), up
        except (KeyError, TypeError) as error:
            raise _strange(error) from None

    def token(self) -> Token:
        """Return our token.

        Raises ConfigError for a file without a token, or that others can read.
        """
        return read_token(self.token_file)

    # Helpers.

    def _program(self, words: str) -> Slurm:
        """Return Slurm's programs, if they are installed. Raises SlurmRefused."""
        if shutil.which("scontrol", path=self.programs.folder or None) is None:
            raise SlurmRefused(
                why="slurmrestd of Slurm 22.05 cannot close or open a machine. On the controller: "
                f"scontrol update {words}"
            )
        return self.programs

    def _change(self, job: int, what: Mapping[str, object]) -> None:
        self._tell("POST", f"job/{job}", what)

    def _read(self, path: str, user: str = "") -> str:
        """Return slurmrestd's complete answer to a query. Raises SlurmUnavailable."""
        status, text = self._ask("GET", path, None, user)
        _, errors = self._parsed(status, text)
        if errors or status != http.client.OK:
            raise SlurmUnavailable(why=self._unanswered(errors))
        return text

    def _tell(
        self, method: str, path: str, what: Mapping[str, object] | None = None, user: str = ""
    ) -> dict[str, Any]:
        status, text = self._ask(method, path, what, user)
        found, errors = self._parsed(status, text)
        if not errors and status == http.client.OK:
            return found
        said = "; ".join(dict.fromkeys(_said(each) for each in errors))
        if any(_code(each) in _ANSWERS for each in errors) and not is_away(said):
            raise SlurmRefused(why=said[:300].rstrip("."))
        raise SlurmUnavailable(why=self._unanswered(errors))

    def _parsed(self, status: int, text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return an answer and the errors in it."""
        if status == http.client.UNAUTHORIZED:
            raise SlurmUnavailable(
                why="slurmrestd takes no tokens: start it with SLURM_JWT=daemon in its environment"
            )
        if status == http.client.NOT_FOUND:
            raise SlurmUnavailable(
                why=f"{self.url} has no {PREFIX}: it is no slurmrestd of Slurm 22.05"
            )
        try:
            found = json.loads(text)
            return found, [dict(each) for each in found.get("errors") or ()]
        except (ValueError, TypeError, AttributeError) as error:
            raise _strange(error) from None

    def _ask(
        self, method: str, path: str, what: Mapping[str, object] | None, user: str
    ) -> tuple[int, str]:
        try:
            token = self.token()
        except ConfigError as error:
            raise SlurmUnavailable(why=error.message.rstrip(".")) from None
        if token.has_ended():
            raise SlurmUnavailable(
                why=f"the token in {self.token_file} ended on {token.ends_at:%Y-%m-%d at %H:%M} "
                f"UTC. Put a new one there: scontrol token username={token.user}"
            )
        headers = {
            "X-SLURM-USER-NAME": user or token.user,
            "X-SLURM-USER-TOKEN": token.text,
            "Content-Type": "application/json",
            "Accept": "application/json",
        }
        body = None if what is None else json.dumps(what)
        try:
            with closing(connection_to(self.url, self.ca, self.seconds)) as connection:
                connection.request(method, PREFIX + path, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise SlurmUnavailable(why=f"slurmrestd at {self.url}: {in_words(error)}") from None

    def _unanswered(self, errors: Iterable[Mapping[str, Any]]) -> str:
        """Explain a missing answer: the controller is away, or it refuses the token."""
        said = "; ".join(dict.fromkeys(_said(each) for each in errors))
        why = f"the controller does not answer slurmrestd, or not to the token in {self.token_file}"
        return f"{why} ({said[:200].rstrip('.')})" if said else why


def job_submission(holder: Holder) -> dict[str, Any]:
    """Return slurmrestd's description of a job. Pure."""
    job: dict[str, Any] = {
        "name": holder.name,
        "comment": holder.comment,
        "partition": holder.partition,
        "nodes": [1, 1],
        "tasks": 1,
        "cpus_per_task": holder.cpus,
        "memory_per_node": holder.megabytes,
        "gres": holder.gres,
        # "requeue": false is ignored by 22.05.8.
        "no_requeue": True,
        "standard_output": "/dev/null",
        "standard_error": "/dev/null",
        "current_working_directory": "/",
        "environment": _ENVIRONMENT,
    }
    if holder.minutes is not None:
        job["time_limit"] = holder.minutes
    if holder.excluded:
        job["exclude_nodes"] = ",".join(holder.excluded)
    if holder.nice > 0:
        job["nice"] = holder.nice
    if holder.account:
        job["account"] = holder.account
    return {"script": SCRIPT, "job": job}


def _each(jobs: Iterable[int], tell: Callable[[int], object]) -> None:
    """Tell Slurm about each job; a refusal is raised after the others were told."""
    refused: SlurmRefused | None = None
    for job in jobs:
        try:
            tell(job)
        except SlurmRefused as error:
            refused = refused or error
    if refused is not None:
        raise refused


def _number(found: Mapping[str, Any]) -> int:
    try:
        return int(found["job_id"])
    except (KeyError, TypeError, ValueError) as error:
        raise _strange(error) from None


def _code(error: Mapping[str, Any]) -> int:
    """Return the number of an error, which has three names in v0.0.38."""
    found = (error.get(key) for key in ("error_code", "error_number", "errno"))
    return next((number for number in found if isinstance(number, int)), 0)


def _said(error: Mapping[str, Any]) -> str:
    return str(error.get("error") or error.get("description") or "no reason given")


def _strange(error: Exception) -> SlurmUnavailable:
    why = f"slurmrestd did not answer as Slurm 22.05 does ({error!r:.80})"
    return SlurmUnavailable(why=why)
