"""The notifier: sends what is to be told, by the channels that each member chose.

At least once: a notice stays unsent in the store until every channel has taken it, or it is
given up. Who is killed between sending and noting it may send it again. A channel is one
queue of its own with a few senders, so that one that hangs holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from traitlets import Dict, Float, List, Unicode
from traitlets.config import LoggingConfigurable

from ..broker import Broker
from ..broker.channels import Channel, chosen, read, wanted
from ..errors import GPUSpawnerError, Unavailable
from ..model import Notice, NoticeKind
from ..patience import within
from ..store.notices import Choice, Outcome, errors_text, failing
from . import hook, sending

SENDERS = 4
"""Messages of one channel on their way at once."""

MOST_HANGING = 16
"""Senders of one channel that may hang; then it is not tried until one comes back."""

BATCH = 500
"""Notices taken up in one round."""


class Notifier(LoggingConfigurable):
    """Sends notices by mail, chat and push (through Apprise), and to a command of the admin's."""

    channels = Dict(
        config=True,
        help="""
        How members can be told, by name: a URL of Apprise's, or a dictionary with ``url``,
        ``label``, ``pattern`` (what an address must match) and ``example`` (of an address).

        ``{address}`` in the URL is what a member types; without it there is nothing to type.
        ``{file:/path}`` (mode 600) and ``{env:NAME}`` are secrets. Example::

            c.Notifier.channels = {
                "mail": "mailtos://gpu:{file:/etc/gpuspawner/smtp}@smtp.lab.example"
                "?from=gpu@lab.example&to={address}",
                "team": {"label": "The lab's chat", "url": "{file:/etc/gpuspawner/team-url}"},
            }
        """,
    )

    default_channels = Dict(
        config=True,
        help="""
        How members are told who chose nothing: channels with their addresses, in which
        ``{user}`` is the member's name. None: such members are told on their page only. Example::

            c.Notifier.default_channels = {"mail": "{user}@lab.example"}
        """,
    )

    hook = List(
        Unicode(),
        config=True,
        help="""
        A command that is run for each notice of every member, with the notice as JSON on its
        standard input (``key``, ``user``, ``kind``, ``title``, ``body``, ``at``). Example::

            c.Notifier.hook = ["/usr/local/bin/gpu-notice", "--from-hub"]
        """,
    )

    hook_seconds = Float(
        10.0,
        min=0.1,
        config=True,
        help="""
        Seconds that the hook may take before it is killed.

        Example::

            c.Notifier.hook_seconds = 30
        """,
    )

    send_seconds = Float(
        60.0,
        min=0.1,
        config=True,
        help="""
        Seconds that one message may take before it counts as not sent.

        Example::

            c.Notifier.send_seconds = 20
        """,
    )

    retry_seconds = List(
        Float(min=0.0),
        default_value=[10.0, 60.0, 300.0, 900.0, 3600.0, 10800.0, 21600.0],
        config=True,
        help="""
        Pauses before each further try of a message that was not sent, in seconds. After the last
        one, and after a day, it is given up; it stays on the member's page. Example::

            c.Notifier.retry_seconds = [30, 300, 3600]
        """,
    )

    def __init__(self, *, broker: Broker, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.broker = broker
        self.known: dict[str, Channel] = read(self.channels, self.default_channels)
        self._senders = {name: asyncio.Semaphore(SENDERS) for name in self.known}
        self._threads = dict.fromkeys(self.known, 0)
        self._hooks = asyncio.Semaphore(SENDERS)
        self._busy: dict[int, asyncio.Task[None]] = {}
        self._outcomes: dict[int, Outcome] = {}
        """What came of notices and is not in the store yet: these are not sent again."""
        self._writing = asyncio.Lock()
        self._not_before: dict[int, float] = {}
        """By id, when the event loop's clock says that the next try is due."""
        self._trouble: dict[str, str] = {}
        self._poke = asyncio.Event()

    @property
    def most_tries(self) -> int:
        return len(self.retry_seconds) + 1

    # Rounds.

    def poke(self) -> None:
        """There is something to send: do not wait for the next round. From the event loop."""
        self._poke.set()

    async def pause(self, seconds: float) -> None:
        """Wait for the next round, or until somebody pokes."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(seconds, self._poke.wait())
        self._poke.clear()

    async def round(self) -> None:
        """Take up all notices that are due. They are sent meanwhile; this does not wait for it."""
        await self._write()
        unsent = await self.broker.run(self.broker.unsent, self.most_tries)
        now = asyncio.get_running_loop().time()
        self._not_before = {n: self._not_before[n] for n in unsent if n in self._not_before}
        due = [
            number
            for number in unsent
            if number not in self._busy
            and number not in self._outcomes
            and self._not_before.get(number, now) <= now
        ]
        found = await self.broker.run(self.broker.with_choices, due[:BATCH]) if due else []
        for notice, own in found:
            if notice.sent_at or notice.tries >= self.most_tries:
                continue  # it was on its way when the ids were read, and has arrived since
            choices = self._choices(notice, own)
            if choices or (self.hook and not notice.tries):
                self._busy[notice.id] = asyncio.create_task(self._deliver(notice, choices))
            else:
                self._outcomes[notice.id] = Outcome(self.broker.clock(), notice.tries)
        await self._write()
        if len(due) > BATCH:
            self.poke()

    async def close(self, seconds: float = 3.0) -> None:
        """Give what is on its way a moment to arrive; then stop."""
        if tasks := list(self._busy.values()):
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _choices(self, notice: Notice, own: Mapping[str, Choice]) -> list[Choice]:
        """By what it is still to be sent: after a try, only where it failed."""
        choices = wanted(chosen(self.known, own, notice.user), notice)
        if not notice.tries:
            return choices
        failed = failing(notice.error)
        return [choice for choice in choices if choice.channel in failed]

    # One notice.

    async def _deliver(self, notice: Notice, choices: list[Choice]) -> None:
        try:
            await self._send_all(notice, choices)
        finally:
            del self._busy[notice.id]

    async def _send_all(self, notice: Notice, choices: list[Choice]) -> None:
        sends = [self._send(self.known[choice.channel], choice, notice) for choice in choices]
        if self.hook and not notice.tries:
            sends.append(self._run_hook(notice))
        said = await asyncio.gather(*sends)
        names = [choice.channel for choice in choices]
        errors = {name: why for name, why in zip(names, said, strict=False) if why}
        self._outcomes[notice.id] = self._outcome(notice, errors)
        try:
            await self._write()
        except Unavailable as error:
            self._note("Notices", str(error))  # the next round tries again

    def _outcome(self, notice: Notice, errors: Mapping[str, str]) -> Outcome:
        if not errors:
            return Outcome(self.broker.clock(), notice.tries)
        tries, text = notice.tries + 1, errors_text(errors)
        if notice.kind is NoticeKind.TEST:
            tries = self.most_tries  # who tries the channels waits for an answer
        if tries < self.most_tries:
            pause = self.retry_seconds[tries - 1]
            self._not_before[notice.id] = asyncio.get_running_loop().time() + pause
        else:
            message = "The notice %r for %s is not sent any more: %s"
            self.log.warning(message, notice.key, notice.user, text.replace("\n", "; "))
        return Outcome(None, tries, text)

    async def _send(self, channel: Channel, choice: Choice, notice: Notice) -> str:
        """Send by one channel; why it failed, or nothing."""
        name = channel.name
        async with self._senders[name]:
            try:
                if self._threads[name] >= MOST_HANGING:
                    raise Unavailable("Its server takes messages and does not answer.")
                await self._in_thread(name, lambda: sending.send(channel, choice.address, notice))
            except GPUSpawnerError as error:
                return self._note(f"Channel {name}", error.message)
            except Exception as error:
                self.log.exception("Channel %s: %r", name, error)
                return type(error).__name__
        self._note(f"Channel {name}", "")
        return ""

    async def _in_thread(self, name: str, work: Callable[[], None]) -> None:
        """Run what blocks. A thread that hangs is left alone: it ends with the process.

        Not in the event loop's own executor: at the end of the program, that is waited for.
        Raises Unavailable when it is not done in time, and whatever the work raises.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._threads[name] += 1

        def settle(error: Exception | None) -> None:
            self._threads[name] -= 1
            if not done.done():
                done.set_exception(error) if error else done.set_result(None)

        def run() -> None:
            error: Exception | None = None
            try:
                work()
            except Exception as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the service has ended meanwhile
                loop.call_soon_threadsafe(settle, error)

        threading.Thread(target=run, name=f"notice-{name}", daemon=True).start()
        await asyncio.wait([done], timeout=self.send_seconds)
        if not done.done():
            done.cancel()
            raise Unavailable(f"It was not done in {self.send_seconds:g} s.")
        done.result()

    async def _run_hook(self, notice: Notice) -> str:
        async with self._hooks:
            try:
                await hook.run(self.hook, hook.as_json(notice), self.hook_seconds)
            except GPUSpawnerError as error:
                self.log.warning("Hook for the notice %r: %s", notice.key, error)
            except Exception as error:
                self.log.exception("Hook for the notice %r: %r", notice.key, error)
        return ""

    # What is noted.

    async def _write(self) -> None:
        """Bring the outcomes to the store. Raises StoreUnavailable; then they are kept."""
        async with self._writing:
            if outcomes := dict(self._outcomes):
                await self.broker.run(self.broker.mark, outcomes)
                for number in outcomes:
                    del self._outcomes[number]

    def _note(self, part: str, sentence: str) -> str:
        """Log a trouble when it begins or changes, and when it is over; the sentence itself."""
        if sentence and self._trouble.get(part) != sentence:
            self._trouble[part] = sentence
            self.log.warning("%s: %s", part, sentence)
        elif not sentence and self._trouble.pop(part, ""):
            self.log.info("%s: all is well again", part)
        return sentence
