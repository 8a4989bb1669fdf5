"""Where slurmrestd is, and the token by which it knows us."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from datetime import datetime, timezone
from urllib.parse import urlsplit

from ..errors import ConfigError
from ..reading import shown
from ..reading.files import read_text

PORT = 6820
MOST_BYTES = 10_000
"""The largest file that is read as a token."""


@dataclass(frozen=True, slots=True)
class Token:
    """What proves to Slurm who we are. Only Slurm can tell whether it is true."""

    text: str
    user: str
    ends_at: datetime | None

    def has_ended(self) -> bool:
        """Whether its time is over."""
        return self.ends_at is not None and self.ends_at <= datetime.now(timezone.utc)


def read_token(path: str) -> Token:
    """The token in the file at ``path``. Raises ConfigError for a file that holds none, or that
    others can read."""
    if not path:
        raise ConfigError(
            "c.Broker.slurm_rest needs a token: write c.Broker.slurm_rest_token, the file with "
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
    """What a token says of itself. Raises ValueError and the like for what is none."""
    _, claims, _ = text.split(".")
    found = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    user, ends = str(found["sun"]), found.get("exp")
    if not (text.isascii() and text.isprintable() and user.isascii() and user.isprintable()):
        raise ValueError("no header of HTTP can hold it")
    at = None if ends is None else datetime.fromtimestamp(int(ends), timezone.utc)
    return Token(text, user, at)


def must_be_safe(url: str) -> None:
    """Raises ConfigError for an address on which others could read along, or that is none."""
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
            f"c.Broker.slurm_rest is {shown(url)}. Write https://HOST:6820, or for this machine "
            "http://127.0.0.1:6820 or unix:///PATH."
        )
    if parts.scheme == "http" and host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(
            f"c.Broker.slurm_rest is {shown(url)}: without TLS everybody on the network could read "
            "the token, and be anybody in Slurm with it. Write https://, with a proxy for TLS in "
            "front of slurmrestd."
        )


def connection_to(url: str, ca: str, seconds: float) -> http.client.HTTPConnection:
    """A connection that is not open yet. Proxies of the environment are for the internet."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or PORT
    if parts.scheme == "unix":
        return _UnixConnection(parts.path, seconds)
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=seconds)
    context = ssl.create_default_context(cafile=ca or None)
    return http.client.HTTPSConnection(host, port, timeout=seconds, context=context)


def in_words(error: Exception) -> str:
    """What went wrong on the way."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not to be trusted ({error.verify_message})"
    if isinstance(error, TimeoutError):
        return "nothing came in time"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
