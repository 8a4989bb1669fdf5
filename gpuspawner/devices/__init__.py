"""Where devices are seen: NVML, or a simulated fleet for trying out and for tests."""

from __future__ import annotations

from .base import DeviceSource, open_source

__all__ = ["DeviceSource", "open_source"]
