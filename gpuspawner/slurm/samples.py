"""What a node's sampler says of its devices, as JSON, and as the hub believes it.

A look is what was seen at one moment. Looks have numbers that grow by one, so that nobody is told
one twice; and an age in place of a time, because the clocks of nodes differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import SplitResult

from ..model import DeviceProcess
from ..telemetry import Sample
from ..telemetry.values import Condition, FarProcess

VERSION = 1
"""Of what is said: a sampler and a hub that differ in it do not believe each other."""

MOST_BYTES = 2_000_000
"""The longest answer that is read."""
MOST_LOOKS = 60
"""In one answer: a minute that the network was away is made up for."""
OLDEST = 600.0
"""Seconds that a look may be old for the hub to believe it."""
TOLD = OLDEST - 60.0
"""Seconds after which a look is told no more: an answer may be on its way for a while."""
_MOST_PROCESSES = 200
_MOST_XIDS = 64
_MOST_XID = 100_000
_MOST_WORDS = 300

_NUMBERS: Mapping[str, int] = {
    "use": 100,
    "memory_activity": 100,
    "used_bytes": 2**50,
    "total_bytes": 2**50,
    "milliwatts": 10_000_000,
    "celsius": 200,
    "sm_mhz": 100_000,
    "memory_mhz": 100_000,
    "throttle": 2**32,
    "ecc_errors": 2**63 - 1,
}
"""Of a sample, with the most that makes sense."""
_FLAGS = ("remap_pending", "remap_failed", "pages_pending")
_SIZES = ("link_width", "link_most", "limit_milliwatts", "usual_milliwatts")


def port_of(parts: SplitResult) -> int:
    """Where a sampler listens and the hub asks, which the address need not say."""
    return parts.port or (80 if parts.scheme == "http" else 443)


class Nonsense(Exception):
    """What was said makes no sense. The text is the end of a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a sampler said."""

    of: str
    """Which run of it: its numbers begin anew with each."""
    last: int
    """The number of its newest look; 0 before there is one."""
    samples: tuple[Sample, ...]
    """The oldest first."""
    newest: frozenset[str] | None
    """The devices of the newest look that was told; None when there was no new one."""
    trouble: str
    """Why it sees nothing just now; empty when it does."""


# What a node says.


def packed(samples: Iterable[Sample], strange: Callable[[DeviceProcess], bool]) -> str:
    """One look as JSON, without what is not known. ``strange`` says of a process whether it is
    nobody's."""
    return json.dumps([_packed(sample, strange) for sample in samples], separators=(",", ":"))


def _packed(sample: Sample, strange: Callable[[DeviceProcess], bool]) -> dict[str, Any]:
    # What a hub would not believe is left out: one wrong value costs a whole answer.
    xids = [xid for xid in sample.xids if 0 <= xid <= _MOST_XID][-_MOST_XIDS:]
    said: dict[str, Any] = {"uuid": sample.uuid, "error": sample.error, "xids": xids}
    said |= {name: getattr(sample, name) for name in _NUMBERS}
    if sample.condition is not None:
        condition = {name: getattr(sample.condition, name) for name in (*_FLAGS, *_SIZES)}
        said["condition"] = _known(condition)
    if sample.processes is not None:
        said["processes"] = [
            [p.pid, p.used_memory_bytes, p.kind, p.name, p.kind == "compute" and strange(p)]
            for p in sample.processes[:_MOST_PROCESSES]
        ]
    return _known(said)


def _known(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if value not in (None, "", [])}


# What the hub believes.


def read(body: bytes, now: datetime, indices: Mapping[str, int]) -> Said:
    """What a sampler said; devices that ``indices`` does not name are left out.

    ``now`` is the hub's, from which ages are counted. Raises Nonsense.
    """
    try:
        told: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise Nonsense("what it says is no JSON") from None
    if not isinstance(told, dict) or "version" not in told:
        raise Nonsense("it is no sampler of gpuspawner")
    if told["version"] != VERSION:
        raise Nonsense(
            f"it is of another version (it says {told['version']!r:.20}, and {VERSION} is wanted): "
            "install the same gpuspawner there as here"
        )
    try:
        looks = _listed(told["looks"], MOST_LOOKS)
        samples: list[Sample] = []
        seen: frozenset[str] | None = None
        for look in looks:
            found = list(_look(look, now, indices))
            samples += found
            seen = frozenset(sample.uuid for sample in found)
        return Said(
            of=_word(told["of"]),
            last=_number(told["last"], 2**53),
            samples=tuple(samples),
            newest=seen,
            trouble=_word(told["trouble"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Nonsense(f"what it says makes no sense ({error!r:.80})") from None


def _look(look: Any, now: datetime, indices: Mapping[str, int]) -> Iterable[Sample]:
    age = look["age"]
    if isinstance(age, bool) or not isinstance(age, int | float) or not math.isfinite(age):
        raise ValueError("an age that is no number")
    if not 0 <= age <= OLDEST:
        raise ValueError(f"a look that is {age:g} seconds old")
    at = now - timedelta(seconds=age)
    found: dict[str, Sample] = {}
    for said in _listed(look["devices"], 1000):
        uuid = _word(said["uuid"])
        if uuid in indices:
            found[uuid] = _sample(said, uuid, indices[uuid], at)
    return found.values()


def _sample(said: Mapping[str, Any], uuid: str, index: int, at: datetime) -> Sample:
    xids = tuple(_number(xid, _MOST_XID) for xid in _listed(said.get("xids", []), _MOST_XIDS))
    if error := _word(said.get("error", "")):
        return Sample(uuid=uuid, index=index, at=at, xids=xids, error=error)
    numbers: dict[str, Any] = {
        name: _number(said[name], most) for name, most in _NUMBERS.items() if name in said
    }
    processes = None
    if "processes" in said:
        listed = _listed(said["processes"], _MOST_PROCESSES)
        processes = tuple(_process(*each) for each in listed)
    condition = _condition(said["condition"]) if "condition" in said else None
    return Sample(
        uuid=uuid,
        index=index,
        at=at,
        xids=xids,
        processes=processes,
        condition=condition,
        **numbers,
    )


def _process(pid: Any, used: Any, kind: Any, name: Any, strange: Any) -> FarProcess:
    if kind not in ("compute", "graphics"):
        raise ValueError("a process of no known kind")
    held = None if used is None else _number(used, 2**50)
    return FarProcess(_number(pid, 2**31), held, kind, _word(name), _flag(strange))


def _condition(said: Mapping[str, Any]) -> Condition:
    flags: dict[str, Any] = {name: _flag(said[name]) for name in _FLAGS if name in said}
    sizes: dict[str, Any] = {name: _number(said[name], 2**40) for name in _SIZES if name in said}
    return Condition(**flags, **sizes)


def _number(value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{value!r:.30} in the place of a number up to {most}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r:.30} in the place of true or false")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.30} in the place of words")
    return "".join(letter for letter in value[:_MOST_WORDS] if letter.isprintable())


def _listed(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"no list of up to {most}")
    return value
