"""Sign-in with an identity provider (OAuth 2, OpenID Connect)."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import jwt
from jupyterhub.utils import maybe_future
from oauthenticator.generic import GenericOAuthenticator
from oauthenticator.oauth2 import OAuthCallbackHandler, OAuthenticator, OAuthLoginHandler
from tornado import web
from tornado.httpclient import HTTPClientError
from traitlets import Unicode, default

from .access import AuthPage, Link, Mail, is_silence
from .mixin import MemberMixin

if TYPE_CHECKING:
    from jupyterhub.handlers import BaseHandler
    from jupyterhub.user import User


CLOCK_LEEWAY_SECONDS = 60
"""Maximum difference between the clocks of the hub and the provider."""

_CHECKS: Any = {
    "verify_signature": False,
    **{f"verify_{claim}": True for claim in ("aud", "exp", "iat", "nbf")},
}
_BROKEN = {"server_error", "temporarily_unavailable"}
"""Error codes of a provider that is not working; see RFC 6749, section 4.1.2.1."""
_DECLINED = {"access_denied", "consent_required"}
_NOT_NOW = {"login_required", "interaction_required", "account_selection_required"}


class AskingLoginHandler(OAuthLoginHandler):
    """Redirects to the provider, and has it ask for the account if the user wants another one."""

    def authorize_redirect(self, *args: Any, **kwargs: Any) -> None:
        """Redirect to the provider, with ``prompt`` if the user asked for another account."""
        prompt = self.authenticator.other_account
        if self.get_argument("another", "") and not _is_address(prompt):
            kwargs["extra_params"] = {**kwargs.get("extra_params", {}), "prompt": prompt}
        super().authorize_redirect(*args, **kwargs)


class SayingCallbackHandler(OAuthCallbackHandler):
    """Handles the redirect from the provider, and explains errors that it reports."""

    def check_error(self) -> None:
        """Raise a page that explains the provider's error code.

        The page does not show the provider's message, because anybody can put one into a link.
        """
        if error := self.get_argument("error", ""):
            raise self.authenticator._declined(error)

    def check_code(self) -> None:
        """Raise a page if the provider sent no code."""
        if not self.get_argument("code", ""):
            raise self.authenticator._begin_again()

    def check_state(self) -> None:
        """Raise a page if the sign-in began elsewhere or too long ago, or was forged."""
        try:
            super().check_state()
        except Exception as failure:
            self.log.warning("A sign-in came back that did not begin here: %s", failure)
            raise self.authenticator._begin_again() from failure


class MemberOAuthMixin(MemberMixin, OAuthenticator):
    """Restricts any class of OAuthenticator to members. It must be the first base class.

    With ``enable_auth_state``, changes at the provider take effect after ``auth_refresh_age``
    seconds and at the next start of a server. It is on if ``JUPYTERHUB_CRYPT_KEY`` is set.
    """

    login_handler = AskingLoginHandler
    callback_handler = SayingCallbackHandler

    other_account = Unicode(
        "select_account",
        config=True,
        help="""
        How a person signs in with another account of the same provider: a `prompt` or an address.
        The `prompt` makes the provider ask: `select_account` (the default) for the account, `login`
        for the password again. The address is that of a page that signs out at the provider. Empty
        if the provider supports neither.

        Example::

            c.MemberOAuthMixin.other_account = "https://id.lab.example/logout"
        """,
    )

    @default("enable_auth_state")
    def _enable_auth_state_default(self) -> bool:
        # The hub needs the stored tokens to ask the provider again later.
        return bool(os.environ.get("JUPYTERHUB_CRYPT_KEY"))

    # Answers of the provider.

    async def token_to_user(self, token_info: dict[str, Any]) -> dict[str, Any]:
        """Return the provider's data about a user. Raises a page as ``_claims_of`` does."""
        if self.userdata_from_id_token:
            return self._claims_of(token_info)
        return dict(await super().token_to_user(token_info))

    def _claims_of(self, token_info: dict[str, Any]) -> dict[str, Any]:
        """Return the claims of the id token, after checking its times and its audience.

        Its signature is not checked: the token came directly from the provider over TLS, which
        proves the same (OpenID Connect Core 3.1.3.7). Raises a page if the token has expired or is
        not valid yet.
        """
        try:
            claims: dict[str, Any] = jwt.decode(
                token_info["id_token"],
                audience=self.client_id,
                leeway=CLOCK_LEEWAY_SECONDS,
                options=_CHECKS,
            )
        except (jwt.ExpiredSignatureError, jwt.ImmatureSignatureError) as failure:
            self.log.error("The id token of %s is out of time: %s", self._service, failure)
            raise self._clocks_differ() from failure
        return claims

    async def get_user_groups(self, auth_state: dict[str, Any]) -> set[str]:
        """Return the hub's names of the groups in the provider's answer."""
        key = self.auth_state_groups_key
        if callable(key):
            return self._named_groups(await maybe_future(key(auth_state)) or (), key)
        found: Any = auth_state
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if found is None:
            self.log.warning("%s names no groups (%s is missing).", self._service, key)
            return set()
        # Some providers send a single group as a string, others as a list.
        return self._named_groups([found] if isinstance(found, str) else found, key)

    def _named_groups(self, found: Any, key: Any) -> set[str]:
        is_list = isinstance(found, (list, tuple, set, frozenset))
        if is_list and all(isinstance(group, str) for group in found):
            return self._hub_groups_from(found)
        self.log.error(
            "%s: the claim %s is not a list of names, so nobody gets a group by it. Set "
            "auth_state_groups_key to a function that returns the names.",
            self._service,
            key,
        )
        return set()

    def _claims_in(self, model: dict[str, Any]) -> dict[str, Any]:
        return dict((model.get("auth_state") or {}).get(self.user_auth_state_key) or {})

    def _mail_of(self, model: dict[str, Any]) -> Mail | Awaitable[Mail]:
        claims = self._claims_in(model)
        return str(claims.get("email") or ""), self._is_confirmed(claims)

    def _is_confirmed(self, claims: dict[str, Any]) -> bool:
        return claims.get("email_verified") in (True, "true")

    # Refresh.

    def _reads_id_token(self) -> bool:
        return bool(self.userdata_from_id_token)

    async def _ask_provider(
        self, user: User, handler: BaseHandler | None, **kwargs: Any
    ) -> bool | dict[str, Any]:
        """Return fresh auth data.

        Data from an id token never changes, so the refresh token is used to get a new one. Without
        a refresh token, users stay signed in until their id token expires.
        """
        if not (self._reads_id_token() and self.enable_auth_state) or self.refresh_user_hook:
            return await super()._ask_provider(user, handler, **kwargs)
        state = await user.get_auth_state() or {}
        if not state.get("refresh_token"):
            return self._is_in_time(state)
        params = self.build_refresh_token_request_params(state["refresh_token"])
        try:
            answer = await self.get_token_info(handler, params)
        except (HTTPClientError, web.HTTPError) as failure:
            if is_silence(failure):
                raise
            self.log.info("%s gives no fresh token for %r.", self._service, user.name)
            return False
        if "id_token" not in answer:
            return False
        answer.setdefault("refresh_token", state["refresh_token"])
        model: dict[str, Any] = await self._token_to_auth_model(answer)
        return model

    def _is_in_time(self, state: dict[str, Any]) -> bool:
        try:
            self._claims_of(state["token_response"])
        except (AuthPage, KeyError, jwt.InvalidTokenError):
            return False
        return True

    # Messages.

    def _try_again(self) -> Link:
        return "Sign in again", self._address("oauth_login")

    def _another_account(self) -> Link | None:
        if not self.other_account:
            return None
        if _is_address(self.other_account):
            return f"Sign out of {self._service}", self.other_account
        return "Sign in with another account", self._address("oauth_login?another=1")

    def _membership_remedy(self) -> str:
        """Return OAuthenticator's ``custom_403_message`` if an admin has set it."""
        stock = self.traits()["custom_403_message"].default_value
        if self.custom_403_message and self.custom_403_message != stock:
            return str(self.custom_403_message)
        return super()._membership_remedy()

    def _declined(self, error: str) -> AuthPage:
        """Return the page that explains an error code of the provider."""
        self.log.warning("%s ended a sign-in with the error %r.", self._service, error[:60])
        if error in _BROKEN:
            return self._not_working()
        if error in _DECLINED:
            return self._failed(
                403,
                f"{self._service} was not allowed to tell this hub who you are: somebody said no "
                "there, you or its admin. The hub needs your name and groups and nothing else. "
                f"Sign in again and agree. {self._lasting()}",
            )
        if error in _NOT_NOW:
            return self._begin_again()
        return self._unusable()

    def _begin_again(self) -> AuthPage:
        return self._failed(
            400,
            "This sign-in began in another browser or too long ago, or was used already. "
            f"Start again. {self._lasting()}",
        )

    def _clocks_differ(self) -> AuthPage:
        return self._failed(
            502,
            f"The clocks of {self._service} and of this hub differ, so its answer seems out of "
            f"date, and you are not signed in. {self._whom_to_ask('to set the time')}",
        )


class MemberOAuthenticator(MemberOAuthMixin, GenericOAuthenticator):
    """Sign-in with the identity provider of a club, lab or company (OpenID Connect).

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


def _is_address(text: str) -> bool:
    return text.startswith(("https://", "http://"))
