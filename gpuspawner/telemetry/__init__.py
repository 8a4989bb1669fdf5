"""What devices do from second to second, and when a server counts as idle. Pure: values in, values
out, and no clock but the times of the samples."""

from __future__ import annotations

from .rollup import Rollups, combine
from .values import DeviceUse, Sample

__all__ = ["DeviceUse", "Rollups", "Sample", "combine"]
