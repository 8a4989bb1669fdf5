"""The server's part of the GPU item in JupyterLab.

The browser asks this server, and this server asks gpuspawner through the hub's API with its own
token, which may ask about this server and no other. So the token stays out of the browser, and all
tabs together ask once. Where there is no hub, no lease or no gpuspawner, nothing is added.

JupyterHub's server has already imported everything that is imported here, so a start takes no
longer. It runs with Python 3.8 or later.
"""

import asyncio
import json
import os
import time

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest

FRESH = 5.0
"""Seconds that an answer is good for every tab."""

FIRST_PAUSE = 15.0
LAST_PAUSE = 600.0
"""Seconds until the hub is asked again after it did not answer; twice as long each time."""

TIMEOUT = 30.0
AWAY = "gpuspawner is not responding. Try again in a moment."

SILENT = (HTTPClientError, OSError, ValueError)
"""No answer, or one that makes no sense."""


class Session:
    """What gpuspawner says of this server."""

    def __init__(self, url, token, ssl_options=None, clock=time.monotonic):
        self._url = url
        self._token = token
        self._ssl = ssl_options
        self._clock = clock
        self._last = {"available": False}
        self._failed = 0
        self._next = 0.0
        self._asking = None

    async def now(self):
        """The service's answer and ``available``, or only that it is not: then also when to ask
        again (``retry_seconds``)."""
        if self._asking is None and self._clock() >= self._next:
            self._asking = asyncio.ensure_future(self._ask_now())
            self._asking.add_done_callback(self._asked)
        if self._asking is not None:
            await asyncio.wait([self._asking])
        if self._last["available"]:
            return self._last
        return {"available": False, "retry_seconds": max(1.0, self._next - self._clock())}

    async def act(self, what):
        """``snooze``, ``extend`` or ``end``; the answer's status and JSON."""
        try:
            status, told = await self._fetch("POST", what)
        except SILENT:
            return 503, {"message": AWAY}
        self._next = 0.0
        return status, told

    def _asked(self, _):
        self._asking = None

    async def _ask_now(self):
        try:
            status, told = await self._fetch("GET", "now")
        except SILENT:
            status, told = 503, {}
        if status == 200:
            self._failed = 0
            self._last = dict(told, available=True)
            self._next = self._clock() + FRESH
            return
        pause = min(LAST_PAUSE, FIRST_PAUSE * 2**self._failed)
        # A refusal would only be repeated: this server has no lease, or another hub.
        self._next = self._clock() + (LAST_PAUSE if 400 <= status < 500 else pause)
        self._failed = min(self._failed + 1, 10)
        self._last = {"available": False}

    async def _fetch(self, method, what):
        request = HTTPRequest(
            self._url + what,
            method=method,
            headers={"Authorization": "token " + self._token},
            body="" if method == "POST" else None,
            connect_timeout=5.0,
            request_timeout=TIMEOUT,
            follow_redirects=False,
            ssl_options=self._ssl,
        )
        answer = await AsyncHTTPClient().fetch(request, raise_error=False)
        told = json.loads(answer.body) if answer.body else {}
        if not isinstance(told, dict):
            raise ValueError("no JSON object")
        return answer.code, told


class NowHandler(APIHandler):
    """What the item and the panel show. Never an error: a browser would show that as one."""

    auth_resource = "gpuspawner"

    def initialize(self, session):
        self.session = session

    @web.authenticated
    @authorized
    async def get(self):
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps(await self.session.now()))


class ActHandler(APIHandler):
    """The buttons. The answer says whether it was done, or else why not, in a sentence."""

    auth_resource = "gpuspawner"

    def initialize(self, session):
        self.session = session

    @web.authenticated
    @authorized
    async def post(self, what):
        status, told = await self.session.act(what)
        message = "" if status == 200 else str(told.get("message") or AWAY)
        self.finish(json.dumps({"done": status == 200, "message": message}))


def session_of(environment):
    """The session that this server's environment names; None if there is none."""
    names = ("JUPYTERHUB_API_URL", "JUPYTERHUB_API_TOKEN", "GPUSPAWNER_LEASE_ID")
    api, token, lease = (environment.get(name) for name in names)
    if not (api and token and lease):
        return None
    from jupyterhub.utils import make_ssl_context  # the hub's own server has it

    files = ("JUPYTERHUB_SSL_KEYFILE", "JUPYTERHUB_SSL_CERTFILE", "JUPYTERHUB_SSL_CLIENT_CA")
    key, certificate, authority = (environment.get(name) for name in files)
    tls = make_ssl_context(key, certificate, cafile=authority) if key else None
    return Session(f"{api.rstrip('/')}/gpuspawner/leases/{lease}/", token, tls)


def _jupyter_server_extension_points():
    return [{"module": "gpuspawner_lab"}]


def _load_jupyter_server_extension(app):
    session = session_of(os.environ)
    if session is None:
        return
    settings = app.web_app.settings
    # Tells the browser's part that this server can answer it.
    settings.setdefault("page_config_data", {})["gpuspawner"] = "on"
    base = url_path_join(settings["base_url"], "gpuspawner", "session")
    handlers = [
        (base, NowHandler, {"session": session}),
        (base + "/(snooze|extend|end)", ActHandler, {"session": session}),
    ]
    app.web_app.add_handlers(".*$", handlers)
