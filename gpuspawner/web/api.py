"""The base of the REST API's handlers, and the handlers for members, devices and leases."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from tornado import web

from ..core.errors import (
    GPUSpawnerError,
    InvalidRequest,
    LedgerError,
    NotAllowed,
    RequestTooLarge,
    UnknownAccount,
)
from ..core.units import format_bytes
from ..leases.models import Lease
from ..ledger.models import member_account
from ..ledger.reports import EntryPage
from . import view_models
from .base import ServiceHandler
from .fields import LAST, MOST_LINES, one_of, whole
from .schemas import (
    Answer,
    B,
    Body,
    DeviceAnswer,
    DevicesAnswer,
    FullDeviceAnswer,
    LeaseAnswer,
    LeasesAnswer,
    MeAnswer,
)

F = TypeVar("F", bound=Callable[..., Any])
Schema = dict[str, Any]
BodyOfChannels = Callable[[Collection[str]], type[BaseModel]]

ERRORS = {
    400: "A field is not valid; the sentence names it.",
    401: "You did not say who you are.",
    403: "Not allowed: it belongs to someone else, or your token lacks the scope.",
    404: "Not found.",
    405: "Nothing can be done here in this way.",
    409: "It cannot be done as things are now.",
    413: "The request is too large; the sentence says how large it may be.",
    429: "It was done a moment ago: wait a little.",
    503: "The database or the Hub is not responding.",
}
"""Descriptions of the errors that any operation may return, by HTTP status."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the path or in the query string."""

    name: str
    schema: Schema
    description: str
    where: str = "query"

    def as_json(self) -> Schema:
        """Return the parameter as OpenAPI."""
        required = {"required": True} if self.where == "path" else {}
        words = {"description": self.description, "schema": self.schema}
        return {"name": self.name, "in": self.where, **required, **words}


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the REST API."""

    name: str
    path: str
    """The path below ``api/``, with parameter names in braces."""
    answer: Any
    """The model of the answer, or a union of the possible models."""
    query: tuple[Parameter, ...] = ()
    body: type[Body] | BodyOfChannels | None = None
    """The model of the body, or a function that makes it from the names of the hub's channels."""
    scope: str = ""
    """The scope that a service or a server needs for it."""
    media: str = "application/json"
    """The media type of the answer."""
    summary: str = ""
    """The description. If empty, the docstring of the method or the handler is used."""

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters of the path, then those of the query string."""
        names = re.findall(r"{(\w+)}", self.path)
        return [*(Parameter(name, *IN_PATH[name], "path") for name in names), *self.query]

    def body_for(self, channels: Collection[str]) -> type[BaseModel] | None:
        """Return the model of the body at a hub with these channels."""
        if self.body is None or isinstance(self.body, type):
            return self.body
        return self.body(channels)


class Action(NamedTuple):
    """One of several operations of a method, selected by the last part of the path."""

    summary: str
    body: type[Body] | None = None


def operation(
    path: str,
    answer: Any,
    *query: Parameter,
    name: str = "",
    body: type[Body] | BodyOfChannels | None = None,
    scope: str = "",
    media: str = "application/json",
) -> Callable[[F], F]:
    """Declare the operation of a handler's method; the docstring describes it.

    The operation is named after the last part of its path, unless ``name`` is given.
    """
    name = name or path.rpartition("/")[2].strip("{}")
    return _declare(Operation(name, path, answer, query, body, scope, media=media))


def each_action(
    path: str, actions: Mapping[str, Action], answer: Any, name: str = "{}"
) -> Callable[[F], F]:
    """Declare one operation for each action of a handler's method."""
    return _declare(
        *(
            Operation(
                name=name.format(action.replace("-", "")),
                path=f"{path}/{action}",
                answer=answer,
                body=body,
                summary=summary,
            )
            for action, (summary, body) in actions.items()
        )
    )


def _declare(*declared: Operation) -> Callable[[F], F]:
    def declare(method: F) -> F:
        method.operations = declared  # type: ignore[attr-defined]
        return method

    return declare


def _text(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


_HEX = _text("^[0-9a-f]{1,64}$")
_ID: Schema = {"type": "integer", "minimum": 1, "maximum": LAST}
_NEXT = "Of the next page: the last answer's `next`."

IN_PATH = {
    "account": (_text("^(member|group):[A-Za-z0-9_.@-]{1,60}$"), "`member:NAME` or `group:NAME`."),
    "environment": (_text("^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"), "Its name in the catalog."),
    "device": (_text("^[0-9A-Za-z-]{1,100}$"), "Its UUID or index."),
    "file": ({"type": "string", "maxLength": 500}, "Its path in the run's folder."),
    "folder": (_text("^[0-9a-f]{16}$"), "The folder's id."),
    "lease": (_HEX, "The lease's id."),
    "rate": ({"type": "integer", "minimum": 1, "maximum": 10**18 - 1}, "Its number."),
    "refill": (_text("^[0-9a-f]{1,32}$"), "Its id."),
    "run": (_text("^[0-9a-z-]{1,64}$"), "The run's id."),
    "schedule": (_text("^[0-9a-z-]{1,64}$"), "The schedule's id."),
    "sweep": (_text("^[0-9a-z-]{1,60}$"), "The sweep's id."),
    "ticket": (_text("^[0-9A-Za-z-]{1,64}$"), "Its id."),
    "transfer": (_text("^[0-9a-f]{32}$"), "Its id."),
}
"""Schemas and descriptions of path parameters."""

LIMIT = Parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": MOST_LINES, "default": 50},
    "How many at most.",
)
BEFORE = Parameter("before", _ID, _NEXT)
BEFORE_LEASE = Parameter("before", _HEX, _NEXT)
AFTER = Parameter("after", {**_ID, "minimum": 0}, _NEXT)
AFTER_NAME = Parameter("after", {"type": "string"}, _NEXT)
SEARCH = Parameter("search", {"type": "string", "maxLength": 200}, "Text in it, in any case.")

DAY: Schema = {"type": "string", "format": "date"}
FROM_DAY = Parameter("from", DAY, "The first day, of the hub's own zone.")

ALL = Parameter("all", {"enum": ["0", "1"]}, "1: everybody's, for admins.")


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

    async def answer_lease(self, found: Lease) -> None:
        """Send a lease, with its cost so far and its end."""
        now = self.services.clock()
        (told,) = await self.read(view_models.lease_figures, self.services, [found], now)
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
        told = await self.read(view_models.lease_figures, self.services, found.found, now)
        self.answer(LeasesAnswer, as_of=now, leases=told, next=found.older)


HANDLERS = [("api/me", MeHandler), ("api/devices", DevicesHandler), ("api/leases", LeasesHandler)]


LONGEST = 64 * 1024
"""Maximum bytes of a request that changes something."""


class ChangingAPI(APIHandler):
    """The base of handlers that change something: they parse the body and report errors."""

    def sent(self, model: type[B], longest: int = LONGEST) -> B:
        """Parse the request's JSON object, of up to ``longest`` bytes.

        Raises HTTPError 400, or 413 for a longer one.
        """
        body = self.request.body
        if len(body) > longest:
            raise web.HTTPError(413) from RequestTooLarge(limit=format_bytes(longest))
        try:
            found = json.loads(body or b"{}")
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
