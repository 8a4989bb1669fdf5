"""Invariants of the ledger, over plain data: each check yields one sentence per problem."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..leases.models import Lease, LeaseState
from .models import Account, TransferKind, is_system
from .rules import owed


@dataclass(frozen=True, slots=True, kw_only=True)
class PostingRow:
    """A posting with its transfer's fields, as stored: it can be invalid."""

    transfer_id: str
    key: str
    kind: TransferKind
    lease_id: str | None
    account: str
    amount: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """The data that the checks read."""

    postings: tuple[PostingRow, ...] = ()
    accounts: tuple[Account, ...] = ()
    leases: tuple[Lease, ...] = ()
    failed: frozenset[str] = frozenset()
    """Ids of ended leases whose start failed: they cost nothing."""


FREE = ("failed", "no_show", "lost", "refunded")
"""Outcomes of leases that cost nothing."""


def check_zero_sum(books: Books) -> Iterator[str]:
    """Check that the postings of each transfer sum to zero."""
    totals: dict[str, int] = defaultdict(int)
    for row in books.postings:
        totals[row.transfer_id] += row.amount
    for transfer_id, total in totals.items():
        if total:
            yield f"The postings of transfer {transfer_id} sum to {total} microcredits, not zero."


def check_keys(books: Books) -> Iterator[str]:
    """Check that no idempotency key belongs to two transfers."""
    owners: dict[str, set[str]] = defaultdict(set)
    for row in books.postings:
        owners[row.key].add(row.transfer_id)
    for key, ids in owners.items():
        if len(ids) > 1:
            yield f"The key {key} was posted {len(ids)} times: {', '.join(sorted(ids))}."


def check_balances(books: Books) -> Iterator[str]:
    """Check that the balance of each account is the sum of its postings.

    Every account with postings must exist; the ledger's own may be missing from ``accounts``.
    """
    sums: dict[str, int] = defaultdict(int)
    for row in books.postings:
        sums[row.account] += row.amount
    for account in books.accounts:
        total = sums.pop(account.name, 0)
        if account.balance != total:
            yield (
                f"The balance of {account.name} is {account.balance} microcredits, but its "
                f"postings sum to {total}."
            )
    for name in sums:
        if not is_system(name):
            yield f"There are postings for {name}, but no such account."


def check_holds(books: Books) -> Iterator[str]:
    """Check that an account holds what its open leases hold: an ended lease holds nothing."""
    held: dict[str, int] = defaultdict(int)
    for lease in books.leases:
        held[lease.account] += lease.held
    for account in books.accounts:
        if account.held != held[account.name]:
            yield (
                f"{account.name} has {account.held} microcredits on hold, but its open leases "
                f"hold {held[account.name]}."
            )


def check_lease_postings(books: Books) -> Iterator[str]:
    """Check that each lease's charged amount is what its charges and refunds moved."""
    moved: dict[tuple[str, str], int] = defaultdict(int)
    for row in books.postings:
        if row.lease_id and row.kind in (TransferKind.CHARGE, TransferKind.REFUND):
            moved[row.lease_id, row.account] -= row.amount
    for lease in books.leases:
        total = moved[lease.id, lease.account]
        if lease.charged != total:
            yield (
                f"Lease {lease.id} says {lease.charged} microcredits were charged, but its "
                f"postings took {total} from {lease.account}."
            )


def check_settled(books: Books) -> Iterator[str]:
    """Check that an ended lease was charged what it owed at its end, less refunds.

    A failed start owes nothing, nor does a server that nobody connected to or could connect to.
    """
    for lease in books.leases:
        if lease.state is not LeaseState.ENDED:
            continue
        if lease.ended_at is None:
            yield f"Lease {lease.id} has ended at an unknown time."
            continue
        # Refunds from before partial refunds existed are not recorded in the lease.
        free = lease.id in books.failed or (lease.outcome in FREE and not lease.refunded)
        due = 0 if free else owed(lease.rate, lease.started_at, lease.ended_at)
        if lease.charged + lease.waived + lease.refunded != due:
            given_back = f" and {lease.refunded} were given back" if lease.refunded else ""
            yield (
                f"Lease {lease.id} has ended and owed {due} microcredits, but {lease.charged} "
                f"were charged{given_back}."
            )
        if lease.refunded < 0:
            yield f"Lease {lease.id} got {lease.refunded} microcredits back."
        if lease.waived < 0 or (lease.waived and lease.when_dry != "overdraft"):
            yield (
                f"Lease {lease.id} was let off {lease.waived} microcredits, and had no overdraft "
                "that ended."
            )


BASIC_CHECKS: tuple[Callable[[Books], Iterator[str]], ...] = (
    check_zero_sum,
    check_keys,
    check_balances,
    check_holds,
    check_lease_postings,
    check_settled,
)


def check_all(books: Books) -> list[str]:
    """Return every problem that the checks find, in their order; empty if all is well."""
    return [problem for check in BASIC_CHECKS for problem in check(books)]
