"""What the broker tells without changing anything."""

from __future__ import annotations

from datetime import datetime

from ..errors import UnknownAccount
from ..model import Account, Lease, ServerRef, Ticket, member_account
from ..store import Store, book, chain, closures, history, invariants, leases, tickets
from ..store.book import Line
from ..store.closures import Change, Closure


class Reads:
    """Questions to the store; each one is answered from one consistent view."""

    store: Store

    def open_leases(self) -> list[Lease]:
        """All open leases, oldest first."""
        return self.store.run(leases.open_leases)

    def lease_of(self, server: ServerRef) -> Lease | None:
        """The open lease of a server, if it has one."""
        return self.store.run(lambda connection: leases.open_of(connection, server))

    def lease(self, lease_id: str) -> Lease:
        """One lease, open or ended. Raises UnknownLease."""
        return self.store.run(lambda connection: leases.get(connection, lease_id))

    def leases_of(self, account: str | None, limit: int = 50) -> list[Lease]:
        """The newest leases of an account (None: of everybody), newest first."""
        return self.store.run(lambda connection: leases.of_account(connection, account, limit))

    def ticket(self, ticket_id: str) -> Ticket:
        """One ticket, waiting or ended. Raises UnknownTicket."""
        return self.store.run(lambda connection: tickets.get(connection, ticket_id))

    def tickets_of(self, user: str, limit: int = 20) -> list[Ticket]:
        """A member's newest tickets, newest first."""
        return self.store.run(lambda connection: tickets.of_user(connection, user, limit))

    def waiting(self) -> list[Ticket]:
        """Every ticket that waits, oldest first."""
        return self.store.run(tickets.waiting)

    def closures(self) -> dict[str, Closure]:
        """Everything that is closed to new leases, by subject."""
        return self.store.run(closures.load)

    def asked_for(self, since: datetime) -> list[tuple[datetime, Lease]]:
        """Leases with devices that ended since then, and when each was asked for, in order."""
        return self.store.run(lambda connection: history.asked_for(connection, since))

    def trail(self, limit: int = 100) -> list[Change]:
        """The newest lines of the audit trail, newest first."""
        return self.store.run(lambda connection: closures.trail(connection, limit))

    def audit(self) -> tuple[list[invariants.Finding], dict[str, int]]:
        """Every invariant held against every row, and how many rows there are, by table."""
        return self.store.run(lambda c: (list(invariants.audit(c)), invariants.sizes(c)))

    def chain_head(self) -> str:
        """Return the head of the audit chain, to be noted elsewhere."""
        return self.store.run(chain.head)

    def knows_head(self, noted: str) -> bool:
        """Return True if a head of the audit chain that was noted earlier is still in it."""
        return self.store.run(lambda connection: chain.knows(connection, noted))

    def account(self, name: str) -> Account:
        """Balance and holds of an account. Raises UnknownAccount."""
        return self.store.run(lambda connection: book.account(connection, name))

    def member(self, user: str) -> Account:
        """The account of a member; one with nothing in it when it is not open yet."""
        try:
            return self.account(member_account(user))
        except UnknownAccount:
            return Account(name=member_account(user))

    def accounts(self) -> list[Account]:
        """Every member's and group's account, by name."""
        return self.store.run(book.all_accounts)

    def statement(self, account: str, limit: int = 100) -> list[Line]:
        """The newest lines of an account, newest first. Raises UnknownAccount."""
        return self.store.run(lambda connection: book.statement(connection, account, limit))
