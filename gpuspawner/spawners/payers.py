"""Who pays, as the form offers it."""

from __future__ import annotations

from dataclasses import dataclass

from ..broker.payers import Payers
from ..model import format_credits


@dataclass(frozen=True, slots=True)
class PayerChoice:
    """One line of the form's list of accounts."""

    value: str
    label: str
    selected: bool


def payer_choices(payers: Payers, last: str | None) -> list[PayerChoice]:
    """What a member may choose from, and what they chose last time; nothing to choose is none."""
    names = [account.name for account in payers.accounts]
    if len(names) < 2:
        return []
    chosen = last if last in names else payers.usual
    return [
        PayerChoice(account.name, _label(account.name, account.available), account.name == chosen)
        for account in payers.accounts
    ]


def _label(account: str, available: int) -> str:
    kind, _, name = account.partition(":")
    whose = f"group {name}" if kind == "group" else "my own credits"
    return f"{whose} ({format_credits(available)} credits)"
