"""The secret that signs the service's cookies, kept in a file that nobody else can read.

With a new one at each start, every form that is open in a browser would be refused after it.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError

NAME = "gpuspawner_cookie_secret"
BYTES = 32


def secret_file(database_url: str) -> Path:
    """Return where the secret lies: beside an SQLite database, else in the working directory."""
    try:
        url = sa.make_url(database_url)
    except ArgumentError:
        return Path(NAME)
    name = url.database or ""
    if url.get_backend_name() != "sqlite" or not name or name.startswith((":memory:", "file:")):
        return Path(NAME)
    return Path(name).absolute().with_name(NAME)


def read_cookie_secret(database_url: str, log: logging.Logger) -> bytes:
    """Return the kept secret, or a new one that is kept from now on. Blocks.

    A file that others can read, or that is not whole, is replaced. Where no file can be written
    the secret lasts until the service ends.
    """
    path = secret_file(database_url)
    try:
        return _kept(path, log) or _make(path)
    except OSError as error:
        message = "%s cannot be used (%s): forms that are open at a restart will be refused"
        log.warning(message, path, error.strerror)
        return secrets.token_bytes(BYTES)


def _kept(path: Path, log: logging.Logger) -> bytes:
    """Return the secret in the file; empty when there is none to use."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    with open(file, "rb") as opened:
        seen = os.fstat(file)
        if seen.st_mode & 0o077 or seen.st_uid != os.geteuid():
            log.warning("Others could read %s: a new secret takes its place", path)
            return b""
        found = opened.read(BYTES + 1)
    return found if len(found) == BYTES else b""


def _make(path: Path) -> bytes:
    secret = secrets.token_bytes(BYTES)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(file, "wb") as opened:
        opened.write(secret)
        opened.flush()
        os.fsync(file)
    new.replace(path)
    return secret
