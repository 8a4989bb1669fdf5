"""The one place that grants, charges and releases."""

from __future__ import annotations

from .broker import Broker
from .queue import Terms
from .standing import Standing
from .view import DeviceView, Overview

__all__ = ["Broker", "DeviceView", "Overview", "Standing", "Terms"]
