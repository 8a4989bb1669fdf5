"""A server that says 200 to everything, in a process of its own, as JupyterHub expects it of a
server that has just come up. ``answering.py VERSION`` prints its port first."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from threading import Thread


@contextlib.contextmanager
def answering_server() -> Iterator[str]:
    """The address of such a server, which ends with the block."""
    command = [sys.executable, __file__, version("jupyterhub")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def serve(listening: socket.socket, hub_version: str) -> None:
    """Answer one request of each connection, for ever."""
    head = f"HTTP/1.1 200 OK\r\nX-JupyterHub-Version: {hub_version}\r\nContent-Length: 2\r\n"
    answer = f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n{{}}".encode()
    while True:
        connection, _ = listening.accept()
        Thread(target=_answer, args=(connection, answer), daemon=True).start()


def _answer(connection: socket.socket, answer: bytes) -> None:
    with connection:
        connection.recv(65536)
        connection.sendall(answer)


if __name__ == "__main__":
    here = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(here.getsockname()[1], flush=True)
    serve(here, sys.argv[1])
