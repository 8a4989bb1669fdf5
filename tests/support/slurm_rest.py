"""slurmrestd beside a tests' cluster: a user of its own, tokens that Slurm signs, and what can be
between it and a hub."""

from __future__ import annotations

import signal
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from gpuspawner.core.errors import SlurmUnavailable
from gpuspawner.slurm.rest import Rest
from tests.support.processes import free_port
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_daemons import Daemon, as_user, folder_of, program


class SlurmRest:
    """``with SlurmRest(cluster, folder) as rest``: one that listens on this machine only."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.token_file = folder / "slurm.token"
        home = folder_of("nobody", cluster.directory / "rest")
        self.socket = home / "socket"
        variables = [f"SLURM_CONF={cluster.conf}", "SLURM_JWT=daemon", "LC_ALL=C"]
        words = [program("slurmrestd"), "-a", "rest_auth/jwt", "-s", "openapi/v0.0.38"]
        listens = [f"127.0.0.1:{self.port}", f"unix:{self.socket}"]
        command = as_user("nobody", ["env", *variables, *words, *listens])
        self._daemon = Daemon("slurmrestd", command, cluster.directory / "log/slurmrestd")

    def __enter__(self) -> SlurmRest:
        self.write_token()
        self.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._daemon.end()

    def start(self) -> None:
        """Also after :meth:`kill`."""
        self.socket.unlink(missing_ok=True)
        self._daemon.start(self._answers)

    def mend(self) -> None:
        """It runs."""
        if not self._daemon.running:
            self.start()

    def kill(self) -> None:
        self._daemon.end(signal.SIGKILL)

    def token(self, user: str = "slurm", seconds: int = 3600) -> str:
        """As ``scontrol token`` prints it."""
        return self.cluster.run("scontrol", "token", f"username={user}", f"lifespan={seconds}")

    def write_token(self, text: str = "") -> None:
        """Put a token into the file: this one, or one of SlurmUser."""
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(text or self.token())

    def controller(self, url: str = "", seconds: float = 60) -> Rest:
        """What a hub has that asks it, or something in its place."""
        return Rest(url or self.url, str(self.token_file), seconds=seconds)

    def _answers(self) -> bool:
        with suppress(SlurmUnavailable):
            return self.controller().ping()[1]
        return False


class Cable:
    """A cable to slurmrestd: ``with Cable(port) as url``.

    ``cut``: where it is cut at the first submit: ``before`` anything of it arrives, or ``after``
    all of it arrived, and the answer does not. ``tls``: a folder with the certificates of a proxy
    at this end.
    """

    def __init__(self, port: int, cut: str = "", tls: Path | None = None) -> None:
        self._port = port
        self._cut = cut
        self._tls = tls
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> str:
        threading.Thread(target=self._serve, daemon=True).start()
        scheme = "https" if self._tls else "http"
        return f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            with caller, suppress(OSError):  # who does not trust us, or leaves
                self._pass_on(self._opened(caller))

    def _opened(self, caller: socket.socket) -> socket.socket:
        if self._tls is None:
            return caller
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._tls / "server-cert.pem", self._tls / "server-key.pem")
        return context.wrap_socket(caller, server_side=True)

    def _pass_on(self, caller: socket.socket) -> None:
        asked = _message(caller)
        is_cut = bool(self._cut) and b"/job/submit" in asked and not self.cuts
        self.cuts += is_cut
        if is_cut and self._cut == "before":
            caller.close()
            return
        with socket.create_connection(("127.0.0.1", self._port)) as there:
            there.sendall(asked)
            answer = _message(there)
        if not is_cut:
            caller.sendall(answer)
        caller.close()


def _message(end: socket.socket) -> bytes:
    """A request or an answer, whole."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += _part(end)
    head, _, body = found.partition(b"\r\n\r\n")
    lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    wanted = int(lengths[0].split(b":")[1]) if lengths else 0
    while len(body) < wanted:
        body += _part(end)
    return head + b"\r\n\r\n" + body


def _part(end: socket.socket) -> bytes:
    """Raises ConnectionError when there is no more, instead of waiting for it for ever."""
    if not (found := end.recv(65536)):
        raise ConnectionError("it left in the middle")
    return found
