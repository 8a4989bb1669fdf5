"""What a member or a group may have at once."""

from __future__ import annotations

from collections import defaultdict

from .values import Limits

HOUR = 3600.0


class Held:
    """Devices and GPU-hours that parties hold, and which limit keeps a ticket waiting."""

    def __init__(self) -> None:
        self._devices: defaultdict[str, int] = defaultdict(int)
        self._hours: defaultdict[str, float] = defaultdict(float)

    def add(self, party: str, devices: int, seconds: float) -> None:
        """``party`` holds so many devices for the next ``seconds``."""
        self._devices[party] += devices
        self._hours[party] += devices * max(0.0, seconds) / HOUR

    def refusal(self, who: str, party: str, limits: Limits, devices: int, seconds: float) -> str:
        """Why a ticket of ``party`` has to wait, in words; empty when no limit does."""
        held = self._devices[party]
        if limits.devices is not None and held + devices > limits.devices:
            return f"{who} may have {limits.devices} GPUs at once and has {held}."
        hours = self._hours[party]
        if limits.gpu_hours is not None and hours + devices * seconds / HOUR > limits.gpu_hours:
            return (
                f"{who} may hold {limits.gpu_hours:g} GPU-hours and holds {hours:.1f}; "
                f"this asks for {devices * seconds / HOUR:.1f}."
            )
        return ""
