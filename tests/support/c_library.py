"""Shared libraries of ours, compiled where a test needs one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def build(directory: Path, name: str, source: Path) -> Path:
    """Compile ``source`` into the library ``name`` in ``directory`` and return its path.

    Needs a C compiler: ``$CC``, ``cc``, ``gcc``, ``clang``, or the package ``ziglang``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / name
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-pthread", f"-Wl,-soname,{name}"]
    new = directory / f"{name}.{os.getpid()}"
    command = [*_compiler(), *flags, "-o", str(new), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    new.replace(library)  # at once: another process may use what is there, or compile it as well
    return library


def _compiler() -> list[str]:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    zig = [sys.executable, "-m", "ziglang", "cc"]
    if subprocess.run([*zig, "--version"], capture_output=True).returncode == 0:
        return zig
    raise RuntimeError("The tests need a C compiler: install gcc, or pip install ziglang.")
