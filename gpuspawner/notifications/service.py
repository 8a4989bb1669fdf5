"""Notices to members: read, chosen, and marked as sent.

A notice is inserted in the transaction of what it reports
(:func:`gpuspawner.notifications.repository.add`), and sent later by the accounting service.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..db.engine import Store
from . import repository
from .models import Notice
from .repository import ChannelChoice, Outcome

TOO_OLD = timedelta(days=1)
"""Older notices are not sent any more; they stay on the member's page."""


@dataclass(eq=False)
class NotificationService:
    """Notices to members, and their choices of channels. Every method is one transaction."""

    store: Store
    clock: Callable[[], datetime]

    def add_notice(self, notice: Notice) -> bool:
        """Add a notice. Returns False, and changes nothing, if its key was used before."""
        return self.store.run(lambda connection: repository.add(connection, notice), write=True)

    def notices_of(self, user: str, limit: int = 20) -> list[Notice]:
        """Return a member's newest notices, newest first."""
        return self.store.run(lambda connection: repository.of_user(connection, user, limit))

    def choices(self, user: str) -> dict[str, ChannelChoice]:
        """Return a member's choices by channel, without channels that they never set."""
        return self.store.run(lambda connection: repository.choices(connection, [user]))[user]

    def choose(self, user: str, choices: Iterable[ChannelChoice]) -> None:
        """Store a member's choices, already checked by :meth:`Channel.choice`."""
        found = list(choices)
        self.store.run(lambda connection: repository.choose(connection, user, found), write=True)

    # What the notifier asks.

    def unsent(self, tries: int) -> list[int]:
        """Return ids of notices to send: not too old, and tried less often than ``tries``."""
        since = self.clock() - TOO_OLD
        return self.store.run(lambda connection: repository.unsent(connection, since, tries))

    def with_choices(self, ids: Collection[int]) -> list[tuple[Notice, dict[str, ChannelChoice]]]:
        """Return notices, oldest first, each with its member's choices."""
        with self.store.read() as connection:
            found = repository.some(connection, ids)
            chosen = repository.choices(connection, {notice.user for notice in found})
        return [(notice, chosen[notice.user]) for notice in found]

    def mark(self, outcomes: Mapping[int, Outcome]) -> None:
        """Record the results of notices, by id."""
        self.store.run(lambda connection: repository.mark(connection, outcomes), write=True)
