"""A mixin for any JupyterHub authenticator that admits members and signs out former ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jupyterhub.utils import maybe_future
from tornado import web
from traitlets import default

from ..core.aio import within
from ..core.errors import GPUSpawnerError
from .access import Refusal, Rules, is_silence

if TYPE_CHECKING:
    from jupyterhub.handlers import BaseHandler
    from jupyterhub.user import User

    from ..members.roster import RosterVerdict
    from ..services import Services


OPEN_ACCOUNT_SECONDS = 3.0
"""Maximum wait for the store at a sign-in. After a timeout, the member is still let in."""

ACTOR = "sign-in"
"""The recorded actor when a sign-in or refresh starts or ends a membership."""

BLOCKED = "this account is blocked on this hub"


class MemberMixin(Rules):
    """Restricts any JupyterHub authenticator to members.

    It must be the first base class::

        from gpuspawner.auth import MemberMixin
        from nativeauthenticator import NativeAuthenticator

        class MemberNativeAuthenticator(MemberMixin, NativeAuthenticator):
            pass

        c.JupyterHub.authenticator_class = MemberNativeAuthenticator
        c.MemberNativeAuthenticator.allowed_users = {"ada", "grace"}

    A member's account is opened, with its opening credits, at their first sign-in. Everyone else
    gets a page that says why, and no account. A former member cannot start servers, and the end
    of the membership is recorded in the store.
    """

    @default("allow_all")
    def _allow_all_default(self) -> bool:
        return False  # some authenticators default to True as long as nothing else is set

    @default("allow_existing_users")
    def _allow_existing_users_default(self) -> bool:
        # JupyterHub's default is True once `allowed_users` is set. Then users who were removed
        # from that list, or who are only known from a group, could still sign in.
        return False

    @default("refresh_pre_spawn")
    def _refresh_pre_spawn_default(self) -> bool:
        return True  # changes at the provider take effect at the next start at the latest

    # Sign-in.

    async def authenticate(
        self, handler: BaseHandler, data: dict[str, str] | None = None, **kwargs: Any
    ) -> dict[str, Any] | None:
        """Check the credentials as the base class does, and explain every failure.

        Returns the auth model with ``groups`` filled in, or None for a wrong password.
        Raises ``HTTPError`` with a message for the user if the check itself fails.
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
            user = handler.find_user(name) if handler is not None else None
            model["groups"] = sorted(group.name for group in user.groups) if user else []
        else:
            await self._add_roster_groups(name, model)
        return model

    async def check_allowed(
        self, username: str, authentication: dict[str, Any] | None = None
    ) -> bool:
        """Return True for a member, else raise ``HTTPError(403)`` with the message to show.

        Without an auth model nobody is signing in, and the result is always returned.
        """
        if authentication is None:
            own = await maybe_future(super().check_allowed(username, None))
            return bool(own) or username in self.admin_users
        # Ask the base class without admin and groups, because this class has its own rules for
        # them. It is asked about every user, because it may raise a refusal itself.
        plain = {**authentication, "admin": None, "groups": []}
        try:
            own = bool(await maybe_future(super().check_allowed(username, plain)))
        except Exception as failure:
            raise self._sentence_for(failure) from failure
        if self._is_named(username, authentication):
            return True
        roster = await self._on_roster(username)
        rules = [rule async for rule in self._each_rule(authentication, own, roster)]
        if self._makes_member(rules):
            # If only the roster admits them, the membership ends with the roster entry.
            by_others = self.membership == "any" and sum(rule.holds for rule in rules) > 1
            authentication["by_roster"] = bool(roster and roster.member and not by_others)
            return True
        why = self._why_no_member(rules)
        await self._tell_ended(username, why)
        raise self._refusal(username, why, self._membership_remedy())

    def _is_named(self, username: str, authentication: dict[str, Any]) -> bool:
        admin = authentication.get("admin") or username in self.admin_users
        return bool(admin) or self.allow_all or username in self.allowed_users

    async def check_blocked_users(
        self, username: str, authentication: dict[str, Any] | None = None
    ) -> bool:
        """Return True unless blocked. If a blocked user signs in, raise ``HTTPError(403)``."""
        passed = await maybe_future(super().check_blocked_users(username, authentication))
        if passed and not self._is_blocked(username):
            return True
        if authentication is None:
            return False
        why = BLOCKED if self._is_blocked(username) else self._why_own_block()
        raise await self._blocked(username, why)

    def _is_blocked(self, username: str) -> bool:
        # JupyterHub lower-cases names at the sign-in, but not in this set.
        return username.lower() in {name.lower() for name in self.blocked_users}

    async def _blocked(self, username: str, why: str) -> Refusal:
        await self._tell_ended(username, why)
        return self._refusal(username, why)

    def _why_own_block(self) -> str:
        """Return why the base class blocks a user who is not in ``blocked_users``."""
        return BLOCKED

    # Refresh.

    async def refresh_user(
        self, user: User, handler: BaseHandler | None = None, **kwargs: Any
    ) -> bool | dict[str, Any]:
        """Return fresh auth data, or False to require a new sign-in.

        It returns False for a former member, and raises ``HTTPError(403)`` with the message to
        show if they try to start a server. If the identity provider is not responding, members stay
        signed in unless ``auth_refresh_strict`` is set.
        """
        try:
            refreshed = await self._ask_provider(user, handler, **kwargs)
        except Refusal as refusal:
            return self._sign_out(user, handler, refusal)
        except Exception as failure:
            # There is no such setting before JupyterHub 6.1.
            if getattr(self, "auth_refresh_strict", False) or not is_silence(failure):
                raise self._sentence_for(failure) from failure
            self.log.warning(
                "%s is not responding (%s): %r stays signed in.", self._service, failure, user.name
            )
            return True
        if isinstance(refreshed, dict) and refreshed.get("name") != user.name:
            refreshed = False  # another name at the provider is another account here
        if refreshed is False:
            return self._sign_in_anew(user, handler)
        try:
            return await self._refreshed(user, refreshed)
        except Refusal as refusal:
            return self._sign_out(user, handler, refusal)
        except web.HTTPError as failure:
            if failure.status_code < 500:  # a refusal of the base class
                return self._sign_in_anew(user, handler)
            # The store or the provider is not responding.
            self.log.warning("%r stays signed in: %s", user.name, failure)
            return refreshed

    async def _ask_provider(
        self, user: User, handler: BaseHandler | None, **kwargs: Any
    ) -> bool | dict[str, Any]:
        """Return the base class's result of a refresh."""
        fresh: bool | dict[str, Any] = await super().refresh_user(user, handler, **kwargs)
        return fresh

    async def _refreshed(
        self, user: User, refreshed: bool | dict[str, Any]
    ) -> bool | dict[str, Any]:
        """Return ``refreshed`` if the user is still a member, else raise Refusal."""
        fresh = refreshed if isinstance(refreshed, dict) else {}
        model = {"admin": None, "auth_state": {}, **fresh}
        if not self.manage_groups or not fresh:
            model["groups"] = sorted(group.name for group in user.groups)
        elif self.roster:
            await self._add_roster_groups(user.name, model)
            fresh["groups"] = model["groups"]
        if not fresh and self._only_provider_knows():
            if self._is_blocked(user.name):
                raise await self._blocked(user.name, BLOCKED)
            return refreshed
        await self.check_blocked_users(user.name, model)
        if self.allow_all or await self.check_allowed(user.name, model):
            await self._tell_member(user.name, bool(model.get("by_roster")))
        return refreshed

    def _sign_out(self, user: User, handler: BaseHandler | None, refusal: Refusal) -> bool:
        """Return False. If the user is starting a server, raise a page that says why it fails."""
        self.log.warning("Signing out %r: %s", user.name, refusal.why)
        if _is_starting(handler):
            raise self._no_start(user.name, refusal.why)
        return False

    def _sign_in_anew(self, user: User, handler: BaseHandler | None) -> bool:
        """Return False. If the user is starting a server in a browser, raise a page instead."""
        if handler is None or not _is_starting(handler):
            return False
        if handler.current_user is user and not getattr(handler, "_token_authenticated", False):
            message = (
                f"{self._service} requires you to sign in again before a server starts. "
                "Sign in, then start the server."
            )
            raise self._failed(403, message)
        return False

    def _only_provider_knows(self) -> bool:
        """Return True if membership cannot be decided without asking the provider."""
        return bool(
            self.manage_groups or self.allowed_mail_domains or self._own_rule() or self.allow_all
        )

    # Roster.

    async def _on_roster(self, username: str) -> RosterVerdict | None:
        """Return the roster's answer; None without a roster. Raises a page if it is unavailable."""
        if not self.roster:
            return None
        try:
            asked = self.services.read(self.services.roster.roster_member, username)
            verdict: RosterVerdict = await within(OPEN_ACCOUNT_SECONDS, asked)
        except (GPUSpawnerError, asyncio.TimeoutError) as failure:
            self.log.warning("The roster cannot be read: %s", failure or "it took too long")
            raise self._failed(
                503,
                "The roster of members cannot be read right now, so the hub cannot check whether "
                "you are on it. Running servers continue. Try again in a moment. "
                + self._lasting(),
            ) from failure
        return verdict

    async def _add_roster_groups(self, username: str, model: dict[str, Any]) -> None:
        if verdict := await self._on_roster(username):
            model["groups"] = sorted({*(model.get("groups") or ()), *verdict.groups})

    # Account and membership.

    async def run_post_auth_hook(
        self, handler: BaseHandler, auth_model: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Open the member's account after the admin's hook, because the hook may refuse them."""
        by_roster = auth_model.pop("by_roster", False)
        admitted: dict[str, Any] | None = await super().run_post_auth_hook(handler, auth_model)
        if admitted:
            await self._open_account(admitted["name"], by_roster)
        return admitted

    async def _open_account(self, user: str, by_roster: bool) -> None:
        def opening(services: Services) -> None:
            services.ledger.open_account(user)
            services.members.membership_returned(user, actor=ACTOR, by_roster=by_roster)

        await self._tell(
            opening,
            f"The account of {user!r} could not be opened at sign-in: %s "
            "It will be opened when they first start a server.",
        )

    async def _tell_member(self, user: str, by_roster: bool) -> None:
        def returned(services: Services) -> None:
            services.members.membership_returned(user, actor=ACTOR, by_roster=by_roster)

        await self._tell(returned, f"Could not record that {user!r} is a member: %s")

    async def _tell_ended(self, user: str, why: str) -> None:
        def ended(services: Services) -> None:
            services.members.membership_ended(user, why, actor=ACTOR)

        await self._tell(ended, f"Could not record that {user!r} is no longer a member: %s")

    async def _tell(self, change: Callable[[Services], None], otherwise: str) -> None:
        """Make a change in the store, or log ``otherwise`` with the reason why that failed."""
        try:
            services = self.services
            await within(OPEN_ACCOUNT_SECONDS, services.run(change, services))
        except Exception as failure:
            # No error of the store may lock members out of the hub.
            expected = isinstance(failure, (GPUSpawnerError, asyncio.TimeoutError))
            why = str(failure) or "the store took too long."
            self.log.warning(otherwise, why, exc_info=not expected)


def _is_starting(handler: BaseHandler | None) -> bool:
    """Return True if the start of a server caused the refresh, and not a visit to a page.

    Scopes are set once the request's user is known. The hub would replace an earlier error by a
    page of its own.
    """
    return bool(getattr(handler, "expanded_scopes", None))
