"""What members are told: read, chosen, and noted as sent.

A notice is written by whoever has something to tell, in the same transaction
(:func:`gpuspawner.notifications.repository.add`), and sent later by the accounting service.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta

from ..db.engine import Store
from . import repository
from .models import Notice
from .repository import ChannelChoice, Outcome

TOO_OLD = timedelta(days=1)
"""What is older is not sent any more; it stays on the member's page."""


class NotificationService:
    """What members are told, and how they want to be told. Every method is one transaction."""

    def __init__(self, store: Store, clock: Callable[[], datetime]) -> None:
        self.store = store
        self.clock = clock

    def add_notice(self, notice: Notice) -> bool:
        """Tell something. False when its key was told before: then nothing changes."""
        return self.store.run(lambda connection: repository.add(connection, notice), write=True)

    def notices_of(self, user: str, limit: int = 20) -> list[Notice]:
        """A member's newest notices, newest first."""
        return self.store.run(lambda connection: repository.of_user(connection, user, limit))

    def choices(self, user: str) -> dict[str, ChannelChoice]:
        """What a member chose, by channel; a channel that is missing was never chosen upon."""
        return self.store.run(lambda connection: repository.choices(connection, [user]))[user]

    def choose(self, user: str, choices: Iterable[ChannelChoice]) -> None:
        """Keep a member's choices, which :meth:`Channel.choice` has checked."""
        found = list(choices)
        self.store.run(lambda connection: repository.choose(connection, user, found), write=True)

    # What the notifier asks.

    def unsent(self, tries: int) -> list[int]:
        """Ids of notices to send: not too old, and tried less often than ``tries``."""
        since = self.clock() - TOO_OLD
        return self.store.run(lambda connection: repository.unsent(connection, since, tries))

    def with_choices(self, ids: Collection[int]) -> list[tuple[Notice, dict[str, ChannelChoice]]]:
        """Notices, oldest first, each with what its member chose."""
        with self.store.read() as connection:
            found = repository.some(connection, ids)
            chosen = repository.choices(connection, {notice.user for notice in found})
        return [(notice, chosen[notice.user]) for notice in found]

    def mark(self, outcomes: Mapping[int, Outcome]) -> None:
        """Write what became of notices, by id."""
        self.store.run(lambda connection: repository.mark(connection, outcomes), write=True)
