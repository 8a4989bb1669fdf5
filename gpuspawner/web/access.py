"""Whose account one may see and give credits to, and the sentences for those who may not."""

from __future__ import annotations

from tornado import web

from ..errors import GPUSpawnerError, NotAllowed, UnknownAccount
from ..ledger.entries import group_account
from ..model import member_account
from ..scopes import GRANT, READ_ACCOUNTS, Reach
from .base import Handler

NOT_YOURS = (
    "The account {account!r} is not yours, so you cannot see what is on it. Your own is on your "
    "page; ask an admin if you need to see another."
)
NO_SCOPE = (
    "You may not give credits to {account!r}. Admins may, and whoever has the scope "
    "custom:gpuspawner:grant for this account's member or group."
)

ONLY_GIVES = (
    "You may give credits to {account!r}, and take none back: an amount below zero is for admins. "
    "Ask one to undo what was given by mistake."
)


async def must_read(handler: Handler, account: str) -> None:
    """Let through who may see this account's statement: its member, an admin, a scope's holder.

    Raises HTTPError 403 with a sentence; whether there is such an account, it does not say.
    """
    if not handler.is_service and account == member_account(handler.user):
        return
    if not await reaches(handler, handler.reach(READ_ACCOUNTS), account):
        raise web.HTTPError(403) from NotAllowed(NOT_YOURS.format(account=account))


async def must_grant(handler: Handler, account: str) -> None:
    """Let through who may give credits to this account. Raises HTTPError 403 with a sentence."""
    if not await reaches(handler, handler.reach(GRANT), account):
        raise web.HTTPError(403) from NotAllowed(NO_SCOPE.format(account=account))


def must_take(handler: Handler, account: str) -> None:
    """Let through who may take credits back: admins alone. Raises HTTPError 403."""
    if not handler.admin:
        raise web.HTTPError(403) from NotAllowed(ONLY_GIVES.format(account=account))


def may_see_balance(handler: Handler, account: str) -> bool:
    """Whether it is an account that the member may draw on: their own, or a group's of theirs."""
    own = {member_account(handler.user), *map(group_account, handler.groups)}
    return not handler.is_service and account in own


async def reaches(handler: Handler, whom: Reach, account: str) -> bool:
    """Whether an account is among those that a scope reaches; the ledger's own never are."""
    if account.startswith("system:"):
        return False
    return whom.everybody or account in await accounts_of(handler, whom)


async def accounts_of(handler: Handler, whom: Reach) -> frozenset[str]:
    """The names of all accounts that a scope reaches which is narrowed; opened or not."""
    names = set(whom.accounts())
    for group in whom.groups:
        names |= {member_account(user) for user in await members_of(handler, group)}
    return frozenset(names)


async def members_of(handler: Handler, group: str) -> frozenset[str]:
    """Who is in a group of the Hub; nobody, when there is no such group."""
    hub = handler.context.hub
    if hub is None:
        return frozenset()
    try:
        return await hub.members_of(group) or frozenset()
    except GPUSpawnerError as error:
        raise web.HTTPError(error.status_code, "%s", error.message) from error


def unknown(account: str) -> web.HTTPError:
    """There is no such account."""
    error = web.HTTPError(404)
    error.__cause__ = UnknownAccount(account=account)
    return error
