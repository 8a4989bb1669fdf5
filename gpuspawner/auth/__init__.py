"""Authenticators that admit members only, and tell everyone else why not and whom to ask.

:class:`MemberMixin` adds this to any JupyterHub authenticator. The classes below combine it with
those of OAuthenticator. The class for an LDAP directory is in ``gpuspawner.auth.ldap`` and needs
the extra ``gpuspawner[ldap]``.
"""

from __future__ import annotations

from .mixin import MemberMixin
from .oauth import (
    MemberCILogonOAuthenticator,
    MemberGitHubOAuthenticator,
    MemberGitLabOAuthenticator,
    MemberGoogleOAuthenticator,
    MemberMicrosoftOAuthenticator,
    MemberOAuthenticator,
    MemberOAuthMixin,
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
