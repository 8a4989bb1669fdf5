"""Where members' files lie: quotas, what is used, archives. Never follows a member's symlink."""

from __future__ import annotations

from .measure import measure
from .quota import Quotas, Use

__all__ = ["Quotas", "Use", "measure"]
