"""Sign-in with a certain identity provider, or with a shared password."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyterhub.authenticators.shared import SharedPasswordAuthenticator
from oauthenticator.azuread import AzureAdOAuthenticator
from oauthenticator.cilogon import CILogonLoginHandler, CILogonOAuthenticator
from oauthenticator.github import GitHubOAuthenticator
from oauthenticator.gitlab import GitLabOAuthenticator
from oauthenticator.google import GoogleOAuthenticator
from traitlets import TraitError, default

from .access import Mail
from .mixin import MemberMixin
from .oauth import AskingLoginHandler, MemberOAuthMixin

if TYPE_CHECKING:
    from jupyterhub.handlers import BaseHandler


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
