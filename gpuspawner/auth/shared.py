"""Members who share a password."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyterhub.authenticators.shared import SharedPasswordAuthenticator

from .mixin import MemberMixin

if TYPE_CHECKING:
    from jupyterhub.handlers import BaseHandler


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
