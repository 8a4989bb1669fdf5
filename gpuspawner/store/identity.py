"""Which hub this is: a random id in a small file beside the hub's cookie secret.

The file goes where the hub goes. A hub that crashed and starts again is the same hub; one that was
installed anew beside the same database is another.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from traitlets.config import Config

from ..errors import ConfigError

NAME = "gpuspawner_hub_id"
_ID = re.compile(r"[0-9a-f]{16}")


def identity_file(config: Config) -> Path:
    """The absolute path of the file for a hub of this configuration, run in this directory."""
    secret = config.get("JupyterHub", {}).get("cookie_secret_file", "jupyterhub_cookie_secret")
    return Path(os.path.abspath(str(secret))).parent / NAME


def read_identity(path: Path) -> str:
    """The id in the file; empty when there is none yet. Raises ConfigError or OSError."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    if not _ID.fullmatch(text):
        what = f"{path} does not hold a hub's id. Put it back from a backup, or remove it"
        raise ConfigError(what=what)
    return text


def make_identity(path: Path) -> str:
    """The id in the file, which is made if it is not there: for its owner only.

    Two processes that make it at once get the same. Raises ConfigError or OSError.
    """
    if found := read_identity(path):
        return found
    part = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.write(descriptor, f"{secrets.token_hex(8)}\n".encode())
        os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(part, path)  # whoever comes first wins, with a file that is whole
    finally:
        os.close(descriptor)
        part.unlink()
    return read_identity(path)
