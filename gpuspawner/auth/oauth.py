"""Sign-in with an identity provider (OAuth 2, OpenID Connect)."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import jwt
from jupyterhub.authenticators.shared import SharedPasswordAuthenticator
from jupyterhub.utils import maybe_future
from oauthenticator.azuread import AzureAdOAuthenticator
from oauthenticator.cilogon import CILogonLoginHandler, CILogonOAuthenticator
from oauthenticator.generic import GenericOAuthenticator
from oauthenticator.github import GitHubOAuthenticator
from oauthenticator.gitlab import GitLabOAuthenticator
from oauthenticator.google import GoogleOAuthenticator
from oauthenticator.oauth2 import OAuthCallbackHandler, OAuthenticator, OAuthLoginHandler
from tornado import web
from tornado.httpclient import HTTPClientError
from traitlets import TraitError, Unicode, default

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
            self.log.warning("A sign-in came back that was not started here: %s", failure)
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
            self.log.error(
                "The id token of %s is expired or not valid yet: %s", self._service, failure
            )
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
            "%s: the claim %s is not a list of names, so it gives nobody a group. Set "
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
                f"{self._service} did not confirm who you are: access was declined "
                "there, by you or its admin. The hub needs only your name and groups. "
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
            f"date and you are not signed in. {self._whom_to_ask('to set the time')}",
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


class MemberSharedPasswordAuthenticator(MemberMixin, SharedPasswordAuthenticator):
    """Sign-in with one password for all members and another for admins, for demos and courses.

    ::

        c.JupyterHub.authenticator_class = "gpu-members-shared-password"
        c.MemberSharedPasswordAuthenticator.user_password = "at-least-8-characters"
        c.MemberSharedPasswordAuthenticator.allowed_users = {"member1", "member2"}
    """

    async def authenticate(
        self, handler: BaseHandler, data: dict[str, str] | None = None, **kwargs: Any
    ) -> dict[str, Any] | None:
        """Return None for a wrong password. The base class can only compare ASCII passwords."""
        password = (data or {}).get("password", "")
        if not password or not password.isascii():
            return None
        return await super().authenticate(handler, data, **kwargs)


_PLACES = "it is in none of the organisations, teams or projects that may use this hub"


class MemberGitHubOAuthenticator(MemberOAuthMixin, GitHubOAuthenticator):
    """Sign-in for members of an organisation or a team on GitHub.

    With ``manage_groups``, their organisations (``lab``) and teams (``lab:gpu``) become hub
    groups, and ``admin_groups`` may name them. ``allowed_mail_domains`` checks every address that
    GitHub has confirmed.
    """

    @default("scope")
    def _scope_default(self) -> list[str]:
        # Without read:org, GitHub only reports public memberships.
        return ["read:org", *(["user:email"] if self.allowed_mail_domains else [])]

    @default("populate_teams_in_auth_state")
    def _populate_teams_default(self) -> bool:
        return bool(self.manage_groups)

    @default("auth_state_groups_key")
    def _auth_state_groups_key_default(self) -> Any:
        return _teams

    def _own_rule(self) -> str:
        return _PLACES if self.allowed_organizations else ""

    async def _mail_of(self, model: dict[str, Any]) -> Mail:
        """Return a confirmed address, from an allowed domain if there is one."""
        answer = model["auth_state"]["token_response"]
        headers = self.build_userdata_request_headers(
            answer["access_token"], answer.get("token_type", "bearer")
        )
        found = await self.httpfetch(
            f"{self.github_api}/user/emails",
            "fetching mail addresses",
            headers=headers,
            validate_cert=self.validate_server_cert,
        )
        confirmed = [address["email"] for address in found or () if address.get("verified")]
        return self._best_mail(confirmed), bool(confirmed)


def _teams(auth_state: dict[str, Any]) -> set[str]:
    teams = auth_state.get("teams") or ()
    organisations = {team["organization"]["login"] for team in teams}
    return organisations | {f"{team['organization']['login']}:{team['slug']}" for team in teams}


class MemberGitLabOAuthenticator(MemberOAuthMixin, GitLabOAuthenticator):
    """Sign-in for members of a group or a project on GitLab.

    With ``manage_groups``, their groups become hub groups named by full path (``lab/gpu``).
    """

    @default("scope")
    def _scope_default(self) -> list[str]:
        # Reading memberships of groups needs a wider scope than reading the user.
        asks = self.allowed_gitlab_groups or self.allowed_project_ids
        return ["read_api" if asks else "read_user", *(["openid"] if self.manage_groups else [])]

    @default("username_claim")
    def _username_claim_default(self) -> str:
        return "username"

    @default("auth_state_groups_key")
    def _auth_state_groups_key_default(self) -> str:
        return "gitlab_groups"

    async def update_auth_model(self, auth_model: dict[str, Any]) -> dict[str, Any]:
        """Return the model with the paths of the user's groups, direct and inherited."""
        model: dict[str, Any] = await super().update_auth_model(auth_model)
        key = self.auth_state_groups_key
        if self.manage_groups and (callable(key) or key.split(".")[0] == "gitlab_groups"):
            token = model["auth_state"]["access_token"]
            said = await self.httpfetch(
                f"{self.gitlab_url}/oauth/userinfo",
                "fetching groups",
                headers={"Authorization": f"Bearer {token}"},
                validate_cert=self.validate_server_cert,
            )
            model["auth_state"]["gitlab_groups"] = list((said or {}).get("groups") or ())
        return model

    def _own_rule(self) -> str:
        return _PLACES if self.allowed_gitlab_groups or self.allowed_project_ids else ""

    def _is_confirmed(self, claims: dict[str, Any]) -> bool:
        return bool(claims.get("confirmed_at"))


class MemberGoogleOAuthenticator(MemberOAuthMixin, GoogleOAuthenticator):
    """Sign-in for members of a Google Workspace, or of one of its groups."""

    @default("auth_state_groups_key")
    def _auth_state_groups_key_default(self) -> str:
        return f"{self.user_auth_state_key}.google_groups"

    def _own_rule(self) -> str:
        why = "it is in no Google group that may use this hub"
        return why if self.allowed_google_groups else ""

    def _why_own_block(self) -> str:
        return "it belongs to no organisation that may use this hub"

    def _is_confirmed(self, claims: dict[str, Any]) -> bool:
        return bool(claims.get("verified_email"))


class MemberMicrosoftOAuthenticator(MemberOAuthMixin, AzureAdOAuthenticator):
    """Sign-in for members of an organisation with Microsoft Entra ID (formerly Azure AD).

    ``tenant_id`` must name the organisation: otherwise anybody with a Microsoft account could sign
    in. By default Entra ID reports groups by id; ``group_names`` gives them names.
    """

    @default("login_service")
    def _login_service_default(self) -> str:
        return "Microsoft"

    @default("scope")
    def _scope_default(self) -> list[str]:
        return ["openid", "profile", "email", "offline_access"]

    @default("username_claim")
    def _username_claim_default(self) -> str:
        # OAuthenticator takes the display name, which people can change.
        return "preferred_username"

    @default("authorize_url")
    def _authorize_url_default(self) -> str:
        return f"{self._tenant()}/authorize"

    @default("token_url")
    def _token_url_default(self) -> str:
        return f"{self._tenant()}/token"

    def _tenant(self) -> str:
        if not self.tenant_id or self.tenant_id in ("common", "organizations", "consumers"):
            raise TraitError(
                "c.MemberMicrosoftOAuthenticator.tenant_id has to be your organisation's own: "
                "without it, anybody with a Microsoft account could sign in."
            )
        return f"{self.graph_url}/{self.tenant_id}/oauth2/v2.0"

    def _reads_id_token(self) -> bool:
        return True

    async def token_to_user(self, token_info: dict[str, Any]) -> dict[str, Any]:
        """Return the claims of the id token. Raises a page as ``_claims_of`` does."""
        return self._claims_of(token_info)

    def _mail_of(self, model: dict[str, Any]) -> tuple[str, bool]:
        # A tenant can write anything into "email". The domains of these names are verified.
        claims = self._claims_in(model)
        name = str(claims.get("upn") or claims.get("preferred_username") or "")
        return name if "@" in name else "", True


class _CILogonLoginHandler(AskingLoginHandler, CILogonLoginHandler):
    """Adds CILogon's choice of the identity provider to the choice of the account."""


class MemberCILogonOAuthenticator(MemberOAuthMixin, CILogonOAuthenticator):
    """Sign-in through CILogon for members of the universities and labs in ``idps``."""

    login_handler = _CILogonLoginHandler

    def _own_rule(self) -> str:
        rules = [idp.get("allow_all") or idp.get("allowed_domains") for idp in self.idps.values()]
        return "its organisation may not use this hub" if any(rules) else ""
