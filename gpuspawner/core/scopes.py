"""Scopes: the least that our services need at the Hub, and what may be done with our service.

Admins give scopes to roles, and tokens can be narrowed to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ACCOUNTING_SCOPES = ("list:users", "read:groups", "servers")
"""All that the accounting service may do.

See which servers there are and who is in a group, stop a server, and start one again that waited in
the queue when the hub went down.
"""

CULLER_SCOPES = ("list:users", "read:users:activity", "read:servers", "delete:servers")
"""All that the idle culler may do."""

GRANT = "custom:gpuspawner:grant"
READ_ACCOUNTS = "custom:gpuspawner:read:accounts"
READ_USAGE = "custom:gpuspawner:read:usage"
READ_METRICS = "custom:gpuspawner:read:metrics"
SESSION = "custom:gpuspawner:session"

CUSTOM_SCOPES: dict[str, dict[str, object]] = {
    GRANT: {"description": "Give GPU credits to members and groups", "subscopes": [READ_ACCOUNTS]},
    READ_ACCOUNTS: {"description": "Read balances, statements and sessions of GPU accounts"},
    READ_USAGE: {"description": "Read reports of who used which GPUs"},
    READ_METRICS: {"description": "Read the metrics of GPUs and credits"},
    SESSION: {"description": "See, extend and stop a server that holds GPUs"},
}
"""Admins of the Hub may do all of this.

The first two can be narrowed like the Hub's own scopes: to a group and its members with
``!group=NAME``, to a member with ``!user=NAME``.
"""

MEMBER_SCOPES = (f"{SESSION}!user",)
"""What members may pass on to their own servers: see :data:`SERVER_SCOPES`."""

SERVER_SCOPES = (f"{SESSION}!server",)
"""All that a server may do with our service by its token.

Ask about itself, and snooze, extend and end its own session, for the item in its JupyterLab.
"""


@dataclass(frozen=True, slots=True)
class ScopeFilter:
    """Whom a scope covers, for its holder."""

    everybody: bool = False
    users: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return self.everybody or bool(self.users or self.groups)

    def accounts(self) -> tuple[str, ...]:
        """Return the accounts that it names itself, without those of its groups' members."""
        members = (f"member:{user}" for user in sorted(self.users))
        return (*members, *(f"group:{group}" for group in sorted(self.groups)))


def reach(held: Iterable[str], scope: str) -> ScopeFilter:
    """Return whom ``scope`` covers, among somebody's scopes as the Hub expanded them."""
    named: dict[str, set[str]] = {"user": set(), "group": set()}
    for text in held:
        name, narrowed, narrowing = text.partition("!")
        if name != scope:
            continue
        if not narrowed:
            return ScopeFilter(everybody=True)
        kind, _, whom = narrowing.partition("=")
        if kind in named and whom:
            named[kind].add(whom)
    return ScopeFilter(users=frozenset(named["user"]), groups=frozenset(named["group"]))
