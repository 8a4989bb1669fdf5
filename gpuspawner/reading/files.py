"""A file read in bounded time and memory."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError


def read_bytes(path: str | Path, most: int) -> bytes:
    """The first bytes of a file, or of what takes its place; waits for nobody. Raises OSError."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=opener) as file:
        return file.read(most) or b""


def read_text(path: str | Path, most: int, what: str) -> str:
    """The text of the admin's file, called ``what``, such as "catalog". Raises ConfigError for one
    that cannot be read, is no UTF-8, or has more than ``most`` bytes."""
    name = os.fspath(path)
    try:
        data = read_bytes(name, most + 1)
    except OSError as error:
        raise ConfigError(
            f"The {what} {name} cannot be read: {error.strerror}. Check the path and who may read "
            "it."
        ) from None
    if len(data) > most:
        raise ConfigError(f"{name} has more than {most} bytes: this is no {what}.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: this is not text in UTF-8. Save it as UTF-8.") from None
