"""What of a GPU changes seldom and tells whether it is well, as NVML tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from ..telemetry.values import Condition
from .nvml_asking import Unanswered, ask_or

LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
"""After these there is nothing more to ask."""

_MOST_LANES = 64
_MOST_MILLIWATTS = 10_000_000


def condition_of(handle: Any) -> Condition:
    """Each that the device tells; what fails, or makes no sense, is left out.

    Raises Unanswered when the device is lost.
    """
    rows = _read("remapped rows", pynvml.nvmlDeviceGetRemappedRows, handle)
    pages = _read("retired pages", pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    return Condition(
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        pages_pending=None if pages is None else bool(pages),
        link_width=_number("PCIe link", pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        link_most=_number("PCIe link", pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        limit_milliwatts=_number(
            "power limit", pynvml.nvmlDeviceGetEnforcedPowerLimit, handle, _MOST_MILLIWATTS
        ),
        usual_milliwatts=_number(
            "power limit", pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle, _MOST_MILLIWATTS
        ),
    )


def _number(
    what: str, call: Callable[[Any], Any], handle: Any, most: int = _MOST_LANES
) -> int | None:
    value = _read(what, call, handle)
    return value if value is not None and 0 < value <= most else None


def _read(what: str, call: Callable[[Any], Any], handle: Any) -> Any:
    try:
        return ask_or(None, what, call, handle)
    except Unanswered as failure:
        if failure.code in LOST:
            raise
        return None
