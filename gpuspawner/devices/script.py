"""Faults of simulated devices, as a script says.

The script is a JSON file, named by the environment variable ``GPUSPAWNER_SIMULATION`` and read
anew when it changes. It says by UUID or index what a device shows instead, until it is gone from
the script: ``{"0": {"use": 97, "celsius": 91}, "1": {"error": "It fell off the bus.", "xids":
[79]}}``. Most names are of :class:`gpuspawner.telemetry.Sample`; ``processes`` are
``[[PID, "name"], ...]``, ``held_bytes`` is memory that no process holds, and ``probe`` is why the
device fails a probe.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..model import DeviceProcess
from ..telemetry.values import Condition

log = logging.getLogger(__name__)

SCRIPT = "GPUSPAWNER_SIMULATION"
SCRIPTED = {
    "use": int,
    "memory_activity": int,
    "used_bytes": int,
    "milliwatts": int,
    "celsius": int,
    "sm_mhz": int,
    "throttle": int,
    "ecc_errors": int,
    "xids": list,
    "error": str,
    "condition": dict,
    "processes": list,
    "held_bytes": int,
    "probe": str,
}
"""What it may say, and of which type."""
CONDITIONS = tuple(each.name for each in fields(Condition))

Shows = Mapping[str, Any]
"""What a device shows instead."""


class Script:
    """The script, as it is now. A mistake in it changes nothing, and is said in the log."""

    def __init__(self) -> None:
        self._read: tuple[Any, Mapping[str, Shows]] = (None, {})

    def of(self, uuid: str, index: int) -> Shows:
        """What one device shows; nothing when it is as it would be."""
        told = self.told()
        return told.get(uuid) or told.get(str(index)) or {}

    def told(self) -> Mapping[str, Shows]:
        """All of it; nothing when there is no script."""
        path = os.environ.get(SCRIPT)
        if not path:
            return {}
        try:
            stat = os.stat(path)
            version = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if self._read[0] != version:
                self._read = (version, _checked(json.loads(Path(path).read_text())))
        except FileNotFoundError:
            self._read = (None, {})
        except (OSError, ValueError) as error:
            log.warning("The script of simulated devices %s cannot be used: %s", path, error)
        return self._read[1]


def processes_of(shows: Shows) -> tuple[DeviceProcess, ...]:
    """The compute processes that a device shows beside its own."""
    return tuple(DeviceProcess(pid, name=name) for pid, name in shows.get("processes", ()))


def _checked(script: Any) -> dict[str, dict[str, Any]]:
    """Raises ValueError with a sentence for what is no script."""
    if not isinstance(script, dict) or not all(isinstance(v, dict) for v in script.values()):
        raise ValueError("write an object of objects, by UUID or index")
    for device, shows in script.items():
        for name, value in shows.items():
            if name not in SCRIPTED:
                raise ValueError(f"device {device} has {name!r}; there are {', '.join(SCRIPTED)}")
            if not isinstance(value, SCRIPTED[name]) or isinstance(value, bool):
                raise ValueError(f"{name} of device {device} is {value!r}")
        for name in shows.get("condition", {}):
            if name not in CONDITIONS:
                there = ", ".join(CONDITIONS)
                raise ValueError(f"condition of device {device} has {name!r}; there are {there}")
        for each in shows.get("processes", []):
            if not _is_process(each):
                raise ValueError(f'{each!r} of device {device} is no process: write [PID, "name"]')
    return script


def _is_process(each: Any) -> bool:
    if not isinstance(each, list) or len(each) != 2:
        return False
    return isinstance(each[0], int) and isinstance(each[1], str)
