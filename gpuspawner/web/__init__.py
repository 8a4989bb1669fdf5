"""The pages and the JSON of members and admins. What they change goes through the broker."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jupyterhub.services.auth import HubOAuth
from tornado import web

from ..broker import Broker
from ..broker.channels import Channel
from ..telemetry import Sample
from . import (
    account,
    accounts,
    api,
    api_credits,
    api_folders,
    api_queue,
    bulk,
    catalog_schema,
    cluster_pages,
    corrections,
    folders,
    idle,
    lease_now,
    lost,
    metrics,
    notices,
    openapi,
    pages,
    queue,
    rates,
    refills,
    sessions,
    trail,
    usage,
    worked,
)
from .base import Context, Duty, HubCalls
from .cookie_secret import read_cookie_secret
from .limits import LimitedApplication, make_server
from .pages import read_templates
from .usage import remember

__all__ = [
    "BELIEVED",
    "make_app",
    "make_server",
    "read_cookie_secret",
    "read_templates",
    "remember",
]

BELIEVED = 10
"""Seconds that the Hub's word on a token is believed: so soon one that was revoked opens nothing,
and who is no admin any more is none here."""

STATIC = Path(__file__).parent / "static"


def make_app(
    broker: Broker,
    *,
    hub_auth: HubOAuth,
    warn_minutes: Sequence[float] = (),
    session_warn_minutes: Sequence[float] = (),
    channels: Mapping[str, Channel] | None = None,
    poke: Callable[[], None] = lambda: None,
    recent: Callable[[], Mapping[str, Sequence[Sample]]] = dict,
    members_see_names: bool = False,
    hub: HubCalls | None = None,
    rounds: Mapping[str, int] | None = None,
    duties: Mapping[str, Duty] | None = None,
    cookie_secret: bytes = b"",
) -> web.Application:
    """The service's web application, below the prefix that the Hub gave it.

    ``channels`` are the ways in which members can be told; ``poke`` says that there is a
    notice to send now; ``recent`` gives the newest samples
    of each device; ``hub`` is asked who is in a group, and to stop a member's server; ``rounds``
    counts the finished rounds of each duty and ``duties`` has the state of each, for the metrics.
    ``cookie_secret`` signs the cookies; empty: a new one, so that browsers sign in again.
    """
    prefix = hub_auth.base_url
    context = Context(
        broker=broker,
        hub_auth=hub_auth,
        warn_minutes=tuple(warn_minutes),
        session_warn_minutes=tuple(session_warn_minutes),
        channels=channels or {},
        poke=poke,
        recent=recent,
        members_see_names=members_see_names,
        hub=hub,
        rounds={} if rounds is None else rounds,
        duties={} if duties is None else duties,
    )
    handlers: list[tuple[Any, ...]] = [
        (prefix + path, handler, {"context": context})
        for path, handler in (
            *pages.HANDLERS,
            *api.HANDLERS,
            *notices.HANDLERS,
            *queue.HANDLERS,
            *api_queue.HANDLERS,
            *sessions.HANDLERS,
            *idle.HANDLERS,
            *lost.HANDLERS,
            *lease_now.HANDLERS,
            *account.HANDLERS,
            *metrics.HANDLERS,
            *accounts.HANDLERS,
            *corrections.HANDLERS,
            *bulk.HANDLERS,
            *rates.HANDLERS,
            *refills.HANDLERS,
            *api_credits.HANDLERS,
            *trail.HANDLERS,
            *folders.HANDLERS,
            *api_folders.HANDLERS,
            *openapi.HANDLERS,
            *catalog_schema.HANDLERS,
            *usage.HANDLERS,
            *worked.HANDLERS,
            *cluster_pages.HANDLERS,
        )
    ]
    handlers.append((prefix + "static/(.*)", web.StaticFileHandler, {"path": str(STATIC)}))
    handlers.append((prefix.rstrip("/"), web.RedirectHandler, {"url": prefix}))
    return LimitedApplication(
        handlers,
        context=context,
        default_handler_class=pages.NotFound,
        default_handler_args={"context": context},
        cookie_secret=cookie_secret or secrets.token_bytes(32),
        xsrf_cookies=True,
        log_function=_log_request,
    )


def _log_request(handler: web.RequestHandler) -> None:
    """One line for what failed. The path alone: a query may hold what nobody should read."""
    status = handler.get_status()
    request = handler.request
    level = logging.WARNING if status >= 500 else logging.DEBUG
    seconds = request.request_time()
    logging.getLogger("tornado.access").log(
        level, "%d %s %s (%.0f ms)", status, request.method, request.path, 1000 * seconds
    )
