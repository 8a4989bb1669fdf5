"""Many grants at once: all of them, or none."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from ..ledger import bulk
from ..ledger.bulk import Problem, Row
from ..model import format_credits
from ..store import book
from .admin import checked_reason
from .refills import Refills


@dataclass(frozen=True, slots=True)
class Gift:
    """What a line did, or would do."""

    row: Row
    before: int
    """The balance in microcredits."""
    after: int
    opened: bool = False
    """Whether the account is opened by this."""


@dataclass(frozen=True, slots=True)
class Bulk:
    """What a file did, or would do."""

    gifts: tuple[Gift, ...]
    problems: tuple[Problem, ...]
    """With one of these nothing was granted to anybody."""
    done: bool
    """Whether it was granted now."""

    @property
    def total(self) -> int:
        """Microcredits of all lines."""
        return sum(gift.row.amount for gift in self.gifts)


class BulkGrants(Refills):
    """The part of the broker that grants from a file."""

    def grant_file(
        self,
        data: bytes,
        *,
        actor: str,
        reason: str = "",
        dry_run: bool = False,
        open_accounts: bool = False,
        again: bool = False,
        until: datetime | None = None,
    ) -> Bulk:
        """Grant what a CSV file says, or say what that would do.

        The same grants are given once, ``again`` gives them once more. ``reason`` is for lines
        without one. ``open_accounts``: members who never signed in get an account, and its
        opening grant. Raises InvalidRequest for an end that cannot be.
        """
        reason, now = checked_reason(reason), self.clock()
        rows, problems = bulk.parse(data, reason)
        key = f"bulk:{bulk.digest(rows)}"
        again_key = f"{key}:{secrets.token_hex(8)}"
        if dry_run or problems:
            with self.store.read() as connection:
                found = [] if again else self._granted_before(connection, rows, key)
                gifts, unknown = self._foresee(connection, rows, open_accounts)
            return Bulk(tuple(gifts), _sorted(problems, found, unknown), done=False)
        with self.store.write() as connection:
            found = [] if again else self._granted_before(connection, rows, key)
            gifts, unknown = self._foresee(connection, rows, open_accounts)
            if found or unknown:
                return Bulk(tuple(gifts), _sorted(found, unknown), done=False)
            for row in rows:
                self._open_account(connection, row.account, now)
                self._give(
                    connection,
                    row.account,
                    row.amount,
                    now,
                    actor=actor,
                    reason=row.reason,
                    key=f"{again_key if again else key}:{row.account}",
                    until=until,
                )
            done = Bulk(tuple(gifts), (), done=True)
            detail = f"{format_credits(done.total)} credits to {len(rows)} accounts: {reason}"
            self._note(connection, actor, "grant_file", key, detail.rstrip(": "), now)
        return done

    # Steps of the above.

    def _foresee(
        self, connection: sa.Connection, rows: Sequence[Row], open_accounts: bool
    ) -> tuple[list[Gift], list[Problem]]:
        """What each line would do, and those whose accounts are not there."""
        gifts, problems = [], []
        known = {account.name: account.balance for account in book.all_accounts(connection)}
        for row in rows:
            if row.account in known:
                before = known[row.account]
                gifts.append(Gift(row, before, before + row.amount))
            elif open_accounts:
                before = self._opening_amount() if row.account.startswith("member:") else 0
                gifts.append(Gift(row, before, before + row.amount, opened=True))
            else:
                problems.append(Problem(row.number, _unknown(row.account, known)))
        return gifts, problems

    def _granted_before(
        self, connection: sa.Connection, rows: Sequence[Row], key: str
    ) -> list[Problem]:
        earlier = book.of_key(connection, f"{key}:{rows[0].account}") if rows else None
        if earlier is None:
            return []
        sentence = (
            f"The same grants were given at {earlier.at:%Y-%m-%d %H:%M} UTC by {earlier.actor}: "
            "nothing is given twice unless you say so (--again)."
        )
        return [Problem(0, sentence)]


def _sorted(*some: Sequence[Problem]) -> tuple[Problem, ...]:
    return tuple(sorted((p for each in some for p in each), key=lambda problem: problem.number))


def _unknown(account: str, known: dict[str, int]) -> str:
    owners = {name.partition(":")[2]: name for name in known}
    near = difflib.get_close_matches(account.partition(":")[2], owners, n=2)
    meant = f" Did you mean {' or '.join(owners[name] for name in near)}?" if near else ""
    return f"there is no account {account!r}.{meant} --open opens it."
