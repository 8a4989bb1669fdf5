"""A private PostgreSQL server on a free port of 127.0.0.1, gone at the end of the run."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa

from tests.support import parts, processes
from tests.support.brokers import make_tables
from tests.support.processes import LIVE, alive, end_process, free_port, wait_for

PREFIX = "gpuspawner-pg-"
MEMORY = Path("/dev/shm")
NEEDED = 4 * 2**30
"""Bytes that must be free in memory for databases to lie there, where making one is quick."""

SERVERS = "/usr/lib/postgresql"
"""Folder of servers, each in one named like its version. ``GPUSPAWNER_TEST_POSTGRES`` names another
folder; then no other server will do."""

STALE = 600
"""Seconds after which a folder without a server belongs to a run that was killed."""


class PrivatePostgres:
    """``with PrivatePostgres() as server``: then ``server.fresh_database()`` for a URL.

    PostgreSQL refuses to run as root; then it runs as Debian's ``postgres``. ``durable``: what
    is committed is on the disk, as at a real site.
    """

    def __init__(self, *, durable: bool = False) -> None:
        self.name = "postgresql"
        self.durable = durable
        self.port = 0
        self.around: Callable[[list[str]], list[str]] = lambda command: command
        """Puts the server into something, such as another time, from the next start on."""
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._migrated = ""

    def __enter__(self) -> PrivatePostgres:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server; after :meth:`halt`, on the same port with the same databases."""
        parts.require("postgres")
        if not self.port:
            self._initialise()
        command = [
            str(self._programs / "postgres"),
            *("-D", str(self.directory / "data"), "-p", str(self.port)),
            *(
                "-c",
                "listen_addresses=127.0.0.1",
                "-c",
                f"unix_socket_directories={self.directory}",
            ),
            # A test's data need not outlive the machine's power. Killed servers still recover.
            *("-c", f"fsync={'on' if self.durable else 'off'}", "-c", "max_connections=200"),
        ]
        with open(self.directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                self._as_user(self.around(processes.die_with_us(command))),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.directory,
            )
        wait_for(self._answers, "PostgreSQL to answer", timeout=30)
        if self not in LIVE:
            LIVE.append(self)
        self._require_version()

    def halt(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop answering; the databases stay for the next :meth:`start`.

        SIGINT is PostgreSQL's "fast" way, which waits for no client.
        """
        if self._process:
            self._process.send_signal(how)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                end_process(self._process.pid)
            self._process = None

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """The server does not answer within the block."""
        self.halt()
        try:
            yield
        finally:
            self.start()

    def stop(self) -> None:
        """End the server and remove its files."""
        if self in LIVE:
            LIVE.remove(self)
        self.halt(signal.SIGQUIT)  # at once, without writing down what is thrown away anyway
        if self.port:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.port = 0

    def fresh_database(self, place: Path | None = None) -> str:
        """Create an empty database and return its SQLAlchemy URL; ``place``: an empty folder of
        the server's user that its tables lie in."""
        if place is None:
            return self._url(self._create())
        name = f"place_{next(self._numbers)}"
        self._execute(f"CREATE TABLESPACE {name} LOCATION '{place}'")
        return self._url(self._create(f"TABLESPACE {name}"))

    def ascii_database(self) -> str:
        """Create an empty database without an encoding, as in a cluster made under LC_ALL=C."""
        how = "ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        return self._url(self._create(how))

    def migrated_database(self) -> str:
        """The same as it is after all migrations, which are done once and then copied."""
        if not self._migrated:
            name = self._create()
            make_tables(self._url(name))
            self.wait_unused(self._url(name))
            self._migrated = name
        return self._url(self._create(f'TEMPLATE "{self._migrated}"'))

    def wait_unused(self, url: str) -> None:
        """Wait for the end of connections that were closed: the server goes on for a moment."""
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
        name = sa.make_url(url).database

        def is_unused() -> bool:
            with contextlib.closing(self._connect()) as connection, connection.cursor() as cursor:
                cursor.execute(query, [name])
                return cursor.fetchone() == (0,)

        wait_for(is_unused, f"nobody to use {name}")

    def replace(self, url: str, origin: str) -> None:
        """Put a copy of another database into the place of one. Nobody is connected to them."""
        name, template = (each.rpartition("/")[2] for each in (url, origin))
        self.wait_unused(url)
        self.wait_unused(origin)
        self._execute(f'DROP DATABASE "{name}"')
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')

    def log_text(self) -> str:
        """The server's last lines."""
        return (self.directory / "log").read_text(errors="replace")[-4000:]

    def drop(self, url: str) -> None:
        """Give back the room of a database in memory. On a disk it stays: that is quicker."""
        if self.directory.parent == MEMORY:
            self._execute(f'DROP DATABASE IF EXISTS "{url.rpartition("/")[2]}" WITH (FORCE)')

    def _create(self, how: str = "") -> str:
        name = f"test_{os.getpid()}_{next(self._numbers)}"
        self._execute(f'CREATE DATABASE "{name}" {how}')
        return name

    def _execute(self, statement: str) -> None:
        """Outside of any transaction."""
        connection = self._connect()
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement)
        connection.close()

    def _url(self, name: str) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{name}"

    def _initialise(self) -> None:
        self.port = free_port()
        self._migrated = ""
        # Not below pytest's own folders: those are closed to the user that the server runs as.
        self.directory = Path(
            tempfile.mkdtemp(prefix=PREFIX, dir=None if self.durable else _memory())
        )
        if os.geteuid() == 0:
            shutil.chown(self.directory, "postgres", "postgres")
        command = [str(self._programs / "initdb"), "-D", str(self.directory / "data")]
        command += ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        processes.run(self._as_user(command), cwd=self.directory)

    @property
    def _programs(self) -> Path:
        """The newest server that Debian installed, or the one on PATH."""
        servers = os.environ.get("GPUSPAWNER_TEST_POSTGRES")
        versions = Path(servers or SERVERS).glob("*/bin/postgres")
        newest = sorted(versions, key=lambda p: float(p.parts[-3]))
        if newest:
            return newest[-1].parent
        if not servers and (on_path := shutil.which("postgres")):
            return Path(on_path).resolve().parent
        where = f"is not in {servers}" if servers else "is not installed: run scripts/test_parts.sh"
        raise RuntimeError(f"PostgreSQL's server {where}")

    def _require_version(self) -> None:
        """Raise AssertionError if the server's version is not that of its folder."""
        with contextlib.closing(self._connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT version()")
            (says,) = cursor.fetchone() or ("",)
        wanted = self._programs.parent.name
        if wanted.isdigit():  # not where it is the one on PATH
            assert says.startswith(f"PostgreSQL {wanted}."), f"{self._programs} is {says}"

    def _as_user(self, command: list[str]) -> list[str]:
        if os.geteuid() != 0:
            return command
        user = pwd.getpwnam("postgres")
        who = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        return ["setpriv", *who, "--", *command]

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname="postgres", connect_timeout=60
        )

    def seconds_ahead(self) -> float:
        """By how much the server's clock is ahead of ours."""
        with contextlib.closing(self._connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT extract(epoch FROM clock_timestamp())")
            (its,) = cursor.fetchone() or (0,)
        return float(its) - time.time()

    def _answers(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"PostgreSQL ended at once:\n{self.log_text()}")
        try:
            self._connect().close()
        except psycopg.OperationalError:
            return False
        return True


def _memory() -> Path | None:
    """Where files lie in memory, if there is room; what killed runs left there is removed."""
    if not MEMORY.is_dir():
        return None
    for left in MEMORY.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if time.time() - left.stat().st_mtime > STALE and not _serves(left):
                shutil.rmtree(left)
    return MEMORY if shutil.disk_usage(MEMORY).free > NEEDED else None


def _serves(directory: Path) -> bool:
    file = directory / "data" / "postmaster.pid"
    return file.exists() and alive(int(file.read_text().splitlines()[0]))
