"""Credits, sizes in bytes and numbers of devices, as people write them."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

DeviceCount: TypeAlias = int | Fraction
"""A number of devices, exactly: whole ones, and such as 1/4 for one slot of four."""


def format_devices(devices: DeviceCount) -> str:
    """Format a number of devices: ``2``, ``1/4`` or ``2 1/4``."""
    whole, rest = divmod(devices, 1)
    if not rest:
        return str(whole)
    return f"{whole} {rest}" if whole else str(rest)


def format_gpus(devices: DeviceCount) -> str:
    """Format a number of devices with its noun: ``1 GPU``, ``1/4 of a GPU`` or ``2 1/4 GPUs``."""
    if 0 < devices < 1:
        return f"{devices} of a GPU"
    return f"{format_devices(devices)} GPU{'' if devices == 1 else 's'}"


_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def format_bytes(size: int) -> str:
    """Format bytes in units of 1024, as people write quotas: ``12.3 GB``; rounded."""
    value, unit = float(size), 0
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{size} bytes"


def format_cores(milli: int) -> str:
    """Format thousandths of CPU cores with their noun: ``1 CPU core`` or ``2.5 CPU cores``."""
    return f"{milli / 1000:g} CPU core{'' if milli == 1000 else 's'}"


MICRO = 1_000_000
"""Microcredits in one credit. All amounts are whole microcredits."""


def parse_credits(text: str | int | float) -> int:
    """Convert ``"12.5"`` to whole microcredits. Raises ValueError."""
    try:
        micro = Decimal(str(text).strip()) * MICRO
        whole = int(micro)
    except (ArithmeticError, ValueError):
        raise ValueError(f"{text!r} is not an amount of credits: write it like 12.5") from None
    if whole != micro:
        raise ValueError(f"{text!r} has more than six decimals")
    return whole


def round_credits(micro: int, places: int = 2) -> int:
    """Round microcredits to ``places`` decimals of a credit (0 to 6), half away from zero."""
    step = 10 ** (6 - places)
    size = (abs(micro) + step // 2) // step * step
    return -size if micro < 0 else size


def format_price(micro: int) -> str:
    """Format credits an hour: two decimals, and four or six for a lower price."""
    places = next((n for n in (2, 4) if round_credits(micro, n)), 6) if micro else 2
    return format_credits(micro, places)


def format_credits(micro: int, places: int = 2) -> str:
    """Format microcredits as decimal credits: what people read, rounded by ``round_credits``."""
    rounded = round_credits(micro, places)
    sign, units = "-" if rounded < 0 else "", abs(rounded) // 10 ** (6 - places)
    if not places:
        return f"{sign}{units}"
    return f"{sign}{units // 10**places}.{units % 10**places:0{places}d}"


def gigabytes(memory_bytes: int) -> int:
    """Return the GB of a GPU's memory as people name it: 80 for 80 GiB and for 80 x 10^9 bytes."""
    gib, rest = divmod(memory_bytes, 2**30)
    return memory_bytes // 10**9 if rest else gib


def format_memory(memory_bytes: int) -> str:
    """Format :func:`gigabytes`: ``80 GB``; of a small share ``160 MB``."""
    if 0 < memory_bytes < 10**9:
        return f"{memory_bytes // 10**6} MB"
    return f"{gigabytes(memory_bytes)} GB"
