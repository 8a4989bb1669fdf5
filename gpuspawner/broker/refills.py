"""Recurring refills: made and ended by admins, given by the accounting service.

An occurrence is given once, whoever looks and however late: it is given to all of its accounts in
one transaction, which writes it down under a key that the database takes once.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import islice

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ..errors import InvalidRequest, UnknownRefill
from ..ledger.recurrence import Recurrence
from ..ledger.refills import Mode, Refill, check_amounts, check_audience
from ..ledger.rules import ACTOR_ACCOUNTING
from ..model import Account, format_credits, member_account
from ..store import lots, memberships, refills
from ..store.refills import Run
from .admin import checked_reason
from .giving import Giving


class Refills(Giving):
    """The part of the broker that gives credits again and again."""

    def add_refill(self, plan: Refill) -> Refill:
        """Make a refill that was planned; what is over when it is made is not given.

        One that was planned with the same key is made once. Raises InvalidRequest when the key
        was used for another one.
        """
        try:
            with self.store.write() as connection:
                if known := refills.find(connection, plan.id):
                    return _same(known, plan)
                refills.insert(connection, plan)
                subject, now = f"refill {plan.id}", self.clock()
                self._note(connection, plan.made_by, "refill_add", subject, _told(plan), now)
        except IntegrityError:  # somebody was quicker with the same key
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
        """A refill for :meth:`add_refill`; nothing is written.

        ``starts_at`` is the rule's beginning and gives its occurrences their time of day; it is
        the first one itself if the rule allows it. Without it, that is the next full minute.
        ``key``: what the same actor plans with it is the same refill.
        Raises InvalidRequest for a rule that never comes or comes too often, and for amounts and
        names that make no sense.
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
                f"{recurrence.rule} has no occurrence that is still to come. Name a later end.",
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
        """Give no further occurrence; what was given stays. Raises UnknownRefill."""
        now, reason = self.clock(), checked_reason(reason)
        with self.store.write() as connection:
            refill = refills.get(connection, refill_id, lock=True)
            if refill.ended_at is not None:
                raise InvalidRequest(
                    f"The refill {refill_id} was ended already. Nothing was changed.",
                    field="refill",
                )
            refills.end(connection, refill_id, now)
            detail = f"{_told(refill)}{': ' if reason else ''}{reason}"
            self._note(connection, actor, "refill_end", f"refill {refill_id}", detail, now)
            return refills.get(connection, refill_id)

    def refills(self, *, ended: bool = False) -> list[Refill]:
        """Every refill, the oldest first; those that an admin ended only when asked for."""
        return self.store.run(lambda connection: refills.all_refills(connection, ended=ended))

    def refill(self, refill_id: str) -> Refill:
        """One refill; of its id the first letters are enough. Raises UnknownRefill."""
        named = [x for x in self.refills(ended=True) if refill_id and x.id.startswith(refill_id)]
        if len(named) != 1:
            raise UnknownRefill(refill=refill_id[:60])
        return named[0]

    def refill_runs(self, refill_id: str, limit: int = 20) -> list[Run]:
        """The newest occurrences of a refill that were given, newest first."""
        return self.store.run(lambda connection: refills.runs(connection, refill_id, limit))

    def preview_refill(
        self, refill: Refill, members: Mapping[str, Collection[str]] | None = None, count: int = 5
    ) -> tuple[list[datetime], list[tuple[Account, int]]]:
        """The next occurrences of a refill, and what the first of them would give to whom if it
        came now. ``members`` are those of each of its groups."""
        now = self.clock()
        if refill.next_at is None or refill.ended_at is not None:
            return [], []
        coming = refill.recurrence.after(refill.next_at, inclusive=True)
        known = self.store.run(_of_members)
        chosen = refill.accounts(known, members or {}, max(now, refill.next_at))
        return list(islice(coming, count)), [(each, refill.gift(each.balance)) for each in chosen]

    # What the accounting service does.

    def due_refills(self) -> list[Refill]:
        """The refills of which an occurrence has come and was not given."""
        now = self.clock()
        return self.store.run(lambda connection: refills.due(connection, now))

    def give_refill(
        self, refill_id: str, members: Mapping[str, Collection[str]] | None = None
    ) -> Run | None:
        """Give the next occurrence of a refill that is due; None when none is.

        ``members`` are those of each of the refill's groups, as the Hub knows them now.
        """
        now = self.clock().astimezone(timezone.utc)
        with self.store.write() as connection:
            refill = refills.get(connection, refill_id, lock=True)
            occurrence = refill.next_at
            if refill.ended_at is not None or occurrence is None or now < occurrence:
                return None
            gifts = self._give_occurrence(connection, refill, occurrence, members or {}, now)
            run = Run(occurrence, now, len(gifts), sum(gifts))
            refills.given(connection, refill_id, run, refill.recurrence.next(occurrence))
            detail = (
                f"{format_credits(run.total)} credits to {run.accounts} accounts, of "
                f"{occurrence:%Y-%m-%d %H:%M} UTC: {refill.reason}"
            )
            subject = f"refill {refill_id}"
            self._note(connection, ACTOR_ACCOUNTING, "refill", subject, detail, now)
        self.log.info("Refill %s: %s", refill_id, detail)
        return run

    # Steps of the above.

    def _give_occurrence(
        self,
        connection: sa.Connection,
        refill: Refill,
        occurrence: datetime,
        members: Mapping[str, Collection[str]],
        now: datetime,
    ) -> list[int]:
        """The amounts that were given; who is full gets nothing."""
        for name in lots.due(connection, now):
            self._settle_lots(connection, name, now)
        gifts = []
        for account in refill.accounts(_of_members(connection), members, occurrence):
            amount = refill.gift(account.balance)
            if not amount:
                continue
            self._give(
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
        """Raises InvalidRequest for an account that is not there: most likely a slip."""
        known = {account.name for account, _ in refills.opened(connection)}
        for name in audience:
            if name.startswith(("member:", "group:")) and name not in known:
                raise InvalidRequest(
                    f"There is no account {name!r}. A member's opens at their first sign-in; "
                    "`gpuspawner grant ACCOUNT AMOUNT --open` opens one now.",
                    field="audience",
                )


def _of_members(connection: sa.Connection) -> list[tuple[Account, datetime]]:
    """Every account but those of former members, which stay as they are until they come back."""
    former = {member_account(known.user) for known in memberships.former(connection)}
    return [each for each in refills.opened(connection) if each[0].name not in former]


def _id(actor: str, key: str) -> str:
    return hashlib.sha256(f"{actor}:{key}".encode()).hexdigest()[:8]


def _same(known: Refill, plan: Refill) -> Refill:
    """The refill that was made, if it is as planned. Raises InvalidRequest."""
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
    """A refill in a line, for the trail."""
    verb = "add" if refill.mode is Mode.ADD else "top up to"
    cap = "" if refill.cap is None else f", at most {format_credits(refill.cap)}"
    keep = "" if refill.keep is None else f", kept for {refill.keep.days} days"
    return (
        f"{refill.recurrence.rule} ({refill.recurrence.zone}): {verb} "
        f"{format_credits(refill.amount)}{cap}{keep}, for {', '.join(refill.audience)}: "
        f"{refill.reason}"
    )
