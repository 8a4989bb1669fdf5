"""Files that the command writes and an admin may edit: what would change, and nothing lost."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

_HEADER = (
    "# Written by gpuspawner slurm config, which replaces it when it is run again. What somebody\n"
    "# edited by hand it replaces with --force only. {digest}\n"
)
_DIGEST = re.compile(r"\A#.*\n#.* ([0-9a-f]{64})\n")
PRIVATE = ("slurmdbd.conf",)
"""Files that nobody else may read: slurmdbd insists."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A file as it would be, beside what is there."""

    path: Path
    text: str
    before: str | None
    """None when there is none."""

    @property
    def changed(self) -> bool:
        return self.text != self.before

    @property
    def edited(self) -> bool:
        """Whether what is there was not left as a run of the command wrote it."""
        return self.before is not None and not _is_ours(self.before)

    def difference(self) -> str:
        """What would change, as ``diff -u`` shows it."""
        lines = difflib.unified_diff(
            _body(self.before or "").splitlines(),
            _body(self.text).splitlines(),
            str(self.path) if self.before is not None else "/dev/null",
            str(self.path),
            lineterm="",
        )
        return "\n".join(lines)


def drafts(folder: Path, bodies: Mapping[str, str]) -> list[Draft]:
    """The files of these names, beside what is in the folder. Raises ConfigError."""
    found = []
    for name, body in bodies.items():
        path = folder / name
        try:
            before = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            before = None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
        found.append(Draft(path, stamped(body), before))
    return found


def stamped(body: str) -> str:
    """The text below a header that tells whether somebody edited it since."""
    return _HEADER.format(digest=_digest(body)) + "\n" + body


def write(changed: Sequence[Draft]) -> None:
    """Put the files in their places, each whole or not at all. Raises ConfigError."""
    for draft in changed:
        folder = draft.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=folder, prefix=f".{draft.path.name}.")
            try:
                with open(number, "w", encoding="utf-8") as file:
                    file.write(draft.text)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(name, 0o600 if draft.path.name in PRIVATE else 0o644)
                os.replace(name, draft.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            raise ConfigError(
                f"{draft.path} cannot be written: {error.strerror}. Name another folder with --out."
            ) from None


def _body(text: str) -> str:
    """Without our header."""
    found = _DIGEST.match(text)
    return text[found.end() + 1 :] if found else text


def _is_ours(text: str) -> bool:
    found = _DIGEST.match(text)
    return found is not None and _digest(_body(text)) == found[1]


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
