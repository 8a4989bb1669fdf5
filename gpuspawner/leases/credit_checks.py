"""Checks before a grant that the account can pay."""

from __future__ import annotations

from datetime import datetime, timedelta

import sqlalchemy as sa

from ..core.errors import NoCredits
from ..core.units import format_credits, format_price
from ..ledger import rules as ledger_rules
from ..ledger.models import Account
from ..ledger.service import LedgerService
from ..ledger.settings import GPUCredits
from . import repository


class CreditChecks:
    """Checks what an account can pay for, after what its servers already owe."""

    def __init__(self, ledger: LedgerService, settings: GPUCredits) -> None:
        self.ledger = ledger
        self.settings = settings

    def payer_now(self, connection: sa.Connection, name: str, now: datetime) -> Account:
        """Return the account, less everything its servers owe but were not charged yet."""
        account = self.ledger.open_in(connection, name, now)
        return ledger_rules.owing(
            [lease for lease, _ in repository.paying(connection, name)], account, now
        )

    def require_credits(self, account: Account, hold: int, rate: int, lead: timedelta) -> None:
        """Raise NoCredits if the hold cannot be paid; ``lead`` is the time that it covers."""
        if ledger_rules.can_afford(account.available, hold):
            return
        set_aside = ""
        if account.held:
            set_aside = f" ({format_credits(account.held)} more are set aside for running servers)"
        kind, _, name = account.name.partition(":")
        whose = f"The group {name}'s" if kind == "group" else "Your"
        first = f"the first {self.settings.hold_minutes:g} minutes"
        if self.settings.hold_session and lead != self.settings.lead(None):
            first = f"the whole session of {ledger_rules.format_time_left(lead)}"
        raise NoCredits(
            f"{whose} balance of {format_credits(account.available)} credits{set_aside} does not "
            f"cover this: it costs {format_price(rate)} credits an hour, and {first} "
            f"({format_credits(-(-hold // 10_000) * 10_000)}) must "
            f"be there at the start. {self.settings.help_text} You can start without a GPU: "
            "that is free.",
            balance=account.available,
            hold=hold,
        )
