"""Who may use the hub: members sign in, everyone else reads why not and whom to ask.

:class:`MemberMixin` adds that to any JupyterHub authenticator, and the classes below are those
of OAuthenticator with it. ``gpuspawner.auth.ldap`` has the one for a directory, which needs the
extra ``gpuspawner[ldap]``.
"""

from __future__ import annotations

from .mixin import MemberMixin
from .oauth import MemberOAuthenticator, MemberOAuthMixin
from .providers import (
    MemberCILogonOAuthenticator,
    MemberGitHubOAuthenticator,
    MemberGitLabOAuthenticator,
    MemberGoogleOAuthenticator,
    MemberMicrosoftOAuthenticator,
    MemberSharedPasswordAuthenticator,
)

__all__ = [
    "MemberCILogonOAuthenticator",
    "MemberGitHubOAuthenticator",
    "MemberGitLabOAuthenticator",
    "MemberGoogleOAuthenticator",
    "MemberMicrosoftOAuthenticator",
    "MemberMixin",
    "MemberOAuthMixin",
    "MemberOAuthenticator",
    "MemberSharedPasswordAuthenticator",
]
