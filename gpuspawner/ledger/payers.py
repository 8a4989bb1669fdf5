"""Who may pay for whom: a member draws on their own account and on those of their groups. Pure."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import InvalidRequest, NotAllowed
from ..model import member_account
from .entries import group_account

LONGEST = 300
"""Characters of an account's name that somebody may send."""


def accounts_of(user: str, groups: Collection[str]) -> tuple[str, ...]:
    """The accounts that a member may draw on, their own first; not all of them need be open."""
    return (member_account(user), *(group_account(group) for group in sorted(groups)))


def check_payer(asked: str, user: str, groups: Collection[str]) -> str:
    """The account that is to pay, if the member may draw on it. Raises NotAllowed."""
    mine = accounts_of(user, groups)
    if asked in mine:
        return asked
    allowed = " or ".join(mine[:5])
    raise NotAllowed(
        f"The field 'account' names {asked[:60]!r}, which you may not draw on: write {allowed}, "
        "or leave it out.",
        field="account",
    )


def parse_account(value: object) -> str:
    """The account that somebody named in a form. Raises InvalidRequest."""
    text = value.strip() if isinstance(value, str) and len(value) <= LONGEST else ""
    kind, _, name = text.partition(":")
    if kind not in ("member", "group") or not name.strip() or not text.isprintable():
        said = "so much" if isinstance(value, int) else repr(str(value)[:60])
        raise InvalidRequest(
            f"The field 'account' must be member:NAME or group:NAME, not {said}.", field="account"
        )
    return text
