"""Who may use the hub: members sign in, everyone else reads why not and whom to ask.

:class:`MemberMixin` adds that to any JupyterHub authenticator. Who is a member is said with
JupyterHub's own traits (``allowed_users``, ``allowed_groups``, ``admin_users``, ``allow_all``,
``allow_existing_users``, ``blocked_users``), which keep their meaning.
"""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jupyterhub.auth import Authenticator
from jupyterhub.authenticators.shared import SharedPasswordAuthenticator
from jupyterhub.utils import maybe_future
from oauthenticator.generic import GenericOAuthenticator
from tornado import web
from tornado.httpclient import HTTPClientError
from traitlets import Any as AnyTrait
from traitlets import Set, Unicode, default

from .errors import GPUSpawnerError
from .patience import within

if TYPE_CHECKING:
    from jupyterhub.handlers import BaseHandler
    from jupyterhub.user import User

OPEN_ACCOUNT_SECONDS = 3.0
"""Longest wait for the store at a sign-in. Past it the member comes in all the same."""

_MAIL_ADDRESS = re.compile(r"[^\s@<>]+@[^\s@<>]+")


class MemberMixin(Authenticator):
    """Members only, for any JupyterHub authenticator. Put it first among the bases::

        from gpuspawner.auth import MemberMixin
        from oauthenticator.github import GitHubOAuthenticator

        class MemberGitHubOAuthenticator(MemberMixin, GitHubOAuthenticator):
            pass

        c.JupyterHub.authenticator_class = MemberGitHubOAuthenticator
        c.MemberGitHubOAuthenticator.allowed_users = {"ada", "grace"}

    A member's account is opened, with its opening credits, when they first sign in. Who is
    not a member gets a page that says so in a sentence, and no account.
    """

    allowed_groups = Set(
        Unicode(),
        config=True,
        help="""
        Members of any of these groups may sign in, beside those in `allowed_users`.

        With `manage_groups` the groups are those that the authenticator reports, such as an
        identity provider's groups claim. Without it they are JupyterHub's own groups, from
        `c.JupyterHub.load_groups`, the admin page or the REST API; an OAuthenticator refuses
        to start in that case, as it does without this package.

        Example::

            c.JupyterHub.load_groups = {"ml-course": {"users": ["ada", "grace"]}}
            c.MemberSharedPasswordAuthenticator.allowed_groups = {"ml-course"}
        """,
    )

    contact = Unicode(
        config=True,
        help="""
        Whom to ask for membership: a mail address, or a sentence. It ends the page that
        someone reads who may not sign in. Shown as text: HTML in it has no effect.

        Example::

            c.MemberMixin.contact = "gpu-admin@lab.example"
            c.MemberMixin.contact = "Ask for a place in room 3.14, Tuesdays at noon."
        """,
    )

    broker = AnyTrait(
        help="The :class:`gpuspawner.broker.Broker` that opens accounts, set up by `c.Broker`.",
    )

    @default("broker")
    def _broker_default(self) -> Any:
        from .broker import Broker

        return Broker(parent=self)

    @default("allow_all")
    def _allow_all_default(self) -> bool:
        return False  # some authenticators say True as long as nothing else is set

    @default("allow_existing_users")
    def _allow_existing_users_default(self) -> bool:
        # JupyterHub's base class says True once `allowed_users` is set, and then a name that
        # was taken off the list, or is only known from a group, could still sign in.
        return False

    # Who comes in

    async def authenticate(
        self, handler: BaseHandler, data: dict[str, str] | None = None, **kwargs: Any
    ) -> dict[str, Any] | None:
        """The authenticator's own check, with every failure turned into a sentence.

        Returns the auth model with ``groups`` filled in, or None for a wrong password.
        Raises ``HTTPError`` with a sentence when no verdict can be had.
        """
        try:
            authenticated = await maybe_future(super().authenticate(handler, data, **kwargs))
        except Exception as failure:
            raise self._sentence_for(failure) from failure
        if authenticated is None:
            return None
        model: dict[str, Any] = (
            authenticated if isinstance(authenticated, dict) else {"name": authenticated}
        )
        name = self.normalize_username(model["name"])
        if not self.validate_username(name):
            raise self._refusal(name, "this name cannot be used on this hub")
        if not self.manage_groups:
            model["groups"] = _hub_groups(handler, name)
        return model

    async def check_allowed(
        self, username: str, authentication: dict[str, Any] | None = None
    ) -> bool:
        """True for a member. Otherwise raises ``HTTPError(403)`` with the sentence to show.

        Without an auth model nobody is signing in: then the verdict is returned, not raised.
        """
        if await maybe_future(super().check_allowed(username, authentication)):
            return True
        if authentication is None:
            return username in self.admin_users
        if authentication.get("admin") or username in self.admin_users:
            return True
        groups = set(authentication.get("groups") or ())
        if groups & self.allowed_groups:
            return True
        raise self._refusal(username, self._why_no_member(groups), self._membership_remedy())

    async def check_blocked_users(
        self, username: str, authentication: dict[str, Any] | None = None
    ) -> bool:
        """True unless blocked. A blocked person who signs in gets ``HTTPError(403)`` in words."""
        # JupyterHub lower-cases the names of those who sign in, but not this set.
        blocked = {name.lower() for name in self.blocked_users}
        passed = await maybe_future(super().check_blocked_users(username, authentication))
        if passed and username not in blocked:
            return True
        if authentication is None:
            return False
        raise self._refusal(username, "this account is blocked on this hub")

    async def refresh_user(
        self, user: User, handler: BaseHandler | None = None, **kwargs: Any
    ) -> bool | dict[str, Any]:
        """Fresh auth data; False, which asks for a new sign-in, once a member is none any more.

        While the identity provider does not answer, members stay signed in, unless
        ``auth_refresh_strict`` says otherwise.
        """
        try:
            refreshed: bool | dict[str, Any] = await super().refresh_user(user, handler, **kwargs)
        except Exception as failure:
            if self.auth_refresh_strict or not _is_silence(failure):
                raise self._sentence_for(failure) from failure
            self.log.warning(
                "%s does not answer (%s): %r stays signed in.", self._service, failure, user.name
            )
            return True
        if isinstance(refreshed, dict) and not await self._is_still_member(user, refreshed):
            return False
        return refreshed

    async def _is_still_member(self, user: User, refreshed: dict[str, Any]) -> bool:
        model = {"admin": None, "auth_state": {}, **refreshed}
        if not self.manage_groups:
            model["groups"] = [group.name for group in user.groups]
        try:
            return await self.check_blocked_users(user.name, model) and (
                self.allow_all or await self.check_allowed(user.name, model)
            )
        except web.HTTPError as refusal:
            self.log.warning("Signing out %r: %s", user.name, refusal)
            return False

    # Their account

    async def run_post_auth_hook(
        self, handler: BaseHandler, auth_model: dict[str, Any]
    ) -> dict[str, Any] | None:
        """The admin's hook, then the member's account: the hook may still refuse them."""
        admitted: dict[str, Any] | None = await super().run_post_auth_hook(handler, auth_model)
        if admitted:
            await self._open_account(admitted["name"])
        return admitted

    async def _open_account(self, user: str) -> None:
        try:
            opening = self.broker.run(self.broker.open_account, user)
            await within(OPEN_ACCOUNT_SECONDS, opening)
        except Exception as failure:
            # Whatever ails the store, it must not lock members out of the hub.
            expected = isinstance(failure, (GPUSpawnerError, asyncio.TimeoutError))
            self.log.warning(
                "The account of %r could not be opened at sign-in: %s "
                "It will be opened when they first start a server.",
                user,
                str(failure) or "the store took too long.",
                exc_info=not expected,
            )

    # Sentences

    @property
    def _service(self) -> str:
        return self.login_service or "The sign-in service"

    def _why_no_member(self, groups: Iterable[str]) -> str:
        """Names only the person's own groups: which ones are let in is not theirs to know."""
        why = "this account is not on the list of members"
        if not self.allowed_groups:
            return why
        if not groups:
            return f"{why} and in no group that may use this hub"
        return f"{why}, nor is any of its groups ({', '.join(sorted(groups))})"

    def _membership_remedy(self) -> str:
        return self._whom_to_ask("to let you in")

    def _whom_to_ask(self, what: str) -> str:
        if not self.contact:
            return f"Ask the admin of this hub {what}."
        if _MAIL_ADDRESS.fullmatch(self.contact):
            return f"Ask {self.contact} {what}."
        return self.contact

    def _refusal(self, name: str, why: str, remedy: str = "") -> web.HTTPError:
        """403: which account was used, why it does not suffice, what to do."""
        at = f" to {self.login_service}" if self.login_service else ""
        sentences = [f"You signed in{at} as {name!r}, but {why}."]
        sentences.append(remedy or self._whom_to_ask("about it"))
        if self.login_service:
            sentences.append(f"To use another account, sign out of {self.login_service} first.")
        return self._page(403, "Forbidden", " ".join(sentences))

    def _sentence_for(self, failure: Exception) -> web.HTTPError:
        """Whatever an authenticator raises, as an ``HTTPError`` that a person can act on."""
        if isinstance(failure, web.HTTPError) and failure.status_code < 500:
            return failure
        lasting = "It stays that way? " + self._whom_to_ask("to look at the hub's log")
        if _is_silence(failure):
            self.log.warning("%s does not answer: %s", self._service, failure)
            return self._page(
                503,
                "Service Unavailable",
                f"{self._service} is not working, so the hub cannot tell who you are. "
                f"Running servers go on. Try again in a moment. {lasting}",
            )
        if isinstance(failure, HTTPClientError) and failure.code < 500:
            self.log.warning("%s did not accept a sign-in: %s", self._service, failure)
            return self._page(
                403,
                "Forbidden",
                f"{self._service} did not accept this sign-in: it may have waited too long or "
                f"been used already. Start again from the sign-in page. {lasting}",
            )
        self.log.error("Sign-in failed: %s", failure, exc_info=failure)
        return self._page(
            502,
            "Bad Gateway",
            f"{self._service} gave an answer that this hub cannot use, so you are not signed in. "
            + self._whom_to_ask("to look at the hub's log"),
        )

    def _page(self, status: int, reason: str, message: str) -> web.HTTPError:
        """JupyterHub escapes the message; the HTML beside it only adds a link to the mail."""
        markup = html.escape(message)
        if _MAIL_ADDRESS.fullmatch(self.contact):
            shown = html.escape(self.contact)
            link = f'<a href="mailto:{quote(self.contact, safe="@")}">{shown}</a>'
            markup = markup.replace(shown, link)
        return _Page(status, message, markup, reason)


class MemberOAuthenticator(MemberMixin, GenericOAuthenticator):
    """Members of a club, lab or company sign in with its identity provider (OpenID Connect).

    ::

        c.JupyterHub.authenticator_class = "gpu-members-oauth"
        c.MemberOAuthenticator.login_service = "Lab account"
        c.MemberOAuthenticator.authorize_url = "https://id.lab.example/oauth/authorize"
        c.MemberOAuthenticator.token_url = "https://id.lab.example/oauth/token"
        c.MemberOAuthenticator.userdata_url = "https://id.lab.example/oauth/userinfo"
        c.MemberOAuthenticator.username_claim = "sub"
        c.MemberOAuthenticator.scope = ["openid", "profile", "groups"]
        c.MemberOAuthenticator.manage_groups = True  # the "groups" claim becomes hub groups
        c.MemberOAuthenticator.allowed_groups = {"ml-course"}
        c.MemberOAuthenticator.contact = "gpu-admin@lab.example"

    The client's id and secret are read from ``OAUTH_CLIENT_ID`` and ``OAUTH_CLIENT_SECRET``.
    """

    def _membership_remedy(self) -> str:
        """OAuthenticator's own trait for this sentence goes first where an admin has set it."""
        stock = self.traits()["custom_403_message"].default_value
        if self.custom_403_message and self.custom_403_message != stock:
            return str(self.custom_403_message)
        return super()._membership_remedy()


class MemberSharedPasswordAuthenticator(MemberMixin, SharedPasswordAuthenticator):
    """Members share one password, admins another: for a demo, a course day, a locked room.

    ::

        c.JupyterHub.authenticator_class = "gpu-members-shared-password"
        c.MemberSharedPasswordAuthenticator.user_password = "at-least-8-characters"
        c.MemberSharedPasswordAuthenticator.allowed_users = {"member1", "member2"}
    """

    async def authenticate(
        self, handler: BaseHandler, data: dict[str, str] | None = None, **kwargs: Any
    ) -> dict[str, Any] | None:
        """None for a wrong password. The comparison below takes ASCII text only."""
        password = (data or {}).get("password", "")
        if not password or not password.isascii():
            return None
        return await super().authenticate(handler, data, **kwargs)


class _Page(web.HTTPError):
    """An error page in words; JupyterHub shows ``jupyterhub_html_message`` where it can."""

    def __init__(self, status: int, message: str, markup: str, reason: str) -> None:
        super().__init__(status, message, reason=reason)
        self.jupyterhub_html_message = markup


def _hub_groups(handler: BaseHandler | None, name: str) -> list[str]:
    """The groups that the hub itself knows for a user."""
    user = handler.find_user(name) if handler is not None else None
    return sorted(group.name for group in user.groups) if user is not None else []


def _is_silence(failure: Exception) -> bool:
    """Whether an identity provider gave no answer, or said that it is broken itself."""
    if isinstance(failure, HTTPClientError):
        return bool(failure.code >= 500)  # 599 is tornado's own code for a timeout
    return isinstance(failure, (OSError, asyncio.TimeoutError))
