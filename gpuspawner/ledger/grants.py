"""Grants to many accounts: recurring refills, and grants from a table.

All accounts get an occurrence in one transaction, under keys that the database accepts only once.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from itertools import islice

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ..core.errors import InvalidRequest, UnknownRefill
from ..core.text import checked_reason
from ..core.units import format_credits
from ..db.engine import Store
from ..members import repository as members_repository
from . import charges, credit_repository, grant_files, repository
from .credit_repository import RefillRun
from .grant_files import GrantRow, Problem
from .models import Account, member_account
from .refills import Mode, Recurrence, Refill, check_amounts, check_audience
from .rules import ACTOR_ACCOUNTING
from .service import LedgerService, give, note


class RefillService:
    """Recurring grants of credits."""

    def __init__(self, store: Store, clock: Callable[[], datetime], log: logging.Logger) -> None:
        self.store = store
        self.clock = clock
        self.log = log

    def add_refill(self, plan: Refill) -> Refill:
        """Create a planned refill; a plan with the same key is created once.

        Raises InvalidRequest if the key was used for another one.
        """
        try:
            with self.store.write() as connection:
                if known := credit_repository.find_refill(connection, plan.id):
                    return _same(known, plan)
                credit_repository.insert_refill(connection, plan)
                subject, now = f"refill {plan.id}", self.clock()
                note(connection, plan.made_by, "refill_add", subject, _told(plan), now)
        except IntegrityError:  # another process was faster with the same key
            return _same(self.refill(plan.id), plan)
        return plan

    def plan_refill(
        self,
        rule: str,
        *,
        amount: int,
        audience: Iterable[str],
        actor: str,
        reason: str,
        zone: str = "UTC",
        starts_at: datetime | None = None,
        mode: Mode = Mode.ADD,
        cap: int | None = None,
        keep: timedelta | None = None,
        key: str = "",
    ) -> Refill:
        """Plan a refill for :meth:`add_refill`, without writing anything.

        ``starts_at`` sets the occurrences' time of day and is the first one itself if the rule
        allows it; by default it is the next full minute. Plans of the same actor with the same
        ``key`` are the same refill. Raises InvalidRequest.
        """
        now = self.clock().astimezone(timezone.utc)
        try:
            recurrence = Recurrence.parse(rule, zone, starts_at or _next_minute(now))
        except ValueError as error:
            raise InvalidRequest(str(error), field="rule") from None
        check_amounts(mode, amount, cap, keep)
        first = next(recurrence.after(now, inclusive=True), None)
        if first is None:
            raise InvalidRequest(
                f"{recurrence.rule} has no future occurrence. Choose a later end.",
                field="rule",
            )
        names = check_audience(audience)
        self.store.run(lambda connection: self._must_be_known(connection, names))
        return Refill(
            id=_id(actor, key) if key else secrets.token_hex(4),
            recurrence=recurrence,
            mode=mode,
            amount=amount,
            audience=names,
            cap=cap,
            keep=keep,
            reason=checked_reason(reason, needed=True),
            made_at=now,
            made_by=actor,
            next_at=first,
        )

    def end_refill(self, refill_id: str, *, actor: str, reason: str = "") -> Refill:
        """End a refill; what was granted stays. Raises UnknownRefill."""
        now, reason = self.clock(), checked_reason(reason)
        with self.store.write() as connection:
            refill = credit_repository.get_refill(connection, refill_id, lock=True)
            if refill.ended_at is not None:
                raise InvalidRequest(
                    f"The refill {refill_id} was ended already. Nothing was changed.",
                    field="refill",
                )
            credit_repository.end_refill(connection, refill_id, now)
            detail = f"{_told(refill)}{': ' if reason else ''}{reason}"
            note(connection, actor, "refill_end", f"refill {refill_id}", detail, now)
            return credit_repository.get_refill(connection, refill_id)

    def all_refills(self, *, ended: bool = False) -> list[Refill]:
        """Return every refill, oldest first; those that an admin ended only on request."""
        with self.store.read() as connection:
            return credit_repository.all_refills(connection, ended=ended)

    def refill(self, refill_id: str) -> Refill:
        """Return a refill by its id or the first letters of it. Raises UnknownRefill."""
        named = [
            x for x in self.all_refills(ended=True) if refill_id and x.id.startswith(refill_id)
        ]
        if len(named) != 1:
            raise UnknownRefill(refill=refill_id[:60])
        return named[0]

    def refill_runs(self, refill_id: str, limit: int = 20) -> list[RefillRun]:
        """Return the latest granted occurrences of a refill, newest first."""
        with self.store.read() as connection:
            return credit_repository.runs_of_refill(connection, refill_id, limit)

    def preview_refill(
        self, refill: Refill, members: Mapping[str, Collection[str]] | None = None, count: int = 5
    ) -> tuple[list[datetime], list[tuple[Account, int]]]:
        """Return the next occurrences, and what the first would grant to whom if it came now.

        ``members`` are those of each of its groups.
        """
        now = self.clock()
        if refill.next_at is None or refill.ended_at is not None:
            return [], []
        coming = refill.recurrence.after(refill.next_at, inclusive=True)
        known = self.store.run(_of_members)
        chosen = refill.accounts(known, members or {}, max(now, refill.next_at))
        return list(islice(coming, count)), [(each, refill.gift(each.balance)) for each in chosen]

    # What the accounting service does.

    def due_refills(self) -> list[Refill]:
        """Return the refills with an occurrence that is due and not granted."""
        now = self.clock()
        return self.store.run(lambda connection: credit_repository.refills_due(connection, now))

    def give_refill(
        self, refill_id: str, members: Mapping[str, Collection[str]] | None = None
    ) -> RefillRun | None:
        """Grant the next occurrence of a refill if it is due; None if it is not.

        ``members`` are those of each of the refill's groups, as the Hub lists them now.
        """
        now = self.clock().astimezone(timezone.utc)
        with self.store.write() as connection:
            refill = credit_repository.get_refill(connection, refill_id, lock=True)
            occurrence = refill.next_at
            if refill.ended_at is not None or occurrence is None or now < occurrence:
                return None
            gifts = self._give_occurrence(connection, refill, occurrence, members or {}, now)
            run = RefillRun(occurrence, now, len(gifts), sum(gifts))
            credit_repository.note_refill_run(
                connection, refill_id, run, refill.recurrence.next(occurrence)
            )
            detail = (
                f"{format_credits(run.total)} credits to {run.accounts} accounts, of "
                f"{occurrence:%Y-%m-%d %H:%M} UTC: {refill.reason}"
            )
            subject = f"refill {refill_id}"
            note(connection, ACTOR_ACCOUNTING, "refill", subject, detail, now)
        self.log.info("Refill %s: %s", refill_id, detail)
        return run

    # Helpers.

    def _give_occurrence(
        self,
        connection: sa.Connection,
        refill: Refill,
        occurrence: datetime,
        members: Mapping[str, Collection[str]],
        now: datetime,
    ) -> list[int]:
        """Return the amounts granted; a full account gets nothing."""
        for name in credit_repository.lots_due(connection, now):
            charges.settle_lots(connection, name, now)
        gifts = []
        for account in refill.accounts(_of_members(connection), members, occurrence):
            amount = refill.gift(account.balance)
            if not amount:
                continue
            give(
                connection,
                account.name,
                amount,
                now,
                actor=ACTOR_ACCOUNTING,
                reason=refill.reason,
                key=refill.key(occurrence, account.name),
                since=occurrence,
                until=None if refill.keep is None else occurrence + refill.keep,
            )
            gifts.append(amount)
        return gifts

    def _must_be_known(self, connection: sa.Connection, audience: Collection[str]) -> None:
        """Raise InvalidRequest for an account that does not exist: most likely a mistake."""
        known = {account.name for account, _ in credit_repository.accounts_since(connection)}
        for name in audience:
            if name.startswith(("member:", "group:")) and name not in known:
                raise InvalidRequest(
                    f"There is no account {name!r}. A member's opens at their first sign-in; "
                    "`gpuspawner grant ACCOUNT AMOUNT --open` opens one now.",
                    field="audience",
                )


def _of_members(connection: sa.Connection) -> list[tuple[Account, datetime]]:
    """Return every account but those of former members, which stay unchanged until they return."""
    former = {member_account(known.user) for known in members_repository.former_members(connection)}
    return [
        each for each in credit_repository.accounts_since(connection) if each[0].name not in former
    ]


def _id(actor: str, key: str) -> str:
    return hashlib.sha256(f"{actor}:{key}".encode()).hexdigest()[:8]


def _same(known: Refill, plan: Refill) -> Refill:
    """Return the existing refill if it is as planned. Raises InvalidRequest."""
    its_own = {
        name: getattr(known, name) for name in ("recurrence", "made_at", "next_at", "ended_at")
    }
    rules = {(some.recurrence.rule, some.recurrence.zone) for some in (known, plan)}
    if replace(plan, **its_own) != known or len(rules) > 1:
        raise InvalidRequest(
            f"The refill {known.id} was made with the same key, and is another one. Nothing was "
            "changed.",
            field="key",
        )
    return known


def _next_minute(now: datetime) -> datetime:
    whole = now.replace(second=0, microsecond=0)
    return whole if whole == now else whole + timedelta(minutes=1)


def _told(refill: Refill) -> str:
    """Describe a refill in one line, for the audit log."""
    verb = "add" if refill.mode is Mode.ADD else "top up to"
    cap = "" if refill.cap is None else f", at most {format_credits(refill.cap)}"
    keep = "" if refill.keep is None else f", kept for {refill.keep.days} days"
    return (
        f"{refill.recurrence.rule} ({refill.recurrence.zone}): {verb} "
        f"{format_credits(refill.amount)}{cap}{keep}, for {', '.join(refill.audience)}: "
        f"{refill.reason}"
    )


@dataclass(frozen=True, slots=True)
class GrantResult:
    """What a line did, or would do."""

    row: GrantRow
    before: int
    """The balance in microcredits, less what is due; of an account that opens, its first grant."""
    after: int
    opened: bool = False
    """True if this opens the account."""


@dataclass(frozen=True, slots=True)
class BulkGrantResult:
    """What a file did, or would do."""

    gifts: tuple[GrantResult, ...]
    problems: tuple[Problem, ...]
    """If there are any, nothing was granted to anybody."""
    done: bool
    """True if it was granted now."""

    @property
    def total(self) -> int:
        """Microcredits of all lines, without the first grants of accounts that open."""
        return sum(gift.row.amount for gift in self.gifts)


class BulkGrantService:
    """Grants from a file."""

    def __init__(self, store: Store, clock: Callable[[], datetime], ledger: LedgerService) -> None:
        self.store = store
        self.clock = clock
        self.ledger = ledger

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
    ) -> BulkGrantResult:
        """Grant what a CSV file says, or report what that would do; once, unless ``again``.

        ``reason`` is for lines without one. ``open_accounts``: members who never signed in get an
        account and its opening grant. Raises InvalidRequest for an invalid ``until``.
        """
        reason, now = checked_reason(reason), self.clock()
        rows, problems = grant_files.parse(data, reason)
        key = f"bulk:{grant_files.digest(rows)}"
        again_key = f"{key}:{secrets.token_hex(8)}"
        only_foresee = dry_run or bool(problems)
        with self.store.read() if only_foresee else self.store.write() as connection:
            found = [] if again else self._granted_before(connection, rows, key)
            gifts, unknown = self._foresee(connection, rows, open_accounts)
            problems = sorted([*problems, *found, *unknown], key=lambda problem: problem.number)
            if only_foresee or problems:
                return BulkGrantResult(tuple(gifts), tuple(problems), done=False)
            for row in rows:
                self.ledger.open_in(connection, row.account, now)
                give(
                    connection,
                    row.account,
                    row.amount,
                    now,
                    actor=actor,
                    reason=row.reason,
                    key=f"{again_key if again else key}:{row.account}",
                    until=until,
                )
            done = BulkGrantResult(tuple(gifts), (), done=True)
            detail = f"{format_credits(done.total)} credits to {len(rows)} accounts: {reason}"
            note(connection, actor, "grant_file", key, detail.rstrip(": "), now)
        return done

    # Helpers.

    def _foresee(
        self, connection: sa.Connection, rows: Sequence[GrantRow], open_accounts: bool
    ) -> tuple[list[GrantResult], list[Problem]]:
        """Return what each line would do, and problems for accounts that do not exist."""
        gifts, problems = [], []
        accounts = self.ledger.less_due_in(connection, repository.all_accounts(connection))
        known = {account.name: account.balance for account in accounts}
        for row in rows:
            if row.account in known:
                before = known[row.account]
                gifts.append(GrantResult(row, before, before + row.amount))
            elif open_accounts:
                before = self.ledger.opening_amount() if row.account.startswith("member:") else 0
                gifts.append(GrantResult(row, before, before + row.amount, opened=True))
            else:
                sentence = f"there is no account {row.account!r}.{meant(row.account, known)}"
                problems.append(Problem(row.number, sentence, remedy="open"))
        return gifts, problems

    def _granted_before(
        self, connection: sa.Connection, rows: Sequence[GrantRow], key: str
    ) -> list[Problem]:
        earlier = repository.of_key(connection, f"{key}:{rows[0].account}") if rows else None
        if earlier is None:
            return []
        sentence = (
            f"The same grants were given at {earlier.at:%Y-%m-%d %H:%M} UTC by {earlier.actor}: "
            "nothing is given twice unless you say so."
        )
        return [Problem(0, sentence, remedy="again")]


def meant(account: str, known: Iterable[str]) -> str:
    """Return the question if one of the known accounts was meant; empty if none is similar."""
    owners = {name.partition(":")[2]: name for name in known}
    near = difflib.get_close_matches(account.partition(":")[2], owners, n=3)
    return f" Did you mean {' or '.join(owners[name] for name in near)}?" if near else ""
