"""All devices, and how many of them are kept free for small requests."""

from __future__ import annotations

from collections.abc import Mapping


class Capacity:
    """Devices by kind."""

    def __init__(self, devices: Mapping[str, int], small_share: float) -> None:
        self.devices = dict(devices)
        """All usable ones by kind."""
        self._for_small = {kind: int(small_share * count) for kind, count in devices.items()}

    def for_small(self, kind: str, devices: int) -> int:
        """How many devices must be left when a request for ``devices`` that is not small
        starts; fewer than usual when it needs nearly all there are."""
        kept = self._for_small.get(kind)
        if not kept:
            return 0
        others = self.devices[kind] - devices
        return kept if others >= kept else max(0, others)
