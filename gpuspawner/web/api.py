"""The base of the REST API's handlers, and the handlers for members, devices and leases."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tornado import web

from ..core.errors import GPUSpawnerError, InvalidRequest, LedgerError, NotAllowed, UnknownAccount
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
from .fields import MOST_LINES, one_of, whole
from .operations import ALL, BEFORE_LEASE, LIMIT, operation
from .schemas import Answer, B

NO_XSRF = (
    "This request comes from a browser without proof that its member sent it. Send the cookie "
    "_xsrf again in the header X-XSRFToken, or use a token of the Hub instead of cookies."
)


@contextmanager
def refusals() -> Iterator[None]:
    """Raise each GPUSpawnerError as an HTTPError with its status."""
    try:
        yield
    except GPUSpawnerError as error:
        raise web.HTTPError(error.status_code) from error


class APIHandler(ServiceHandler):
    """A handler that answers in JSON, also for errors, and never redirects to a login page."""

    def set_default_headers(self) -> None:
        """Add the content type of JSON."""
        super().set_default_headers()
        self.set_header("Content-Type", "application/json")

    # JupyterHub checks XSRF while it looks up the user, and only for requests with a cookie: a
    # token in a header is proof enough.

    _no_xsrf = False

    def check_xsrf_cookie(self) -> None:
        """Check the XSRF token and remember a failure for :meth:`prepare`."""
        try:
            super().check_xsrf_cookie()
        except web.HTTPError:
            self._no_xsrf = True
            raise

    async def prepare(self) -> None:
        """Ask the Hub who sent the request. Raises HTTPError 401, 403 or 503."""
        await super().prepare()
        if self._no_xsrf:
            raise web.HTTPError(403) from NotAllowed(NO_XSRF)
        if not self.current_user:
            raise web.HTTPError(403 if self.refused else 401)

    def get_login_url(self) -> str:
        """Raise HTTPError 401 instead of redirecting to a login page."""
        raise web.HTTPError(401)

    def answer(self, model: type[Answer], found: object = None, /, **more: Any) -> None:
        """Send the model's fields as JSON, read from an object and from ``more``."""
        self.finish(model.of(found, **more).as_json())

    def answer_lease(self, found: Lease) -> None:
        """Send a lease, with its cost so far."""
        (told,) = view_models.lease_figures(self.services, [found], self.services.clock())
        self.answer(LeaseAnswer, told)

    @property
    def limit(self) -> int:
        """The requested number of entries. Raises HTTPError 400."""
        return whole(self.get_query_argument("limit", "50"), "limit", 1, MOST_LINES)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Send the error as JSON."""
        reason, sentence = self.sentence(status_code, **kwargs)
        # Without a model: the message may quote text that a model would reject.
        self.finish({"status": status_code, "error": reason, "message": sentence})


class MeHandler(APIHandler):
    """The member's own account, servers and statement."""

    @operation("me", MeAnswer)
    @web.authenticated
    async def get(self) -> None:
        """Return my balance, how long it lasts, my servers and my statement."""
        minutes = self.context.warn_minutes
        mine = await self.read(view_models.member, self.services, self.user, minutes)
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
        except UnknownAccount:  # the first sign-in opens it
            return EntryPage((), None)


class DevicesHandler(APIHandler):
    """All devices with their states."""

    @operation("devices", DevicesAnswer)
    @web.authenticated
    async def get(self) -> None:
        """List every device with its state. Only admins see other members' names."""
        overview, found = await self.read(
            view_models.device_figures, self.services, self.user, self.admin
        )
        model = FullDeviceAnswer if self.admin else DeviceAnswer
        self.answer(
            DevicesAnswer,
            overview,
            seen=not overview.error,
            error=overview.error if self.admin else "",
            devices=[
                model.of(x, mine=bool(x.lease and x.lease.server.user == self.user)) for x in found
            ],
        )


class LeasesHandler(APIHandler):
    """The member's own leases; for admins those of all members."""

    @operation("leases", LeasesAnswer, ALL, BEFORE_LEASE, LIMIT)
    @web.authenticated
    async def get(self) -> None:
        """List my leases, newest first. Admins get everybody's with ``?all=1``."""
        of_all = one_of(self.get_query_argument("all", "0"), "all", ("0", "1")) == "1"
        if of_all:
            self.need_admin()
        find = partial(
            self.services.reports.find_leases,
            user=None if of_all else self.user,
            before=self.get_query_argument("before", None),
            limit=self.limit,
        )
        found = await self.read(find)
        now = self.services.clock()
        told = view_models.lease_figures(self.services, found.found, now)
        self.answer(LeasesAnswer, as_of=now, leases=told, next=found.older)


HANDLERS = [("api/me", MeHandler), ("api/devices", DevicesHandler), ("api/leases", LeasesHandler)]


LONGEST = 64 * 1024
"""Maximum bytes of a request that changes something."""


class ChangingAPI(APIHandler):
    """The base of handlers that change something: they parse the body and report errors."""

    def sent(self, model: type[B], longest: int = LONGEST) -> B:
        """Parse the request's JSON object, of up to ``longest`` bytes. Raises HTTPError 400."""
        body = self.request.body
        try:
            found = json.loads(body or b"{}") if len(body) <= longest else None
        except (ValueError, RecursionError):
            found = None
        with refusals():
            return model.model_validate(found)

    async def change(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a service method that changes something, with the member as ``actor``."""
        return await self.read(partial(work, *args, actor=self.user, **kwargs))

    async def do(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a service method with valid arguments. Raises HTTPError 409 if it is refused now."""
        try:
            return await self.services.run(work, *args, actor=self.actor, **kwargs)
        except (InvalidRequest, LedgerError) as error:
            raise web.HTTPError(409) from error
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code) from error
