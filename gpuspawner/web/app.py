"""The service's web application: routes, request limits and the cookie secret.

A connection holds at most its headers, a small body and one chunk that was read ahead:
:data:`CONNECTION_BYTES`. A thousand hostile connections hold less than 256 MiB.
"""

from __future__ import annotations

import logging
import os
import resource
import secrets
import ssl
from pathlib import Path
from typing import Any

from tornado import httputil, web
from tornado.http1connection import HTTP1Connection
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream

from ..catalog import views as catalog_views
from ..db import views as db_views
from ..db.engine import sqlite_file
from ..devices import views as devices_views
from ..leases import views as leases_views
from ..ledger import correction_views, rate_views, refill_views
from ..ledger import views as ledger_views
from ..members import views as members_views
from ..monitoring import cluster_views, metrics
from ..monitoring import views as monitoring_views
from ..notifications import views as notifications_views
from ..queue import views as queue_views
from ..runs import file_views, run_page, schedule_views, sweep_views
from ..runs import views as runs_views
from ..storage import views as storage_views
from . import api, openapi, pages
from .base import Context, ServiceHandler
from .frame import STATIC

NAME = "gpuspawner_cookie_secret"
BYTES = 32


def secret_file(database_url: str) -> Path:
    """Return the secret's path: next to an SQLite database, else in the working directory."""
    file = sqlite_file(database_url)
    return file.with_name(NAME) if file else Path(NAME)


def read_cookie_secret(database_url: str, log: logging.Logger) -> bytes:
    """Return the stored secret, so that open forms stay valid, or make and store one. Blocks.

    A file that others can read or that has the wrong size is replaced. If no file can be written,
    the secret lasts until the service ends.
    """
    path = secret_file(database_url)
    try:
        return _kept(path, log) or _make(path)
    except OSError as error:
        message = "%s cannot be used (%s): forms that are open at a restart will be refused"
        log.warning(message, path, error.strerror)
        return secrets.token_bytes(BYTES)


def _kept(path: Path, log: logging.Logger) -> bytes:
    """Return the secret from the file, or empty bytes if the file is missing or unusable."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    with open(file, "rb") as opened:
        seen = os.fstat(file)
        if seen.st_mode & 0o077 or seen.st_uid != os.geteuid():
            log.warning("Others could read %s: it is replaced by a new secret", path)
            return b""
        found = opened.read(BYTES + 1)
    return found if len(found) == BYTES else b""


def _make(path: Path) -> bytes:
    secret = secrets.token_bytes(BYTES)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(file, "wb") as opened:
        opened.write(secret)
        opened.flush()
        os.fsync(file)
    new.replace(path)
    return secret


HEADER_BYTES = 32 * 1024
BODY_BYTES = 128 * 1024
"""Maximum size of most request bodies."""
LARGE_BODY_BYTES = 4 * 1024 * 1024
"""Maximum size of an admin's request to a handler that takes files."""
CHUNK_BYTES = 64 * 1024
CONNECTION_BYTES = HEADER_BYTES + BODY_BYTES + CHUNK_BYTES

HEADER_SECONDS = 120.0
"""Timeout for all headers, and between two requests on a connection."""
BODY_SECONDS = 60.0

MOST_CONNECTIONS = 4000
OWN_FILES = 200
"""Files and sockets that the service needs besides its connections."""


def make_server(app: web.Application, ssl_options: ssl.SSLContext | None = None) -> HTTPServer:
    """Return a server with these limits that does not listen yet."""
    return _Server(
        app,
        ssl_options=ssl_options,
        chunk_size=CHUNK_BYTES,
        max_header_size=HEADER_BYTES,
        max_body_size=BODY_BYTES,
        max_buffer_size=2 * CHUNK_BYTES,
        idle_connection_timeout=HEADER_SECONDS,
        body_timeout=BODY_SECONDS,
    )


class _Server(HTTPServer):
    """A server that closes a new connection at once if there are too many."""

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        super().initialize(*args, **kwargs)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST_CONNECTIONS + OWN_FILES
        files = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        if files > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        self._most = max(1, min(MOST_CONNECTIONS, files - OWN_FILES))
        self._opened = 0

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        if self._opened >= self._most:
            stream.close()
            return
        self._opened += 1
        super().handle_stream(stream, address)

    def on_close(self, server_conn: object) -> None:
        self._opened -= 1
        super().on_close(server_conn)


class LimitedApplication(web.Application):
    """An application that accepts large bodies only from admins, for handlers that take files."""

    # Tornado's annotation is narrower than the delegates that it accepts.
    def get_handler_delegate(  # type: ignore[override]
        self,
        request: httputil.HTTPServerRequest,
        target_class: type[web.RequestHandler],
        *args: Any,
        **kwargs: Any,
    ) -> httputil.HTTPMessageDelegate:
        """Return a delegate that checks the sender of a large body, if the handler takes files."""
        delegate = super().get_handler_delegate(request, target_class, *args, **kwargs)
        has_body = {"Content-Length", "Transfer-Encoding"} & set(request.headers)
        if has_body and issubclass(target_class, ServiceHandler) and target_class.takes_files:
            context = self.settings["context"]
            return _LargeBody(delegate, request, ServiceHandler(self, request, context=context))
        return delegate


class _LargeBody(httputil.HTTPMessageDelegate):
    """A delegate that asks the Hub who sends a large body before any of it is read."""

    def __init__(
        self,
        delegate: httputil.HTTPMessageDelegate,
        request: httputil.HTTPServerRequest,
        handler: ServiceHandler,
    ) -> None:
        self._delegate = delegate
        self._request = request
        self._handler = handler

    async def headers_received(self, start_line: Any, headers: httputil.HTTPHeaders) -> None:
        connection = self._request.connection
        if isinstance(connection, HTTP1Connection) and await self._is_from_admin():
            connection.set_max_body_size(LARGE_BODY_BYTES)
        self._delegate.headers_received(start_line, headers)

    async def _is_from_admin(self) -> bool:
        context: Context = self._handler.context
        try:
            token = context.hub_auth.get_token(self._handler)
            user = await context.hub_auth.user_for_token(token, sync=False) if token else None
        except web.HTTPError:  # the Hub does not respond
            return False
        return bool(user and user.get("admin"))

    def data_received(self, chunk: bytes) -> Any:
        return self._delegate.data_received(chunk)

    def finish(self) -> None:
        self._delegate.finish()

    def on_connection_close(self) -> None:
        self._delegate.on_connection_close()


BELIEVED = 10
"""Seconds for which the Hub's answer about a token is cached.

A revoked token or a removed admin loses access within this time.
"""

ROUTES: tuple[tuple[str, type[web.RequestHandler]], ...] = (
    *pages.HANDLERS,
    *api.HANDLERS,
    *notifications_views.HANDLERS,
    *queue_views.QUEUE_HANDLERS,
    *runs_views.HANDLERS,
    *run_page.HANDLERS,
    *file_views.HANDLERS,
    *sweep_views.HANDLERS,
    *schedule_views.HANDLERS,
    *devices_views.HANDLERS,
    *leases_views.LEASE_HANDLERS,
    *ledger_views.STATEMENT_HANDLERS,
    *metrics.HANDLERS,
    *ledger_views.ACCOUNT_HANDLERS,
    *correction_views.CORRECTION_HANDLERS,
    *correction_views.BULK_GRANT_HANDLERS,
    *rate_views.RATE_HANDLERS,
    *refill_views.REFILL_HANDLERS,
    *ledger_views.ACCOUNT_API_HANDLERS,
    *db_views.HANDLERS,
    *members_views.HANDLERS,
    *storage_views.FOLDER_HANDLERS,
    *storage_views.WORKSPACE_HANDLERS,
    *storage_views.FOLDER_API_HANDLERS,
    *storage_views.WORKSPACE_API_HANDLERS,
    *catalog_views.CATALOG_API_HANDLERS,
    *openapi.OPENAPI_HANDLERS,
    *openapi.CATALOG_SCHEMA_HANDLERS,
    *monitoring_views.USAGE_HANDLERS,
    *monitoring_views.UTILIZATION_HANDLERS,
    *cluster_views.HANDLERS,
)
"""Path patterns below the prefix, and their handlers."""


def make_app(context: Context, cookie_secret: bytes = b"") -> web.Application:
    """Return the service's web application, below the prefix that the Hub assigned.

    ``cookie_secret`` signs the cookies. If empty, a new one is made and browsers sign in again.
    """
    prefix = context.prefix
    handlers: list[tuple[Any, ...]] = [
        (prefix + path, handler, {"context": context}) for path, handler in ROUTES
    ]
    handlers.append((prefix + "static/(.*)", web.StaticFileHandler, {"path": str(STATIC)}))
    handlers.append((prefix.rstrip("/"), web.RedirectHandler, {"url": prefix}))
    return LimitedApplication(
        handlers,
        context=context,
        routed=[handler for _, handler in ROUTES],
        default_handler_class=pages.NotFound,
        default_handler_args={"context": context},
        cookie_secret=cookie_secret or secrets.token_bytes(32),
        xsrf_cookies=True,
        log_function=_log_request,
    )


def _log_request(handler: web.RequestHandler) -> None:
    """Log a request by its path alone, because a query may hold confidential text."""
    status = handler.get_status()
    request = handler.request
    level = logging.WARNING if status >= 500 else logging.DEBUG
    seconds = request.request_time()
    logging.getLogger("tornado.access").log(
        level, "%d %s %s (%.0f ms)", status, request.method, request.path, 1000 * seconds
    )
