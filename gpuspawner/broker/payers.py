"""Who pays for a server: the member's own account, or that of a group of theirs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa

from ..errors import NotAllowed
from ..ledger.entries import check_account
from ..ledger.payers import accounts_of, check_payer
from ..model import Account, member_account
from ..store import book, closures, payers
from .core import Core


@dataclass(frozen=True, slots=True)
class Payers:
    """The accounts that a member may draw on."""

    accounts: tuple[Account, ...]
    """Those that are open, the member's own first."""
    usual: str
    """The name of the one that pays when the member does not say it."""


class Paying(Core):
    """The part of the broker that knows who pays."""

    def payers(self, user: str, groups: Collection[str]) -> Payers:
        """Whom a member of these groups may let pay, and who does so usually."""
        with self.store.read() as connection:
            found = [book.find(connection, name) for name in accounts_of(user, groups)]
            usual = self._usual_payer(connection, user, groups)
        known = tuple(account for account in found if account)
        if not known or known[0].name != member_account(user):  # not open yet
            known = (Account(name=member_account(user)), *known)
        return Payers(known, usual)

    def keep_payer(
        self, user: str, account: str, *, actor: str, groups: Collection[str] | None = None
    ) -> None:
        """Let this account pay for the member from now on, unless they say another one.

        An account of a group pays only as long as the member is in that group; their own is
        the default of whoever kept none. ``groups``: those of the member, None when nobody
        can say (then it is asked at each start). Raises NotAllowed or UnknownAccount.
        """
        now = self.clock()
        if groups is not None:
            check_payer(account, user, groups)
        elif account != member_account(user) and not check_account(account).startswith("group:"):
            raise NotAllowed(
                f"{account} cannot pay for {user}: a member's own account can, or group:NAME.",
                field="account",
            )
        with self.store.write() as connection:
            own = account == member_account(user)
            if not own:
                book.account(connection, account)
            if payers.get(connection, user) == ("" if own else account):
                return
            payers.put(connection, user, "" if own else account, now)
            if actor != user:
                closures.note(
                    connection,
                    at=now,
                    actor=actor,
                    action="payer",
                    subject=member_account(user),
                    detail=f"{account} pays for them",
                )

    def _payer(self, user: str, groups: Collection[str], asked: str, *, free: bool) -> str:
        """The account that pays for a server. Raises NotAllowed for one that may not.

        ``free``: the server costs nothing, and needs no budget of a group.
        """
        own = member_account(user)
        if asked:
            check_payer(asked, user, groups)
        if asked == own or not groups or (free and not asked):
            return own
        with self.store.read() as connection:
            if not asked:
                return self._usual_payer(connection, user, groups)
            if book.find(connection, asked):
                return asked
        raise NotAllowed(
            f"The field 'account' names {asked!r}, which has no credits yet: an admin gives it "
            f"some. Until then write {own}, or leave it out.",
            field="account",
        )

    def _usual_payer(self, connection: sa.Connection, user: str, groups: Collection[str]) -> str:
        kept = payers.get(connection, user)
        return kept if kept in accounts_of(user, groups) else member_account(user)
