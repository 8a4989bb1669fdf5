"""Programs whose clock is not this machine's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

LIBRARY = "faketime/libfaketimeMT.so.1"


def apart(seconds: int) -> Callable[[list[str]], list[str]]:
    """Puts a command into a time that is so many seconds ahead of ours, and goes as fast.

    Programs in Go ask the kernel themselves and keep our time; and a thread of Python's that waits
    for an event with a timeout would wait for longer.
    """
    found = [str(path) for path in Path("/usr/lib").glob(f"*/{LIBRARY}")]
    if not found:
        raise RuntimeError("faketime is not installed: run scripts/test_parts.sh")
    words = {
        "LD_PRELOAD": found[0],
        "FAKETIME": f"{seconds:+d}s",
    }
    variables = [f"{name}={value}" for name, value in words.items()]
    return lambda command: ["env", *variables, *command]
