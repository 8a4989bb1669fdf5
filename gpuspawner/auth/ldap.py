"""Sign-in with the name and password of an LDAP directory."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import ldap3
from jupyterhub.auth import Authenticator
from jupyterhub.utils import maybe_future
from ldap3.core.exceptions import LDAPCommunicationError, LDAPMaximumRetriesError, LDAPStartTLSError
from ldap3.utils.conv import escape_filter_chars
from ldap3.utils.dn import escape_rdn
from ldapauthenticator import LDAPAuthenticator
from traitlets import Set, TraitError, Unicode, default, validate

from ..core.aio import within
from .mixin import MemberMixin

if TYPE_CHECKING:
    from jupyterhub.handlers import BaseHandler
    from jupyterhub.user import User


ANSWER_SECONDS = 15.0
"""Maximum wait for the directory, for all requests of one sign-in together."""

ANYTHING = "(objectClass=*)"

GROUP_NAME = "cn"
"""The attribute with a group's name."""

T = TypeVar("T")


class Directory(LDAPAuthenticator):
    """LDAPAuthenticator with groups and a member filter.

    It identifies users by the settings of its base class. It replaces the base class's sign-in,
    which blocks the hub while it waits, treats a user that fails ``search_filter`` like a wrong
    password, and supports neither groups by name nor a refresh.
    """

    member_filter = Unicode(
        config=True,
        help="""
        The LDAP filter that finds members: everybody whose entry matches it is one. The base
        class's `search_filter` is a further condition: everybody must match it, and it makes nobody
        a member.

        Example::

            c.MemberLDAPAuthenticator.member_filter = (
                "(&(memberOf=cn=gpu,cn=groups,cn=accounts,dc=lab,dc=example)"
                "(!(nsAccountLock=TRUE)))"
            )
        """,
    )

    group_search_base = Unicode(
        config=True,
        help="""
        The entry below which the directory keeps its groups. With `manage_groups`, the groups that
        `group_search_filter` finds for a user become the user's groups on the hub. Empty: no groups
        are read.

        Example::

            c.MemberLDAPAuthenticator.group_search_base = "ou=groups,dc=lab,dc=example"
        """,
    )

    mail_attribute = Unicode(
        "mail",
        config=True,
        help="""
        The attribute that holds a user's mail addresses, for `allowed_mail_domains`. They count as
        confirmed: make sure that people cannot set their own address in the directory.

        Example::

            c.MemberLDAPAuthenticator.mail_attribute = "mail"
        """,
    )

    @default("tls_kwargs")
    def _tls_kwargs_default(self) -> dict[str, Any]:
        # By default ldap3 accepts any certificate, and passwords are sent to this server.
        return {"validate": ssl.CERT_REQUIRED}

    @validate("tls_kwargs")
    def _certificates_count(self, proposal: Any) -> dict[str, Any]:
        return {"validate": ssl.CERT_REQUIRED, **proposal.value}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # ldap3 blocks. Its own threads keep it from delaying anything else.
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="ldap")

    async def authenticate(
        self, handler: Any, data: dict[str, str] | None = None, **kwargs: Any
    ) -> dict[str, Any] | None:
        """Return the auth model; None for a wrong name or password.

        Raises:
            OSError: The directory is not responding (before Python 3.11 also asyncio.TimeoutError).
            LookupError: The directory refuses the account in ``lookup_dn_search_user``.
        """
        name = (data or {}).get("username", "").strip().lower()
        password = (data or {}).get("password", "")
        # A directory treats an empty password as an anonymous bind, which succeeds.
        if not password.strip() or not re.fullmatch(self.valid_username_regex, name):
            return None
        model = await self._off_the_loop(partial(self._sign_in, name, password))
        return self._completed(model) if model else None

    async def look_up(self, name: str) -> dict[str, Any] | None:
        """Return the auth model of a known user; None if the directory no longer has them.

        Raises the same errors as ``authenticate``.
        """
        model = await self._off_the_loop(partial(self._look_up, name))
        return self._completed(model) if model else None

    def _completed(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return the final auth model; subclasses override this."""
        return model

    async def check_allowed(self, username: str, auth_model: dict[str, Any] | None) -> bool:
        """Return True if JupyterHub's own settings or ``member_filter`` allow the user."""
        # LDAPAuthenticator's own check is skipped: it expects groups by their DN.
        if await maybe_future(Authenticator.check_allowed(self, username, auth_model)):
            return True
        return bool(_found(auth_model).get("member_filter"))

    async def check_blocked_users(
        self, username: str, auth_model: dict[str, Any] | None = None
    ) -> bool:
        """Return False if the user is blocked, or if ``search_filter`` does not find them."""
        fits: bool = _found(auth_model).get("search_filter", True)
        passed: bool = super().check_blocked_users(username, auth_model)
        return fits and passed

    def get_connection(self, userdn: str | None, password: str | None) -> Any:
        """Return a bound connection; None for a wrong password.

        Raises LookupError if the directory refuses ``lookup_dn_search_user``.
        """
        connection = super().get_connection(userdn, password)
        if connection is None and userdn == self.lookup_dn_search_user:
            raise LookupError("the directory rejects lookup_dn_search_user or its password")
        return connection

    # Runs in a thread.

    async def _off_the_loop(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await within(ANSWER_SECONDS, loop.run_in_executor(self._threads, work))
        except (LDAPCommunicationError, LDAPMaximumRetriesError, LDAPStartTLSError) as failure:
            raise ConnectionError(str(failure)) from failure

    def _sign_in(self, name: str, password: str) -> dict[str, Any] | None:
        resolved, dns = name, []
        if self.lookup_dn:
            resolved, dn = self.resolve_username(name)
            if not dn:
                return None
            dns = [dn]
        if self.bind_dn_template:
            dns = [t.format(username=escape_rdn(resolved)) for t in self.bind_dn_template]
        for dn in dns:
            connection = self.get_connection(dn, password)
            if connection:
                with _closing(connection), self._reading(connection) as reader:
                    model = self._model(reader, dn, resolved)
                    model["name"] = resolved if self.use_lookup_dn_username else name
                    return model
        return None

    def _look_up(self, name: str) -> dict[str, Any] | None:
        with self._reading(None) as reader:
            dn = self._dn_of(reader, name)
            return {"name": name, **self._model(reader, dn, name)} if dn else None

    def _dn_of(self, reader: Any, name: str) -> str | None:
        if not self.lookup_dn:
            written = [t.format(username=escape_rdn(name)) for t in self.bind_dn_template]
            return next((dn for dn in written if _search(reader, dn, ANYTHING)), None)
        renamed = self.use_lookup_dn_username
        attribute = self.lookup_dn_user_dn_attribute if renamed else self.user_attribute
        wanted = f"({attribute}={escape_filter_chars(name)})"
        found = _search(reader, self.user_search_base, wanted, scope=ldap3.SUBTREE)
        return str(found[0].entry_dn) if len(found) == 1 else None

    @contextmanager
    def _reading(self, own: Any) -> Iterator[Any]:
        """Yield a connection for searches: of ``lookup_dn_search_user`` if set, else ``own``."""
        if own is not None and not self.lookup_dn_search_user:
            yield own
            return
        with _closing(
            self.get_connection(self.lookup_dn_search_user, self.lookup_dn_search_password)
        ) as reader:
            yield reader

    def _model(self, reader: Any, dn: str, name: str) -> dict[str, Any]:
        """Return the auth model of a directory entry, without its ``name``."""
        wanted = sorted({self.mail_attribute, *self.auth_state_attributes})
        entries = _search(reader, dn, ANYTHING, wanted)
        attributes = entries[0].entry_attributes_as_dict if entries else {}
        found: dict[str, bool] = {}
        if self.search_filter:
            must = self.search_filter.format(
                userattr=self.user_attribute, username=escape_filter_chars(name)
            )
            found["search_filter"] = bool(_search(reader, dn, must))
        if self.member_filter:
            found["member_filter"] = bool(_search(reader, dn, self.member_filter))
        state = {
            "ldap_mail": [str(mail) for mail in attributes.get(self.mail_attribute) or ()],
            "ldap_found": found,
            "user_attributes": {
                key: value for key, value in attributes.items() if key in self.auth_state_attributes
            },
        }
        model: dict[str, Any] = {"auth_state": state}
        if self.manage_groups:
            model["groups"] = self._groups(reader, dn, name)
        return model

    def _groups(self, reader: Any, dn: str, name: str) -> list[str]:
        if not self.group_search_base:
            return []
        wanted = self.group_search_filter.format(
            userdn=escape_filter_chars(dn), uid=escape_filter_chars(name)
        )
        base, scope = self.group_search_base, ldap3.SUBTREE
        entries = _search(reader, base, wanted, [GROUP_NAME], scope=scope)
        names = (entry.entry_attributes_as_dict.get(GROUP_NAME) or () for entry in entries)
        return sorted({str(name) for of_one in names for name in of_one})


def _search(
    reader: Any,
    base: str,
    wanted: str,
    attributes: list[str] | None = None,
    *,
    scope: str = ldap3.BASE,
) -> list[Any]:
    """Return the entries that a filter finds; none if ``base`` does not exist."""
    reader.search(base, wanted, search_scope=scope, attributes=attributes)
    return list(reader.entries)


@contextmanager
def _closing(connection: Any) -> Iterator[Any]:
    try:
        yield connection
    finally:
        connection.unbind()


def _found(auth_model: dict[str, Any] | None) -> dict[str, bool]:
    """Return True or False for each filter that was checked, by its name."""
    state: dict[str, Any] = (auth_model or {}).get("auth_state") or {}
    return dict(state.get("ldap_found") or {})


class MemberLDAPAuthenticator(MemberMixin, Directory):
    """Sign-in for members in a directory, whose groups the hub uses with ``manage_groups``.

    With ``lookup_dn_search_user``, signed-in users are looked up again: if they left the directory
    or a group, that takes effect after ``auth_refresh_age`` seconds, or at the next start of a
    server. Without it, changes take effect at the next sign-in.
    """

    admin_groups = Set(
        Unicode(),
        config=True,
        help="""
        Groups whose members are admins of the hub, with `manage_groups`. Once this is set, an admin
        who is neither in one of these groups nor in `admin_users` stops being one at the next
        sign-in or refresh.

        Example::

            c.MemberLDAPAuthenticator.admin_groups = {"gpu-admins"}
        """,
    )

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        named = self.allowed_groups | self.admin_groups
        if named and not self.manage_groups and self.group_search_base:
            raise TraitError("c.MemberLDAPAuthenticator.group_search_base needs manage_groups.")
        if any("=" in name for name in named):
            raise TraitError(
                "c.MemberLDAPAuthenticator's allowed_groups and admin_groups take the names of "
                "groups (cn), not DNs."
            )

    async def _ask_provider(
        self, user: User, handler: BaseHandler | None, **kwargs: Any
    ) -> bool | dict[str, Any]:
        if not self.lookup_dn_search_user:
            return True
        names = {here: there for there, here in self.username_map.items()}
        found = await self.look_up(names.get(user.name, user.name))
        if found is None:
            why = "the account no longer exists in the directory"
            await self._tell_ended(user.name, why)
            raise self._refusal(user.name, why, self._membership_remedy())
        return {**found, "name": user.name}

    def _completed(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return the model with the hub's group names, and ``admin`` by ``admin_groups``."""
        if self.manage_groups:
            model["groups"] = sorted(self._hub_groups_from(model.get("groups") or ()))
        if self.manage_groups and self.admin_groups:
            by_group = bool(self.admin_groups & set(model["groups"]))
            model["admin"] = by_group or self.normalize_username(model["name"]) in self.admin_users
        return model

    # Rules and messages.

    @property
    def _service(self) -> str:
        # JupyterHub shows no sign-in form if login_service is set.
        return self.login_service or "The directory"

    def _own_rule(self) -> str:
        return "the directory does not list it as a member" if self.member_filter else ""

    def _why_own_block(self) -> str:
        return "the directory does not list it among those who may use this hub"

    def _mail_of(self, model: dict[str, Any]) -> tuple[str, bool]:
        return self._best_mail((model.get("auth_state") or {}).get("ldap_mail") or []), True
