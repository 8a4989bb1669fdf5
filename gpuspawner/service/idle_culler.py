"""The hook of the idle culler: are a server's GPUs idle before it is stopped?

``add_services(c, cull_idle_after=...)`` starts jupyterhub-idle-culler with it. If you run that
culler yourself, write into its configuration::

    from gpuspawner.service.idle_culler import cull_arbiter
    c.IdleCuller.cull_arbiter_hook = cull_arbiter

and give it ``GPUSPAWNER_DATABASE_URL``.
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
from ..services import Services

log = logging.getLogger(__name__)

STALE = timedelta(minutes=10)
"""A judgement older than this no longer counts."""


async def cull_arbiter(
    *, inactive: timedelta | None, inactive_limit: float, server: Mapping[str, Any], **_: Any
) -> bool:
    """Return True to stop a server: it was inactive for too long, and its GPUs are idle as well.

    So training continues with the tab closed, even if the culler sees no activity. If the store
    does not answer, or a GPU's use is unknown, nothing is stopped.
    """
    if inactive is None or inactive.total_seconds() < inactive_limit:
        return False
    ref = server_of(server)
    if ref is None:
        return True
    try:
        lease, watched = await asyncio.to_thread(_services().idle.idle_state, ref)
    except GPUSpawnerError as error:
        log.warning("It is not known if the GPUs of %s are idle: %s", ref, error)
        return False
    return lease is None or not lease.devices or _are_gpus_idle(lease, watched, _services().clock())


def _are_gpus_idle(lease: Lease, watched: WatchedLease | None, now: datetime) -> bool:
    if lease.outcome:
        return True  # its stop was ordered
    if watched is None:
        return False
    if watched.state.stops_at is not None and now < watched.state.stops_at:
        return False  # its member was told when, or snoozed it
    return watched.state.credit <= 0 and watched.judged_until >= now - STALE


def server_of(server: Mapping[str, Any]) -> ServerRef | None:
    """Return the server of a Hub model, where only the URL names the member; None if invalid."""
    name = str(server.get("name") or "")
    ending = f"{re.escape(quote(name, safe=_SAFE))}/" if name else ""
    found = re.search(rf"/user/([^/]+)/{ending}$", str(server.get("url") or ""))
    return ServerRef(unquote(found[1]), name) if found else None


_SAFE = "@~"
"""What JupyterHub does not escape in names, besides letters and digits."""


@lru_cache(maxsize=1)
def _services() -> Services:
    return Services()
