"""What the idle culler asks before it stops a server: do its GPUs rest?

``add_services(c, cull_idle_after=...)`` starts jupyterhub-idle-culler with it. Who runs that culler
by themselves writes into its configuration::

    from gpuspawner.service.idle_culler import cull_arbiter
    c.IdleCuller.cull_arbiter_hook = cull_arbiter

and lets it have ``GPUSPAWNER_DATABASE_URL``.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

from ..core.errors import GPUSpawnerError
from ..leases.models import Lease, ServerRef
from ..monitoring.repository import WatchedLease
from ..services import Broker

log = logging.getLogger(__name__)

STALE = timedelta(minutes=10)
"""What was judged up to longer ago than this tells nothing of now."""


async def cull_arbiter(
    *, inactive: timedelta | None, inactive_limit: float, server: Mapping[str, Any], **_: Any
) -> bool:
    """Whether to stop a server: after so much time without activity, as ever; but one that holds
    GPUs only when these have rested as well.

    So training goes on with the tab closed, whatever the culler sees of it. A store that does not
    answer, or what is not known of a GPU, stops nothing.
    """
    if inactive is None or inactive.total_seconds() < inactive_limit:
        return False
    ref = server_of(server)
    if ref is None:
        return True
    try:
        lease, watched = await asyncio.to_thread(_broker().idle.idle_state, ref)
    except GPUSpawnerError as error:
        log.warning("Whether the GPUs of %s rest is not known: %s", ref, error)
        return False
    return lease is None or not lease.devices or _rest(lease, watched, _broker().clock())


def _rest(lease: Lease, watched: WatchedLease | None, now: datetime) -> bool:
    if lease.outcome:
        return True  # its stop was ordered
    if watched is None:
        return False
    if watched.state.stops_at is not None and now < watched.state.stops_at:
        return False  # its member was told when, or put it off
    return watched.state.credit <= 0 and watched.judged_until >= now - STALE


def server_of(server: Mapping[str, Any]) -> ServerRef | None:
    """Whose server the Hub speaks of: its model has the member in its URL only. None when that
    makes no sense."""
    name = str(server.get("name") or "")
    ending = f"{re.escape(quote(name, safe=_SAFE))}/" if name else ""
    found = re.search(rf"/user/([^/]+)/{ending}$", str(server.get("url") or ""))
    return ServerRef(unquote(found[1]), name) if found else None


_SAFE = "@~"
"""What JupyterHub does not escape in names, beside letters and digits."""


@lru_cache(maxsize=1)
def _broker() -> Broker:
    return Broker()
