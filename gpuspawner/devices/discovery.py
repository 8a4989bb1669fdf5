"""Which device source a configuration names: NVML or a simulated fleet."""

from __future__ import annotations

from ..core.errors import ConfigError
from .source import DeviceSource, DriverGate

EXAMPLE = "simulated:4xA100-80GB,2xT4"


def open_source(spec: str, gate: DriverGate | None = None) -> DeviceSource:
    """Return the device source that a configuration names.

    ``""``, ``"auto"`` and ``"nvml"`` are the GPUs of this machine, also when it has none: the
    inventory says so then. ``"simulated:FLEET"`` is a simulated fleet. ``gate`` is for a
    process that keeps NVML open. Raises ConfigError.
    """
    kind, colon, fleet = spec.strip().partition(":")
    if kind.lower() in ("", "auto", "nvml") and not colon:
        from .nvml import NVMLDevices

        return NVMLDevices(gate)
    if kind.lower() == "simulated":
        from .simulated import SimulatedDevices

        return SimulatedDevices(fleet)
    raise ConfigError(
        f"There is no device source {spec!r}. Write nvml for the GPUs of this machine, "
        f"or a simulated fleet such as {EXAMPLE}."
    )
