"""The standard input and output of a container, from outside."""

from __future__ import annotations

import contextlib
import select
import time
from typing import Any

HEAD = 8
"""Docker puts so many bytes before each piece: which stream it is of, and how long it is."""


class NotWarm(Exception):
    """A warm container, or this machine, does not do what it should: in words, for the admin."""


class Channel:
    """What ``attach_socket`` gave, in lines. The other end's standard input ends with it."""

    def __init__(self, attached: Any) -> None:
        self._attached = attached
        self._socket = getattr(attached, "_sock", attached)
        self._pieces = b""
        self._text = b""

    def say(self, text: str) -> None:
        """Send one line. Raises OSError."""
        self._socket.sendall(text.encode() + b"\n")

    def hear(self, *wanted: str, timeout: float) -> str:
        """The first line that begins with one of these. Raises NotWarm when none comes in time."""
        until = time.monotonic() + timeout
        while True:
            while b"\n" in self._text:
                line, _, self._text = self._text.partition(b"\n")
                said = line.decode(errors="replace").strip()
                if said.startswith(wanted):
                    return said
            if not self._more(until - time.monotonic()):
                raise NotWarm(f"it did not say {wanted[0]!r} within {timeout:.0f} seconds")

    def quiet(self) -> bool:
        """Whether the other end is there, and has nothing to say."""
        watched = select.poll()
        try:
            watched.register(self._socket, select.POLLIN)
            return not watched.poll(0)
        except (OSError, ValueError):  # closed on this side
            return False

    def close(self) -> None:
        """The other end's standard input ends."""
        with contextlib.suppress(OSError):
            self._socket.close()
            self._attached.close()

    def _more(self, seconds: float) -> bool:
        """Read on. False when nothing comes in time. Raises NotWarm at the end, and OSError."""
        if seconds <= 0:
            return False
        self._socket.settimeout(seconds)
        try:
            part = self._socket.recv(65536)
        except TimeoutError:
            return False
        if not part:
            raise NotWarm("it ended")
        self._pieces += part
        while len(self._pieces) >= HEAD:
            end = HEAD + int.from_bytes(self._pieces[4:HEAD], "big")
            if len(self._pieces) < end:
                break
            self._text += self._pieces[HEAD:end]
            self._pieces = self._pieces[end:]
        return True
