"""Credits given, taken back, refunded, reversed, and at their end.

Nothing in the ledger is ever changed: a correction is one transfer more, with its reason. What an
admin does is in the audit trail too, in the same transaction.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa

from ..errors import InvalidRequest
from ..ledger import lots as pure
from ..ledger import rules
from ..ledger.entries import Transfer, TransferKind, group_account
from ..ledger.lots import Lot
from ..model import Lease, LeaseState, format_credits
from ..store import book, chain, closures, leases, lots, totals
from .admin import checked_reason
from .core import Core

REFUNDED = "refunded"
"""The outcome of a lease whose charges an admin gave back."""


class Giving(Core):
    """The part of the broker that moves credits for an admin."""

    def grant(
        self,
        account: str,
        amount: int,
        *,
        actor: str,
        reason: str,
        key: str = "",
        until: datetime | None = None,
    ) -> bool:
        """Give microcredits to an account, or take some with an amount below zero.

        ``until`` is when they end: what is left then is taken back. False when ``key`` was used
        for it before. Raises UnknownAccount, LedgerError, or InvalidRequest for an end that
        cannot be.
        """
        now = self.clock()
        with self.store.write() as connection:
            done = self._give(
                connection,
                account,
                amount,
                now,
                actor=actor,
                reason=reason,
                key=key or f"grant:{secrets.token_hex(8)}",
                until=until,
            )
            if done:
                ends = f", until {_utc(until)}" if until else ""
                detail = f"{_signed(amount)} credits{ends}: {reason}"
                self._note(connection, actor, "grant", account, detail, now)
        return done

    def open_group_account(self, group: str, *, actor: str) -> bool:
        """Open a group's account, which is empty. False when it is there."""
        name, now = group_account(group), self.clock()
        with self.store.write() as connection:
            opened = book.open_account(connection, name, now)
            if opened:
                self._note(connection, actor, "open_account", name, "", now)
        return opened

    def refund(
        self, lease_id: str, amount: int | None = None, *, actor: str, reason: str, key: str = ""
    ) -> Lease:
        """Give back so many microcredits of what a lease was charged, or all that is left of it:
        its device was sick, say.

        Never more than was charged, whatever came back before. The same ``key`` is done once.
        Raises UnknownLease, InvalidRequest for a lease that goes on, that nothing was charged
        for, or of which less is left, and LedgerError for a key that was used for another amount.
        """
        reason, now = checked_reason(reason, needed=True), self.clock()
        with self.store.write() as connection:
            lease = leases.get(connection, lease_id, lock=True)
            key = rules.refund_key(lease.id, key or secrets.token_hex(8))
            if book.of_key(connection, key) is None:
                amount = _refundable(connection, lease, amount)
            elif amount is None:
                return lease
            self._refund(connection, lease, amount, key, now, actor=actor, reason=reason)
            return leases.get(connection, lease.id)

    def transfer(self, transfer_id: str) -> Transfer:
        """One transfer of the ledger; of an id its first letters are enough when no other has
        them. Raises InvalidRequest."""
        return self.store.run(lambda connection: _transfer(connection, transfer_id))

    def reverse(self, transfer_id: str, *, actor: str, reason: str) -> Transfer:
        """Undo a transfer by its opposite; the reversal is returned.

        Once a transfer: a reversal can be reversed itself. Raises InvalidRequest for a transfer
        that is not there or was reversed before.
        """
        reason, now = checked_reason(reason, needed=True), self.clock()
        with self.store.write() as connection:
            transfer = _transfer(connection, transfer_id)
            key = rules.reversal_key(transfer.id)
            if earlier := book.of_key(connection, key):
                raise InvalidRequest(
                    f"Transfer {transfer.id} was reversed already, by {earlier.actor} at "
                    f"{_utc(earlier.at)}: {earlier.reason}. Nothing was changed.",
                    field="transfer",
                )
            _must_be_reversible(connection, transfer)
            opposite = rules.reversal(transfer, key=key, at=now, actor=actor, reason=reason)
            book.post(connection, opposite)
            if lot := lots.of_transfer(connection, transfer.id):
                lots.update(connection, lot.id, cancelled_at=now)
                self._settle_lots(connection, lot.account, now)
            moved = ", ".join(
                f"{_signed(posting.amount)} to {posting.account}"
                for posting in opposite.postings
                if not posting.account.startswith("system:")
            )
            subject = f"transfer {transfer.id}"
            self._note(connection, actor, "reverse", subject, f"{moved}: {reason}", now)
        return opposite

    # Credits that end.

    def lots_of(self, account: str) -> list[tuple[Lot, int]]:
        """The lots of an account that have not ended, the one that is spent first being first,
        and the microcredits that are left of each. Raises UnknownAccount."""
        now = self.clock()
        with self.store.read() as connection:
            book.account(connection, account)
            return self._lots_left(connection, account, now)

    def ending_of(self, accounts: Collection[str]) -> dict[str, tuple[tuple[datetime, int], ...]]:
        """When credits of these accounts end, and how many microcredits are left of them; of
        accounts that have none of these, nothing."""
        now = self.clock()
        with self.store.read() as connection:
            found = {name: self._ending(connection, name, now) for name in accounts}
        return {name: ending for name, ending in found.items() if ending}

    def end_lots(self) -> int:
        """Take back what is left of credits that have ended; how many accounts had some.

        It may come late, or twice: what is left follows from times that are in the store.
        """
        now = self.clock()
        names = self.store.run(lambda connection: lots.due(connection, now))
        for name in names:
            with self.store.write() as connection:
                self._settle_lots(connection, name, now)
        return len(names)

    # Steps of the above, and of others.

    def _refund(
        self,
        connection: sa.Connection,
        lease: Lease,
        amount: int,
        key: str,
        now: datetime,
        *,
        actor: str,
        reason: str,
    ) -> None:
        """Give back so much of what a lease was charged, which has ended, once for the key."""
        transfer = rules.refund(lease, amount, key=key, at=now, actor=actor, reason=reason)
        if not book.post(connection, transfer):
            return
        left = lease.charged - amount
        outcome = lease.outcome if left else REFUNDED
        changes = {"charged": left, "refunded": lease.refunded + amount, "outcome": outcome}
        totals.take_out(connection, lease)
        leases.update(connection, lease.id, **changes)
        chain.seal_lease(connection, lease.id)
        subject = f"lease {lease.id} of {lease.server}"
        detail = f"{format_credits(amount)} credits to {lease.account}: {reason}"
        self._note(connection, actor, "refund", subject, detail, now)

    def _give(
        self,
        connection: sa.Connection,
        account: str,
        amount: int,
        now: datetime,
        *,
        actor: str,
        reason: str,
        key: str,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> bool:
        """Post a grant, with its lot when it ends. ``since``: from when a lot counts."""
        make: Callable[..., Transfer] = rules.grant if amount > 0 else rules.adjustment
        transfer = make(account, amount, key=key, at=now, actor=actor, reason=reason)
        since = since or now
        if until is not None:
            _must_end_later(amount, since, until)
        if not book.post(connection, transfer):
            return False
        if until is not None:
            lot = Lot(
                id=transfer.id, account=account, amount=amount, starts_at=since, ends_at=until
            )
            lots.insert(connection, lot)
            # It may have been spent already, before others that were thought to be.
            if until <= now or lots.closed_since(connection, account, since):
                self._settle_lots(connection, account, now)
        return True

    def _lots_left(
        self, connection: sa.Connection, account: str, now: datetime
    ) -> list[tuple[Lot, int]]:
        known = lots.of_account(connection, account)
        if not known:
            return []
        left = pure.left_of(known, lots.flow(connection, account), now)
        return [(lot, left[lot.id]) for lot in known if lot.starts_at <= now < lot.over_at]

    def _ending(
        self, connection: sa.Connection, account: str, now: datetime
    ) -> tuple[tuple[datetime, int], ...]:
        """When credits of an account end, and what is left of them. Quick where none do."""
        if lots.first_due(connection, account) is None:
            return ()
        found = self._lots_left(connection, account, now)
        return tuple((lot.ends_at, left) for lot, left in found if left)

    def _settle_lots(self, connection: sa.Connection, account: str, now: datetime) -> None:
        """Bring what was taken back from the account's lots in line with what is known now."""
        known = lots.of_account(connection, account)
        if not known:
            return
        left = pure.left_of(known, lots.flow(connection, account), now)
        for lot in known:
            if now < lot.over_at:
                continue
            taken = 0 if lot.cancelled_at else left[lot.id]
            changes: dict[str, Any] = {} if lot.closed_at else {"closed_at": now}
            if transfer := pure.expiry(lot, taken, now if lot.closed_at else lot.over_at):
                book.post(connection, transfer)
                changes |= {"taken": taken, "takes": lot.takes + 1}
            if changes:
                lots.update(connection, lot.id, **changes)

    def _end_due_lots(self, connection: sa.Connection, account: str, now: datetime) -> None:
        """Before a balance is relied on: nobody starts on credits that have ended."""
        due = lots.first_due(connection, account)
        if due is not None and due <= now:
            self._settle_lots(connection, account, now)

    def _settle_lots_since(
        self, connection: sa.Connection, lease: Lease, now: datetime, newest: datetime | None
    ) -> None:
        """A lease has ended, maybe before lots ended that it was believed to spend from; the
        ``newest`` of its account is the one that ends last."""
        if newest is not None and lease.started_at is not None and lease.started_at < newest:
            self._settle_lots(connection, lease.account, now)

    def _note(
        self,
        connection: sa.Connection,
        actor: str,
        action: str,
        subject: str,
        detail: str,
        now: datetime,
    ) -> None:
        closures.note(
            connection, at=now, actor=actor, action=action, subject=subject, detail=detail
        )


def refundable(connection: sa.Connection, lease: Lease) -> int:
    """Microcredits that are left of what a lease was charged."""
    reversed_ = book.reversed_of_lease(connection, lease.id, lease.account)
    return max(0, min(lease.charged, lease.charged - reversed_))


def _refundable(connection: sa.Connection, lease: Lease, amount: int | None) -> int:
    """What is given back of what a lease was charged; None asks for all that is left of it.

    Raises InvalidRequest.
    """
    _must_be_refundable(lease)
    left = refundable(connection, lease)
    if not left:
        raise InvalidRequest(
            f"All that lease {lease.id} of {lease.server} was charged came back already: there is "
            "nothing to refund.",
            field="lease",
        )
    if amount is None:
        return left
    if not 0 < amount <= left:
        raise InvalidRequest(
            f"{format_credits(amount, 6)} credits cannot be given back for lease {lease.id} of "
            f"{lease.server}: write more than 0 and at most {format_credits(left, 6)}, which is "
            "what is left of its charges.",
            field="amount",
        )
    return amount


def _must_be_refundable(lease: Lease) -> None:
    """Raises InvalidRequest."""
    if lease.outcome == REFUNDED:
        raise InvalidRequest(
            f"Lease {lease.id} was refunded already. Nothing was changed.", field="lease"
        )
    if lease.state is not LeaseState.ENDED:
        raise InvalidRequest(
            f"Lease {lease.id} of {lease.server} goes on: stop its server first, then refund it.",
            field="lease",
        )
    if not lease.charged:
        raise InvalidRequest(
            f"Nothing was charged for lease {lease.id} of {lease.server}: there is nothing to "
            "refund.",
            field="lease",
        )


def _must_be_reversible(connection: sa.Connection, transfer: Transfer) -> None:
    """Raises InvalidRequest for what came back already."""
    if transfer.lease_id is None or transfer.kind is not TransferKind.CHARGE:
        return
    lease = leases.get(connection, transfer.lease_id, lock=True)
    if lease.outcome == REFUNDED:
        raise InvalidRequest(
            f"Lease {transfer.lease_id} was refunded: nothing is left to reverse.",
            field="transfer",
        )
    left = lease.charged - book.reversed_of_lease(connection, lease.id, lease.account)
    if -transfer.amount_for(lease.account) > left:
        raise InvalidRequest(
            f"Of what lease {lease.id} of {lease.server} was charged, "
            f"{format_credits(max(0, left), 6)} credits are left, and this charge is more: refund "
            "what is left of the lease instead.",
            field="transfer",
        )


def _must_end_later(amount: int, since: datetime, until: datetime) -> None:
    """Raises InvalidRequest for an end that credits cannot have."""
    if amount <= 0:
        raise InvalidRequest("What is taken back has no end: leave the end out.", field="until")
    if until <= since:
        raise InvalidRequest(
            f"These credits would end at {_utc(until)}, which is over already. Name a later end.",
            field="until",
        )


def _transfer(connection: sa.Connection, transfer_id: str) -> Transfer:
    found = book.transfers_like(connection, transfer_id)
    if len(found) == 1:
        return found[0]
    what = "More than one transfer begins" if found else "There is no transfer that begins"
    raise InvalidRequest(
        f"{what} with {transfer_id[:60]!r}. `gpuspawner statement MEMBER --json` names the "
        "transfers of an account.",
        field="transfer",
    )


def _utc(moment: datetime) -> str:
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"


def _signed(amount: int) -> str:
    return f"{'+' if amount > 0 else ''}{format_credits(amount, 6).rstrip('0').rstrip('.')}"
