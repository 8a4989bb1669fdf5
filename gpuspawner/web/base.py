"""The base of the service's handlers: authentication, permissions and error messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from jupyterhub.services.auth import HubOAuth, HubOAuthenticated, UserNotAllowed, check_scopes
from tornado import web

from ..core.errors import GPUSpawnerError, NotAllowed, Unavailable, UnknownAccount
from ..core.scopes import CUSTOM_SCOPES, GRANT, READ_ACCOUNTS, SESSION, ScopeFilter, reach
from ..leases.models import ServerRef
from ..ledger.models import group_account, member_account
from ..monitoring.models import Sample
from ..notifications.channels import Channel
from ..runs.files import RunFiles
from ..services import Services
from .fields import LAST, whole
from .frame import Frame

T = TypeVar("T")

POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)

SENTENCES = {
    400: "The address is not complete or not valid. Go back, and follow the link again.",
    401: "Say who you are: send a token of the Hub in the header Authorization (token ...).",
    403: "You do not have access to this page. Sign in with another account, or ask your admin.",
    404: "There is no such page.",
    405: "This page can only be read.",
    503: "A part of the hub is not responding. Try again in a moment.",
}
OTHERWISE = "Something went wrong. Try again in a moment, and tell your admin if it stays."


class HubCalls(Protocol):
    """Calls to the Hub other than authentication. They raise Unavailable."""

    async def members_of(self, group: str) -> frozenset[str] | None:
        """Return the names of a group's members, or None if the Hub has no such group."""

    async def stop_server(self, server: ServerRef) -> bool:
        """Ask the Hub to stop a server. Return False if the Hub has no such server."""

    # These also raise RefusedByHub.

    async def submit_run(self, user: str, fields: Mapping[str, Any]) -> str:
        """Submit a member's run, and return its id."""

    async def quote_run(self, user: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a member's run would cost, and when it would start."""

    async def submit_sweep(self, user: str, fields: Mapping[str, Any]) -> str:
        """Submit a member's sweep, and return its id."""

    async def quote_sweep(self, user: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a member's sweep costs at most."""

    async def environments(self, user: str) -> Sequence[Mapping[str, Any]]:
        """Return the environments that a member may choose, as in the catalog."""

    async def image_updates(self) -> Sequence[Mapping[str, Any]]:
        """Return the updates of images that run or ended lately, newest first."""

    async def image_offer(self, environment: str, *, actor: str) -> Mapping[str, Any]:
        """Return what the registry of an environment offers, for an admin."""

    async def update_image(
        self, environment: str, *, digest: str, keep_as: str, actor: str
    ) -> Mapping[str, Any]:
        """Begin to update an environment's image, for an admin."""


class Duty(Protocol):
    """The state of a background duty of the service."""

    is_running: bool
    failures: int
    """Number of failures since the service started."""


@dataclass(frozen=True, slots=True)
class Context:
    """What every handler has access to."""

    services: Services
    hub_auth: HubOAuth
    warn_minutes: Sequence[float] = ()
    """Members are warned when their account lasts only this many minutes."""
    session_warn_minutes: Sequence[float] = ()
    """Members are warned this many minutes before their session ends."""
    channels: Mapping[str, Channel] = field(default_factory=dict)
    """Notification channels by name."""
    poke: Callable[[], None] = lambda: None
    """Called when a notice is ready to be sent."""
    recent: Callable[[], Mapping[str, Sequence[Sample]]] = dict
    """Returns the newest samples of each device by its UUID, oldest first."""
    recent_of_leases: Callable[[], Mapping[tuple[str, str], Sequence[Sample]]] = dict
    """Returns the same of each lease on a device that others may share, by UUID and lease id."""
    members_see_names: bool = False
    """True if the cluster page shows all members who has a GPU."""
    hub: HubCalls | None = None
    """If None, nothing that needs the Hub can be done."""
    run_files: RunFiles | None = None
    """If None, no files of runs can be read."""
    frame: Frame = field(default_factory=Frame)
    """The Hub's settings of its pages."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    """Number of finished rounds of each background duty, by its name."""
    duties: Mapping[str, Duty] = field(default_factory=dict)
    """State of each background duty, by its name."""

    @property
    def prefix(self) -> str:
        """The path of the service, such as ``/services/gpu/``."""
        return str(self.hub_auth.base_url)

    @property
    def hub_url(self) -> str:
        """The URL of the Hub's own pages, such as ``/hub/``."""
        return str(self.hub_auth.hub_host + self.hub_auth.hub_prefix)


@contextmanager
def _as_http_error() -> Iterator[None]:
    try:
        yield
    except GPUSpawnerError as error:
        raise web.HTTPError(error.status_code, "%s", error.message) from error


class ServiceHandler(HubOAuthenticated, web.RequestHandler):
    """A handler that knows its user. Subclasses decorate ``get`` with ``web.authenticated``."""

    refused = False
    """True if the Hub knows the user, but they may not use this service."""

    for_services = False
    """True if services of the Hub may use this handler with one of our scopes."""

    for_servers = False
    """True if a server may ask about itself with its own token, see :meth:`concerns`."""

    takes_files = False
    """True if only admins may use this handler, and may send large bodies."""

    narrowed = False
    """True if the token allows no more than a server's token."""

    has_xsrf_proof = False
    """True if a session cookie came with its XSRF token."""

    _is_resolving = False
    """True as soon as :meth:`prepare` asks the Hub for the user."""

    _is_resolved = False
    """True once the Hub has answered."""

    def initialize(self, context: Context) -> None:
        """Store the context that all handlers share."""
        self.context = context
        self.services = context.services
        self.hub_auth = context.hub_auth

    def set_default_headers(self) -> None:
        """Set headers for security and against caching."""
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "same-origin")
        self.set_header("Cache-Control", "no-store")

    # prepare() looks up the user once, without blocking the event loop. JupyterHub's own look-up
    # in get_current_user() blocks it with a pool of one thread. Tornado checks XSRF before
    # prepare(); JupyterHub's check then looks up the user, which checks XSRF again in that thread
    # and waits for the same pool: the service would hang forever. So the check is skipped until
    # the look-up has begun, and there is no current user until it has ended.

    async def prepare(self) -> None:
        """Ask the Hub who sent the request. Raises HTTPError 503 if it does not respond."""
        self._is_resolving = True
        try:
            await self.hub_auth.get_user(self, sync=False)
        except web.HTTPError as error:
            if error.status_code < 500:
                raise
            sentence = "The Hub cannot confirm who you are right now. Try again in a moment."
            raise web.HTTPError(503, "%s", error.log_message) from Unavailable(sentence)
        self._is_resolved = True
        # Overwrite the None that Tornado cached during the XSRF check.
        self.current_user = self.get_current_user()

    def get_current_user(self) -> Any:
        """Return the member or service that the Hub named, or None before it has answered."""
        return super().get_current_user() if self._is_resolved else None

    def check_xsrf_cookie(self) -> None:
        """Check the XSRF token, but not before :meth:`prepare`. Raises HTTPError 403."""
        if self._is_resolving:
            super().check_xsrf_cookie()
            self.has_xsrf_proof = True

    def check_hub_user(self, model: dict[str, Any]) -> dict[str, Any] | None:
        """Check that the user may use this handler. Raises HTTPError 403 or UserNotAllowed.

        Only people have accounts: a service with a member's name is not that member. Services may
        use handlers with ``for_services`` if they have one of our scopes, but own nothing
        themselves.
        """
        if model.get("kind") != "user" and not (
            self.for_services and any(reach(model["scopes"], scope) for scope in CUSTOM_SCOPES)
        ):
            raise web.HTTPError(403)
        held = (scope.partition("!")[0] for scope in model["scopes"])
        may_enter = self.hub_auth.check_scopes(self.hub_scopes or set(), model)
        if self.for_servers and not may_enter and SESSION in held:
            self.narrowed = True
            return model
        try:
            allowed: dict[str, Any] | None = super().check_hub_user(model)
        except UserNotAllowed:
            self.refused = True
            raise
        return allowed

    def concerns(self, server: ServerRef) -> bool:
        """Return True if the token covers this server, given that it is the user's own."""
        if not self.narrowed:
            return True
        needed = f"{SESSION}!server={server.user}/{server.name}"
        return bool(check_scopes(needed, set(self.current_user["scopes"])))

    @property
    def user(self) -> str:
        """The name of the member or service that sent the request."""
        return str(self.current_user["name"])

    @property
    def is_service(self) -> bool:
        """True if a service of the Hub sent the request, not a member."""
        return self.current_user.get("kind") != "user"

    @property
    def actor(self) -> str:
        """The name of the user as the ledger and the audit log record it."""
        return f"service:{self.user}" if self.is_service else self.user

    @property
    def admin(self) -> bool:
        """True if the member is an admin of the Hub and does not use a server's token."""
        return bool(self.current_user.get("admin")) and not (self.is_service or self.narrowed)

    @property
    def groups(self) -> frozenset[str]:
        """The member's groups at the Hub."""
        return frozenset(self.current_user.get("groups") or ())

    def reach(self, scope: str) -> ScopeFilter:
        """Return whom the user may access with one of our scopes; admins may access everybody."""
        if self.admin:
            return ScopeFilter(everybody=True)
        return reach(self.current_user.get("scopes") or (), scope)

    def need_admin(self) -> None:
        """Raise HTTPError 403 unless the user is an admin."""
        if not self.admin:
            raise web.HTTPError(403)

    @property
    def before(self) -> int | None:
        """The id that the page's entries come before, or None. Raises HTTPError 400."""
        text = self.get_query_argument("before", None)
        return None if text is None else whole(text, "before", 1, LAST)

    async def read(self, work: Callable[..., T], *args: Any) -> T:
        """Call the services off the event loop. Raises HTTPError with the error's message."""
        with _as_http_error():
            return await self.services.read(work, *args)

    async def report(self, work: Callable[..., T], *args: Any) -> T:
        """Call a slow report like :meth:`read`, without delaying pages."""
        with _as_http_error():
            return await self.services.report(work, *args)

    def set_status(self, status_code: int, reason: str | None = None) -> None:
        """Set the status, with the headers that HTTP requires for 401 and 405."""
        super().set_status(status_code, reason)
        if status_code == 401:
            self.set_header("WWW-Authenticate", "Bearer")
        if status_code == 405:
            missing = web.RequestHandler._unimplemented_method
            methods = [
                method
                for method in self.SUPPORTED_METHODS
                if method != self.request.method
                and getattr(type(self), method.lower()) is not missing
            ]
            self.set_header("Allow", ", ".join(methods))

    def sentence(self, status: int, **kwargs: Any) -> tuple[str, str]:
        """Return an error's reason and message, a general one if none was written for users."""
        exception = kwargs.get("exc_info", (None, None, None))[1]
        cause = getattr(exception, "__cause__", None)
        if isinstance(cause, GPUSpawnerError):
            return cause.reason, cause.message
        return f"http_{status}", SENTENCES.get(status, OTHERWISE)


NOT_YOURS = (
    "The account {account!r} is not yours, so you cannot see what is on it. Your own is on your "
    "page; ask an admin if you need to see another."
)
NO_SCOPE = (
    "You may not give credits to {account!r}. Admins may, and users with the scope "
    "custom:gpuspawner:grant for this account's member or group."
)
ONLY_GIVES = (
    "You may give credits to {account!r}, and take none back: an amount below zero is for admins. "
    "Ask one to undo what was given by mistake."
)


async def must_read(handler: ServiceHandler, account: str) -> None:
    """Require that the user may see this account's statement, as its member, an admin or by scope.

    Raises HTTPError 403 with a message that does not reveal if the account exists.
    """
    if not handler.is_service and account == member_account(handler.user):
        return
    if not await reaches(handler, handler.reach(READ_ACCOUNTS), account):
        raise web.HTTPError(403) from NotAllowed(NOT_YOURS.format(account=account))


async def must_grant(handler: ServiceHandler, account: str) -> None:
    """Require that the user may grant credits to this account. Raises HTTPError 403."""
    if not await reaches(handler, handler.reach(GRANT), account):
        raise web.HTTPError(403) from NotAllowed(NO_SCOPE.format(account=account))


def must_take(handler: ServiceHandler, account: str) -> None:
    """Require an admin, because only they may take credits back. Raises HTTPError 403."""
    if not handler.admin:
        raise web.HTTPError(403) from NotAllowed(ONLY_GIVES.format(account=account))


def may_see_balance(handler: ServiceHandler, account: str) -> bool:
    """Return True if the account is the member's own or one of their groups'."""
    own = {member_account(handler.user), *map(group_account, handler.groups)}
    return not handler.is_service and account in own


async def reaches(handler: ServiceHandler, whom: ScopeFilter, account: str) -> bool:
    """Return True if the scope covers the account. No scope covers the ledger's system accounts."""
    if account.startswith("system:"):
        return False
    return whom.everybody or account in await accounts_of(handler, whom)


async def accounts_of(handler: ServiceHandler, whom: ScopeFilter) -> frozenset[str]:
    """Return the names of all accounts that a narrowed scope covers, even if not opened yet."""
    names = set(whom.accounts())
    for group in whom.groups:
        names |= {member_account(user) for user in await members_of(handler, group)}
    return frozenset(names)


async def members_of(handler: ServiceHandler, group: str) -> frozenset[str]:
    """Return the members of a group of the Hub; nobody if there is no such group."""
    hub = handler.context.hub
    if hub is None:
        return frozenset()
    with _as_http_error():
        return await hub.members_of(group) or frozenset()


def unknown(account: str) -> web.HTTPError:
    """Return the HTTPError 404 for an unknown account."""
    error = web.HTTPError(404)
    error.__cause__ = UnknownAccount(account=account)
    return error
