"""The base of the service's handlers: who asks, what they may see, and errors as sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from jupyterhub.services.auth import HubOAuth, HubOAuthenticated, UserNotAllowed, check_scopes
from tornado import web

from ..core.errors import GPUSpawnerError, NotAllowed, Unavailable, UnknownAccount
from ..core.scopes import CUSTOM_SCOPES, GRANT, READ_ACCOUNTS, SESSION, Reach, reach
from ..leases.models import ServerRef
from ..ledger.models import group_account, member_account
from ..monitoring.models import Sample
from ..notifications.channels import Channel
from ..services import Services

T = TypeVar("T")

POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)

SENTENCES = {
    400: "The address is not complete or not valid. Go back, and follow the link again.",
    401: "Say who you are: send a token of the Hub in the header Authorization (token ...).",
    403: "This page is not for you. Sign in as somebody who may see it, or ask your admin.",
    404: "There is no such page.",
    405: "This page can only be read.",
    503: "A part of the hub does not answer. Try again in a moment.",
}
OTHERWISE = "Something went wrong. Try again in a moment, and tell your admin if it stays."


class HubCalls(Protocol):
    """What the pages ask the Hub beside who it is that asks. Raises Unavailable."""

    async def members_of(self, group: str) -> frozenset[str] | None:
        """The names of a group's members; None when the Hub has no such group."""

    async def stop_server(self, server: ServerRef) -> bool:
        """Ask for a server's stop. False when the Hub has no such server."""


class Duty(Protocol):
    """The state of a background duty of the service."""

    is_running: bool
    failures: int
    """How often it failed since the service started."""


@dataclass(frozen=True, slots=True)
class Context:
    """What every handler is given."""

    services: Services
    hub_auth: HubOAuth
    warn_minutes: tuple[float, ...] = ()
    """Minutes that an account lasts."""
    session_warn_minutes: tuple[float, ...] = ()
    """Minutes before a session's end."""
    channels: Mapping[str, Channel] = field(default_factory=dict)
    """How members can be told."""
    poke: Callable[[], None] = lambda: None
    """There is a notice to send now."""
    recent: Callable[[], Mapping[str, Sequence[Sample]]] = dict
    """The newest samples of each device by its UUID, the oldest first."""
    members_see_names: bool = False
    """Whether members are told on the page of the cluster who has a GPU."""
    hub: HubCalls | None = None
    """None where nobody answers for the Hub: then nothing that needs it can be done."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    """Finished rounds of each duty of the service, by the duty's name."""
    duties: Mapping[str, Duty] = field(default_factory=dict)
    """The state of each duty of the service, by its name."""

    @property
    def prefix(self) -> str:
        """Where the service lies, such as ``/services/gpu/``."""
        return str(self.hub_auth.base_url)

    @property
    def hub_url(self) -> str:
        """Where the Hub's own pages lie, such as ``/hub/``."""
        return str(self.hub_auth.hub_host + self.hub_auth.hub_prefix)


class ServiceHandler(HubOAuthenticated, web.RequestHandler):
    """A handler that knows who asks. Subclasses decorate ``get`` with ``web.authenticated``."""

    refused = False
    """Whether the Hub knows who asks, and they may not use this service."""

    for_services = False
    """Whether a service of the Hub may ask too, with a scope of ours."""

    for_servers = False
    """Whether a server may ask too, by its own token: about itself, see :meth:`concerns`."""

    takes_files = False
    """True for what admins alone may use, with bodies that are larger than others may be."""

    narrowed = False
    """Whether who asks may do no more than a server may."""

    has_xsrf_proof = False
    """True when a session cookie came with the XSRF token that belongs to it."""

    _is_resolving = False
    """True from the moment at which :meth:`prepare` begins to ask the Hub who asks."""

    _is_resolved = False
    """True once the Hub has answered."""

    def initialize(self, context: Context) -> None:
        self.context = context
        self.services = context.services
        self.hub_auth = context.hub_auth

    def set_default_headers(self) -> None:
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "same-origin")
        self.set_header("Cache-Control", "no-store")

    # Who asks is resolved once, in prepare(), without blocking the event loop. JupyterHub's own
    # look-up from get_current_user() blocks it in a pool of one thread. Tornado checks XSRF before
    # prepare(); JupyterHub's check then looks the user up, which checks XSRF again in that thread
    # and waits for the same pool: the service would hang for good. So the check waits until the
    # look-up has begun, and nobody is the current user until it has ended.

    async def prepare(self) -> None:
        """Ask the Hub who asks. Raises HTTPError 503 when it does not answer."""
        self._is_resolving = True
        try:
            await self.hub_auth.get_user(self, sync=False)
        except web.HTTPError as error:
            if error.status_code < 500:
                raise
            sentence = "The Hub cannot say who you are just now. Try again in a moment."
            raise web.HTTPError(503, "%s", error.log_message) from Unavailable(sentence)
        self._is_resolved = True
        # Set, for Tornado keeps what the XSRF check was told meanwhile: nobody.
        self.current_user = self.get_current_user()

    def get_current_user(self) -> Any:
        """Return the member or service that the Hub named; None before it has answered."""
        return super().get_current_user() if self._is_resolved else None

    def check_xsrf_cookie(self) -> None:
        """Check the XSRF token; before :meth:`prepare` do nothing, for JupyterHub checks later.

        Raises HTTPError 403.
        """
        if self._is_resolving:
            super().check_xsrf_cookie()
            self.has_xsrf_proof = True

    def check_hub_user(self, model: dict[str, Any]) -> dict[str, Any] | None:
        """Only people have accounts: a service that bears a member's name is not the member.

        Where services may ask, they need a scope of ours, and have nothing of their own.
        """
        if model.get("kind") != "user" and not (
            self.for_services and any(reach(model["scopes"], scope) for scope in CUSTOM_SCOPES)
        ):
            raise web.HTTPError(403)
        if self.for_servers and self._only_for_servers(model):
            self.narrowed = True
            return model
        try:
            allowed: dict[str, Any] | None = super().check_hub_user(model)
        except UserNotAllowed:
            self.refused = True
            raise
        return allowed

    def _only_for_servers(self, model: dict[str, Any]) -> bool:
        """Whether this token opens nothing of ours but what is about a server."""
        may_enter = self.hub_auth.check_scopes(self.hub_scopes or set(), model)
        held = (scope.partition("!") for scope in model["scopes"])
        return not may_enter and any(name == SESSION for name, _, _ in held)

    def concerns(self, server: ServerRef) -> bool:
        """Whether who asks may ask about this server, if it is their own."""
        if not self.narrowed:
            return True
        needed = f"{SESSION}!server={server.user}/{server.name}"
        return bool(check_scopes(needed, set(self.current_user["scopes"])))

    @property
    def user(self) -> str:
        """The member who asks."""
        return str(self.current_user["name"])

    @property
    def is_service(self) -> bool:
        """Whether it is no member who asks, but a service of the Hub."""
        return self.current_user.get("kind") != "user"

    @property
    def actor(self) -> str:
        """Who asks, for the books."""
        return f"service:{self.user}" if self.is_service else self.user

    @property
    def admin(self) -> bool:
        """Whether the member is an admin of the Hub. By the token of a server nobody is."""
        return bool(self.current_user.get("admin")) and not (self.is_service or self.narrowed)

    @property
    def groups(self) -> frozenset[str]:
        """The member's groups at the Hub."""
        return frozenset(self.current_user.get("groups") or ())

    def reach(self, scope: str) -> Reach:
        """Whom the one who asks reaches with a scope of ours; admins reach everybody."""
        if self.admin:
            return Reach(everybody=True)
        return reach(self.current_user.get("scopes") or (), scope)

    def need_admin(self) -> None:
        """Refuse everybody but admins."""
        if not self.admin:
            raise web.HTTPError(403)

    async def read(self, work: Callable[..., T], *args: Any) -> T:
        """Ask the services off the event loop; what it refuses becomes the page's sentence."""
        try:
            return await self.services.read(work, *args)
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code, "%s", error.message) from error

    async def report(self, work: Callable[..., T], *args: Any) -> T:
        """Do as :meth:`read` for what may take long, so that no page waits for it."""
        try:
            return await self.services.report(work, *args)
        except GPUSpawnerError as error:
            raise web.HTTPError(error.status_code, "%s", error.message) from error

    def set_status(self, status_code: int, reason: str | None = None) -> None:
        super().set_status(status_code, reason)
        if status_code == 401:
            self.set_header("WWW-Authenticate", "Bearer")
        if status_code == 405:
            self.set_header("Allow", ", ".join(self._methods()))

    def _methods(self) -> list[str]:
        """The methods that this handler answers, but for the one that it was asked with."""
        return [
            method
            for method in self.SUPPORTED_METHODS
            if method != self.request.method
            and getattr(type(self), method.lower()) is not web.RequestHandler._unimplemented_method
        ]

    def sentence(self, status: int, **kwargs: Any) -> tuple[str, str]:
        """Reason and sentence for an error; never anything that was not written for people."""
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
    "You may not give credits to {account!r}. Admins may, and whoever has the scope "
    "custom:gpuspawner:grant for this account's member or group."
)

ONLY_GIVES = (
    "You may give credits to {account!r}, and take none back: an amount below zero is for admins. "
    "Ask one to undo what was given by mistake."
)


async def must_read(handler: ServiceHandler, account: str) -> None:
    """Let through who may see this account's statement: its member, an admin, a scope's holder.

    Raises HTTPError 403 with a sentence; whether there is such an account, it does not say.
    """
    if not handler.is_service and account == member_account(handler.user):
        return
    if not await reaches(handler, handler.reach(READ_ACCOUNTS), account):
        raise web.HTTPError(403) from NotAllowed(NOT_YOURS.format(account=account))


async def must_grant(handler: ServiceHandler, account: str) -> None:
    """Let through who may give credits to this account. Raises HTTPError 403 with a sentence."""
    if not await reaches(handler, handler.reach(GRANT), account):
        raise web.HTTPError(403) from NotAllowed(NO_SCOPE.format(account=account))


def must_take(handler: ServiceHandler, account: str) -> None:
    """Let through who may take credits back: admins alone. Raises HTTPError 403."""
    if not handler.admin:
        raise web.HTTPError(403) from NotAllowed(ONLY_GIVES.format(account=account))


def may_see_balance(handler: ServiceHandler, account: str) -> bool:
    """Whether it is an account that the member may draw on: their own, or a group's of theirs."""
    own = {member_account(handler.user), *map(group_account, handler.groups)}
    return not handler.is_service and account in own


async def reaches(handler: ServiceHandler, whom: Reach, account: str) -> bool:
    """Whether an account is among those that a scope reaches; the ledger's own never are."""
    if account.startswith("system:"):
        return False
    return whom.everybody or account in await accounts_of(handler, whom)


async def accounts_of(handler: ServiceHandler, whom: Reach) -> frozenset[str]:
    """The names of all accounts that a scope reaches which is narrowed; opened or not."""
    names = set(whom.accounts())
    for group in whom.groups:
        names |= {member_account(user) for user in await members_of(handler, group)}
    return frozenset(names)


async def members_of(handler: ServiceHandler, group: str) -> frozenset[str]:
    """Who is in a group of the Hub; nobody, when there is no such group."""
    hub = handler.context.hub
    if hub is None:
        return frozenset()
    try:
        return await hub.members_of(group) or frozenset()
    except GPUSpawnerError as error:
        raise web.HTTPError(error.status_code, "%s", error.message) from error


def unknown(account: str) -> web.HTTPError:
    """There is no such account."""
    error = web.HTTPError(404)
    error.__cause__ = UnknownAccount(account=account)
    return error
