"""What a request may take of the service before it is known who asks: memory, time, connections.

A connection holds at most its headers, a small body and one chunk that was read ahead:
:data:`CONNECTION_BYTES`. A thousand hostile connections hold less than 256 MiB.
"""

from __future__ import annotations

import resource
import ssl
from typing import Any

from tornado import httputil, web
from tornado.http1connection import HTTP1Connection
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream

from .base import Context, Handler

HEADER_BYTES = 32 * 1024
BODY_BYTES = 128 * 1024
"""Of most requests."""
LARGE_BODY_BYTES = 4 * 1024 * 1024
"""Of an admin's request to a handler that takes files."""
CHUNK_BYTES = 64 * 1024
CONNECTION_BYTES = HEADER_BYTES + BODY_BYTES + CHUNK_BYTES

HEADER_SECONDS = 120.0
"""For all headers, and between two requests on one connection."""
BODY_SECONDS = 60.0

MOST_CONNECTIONS = 4000
OWN_FILES = 200
"""Files and sockets that the service needs beside its connections."""


def make_server(app: web.Application, ssl_options: ssl.SSLContext | None = None) -> HTTPServer:
    """Return a server with these limits, not yet listening."""
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
    """Closes a connection that is one too many as soon as it is made."""

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
    """Lets admins send large bodies to the handlers that take them, and nobody else."""

    # Tornado's annotation names a class of its own for what is used as any delegate.
    def get_handler_delegate(  # type: ignore[override]
        self,
        request: httputil.HTTPServerRequest,
        target_class: type[web.RequestHandler],
        *args: Any,
        **kwargs: Any,
    ) -> httputil.HTTPMessageDelegate:
        delegate = super().get_handler_delegate(request, target_class, *args, **kwargs)
        has_body = {"Content-Length", "Transfer-Encoding"} & set(request.headers)
        if has_body and issubclass(target_class, Handler) and target_class.takes_files:
            context = self.settings["context"]
            return _LargeBody(delegate, request, Handler(self, request, context=context))
        return delegate


class _LargeBody(httputil.HTTPMessageDelegate):
    """Asks the Hub who sends a large body before any of it is read."""

    def __init__(
        self,
        delegate: httputil.HTTPMessageDelegate,
        request: httputil.HTTPServerRequest,
        handler: Handler,
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
        except web.HTTPError:  # the Hub does not answer
            return False
        return bool(user and user.get("admin"))

    def data_received(self, chunk: bytes) -> Any:
        return self._delegate.data_received(chunk)

    def finish(self) -> None:
        self._delegate.finish()

    def on_connection_close(self) -> None:
        self._delegate.on_connection_close()
