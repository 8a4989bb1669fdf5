"""Members who sign in with their name and password in a directory: OpenLDAP, FreeIPA, AD."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from traitlets import Set, TraitError, Unicode

from .directory import Directory
from .mixin import MemberMixin

if TYPE_CHECKING:
    from jupyterhub.handlers import BaseHandler
    from jupyterhub.user import User


class MemberLDAPAuthenticator(MemberMixin, Directory):
    """Members that a directory knows. With ``manage_groups`` its groups are those of the hub.

    With ``lookup_dn_search_user`` the directory is asked again for those who are signed in: who
    left it or a group is out after ``auth_refresh_age`` seconds, at the latest at the next
    start. Without it, what was so at the sign-in holds until the next one.
    """

    admin_groups = Set(
        Unicode(),
        config=True,
        help="""
        Members of these groups are admins of the hub, with `manage_groups`. Who is in none of
        them, nor in `admin_users`, is an admin no more after the next sign-in or refresh.

        Example::

            c.MemberLDAPAuthenticator.admin_groups = {"gpu-admins"}
        """,
    )

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        named = self.allowed_groups | self.admin_groups
        if named and not self.manage_groups and self.group_search_base:
            raise TraitError("c.MemberLDAPAuthenticator.group_search_base needs manage_groups.")
        if any("=" in name for name in named) and self.group_name_attribute == "cn":
            raise TraitError(
                "c.MemberLDAPAuthenticator's allowed_groups and admin_groups take the names of "
                "groups (cn) and no DNs."
            )

    async def _ask_provider(
        self, user: User, handler: BaseHandler | None, **kwargs: Any
    ) -> bool | dict[str, Any]:
        if not self.lookup_dn_search_user:
            return True
        names = {here: there for there, here in self.username_map.items()}
        found = await self.look_up(names.get(user.name, user.name))
        if found is None:
            why = "the directory has no such account any more"
            await self._tell_ended(user.name, why)
            raise self._refusal(user.name, why, self._membership_remedy())
        return {**found, "name": user.name}

    def _completed(self, model: dict[str, Any]) -> dict[str, Any]:
        """The same, with groups and admins as this hub has them."""
        if self.manage_groups:
            model["groups"] = sorted(self._hub_groups_from(model.get("groups") or ()))
        if self.manage_groups and self.admin_groups:
            by_group = bool(self.admin_groups & set(model["groups"]))
            model["admin"] = by_group or self.normalize_username(model["name"]) in self.admin_users
        return model

    # Rules and sentences.

    @property
    def _service(self) -> str:
        # A login_service would take the form from the sign-in page.
        return self.login_service or "The directory"

    def _own_rule(self) -> str:
        return "the directory does not have it as a member" if self.member_filter else ""

    def _why_own_block(self) -> str:
        return "the directory does not have it among those who may use this hub"

    def _mail_of(self, model: dict[str, Any]) -> tuple[str, bool]:
        mails = (model.get("auth_state") or {}).get("ldap_mail") or []
        fitting = [mail for mail in mails if self._by_mail(mail, True).holds]
        return next(iter([*fitting, *mails]), ""), True
