"""A gate before a Docker Engine: shut, whoever goes through it finds no engine behind it."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

_REQUEST = re.compile(rb"([A-Z]+ \S+) HTTP/1.1\r\n")


class Gate:
    """``with Gate(engine.url) as gate``: a hub with ``DOCKER_HOST=gate.url`` loses its engine
    by ``gate.shut()`` while the containers live on, and finds it again after ``gate.open()``.
    """

    late = 0.0
    """Seconds by which each answer of the engine comes late, as those of a busy one do."""

    def __init__(self, engine_url: str) -> None:
        self.asked: list[str] = []
        """Method and path of each request so far, such as ``GET /v1.44/info``."""
        self._engine = engine_url.removeprefix("unix://")
        # Not below pytest's folders: the path of such a socket must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="gate-"))
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._open_sockets: set[socket.socket] = set()

    @property
    def url(self) -> str:
        """For ``DOCKER_HOST``."""
        return f"unix://{self._folder}/docker.sock"

    def __enter__(self) -> Gate:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self) -> None:
        """Let calls through."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.url.removeprefix("unix://"))
        listener.listen(64)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def shut(self) -> None:
        """Refuse new connections and cut those that there are."""
        Path(self._folder, "docker.sock").unlink(missing_ok=True)
        if self._listener:
            _close(self._listener)
            self._listener = None
        with self._lock:
            for connection in self._open_sockets:
                _close(connection)
            self._open_sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                caller, _ = listener.accept()
                engine = socket.socket(socket.AF_UNIX)
                engine.connect(self._engine)
            except OSError:
                if self._listener is not listener:
                    return
                _close(caller)  # no engine behind an open gate
                continue
            with self._lock:
                if self._listener is not listener:  # it was shut since the call came
                    _close(caller)
                    _close(engine)
                    return
                self._open_sockets |= {caller, engine}
            for way in ((caller, engine, False), (engine, caller, True)):
                threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if answers:
                    time.sleep(self.late)
                elif request := _REQUEST.match(data):
                    self.asked.append(request[1].decode())
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        with self._lock:
            self._open_sockets.discard(source)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
