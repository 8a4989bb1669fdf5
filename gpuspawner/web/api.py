"""The REST API: its handlers, and the figures of a member's page as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest, LedgerError, NotAllowed, UnknownAccount
from ..db.search import Leases
from ..leases.models import Lease
from ..ledger.models import member_account
from ..ledger.statements import EntryPage
from . import view_models
from .answers import (
    DeviceAnswer,
    DevicesAnswer,
    FullDeviceAnswer,
    LeaseAnswer,
    LeasesAnswer,
    MeAnswer,
)
from .base import ServiceHandler
from .fields import LAST, MOST_LINES, one_of, whole
from .operations import ALL, BEFORE_LEASE, LIMIT, operation
from .schemas import Answer, B

NO_XSRF = (
    "This request comes from a browser without proof that its member sent it. Send the cookie "
    "_xsrf again in the header X-XSRFToken, or use a token of the Hub instead of cookies."
)


@contextmanager
def refusals() -> Iterator[None]:
    """What is sent is checked here: a mistake is the answer. Raises HTTPError."""
    try:
        yield
    except GPUSpawnerError as error:
        raise web.HTTPError(error.status_code) from error


class APIHandler(ServiceHandler):
    """A handler that answers in JSON, errors too, and never sends anybody to a login page."""

    def set_default_headers(self) -> None:
        super().set_default_headers()
        self.set_header("Content-Type", "application/json")

    # JupyterHub checks XSRF while it finds out who asks, and only for those who come with a
    # cookie: a token in a header is proof enough.

    _no_xsrf = False

    def check_xsrf_cookie(self) -> None:
        try:
            super().check_xsrf_cookie()
        except web.HTTPError:
            self._no_xsrf = True
            raise

    async def prepare(self) -> None:
        await super().prepare()
        if self._no_xsrf:
            raise web.HTTPError(403) from NotAllowed(NO_XSRF)
        if not self.current_user:
            raise web.HTTPError(403 if self.refused else 401)

    def get_login_url(self) -> str:
        raise web.HTTPError(401)

    def answer(self, model: type[Answer], found: object = None, /, **more: Any) -> None:
        """Send what a model tells of an object, and of ``more`` beside it, as JSON."""
        self.finish(model.of(found, **more).as_json())

    def answer_lease(self, found: Lease) -> None:
        """Send a lease, with what it cost up to now."""
        (told,) = view_models.lease_figures(self.services, [found], self.services.clock())
        self.answer(LeaseAnswer, told)

    @property
    def limit(self) -> int:
        """How many are asked for. Raises HTTPError 400."""
        return whole(self.get_query_argument("limit", "50"), "limit", 1, MOST_LINES)

    @property
    def before(self) -> int | None:
        """What the page that is asked for comes before; None of the first. Raises HTTPError 400."""
        text = self.get_query_argument("before", "")
        return whole(text, "before", 1, LAST) if text else None

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        reason, sentence = self.sentence(status_code, **kwargs)
        # Not by a model: a sentence may quote what a model would not take for text.
        self.finish({"status": status_code, "error": reason, "message": sentence})


class MeHandler(APIHandler):
    """My balance, how long it lasts, my servers, my statement."""

    @operation("me", MeAnswer)
    @web.authenticated
    async def get(self) -> None:
        mine = await self.read(
            view_models.member, self.services, self.user, self.context.warn_minutes
        )
        page = await self.read(self._newest)
        self.answer(
            MeAnswer,
            name=self.user,
            admin=self.admin,
            as_of=mine.now,
            account=mine.funds,
            running=mine.running,
            statement=page.entries,
        )

    def _newest(self) -> EntryPage:
        try:
            return self.services.reports.statement_page(member_account(self.user), limit=100)
        except UnknownAccount:  # it opens with the first sign-in
            return EntryPage((), None)


class DevicesHandler(APIHandler):
    """Every device with its state; whose it is only when it is mine, or for admins."""

    @operation("devices", DevicesAnswer)
    @web.authenticated
    async def get(self) -> None:
        overview, found = await self.read(
            view_models.device_figures, self.services, self.user, self.admin
        )
        model = FullDeviceAnswer if self.admin else DeviceAnswer
        self.answer(
            DevicesAnswer,
            overview,
            seen=not overview.error,
            error=overview.error if self.admin else "",
            devices=[model.of(some, mine=self._is_mine(some)) for some in found],
        )

    def _is_mine(self, some: view_models.DeviceFigures) -> bool:
        return some.lease is not None and some.lease.server.user == self.user


class LeasesHandler(APIHandler):
    """My servers' leases, newest first; with ``?all=1`` everybody's, for admins."""

    @operation("leases", LeasesAnswer, ALL, BEFORE_LEASE, LIMIT)
    @web.authenticated
    async def get(self) -> None:
        of_all = one_of(self.get_query_argument("all", "0"), "all", ("0", "1")) == "1"
        if of_all:
            self.need_admin()
        limit = self.limit
        before = self.get_query_argument("before", None)
        found = await self.read(self._find, None if of_all else self.user, before, limit)
        now = self.services.clock()
        told = view_models.lease_figures(self.services, found.found, now)
        self.answer(LeasesAnswer, as_of=now, leases=told, next=found.older)

    def _find(self, user: str | None, before: str | None, limit: int) -> Leases:
        return self.services.reports.find_leases(user=user, before=before, limit=limit)


HANDLERS = [
    ("api/me", MeHandler),
    ("api/devices", DevicesHandler),
    ("api/leases", LeasesHandler),
]


LONGEST = 64 * 1024
"""Bytes of a request that changes something."""


class ChangingAPI(APIHandler):
    """What changes share: the object that was sent, and refusals as sentences."""

    def sent(self, model: type[B], longest: int = LONGEST) -> B:
        """The JSON object that was sent, of so many bytes at the most. Raises HTTPError 400."""
        body = self.request.body
        try:
            found = json.loads(body or b"{}") if len(body) <= longest else None
        except (ValueError, RecursionError):
            found = None
        with refusals():
            return model.model_validate(found)

    async def change(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Change something through the services, as the one who asks."""

        def call() -> Any:
            return work(*args, actor=self.user, **kwargs)

        return await self.read(call)

    async def do(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same, of what was checked before: it cannot be done as things are, if it cannot."""
        try:
            return await self.services.run(work, *args, actor=self.actor, **kwargs)
        except (InvalidRequest, LedgerError) as error:
            raise web.HTTPError(409) from error
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code) from error
