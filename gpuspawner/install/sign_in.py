"""The ways to sign in, and what each needs to know."""

from __future__ import annotations

from .models import Question, Secret, SignIn

_CONTACT = "Mail address for people who are not let in"
_LAB_CONTACT = Question("contact", _CONTACT, "gpu-admin@lab.example", "")
_ENTRA_GROUP = "4f1c2a7e-3b0e-4f5d-9a51-0e2f6c1d7b90"
_ENTRA_ADMINS = "9b7d7c55-9f0c-4c39-8a27-6c1f0a3f2f11"


def _client(variable: str) -> Question:
    example = "written-by-the-provider"
    return Question("client_id", "Client id, from the provider", example, variable=variable)


def _client_secret(variable: str) -> Secret:
    return Secret(variable, "Client secret, from the provider")


SIGN_INS = {
    each.name: each
    for each in (
        SignIn(
            "shared-password",
            "one password for all members, for trying out",
            secrets=(
                Secret("GPUSPAWNER_MEMBER_PASSWORD", "Password of all members", True, 8),
                Secret("GPUSPAWNER_ADMIN_PASSWORD", "Password of the admins", True, 32),
            ),
            needs_domain=False,
            in_file=False,
        ),
        SignIn(
            "oauth",
            "any OpenID provider, such as Keycloak",
            questions=(
                _client("OAUTH_CLIENT_ID"),
                Question(
                    "authorize_url",
                    "The provider's authorization endpoint (https://...)",
                    "https://YOUR-PROVIDER/oauth/authorize",
                    variable="OAUTH2_AUTHORIZE_URL",
                ),
                Question(
                    "token_url",
                    "Its token endpoint (https://...)",
                    "https://YOUR-PROVIDER/oauth/token",
                    variable="OAUTH2_TOKEN_URL",
                ),
                Question(
                    "userdata_url",
                    "Its userinfo endpoint (https://...)",
                    "https://YOUR-PROVIDER/oauth/userinfo",
                    variable="OAUTH2_USERDATA_URL",
                ),
                Question(
                    "login_service", "Its name, for the button", "Example Lab", "your account"
                ),
                Question(
                    "username_claim",
                    "The claim with a member's name",
                    "preferred_username",
                    "preferred_username",
                ),
                Question("allowed", "Groups of members", "gpu-members", "gpu-members"),
                Question("admin_group", "Groups of admins", "gpu-admins", "gpu-admins"),
                Question("contact", _CONTACT, "gpu-admin@example.org", ""),
            ),
            secrets=(_client_secret("OAUTH_CLIENT_SECRET"),),
            in_file=False,
        ),
        SignIn(
            "github",
            "an organisation or team on GitHub",
            questions=(
                _client("GITHUB_CLIENT_ID"),
                Question(
                    "allowed", "Organisations, or teams as organisation:team", "lab-example:gpu"
                ),
                Question("admin_group", "Teams of admins", "lab-example:gpu-admins", ""),
                _LAB_CONTACT,
            ),
            secrets=(_client_secret("GITHUB_CLIENT_SECRET"),),
        ),
        SignIn(
            "gitlab",
            "a group on GitLab",
            questions=(
                Question("url", "GitLab's address", "https://gitlab.com", "https://gitlab.com"),
                _client("GITLAB_CLIENT_ID"),
                Question("allowed", "Groups of members, by their paths", "lab-example/gpu"),
                Question("admin_group", "Groups of admins", "lab-example/gpu-admins", ""),
                _LAB_CONTACT,
            ),
            secrets=(_client_secret("GITLAB_CLIENT_SECRET"),),
        ),
        SignIn(
            "google",
            "a domain of Google Workspace",
            questions=(
                _client("OAUTH_CLIENT_ID"),
                Question("allowed", "The Workspace domain", "lab.example"),
                _LAB_CONTACT,
            ),
            secrets=(_client_secret("OAUTH_CLIENT_SECRET"),),
        ),
        SignIn(
            "microsoft",
            "a group of a Microsoft Entra tenant",
            questions=(
                Question("tenant", "Tenant id", "written-by-entra", variable="AAD_TENANT_ID"),
                _client("OAUTH_CLIENT_ID"),
                Question("allowed", "Id of the members' group", _ENTRA_GROUP),
                Question(
                    "admin_group",
                    "Id of the admins' group",
                    _ENTRA_ADMINS,
                    "",
                ),
                _LAB_CONTACT,
            ),
            secrets=(_client_secret("OAUTH_CLIENT_SECRET"),),
        ),
        SignIn(
            "cilogon",
            "a university or lab, through CILogon",
            questions=(
                _client("CILOGON_CLIENT_ID"),
                Question(
                    "provider",
                    "The entity id of the identity provider",
                    "https://idp.lab.example/shibboleth",
                ),
                Question("allowed", "The domain of its members", "lab.example"),
                _LAB_CONTACT,
            ),
            secrets=(_client_secret("CILOGON_CLIENT_SECRET"),),
        ),
        SignIn(
            "ldap",
            "a directory, such as OpenLDAP",
            questions=(
                Question("server", "The directory's host name", "ldap.lab.example"),
                Question(
                    "search_user",
                    "The account that looks people up (DN)",
                    "cn=hub,dc=lab,dc=example",
                ),
                Question("user_base", "Where people are (DN)", "ou=people,dc=lab,dc=example"),
                Question("user_attribute", "The attribute with a member's name", "uid", "uid"),
                Question("group_base", "Where groups are (DN)", "ou=groups,dc=lab,dc=example"),
                Question("allowed", "Groups of members", "gpu-members", "gpu-members"),
                Question("admin_group", "Groups of admins", "gpu-admins", "gpu-admins"),
                _LAB_CONTACT,
            ),
            secrets=(Secret("LDAP_PASSWORD", "Password of that account"),),
            needs_domain=False,
            module="ldapauthenticator",
            extra="ldap",
        ),
        SignIn(
            "lti",
            "courses of a learning platform, by LTI 1.3",
            questions=(
                Question(
                    "issuer", "The platform's issuer (https://...)", "https://moodle.lab.example"
                ),
                Question(
                    "authorize_url",
                    "Its authentication endpoint (https://...)",
                    "https://moodle.lab.example/mod/lti/auth.php",
                ),
                Question(
                    "keys_url",
                    "Its public keys (https://...)",
                    "https://moodle.lab.example/mod/lti/certs.php",
                ),
                Question("client_id", "Client id, from the platform", "written-by-the-platform"),
                _LAB_CONTACT,
            ),
            module="ltiauthenticator",
            extra="lti",
        ),
    )
}
"""Every sign-in, by its name for ``--auth``. The first one needs no other service."""

DEFAULT = next(iter(SIGN_INS))
EXAMPLE_DOMAIN = "hub.example"
"""The domain in hub_config/auth."""
