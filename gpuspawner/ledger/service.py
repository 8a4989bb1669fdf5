"""Grants, refunds and reversals of credits, and who pays for a server.

Nothing in the ledger is ever changed: a correction is another transfer, with its reason. What an
admin does is also in the audit log, in the same transaction.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import sqlalchemy as sa

from ..core.errors import ConfigError, InvalidRequest, NotAllowed, UnknownAccount
from ..core.text import checked_reason
from ..core.units import format_credits, parse_credits, round_credits
from ..db import audit_log, hash_chain
from ..db.engine import Store
from ..leases import repository as leases_repository
from ..leases.models import Lease, LeaseState
from . import charges, credit_repository, reports, repository, rules, totals
from .lots import Lot
from .models import Account, Transfer, TransferKind, check_account, group_account, member_account
from .reports import StatementEntry
from .rules import accounts_of, check_payer

if TYPE_CHECKING:
    from .settings import GPUCredits

REFUNDED = "refunded"
"""The outcome of a lease whose charges an admin refunded."""


@dataclass(frozen=True, slots=True)
class Payers:
    """The accounts that a member may draw on."""

    accounts: tuple[Account, ...]
    """The open ones, the member's own first."""
    usual: str
    """The name of the one that pays if the member does not choose."""


class LedgerService:
    """Accounts and their credits: opened, granted, charged, refunded, reversed, and who pays."""

    def __init__(self, store: Store, clock: Callable[[], datetime], settings: GPUCredits) -> None:
        self.store = store
        self.clock = clock
        self.settings = settings

    # Accounts.

    def account(self, name: str) -> Account:
        """Return the balance and holds of an account. Raises UnknownAccount."""
        return self.store.run(lambda connection: repository.get_account(connection, name))

    def current_account(self, name: str) -> Account:
        """Return the account less what is due now, as pages show it. Raises UnknownAccount."""
        return self.less_due([self.account(name)])[0]

    def less_due(self, accounts: Iterable[Account]) -> list[Account]:
        """Return accounts as if all that is due now for running servers were charged."""
        return self.store.run(lambda connection: self.less_due_in(connection, accounts))

    def less_due_in(self, connection: sa.Connection, accounts: Iterable[Account]) -> list[Account]:
        """Return the same in the caller's transaction."""
        now, opened = self.clock(), leases_repository.open_leases(connection)
        return [
            rules.owing((lease for lease in opened if lease.account == some.name), some, now)
            for some in accounts
        ]

    def member(self, user: str) -> Account:
        """Return the account of a member; an empty one if it is not open yet."""
        try:
            return self.account(member_account(user))
        except UnknownAccount:
            return Account(name=member_account(user))

    def accounts(self) -> list[Account]:
        """Return every member's and group's account, by name."""
        return self.store.run(repository.all_accounts)

    def statement(self, account: str, limit: int = 100) -> tuple[StatementEntry, ...]:
        """Return the newest lines of an account, newest first. Raises UnknownAccount."""
        read = reports.entry_page
        return self.store.run(lambda connection: read(connection, account, None, limit)).entries

    def open_account(self, user: str) -> Account:
        """Open a member's account with the opening grant, unless it exists."""
        name = member_account(user)
        with self.store.write() as connection:
            return self.open_in(connection, name, self.clock())

    def open_in(self, connection: sa.Connection, name: str, now: datetime) -> Account:
        """Return the account; a member's is opened with the opening grant if it does not exist."""
        charges.end_due_lots(connection, name, now)
        if found := repository.find_account(connection, name):
            return found
        repository.open_account(connection, name, now)
        if name.startswith("member:"):
            amount, key = self.opening_amount(), rules.opening_key(name)
            # A former owner of this name, who was renamed, has that key.
            if repository.of_key(connection, key):
                key += f":{secrets.token_hex(4)}"
            opening = rules.opening_grant(name, amount, at=now, actor="gpuspawner", key=key)
            if opening:
                repository.post(connection, opening)
        return repository.get_account(connection, name)

    def opening_amount(self) -> int:
        """Return the microcredits that a new member gets. Raises ConfigError."""
        try:
            return parse_credits(self.settings.opening_grant)
        except ValueError as error:
            raise ConfigError(what=f"c.GPUCredits.opening_grant: {error}") from None

    # Actions of admins.

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
        """Grant microcredits until a time, or take some. Returns False if ``key`` was used before.

        Raises UnknownAccount, LedgerError, or InvalidRequest for an invalid ``until``.
        """
        now = self.clock()
        with self.store.write() as connection:
            done = give(
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
                note(connection, actor, "grant", account, detail, now)
        return done

    def open_group_account(self, group: str, *, actor: str) -> bool:
        """Open a group's account, which is empty. Returns False if it exists."""
        name, now = group_account(group), self.clock()
        with self.store.write() as connection:
            opened = repository.open_account(connection, name, now)
            if opened:
                note(connection, actor, "open_account", name, "", now)
        return opened

    def refund(
        self, lease_id: str, amount: int | None = None, *, actor: str, reason: str, key: str = ""
    ) -> Lease:
        """Refund microcredits of what a lease was charged (None: all that is left), once per key.

        Raises UnknownLease, InvalidRequest for an open lease, one that was not charged or has less
        left, and LedgerError for a key that was used for another amount.
        """
        reason, now = checked_reason(reason, needed=True), self.clock()
        with self.store.write() as connection:
            lease = leases_repository.get(connection, lease_id, lock=True)
            key = rules.refund_key(lease.id, key or secrets.token_hex(8))
            if (done := repository.of_key(connection, key)) is None:
                amount = _refundable(connection, lease, amount)
            elif amount in (None, round_credits(done.amount_for(lease.account))):
                return lease
            assert amount is not None
            refund_lease(connection, lease, amount, key, now, actor=actor, reason=reason)
            return leases_repository.get(connection, lease.id)

    def transfer(self, transfer_id: str) -> Transfer:
        """Return a transfer by its id or the unique first letters of it. Raises InvalidRequest."""
        return self.store.run(lambda connection: _transfer(connection, transfer_id))

    def reverse(self, transfer_id: str, *, actor: str, reason: str) -> Transfer:
        """Undo a transfer (or a reversal) by its opposite, and return that.

        Raises InvalidRequest for a transfer that does not exist or was reversed before.
        """
        reason, now = checked_reason(reason, needed=True), self.clock()
        with self.store.write() as connection:
            transfer = _transfer(connection, transfer_id)
            key = rules.reversal_key(transfer.id)
            if earlier := repository.of_key(connection, key):
                raise InvalidRequest(
                    f"Transfer {transfer.id} was reversed already, by {earlier.actor} at "
                    f"{_utc(earlier.at)}: {earlier.reason}. Nothing was changed.",
                    field="transfer",
                )
            _must_be_reversible(connection, transfer)
            opposite = rules.reversal(transfer, key=key, at=now, actor=actor, reason=reason)
            repository.post(connection, opposite)
            if lot := credit_repository.lots_of_transfer(connection, transfer.id):
                credit_repository.update_lot(connection, lot.id, cancelled_at=now)
                charges.settle_lots(connection, lot.account, now)
            moved = ", ".join(
                f"{_signed(posting.amount)} to {posting.account}"
                for posting in opposite.postings
                if not posting.account.startswith("system:")
            )
            subject = f"transfer {transfer.id}"
            note(connection, actor, "reverse", subject, f"{moved}: {reason}", now)
        return opposite

    # Expiring credits.

    def lots_of(self, account: str) -> list[tuple[Lot, int]]:
        """Return an account's lots that have not ended, first to be spent first, and what is left.

        In microcredits. Raises UnknownAccount.
        """
        now = self.clock()
        with self.store.read() as connection:
            repository.get_account(connection, account)
            return charges.lots_left(connection, account, now)

    def ending_of(self, accounts: Collection[str]) -> dict[str, tuple[tuple[datetime, int], ...]]:
        """Return when credits of these accounts expire, and how many microcredits are left.

        Accounts without such credits are left out.
        """
        now = self.clock()
        with self.store.read() as connection:
            found = {name: charges.ending_credits(connection, name, now) for name in accounts}
        return {name: ending for name, ending in found.items() if ending}

    def end_lots(self) -> int:
        """Take back what is left of expired credits, and return how many accounts had some."""
        now = self.clock()
        names = self.store.run(lambda connection: credit_repository.lots_due(connection, now))
        for name in names:
            with self.store.write() as connection:
                charges.settle_lots(connection, name, now)
        return len(names)

    # Charges.

    def charge_all(self) -> int:
        """Charge every running lease up to now, and return how many were charged."""
        now = self.clock()
        with self.store.write() as connection:
            due = repository.charges_due(connection, now)
            return charges.charge_due_leases(connection, due, repository.bounded(connection), now)

    def charge_portion(self, every: timedelta, most: int = 200) -> int:
        """Charge up to ``most`` running leases that were not charged in their current period.

        Periods of ``every`` count from each lease's start. Returns how many were charged.
        """
        now = self.clock()
        with self.store.write() as connection:
            found = repository.portion_of_charges(connection, now, every, most)
            return charges.charge_due_leases(connection, *found, now)

    # Who pays.

    def payers(self, user: str, groups: Collection[str]) -> Payers:
        """Return the accounts that may pay for a member of these groups, and the usual one.

        What is due now is subtracted already.
        """
        with self.store.read() as connection:
            found = [
                repository.find_account(connection, name) for name in accounts_of(user, groups)
            ]
            usual = usual_payer(connection, user, groups)
        known = tuple(self.less_due(account for account in found if account))
        if not known or known[0].name != member_account(user):  # not open yet
            known = (Account(name=member_account(user)), *known)
        return Payers(known, usual)

    def keep_payer(
        self, user: str, account: str, *, actor: str, groups: Collection[str] | None = None
    ) -> None:
        """Let this account pay for the member from now on, unless they choose another one.

        An account of a group pays only while the member is in it, which each start checks.
        ``groups``: the member's, None if unknown. Raises NotAllowed or UnknownAccount.
        """
        now = self.clock()
        if groups is not None:
            check_payer(account, user, groups)
        elif account != member_account(user) and not check_account(account).startswith("group:"):
            raise NotAllowed(
                f"{account} cannot pay for {user}: a member's own account can, or group:NAME.",
                field="account",
            )
        kept = "" if account == member_account(user) else account
        with self.store.write() as connection:
            if kept:
                repository.get_account(connection, account)
            if repository.get_payer(connection, user) == kept:
                return
            repository.put_payer(connection, user, kept, now)
            if actor != user:
                detail = f"{account} pays for them"
                note(connection, actor, "payer", member_account(user), detail, now)

    def payer(self, user: str, groups: Collection[str], asked: str, *, free: bool) -> str:
        """Return the account that pays for a server. Raises NotAllowed for one that may not.

        ``free``: the server costs nothing, and needs no budget of a group.
        """
        own = member_account(user)
        if asked:
            check_payer(asked, user, groups)
        if asked == own or not groups or (free and not asked):
            return own
        with self.store.read() as connection:
            if not asked:
                return usual_payer(connection, user, groups)
            if repository.find_account(connection, asked):
                return asked
        raise NotAllowed(
            f"The field 'account' names {asked!r}, which has no credits yet; an admin can grant "
            f"some. Until then write {own}, or leave it out.",
            field="account",
        )


def refund_lease(
    connection: sa.Connection,
    lease: Lease,
    amount: int,
    key: str,
    now: datetime,
    *,
    actor: str,
    reason: str,
) -> None:
    """Refund an amount of what an ended lease was charged, once per key."""
    transfer = rules.refund(lease, amount, key=key, at=now, actor=actor, reason=reason)
    if not repository.post(connection, transfer):
        return
    left = lease.charged - amount
    outcome = lease.outcome if left else REFUNDED
    changes = {"charged": left, "refunded": lease.refunded + amount, "outcome": outcome}
    totals.take_out(connection, lease)
    leases_repository.update(connection, lease.id, **changes)
    hash_chain.seal_lease(connection, lease.id)
    subject = f"lease {lease.id} of {lease.server}"
    detail = f"{format_credits(amount)} credits to {lease.account}: {reason}"
    note(connection, actor, "refund", subject, detail, now)


def give(
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
    """Post a grant, with its lot if it expires. ``since``: from when a lot counts."""
    make: Callable[..., Transfer] = rules.grant if amount > 0 else rules.adjustment
    transfer = make(account, amount, key=key, at=now, actor=actor, reason=reason)
    since = since or now
    if until is not None and amount <= 0:
        raise InvalidRequest("A deduction has no end: leave the end out.", field="until")
    if until is not None and until <= since:
        raise InvalidRequest(
            f"These credits would end at {_utc(until)}, which is in the past. Choose a later end.",
            field="until",
        )
    if not repository.post(connection, transfer):
        return False
    if until is not None:
        lot = Lot(id=transfer.id, account=account, amount=amount, starts_at=since, ends_at=until)
        credit_repository.insert_lot(connection, lot)
        # It may already be spent, before lots that were thought to be spent first.
        if until <= now or credit_repository.lots_closed_since(connection, account, since):
            charges.settle_lots(connection, account, now)
    return True


def note(
    connection: sa.Connection, actor: str, action: str, subject: str, detail: str, now: datetime
) -> None:
    """Write an entry of the audit log."""
    audit_log.note(connection, at=now, actor=actor, action=action, subject=subject, detail=detail)


def refundable(connection: sa.Connection, lease: Lease) -> int:
    """Return the microcredits left of what a lease was charged."""
    reversed_ = repository.reversed_of_lease(connection, lease.id, lease.account)
    return max(0, min(lease.charged, lease.charged - reversed_))


def _refundable(connection: sa.Connection, lease: Lease, amount: int | None) -> int:
    """Return what can be refunded of what a lease was charged; None asks for all of it.

    Raises InvalidRequest.
    """
    named, left = f"{lease.id} of {lease.server}", refundable(connection, lease)
    why = ""
    if lease.outcome == REFUNDED:
        why = f"Lease {lease.id} was refunded already. Nothing was changed."
    elif lease.state is not LeaseState.ENDED:
        why = f"Lease {named} is still open: stop its server first, then refund it."
    elif not lease.charged:
        why = f"Nothing was charged for lease {named}: there is nothing to refund."
    elif not left:
        why = f"Lease {named} is already fully refunded."
    if why:
        raise InvalidRequest(why, field="lease")
    if amount is None:
        return left
    if left < amount <= round_credits(left):
        return left  # all of it, as it is shown
    if not 0 < amount <= left:
        raise InvalidRequest(
            f"{format_credits(amount)} credits cannot be refunded for lease {named}: write "
            f"more than 0 and at most {format_credits(left)}, the part of its charges that "
            "was not refunded.",
            field="amount",
        )
    return amount


def _must_be_reversible(connection: sa.Connection, transfer: Transfer) -> None:
    """Raise InvalidRequest for a charge that was already refunded."""
    if transfer.lease_id is None or transfer.kind is not TransferKind.CHARGE:
        return
    lease = leases_repository.get(connection, transfer.lease_id, lock=True)
    if lease.outcome == REFUNDED:
        raise InvalidRequest(
            f"Lease {transfer.lease_id} was refunded: nothing is left to reverse.",
            field="transfer",
        )
    left = lease.charged - repository.reversed_of_lease(connection, lease.id, lease.account)
    if -transfer.amount_for(lease.account) > left:
        raise InvalidRequest(
            f"Of what lease {lease.id} of {lease.server} was charged, "
            f"{format_credits(max(0, left))} credits are left, and this charge is more: refund "
            "what is left of the lease instead.",
            field="transfer",
        )


def _transfer(connection: sa.Connection, transfer_id: str) -> Transfer:
    found = repository.transfers_like(connection, transfer_id)
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


def usual_payer(connection: sa.Connection, user: str, groups: Collection[str]) -> str:
    """Return the account that pays for a member of these groups who does not choose."""
    kept = repository.get_payer(connection, user)
    return kept if kept in accounts_of(user, groups) else member_account(user)
