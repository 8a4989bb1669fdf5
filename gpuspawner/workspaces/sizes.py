"""Sizes for people."""

from __future__ import annotations

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def format_bytes(size: int) -> str:
    """Bytes as people write quotas, in units of 1024: ``12.3 GB``; rounded to the nearest."""
    value, unit = float(size), 0
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{size} bytes"
