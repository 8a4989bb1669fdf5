"""Files beside the catalog: logos, lists of packages, notebooks and changes.

A catalog names them by paths relative to its own folder. A file is rejected if it is outside of
this folder (by ``..`` or a symbolic link), is not a regular file, or is larger than the maximum.
"""

from __future__ import annotations

import stat
from pathlib import Path

from ..core.config_files import read_bytes, shown
from .value_kinds import plain_path

MOST_BYTES = {
    "logo": 200_000,
    "packages": 1_000_000,
    "sample_notebook": 2_000_000,
    "changes": 200_000,
}
"""Maximum size of a file in bytes, by the key that names it."""


def find(folder: Path, key: str, name: str) -> Path:
    """Return the path of a file beside a catalog. Raises ValueError with the end of a sentence."""
    try:
        inner = folder.resolve(strict=True)
        path = (inner / plain_path(name)).resolve(strict=True)
        found = path.stat()
    except (OSError, RuntimeError) as error:  # a loop of links can be a RuntimeError
        why = error.strerror if isinstance(error, OSError) else "its links form a loop"
        raise ValueError(
            f"names {shown(name)}, which cannot be read beside the catalog: {why}. Put the file "
            "there, or leave the key out."
        ) from None
    if not path.is_relative_to(inner):
        raise ValueError(
            f"names {shown(name)}, a link that leads out of the catalog's folder. Put the file "
            "itself there."
        )
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"names {shown(name)}, which is not a regular file. Name one that is.")
    most = MOST_BYTES[key]
    if found.st_size > most:
        raise ValueError(
            f"names {shown(name)}, a file of {found.st_size} bytes; {most} are the most. Make it "
            "smaller."
        )
    return path


def read(folder: Path, key: str, name: str) -> bytes:
    """Return a file's content. Raises ValueError as :func:`find` does, or if it cannot be read."""
    path = find(folder, key, name)
    try:
        return read_bytes(path, MOST_BYTES[key])
    except OSError as error:
        raise ValueError(f"names {shown(name)}, which cannot be read: {error.strerror}.") from None


def read_text(folder: Path, key: str, name: str) -> str:
    """Return a file's content as text. Raises ValueError as :func:`read` does, or if not UTF-8."""
    try:
        return read(folder, key, name).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(
            f"names {shown(name)}, which is not text in UTF-8. Save it as UTF-8."
        ) from None
