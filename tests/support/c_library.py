"""Shared libraries of ours, compiled where a test needs one."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.processes import kept_dir


def compiled(name: str, source: Path) -> Path:
    """Compile ``source`` to the library ``name``, once on a machine, and return where it is kept.

    Needs a C compiler: ``$CC``, ``cc``, ``gcc``, ``clang``, or the package ``ziglang``.
    """
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-pthread", f"-Wl,-soname,{name}"]
    made_of = hashlib.sha256(source.read_bytes() + repr(flags).encode()).hexdigest()
    kept = kept_dir() / f"{name}-{made_of[:16]}"
    if not kept.exists():
        new = kept.with_name(f"{kept.name}.{os.getpid()}")
        command = [*_compiler(), *flags, "-o", str(new), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        new.replace(kept)  # at once: another process may use what is there, or compile it as well
    return kept


def build(directory: Path, name: str, source: Path) -> Path:
    """Put the library ``name``, compiled from ``source``, into ``directory``: return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    new = directory / f"{name}.{os.getpid()}"
    shutil.copy(compiled(name, source), new)
    return new.replace(directory / name)


def _compiler() -> list[str]:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    zig = [sys.executable, "-m", "ziglang", "cc"]
    if subprocess.run([*zig, "--version"], capture_output=True).returncode == 0:
        return zig
    raise RuntimeError("The tests need a C compiler: install gcc, or pip install ziglang.")
