"""What tests of notices share: a notice, a notifier at work, a channel that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from gpuspawner.notifications.channels import KINDS
from gpuspawner.notifications.models import Notice, NoticeKind
from gpuspawner.notifications.repository import ChannelChoice
from gpuspawner.service.notifier import GPUNotifications, Notifier
from gpuspawner.services import Services
from tests.support.processes import PATIENCE


def tell(services: Services, user: str = "ada", key: str = "", **fields: Any) -> Notice:
    """Tell a member something; the notice as the store has it."""
    notice = Notice(
        key=key or f"key-{len(services.notifications.notices_of(user, 10_000))}-{user}",
        user=user,
        kind=fields.get("kind", NoticeKind.TURN),
        title=fields.get("title", "Your server starts"),
        body=fields.get("body", "It was your turn."),
        at=fields.get("at", services.clock()),
    )
    assert services.notifications.add_notice(notice)
    return now(services, notice)


def now(services: Services, notice: Notice) -> Notice:
    """The same notice as the store has it now."""
    found = services.notifications.notices_of(notice.user, 10_000)
    (same,) = [some for some in found if some.key == notice.key]
    return same


def choose(
    services: Services,
    user: str,
    channel: str = "mail",
    address: str = "",
    kinds: Iterable[NoticeKind] = KINDS,
) -> None:
    """Choose a channel for a member, with an address made of the name."""
    address = address or f"{user}@lab.example"
    services.notifications.choose(user, [ChannelChoice(channel, address, frozenset(kinds))])


@asynccontextmanager
async def notifying(
    services: Services,
    retry_seconds: Sequence[float] = (0.05,) * 3,
    hook_seconds: float = 15.0 * PATIENCE,
    **settings: Any,
) -> AsyncIterator[Notifier]:
    """A notifier whose rounds follow one another quickly."""
    patch = pytest.MonkeyPatch()
    patch.setattr("gpuspawner.service.notifier.RETRY_SECONDS", retry_seconds)
    patch.setattr("gpuspawner.service.notifier.HOOK_SECONDS", hook_seconds)
    # Apprise gives up a server after 4 s, and what has arrived by then would be sent again.
    for name in ("socket_connect_timeout", "socket_read_timeout"):
        patch.setattr(f"apprise.URLBase.{name}", 15.0 * PATIENCE)
    notifier = Notifier(GPUNotifications(**settings), services, services.log)

    async def rounds() -> None:
        while True:
            await notifier.round()
            await notifier.pause(0.02)

    task = asyncio.create_task(rounds())
    try:
        yield notifier
    finally:
        patch.undo()
        await notifier.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(look: Any, what: str, timeout: float = 60.0 * PATIENCE) -> Any:
    """Wait, without holding up the event loop, until ``look`` answers something true."""
    end = asyncio.get_running_loop().time() + timeout
    while not (found := look()):
        if asyncio.get_running_loop().time() > end:
            raise TimeoutError(f"waited {timeout:.0f} s for {what}")
        await asyncio.sleep(0.02)
    return found


async def sent(services: Services, notice: Notice) -> Notice:
    """The notice once it is sent."""

    def look() -> Notice | None:
        found = now(services, notice)
        return found if found.sent_at else None

    found: Notice = await until(look, f"{notice.key} to be sent")
    return found


async def tried(services: Services, notice: Notice, times: int = 1) -> Notice:
    """The notice once it was tried in vain so often."""

    def look() -> Notice | None:
        found = now(services, notice)
        return found if found.tries >= times else None

    found: Notice = await until(look, f"{notice.key} to be tried {times} times")
    return found


@contextmanager
def hanging() -> Iterator[int]:
    """A port of this machine where somebody listens and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        yield int(listening.getsockname()[1])
