"""The notifier: sends notices through Apprise, and runs the admin's hook.

Notices are delivered at least once: a notice stays unsent in the store until every channel has
accepted it, or it is given up. A process killed between sending and recording may send it again.
Each channel has its own queue with a few senders, so that a hanging one does not delay others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import timezone
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from traitlets import Dict, List, Unicode
from traitlets.config import LoggingConfigurable

from ..core.aio import in_daemon_thread, within
from ..core.errors import GPUSpawnerError, Unavailable
from ..notifications.channels import Channel, chosen, read, wanted
from ..notifications.models import Notice, NoticeKind
from ..notifications.repository import ChannelChoice, Outcome, errors_text, failing
from ..services import Services

if TYPE_CHECKING:
    from apprise import AppriseAsset

HOOK_SECONDS = 10.0
"""Seconds that an admin's command may take before it is killed."""

SEND_SECONDS = 60.0
"""Seconds that one message may take before it counts as not sent."""

TITLE, BODY = 200, 4000
"""Maximum characters of a message's two parts."""

_TYPES = {
    NoticeKind.TURN: "success",
    NoticeKind.SESSION_ENDS: "warning",
    NoticeKind.CREDITS_LOW: "warning",
    NoticeKind.GPU_SICK: "warning",
    NoticeKind.DISK_LOW: "warning",
    NoticeKind.GPU_MEMORY: "warning",
    NoticeKind.OUT_OF_MEMORY: "warning",
    NoticeKind.STOPPED: "warning",
}
"""Apprise's types of those that are not just information."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def send(channel: Channel, address: str, notice: Notice) -> None:
    """Send a notice; may block for long. Raises Unavailable, with no secret in its message."""
    # Slow to import, and a site without channels never needs it.
    from apprise import Apprise, NotifyFormat, NotifyType

    secrets = {place: read_secret(place) for place in channel.secrets()}
    said: list[str] = []
    token = _said.set(said)
    try:
        service = Apprise.instantiate(channel.fill(address, secrets), asset=_asset())
        if service is None:
            raise Unavailable(
                _reason(channel, secrets, said) or "Apprise does not know such a URL."
            )
        messenger = Apprise(asset=_asset())
        messenger.add(service)
        sent = messenger.notify(
            title=one_line(notice.title),
            body=plain(notice.body),
            notify_type=NotifyType(_TYPES.get(notice.kind, "info")),
            body_format=NotifyFormat.TEXT,
        )
    finally:
        _said.reset(token)
    if not sent:
        raise Unavailable(_reason(channel, secrets, said) or "The message was not taken.")


def read_secret(place: str) -> str:
    """Return the content of ``env:NAME`` or ``file:/path``, stripped. Raises Unavailable."""
    kind, _, name = place.partition(":")
    if kind == "env":
        if not (value := os.environ.get(name, "").strip()):
            raise Unavailable(f"The variable {name} is not set for the hub.")
        return value
    path = Path(name)
    try:
        if path.stat().st_mode & 0o077:
            raise Unavailable(f"Others can read the secret in {path}: chmod 600 {path}")
        if not (value := path.read_text(encoding="utf-8").strip()):
            raise Unavailable(f"The secret in {path} is empty.")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise Unavailable(f"The secret in {path} cannot be read: {why}.") from None
    return value


def one_line(text: str) -> str:
    """Return a title without line ends and control characters, which names in it may contain."""
    return " ".join(_readable(text).split())[:TITLE]


def plain(text: str) -> str:
    """Return a body with lines and tabs, and no other control characters."""
    return _readable(text.replace("\r\n", "\n")).strip()[:BODY]


def _readable(text: str) -> str:
    return _CONTROL.sub(" ", text).encode("utf-8", "replace").decode("utf-8")


# Apprise logs its errors. They are stored with the message that they are about.

_said: ContextVar[list[str] | None] = ContextVar("said", default=None)
_CAUSE = "Socket Exception: "


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said = _said.get()
        if said is not None:
            text = " ".join(record.getMessage().split())
            if record.levelno >= logging.WARNING or text.startswith(_CAUSE):
                said.append(text)


_apprise_log = logging.getLogger("apprise")
_apprise_log.addHandler(_Listener())
_apprise_log.propagate = False
_apprise_log.setLevel(logging.DEBUG)  # where Apprise 2 reports why a mail server refused it


def _asset() -> AppriseAsset:
    from apprise import AppriseAsset

    asset = AppriseAsset(async_mode=False, app_id="gpuspawner", app_desc="gpuspawner")
    # Apprise 2 would send from a few threads shared by all channels: a hanging server would delay
    # the others. Our own limit is in the notifier.
    asset._service_timeout = 0
    return asset


def _reason(channel: Channel, secrets: dict[str, str], said: list[str]) -> str:
    """Return Apprise's messages without the secrets in them."""
    if not channel.mail:  # the cause may contain the address of a web hook, which is a secret
        said = [line for line in said if not line.startswith(_CAUSE)]
    text = " ".join(line.removeprefix(_CAUSE) for line in said)
    for secret in secrets.values():
        for form in (secret, quote(secret, safe="")):
            text = text.replace(form, "(secret)")
    return text


SHOWN = 300
"""How many characters of a failed command's output its error repeats."""

READ = 64 * 1024
_PRIVATE = ("JUPYTERHUB_", "GPUSPAWNER_")
"""Variables of the service that are withheld from the command: tokens and database URLs."""


async def run(command: Sequence[str], text: bytes, seconds: float) -> None:
    """Run the command with the text as its input. Raises Unavailable; then all of it is killed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_PRIVATE)}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=kept,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise Unavailable(f"The hook {command[0]} cannot be started: {error}") from None
    try:
        said = await within(seconds, _talk(process, text))
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if isinstance(error, asyncio.TimeoutError):
            raise Unavailable(
                f"The hook did not finish within {seconds:g} s and was killed."
            ) from None
        raise
    if process.returncode:
        raise Unavailable(f"The hook ended with {process.returncode}: {said or 'no output'}")


def as_json(notice: Notice) -> bytes:
    """Return a notice as the command reads it: one JSON object and a line end."""
    told = {
        "key": notice.key,
        "user": notice.user,
        "kind": notice.kind.value,
        "title": notice.title,
        "body": notice.body,
        "at": notice.at.astimezone(timezone.utc).isoformat(timespec="milliseconds"),
    }
    return json.dumps(told | dict(notice.facts)).encode() + b"\n"


async def _talk(process: asyncio.subprocess.Process, text: bytes) -> str:
    """Pass the input and wait for the end; returns its error output, shortened."""
    assert process.stdin and process.stderr
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read
        process.stdin.write(text)
        await process.stdin.drain()
        process.stdin.close()
    said = await process.stderr.read(READ)
    while await process.stderr.read(READ):
        pass
    await process.wait()
    return " ".join(said.decode("utf-8", "replace").split())[:SHOWN]


RETRY_SECONDS: Sequence[float] = (10.0, 60.0, 300.0, 900.0, 3600.0, 10800.0, 21600.0)
"""Pauses before further tries of a message. After the last it is given up: a mail server that is
away for a night is back by then, and the message stays on its member's page."""

SENDERS = 4
"""How many messages of one channel are being sent at once."""

MOST_HANGING = 16
"""How many senders of one channel may hang; then it is not tried until one comes back."""

BATCH = 500
"""Notices handled in one round."""


class GPUNotifications(LoggingConfigurable):
    """How members are notified."""

    channels = Dict(
        config=True,
        help="""
        Channels by which members can be told, by name. Each is a URL of Apprise, or a dictionary
        with ``url``, ``label``, ``pattern`` (what an address must match) and ``example`` (of an
        address).

        ``{address}`` in the URL stands for what a member types; without it, members type nothing.
        ``{file:/path}`` (mode 600) and ``{env:NAME}`` stand for secrets. Example::

            c.GPUNotifications.channels = {
                "mail": "mailtos://gpu:{file:/etc/gpuspawner/smtp}@smtp.lab.example"
                "?from=gpu@lab.example&to={address}",
                "team": {"label": "The lab's chat", "url": "{file:/etc/gpuspawner/team-url}"},
            }
        """,
    )

    default_channels = Dict(
        config=True,
        help="""
        Channels, each with an address, for members who have chosen nothing. ``{user}`` in an
        address stands for the member's name. Empty: such members are told on their page only.
        Example::

            c.GPUNotifications.default_channels = {"mail": "{user}@lab.example"}
        """,
    )

    hook = List(
        Unicode(),
        config=True,
        help="""
        A command that is run for each notice of every member, with one JSON object on its
        standard input: ``key``, ``user``, ``kind``, ``title``, ``body``, ``at``, ``event`` (such
        as ``session_ends``, ``session_over``, ``credits_low``, ``credits_gone``), ``lease``,
        ``server``, ``environment``, ``gpus``, ``account``, ``balance``, ``rate_per_hour``,
        ``minutes`` (of a warning), ``ends_at``, ``stops_at`` and ``reason``. Fields that do not
        apply to a notice are null or empty. Only this command gets the event ``credits_back``: new
        credits came in time. Example::

            c.GPUNotifications.hook = ["/usr/local/bin/gpu-notice", "--from-hub"]
        """,
    )


class Notifier:
    """Sends notices by mail, chat and push (through Apprise), and to an admin's command."""

    def __init__(self, settings: GPUNotifications, services: Services, log: logging.Logger) -> None:
        self.settings = settings
        self.services = services
        self.log = log
        self.known: dict[str, Channel] = read(settings.channels, settings.default_channels)
        self._senders = {name: asyncio.Semaphore(SENDERS) for name in self.known}
        self._threads = dict.fromkeys(self.known, 0)
        self._hooks = asyncio.Semaphore(SENDERS)
        self._busy: dict[int, asyncio.Task[None]] = {}
        self._outcomes: dict[int, Outcome] = {}
        """Results of notices that are not in the store yet: these are not sent again."""
        self._writing = asyncio.Lock()
        self._not_before: dict[int, float] = {}
        """When the next try of each is due, by id, in the event loop's time."""
        self._trouble: dict[str, str] = {}
        self._poke = asyncio.Event()
        self._for_admin: set[asyncio.Task[str]] = set()
        """Runs of the hook for events that no member is told about."""

    @property
    def most_tries(self) -> int:
        """After how many tries a notice is given up."""
        return len(RETRY_SECONDS) + 1

    def tell_admin(self, notice: Notice) -> None:
        """Run the hook, without waiting for it, for an event that no member is told about."""
        if self.settings.hook:
            task = asyncio.create_task(self._run_hook(notice))
            self._for_admin.add(task)
            task.add_done_callback(self._for_admin.discard)

    # Rounds.

    def poke(self) -> None:
        """Start the next round now: there is something to send. From the event loop."""
        self._poke.set()

    async def pause(self, seconds: float) -> None:
        """Wait for the next round, or until it is poked."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(seconds, self._poke.wait())
        self._poke.clear()

    async def round(self) -> None:
        """Start sending all notices that are due, without waiting for it."""
        await self._write()
        unsent = await self.services.run(self.services.notifications.unsent, self.most_tries)
        now = asyncio.get_running_loop().time()
        self._not_before = {n: self._not_before[n] for n in unsent if n in self._not_before}
        due = [
            number
            for number in unsent
            if number not in self._busy
            and number not in self._outcomes
            and self._not_before.get(number, now) <= now
        ]
        with_choices = self.services.notifications.with_choices
        found = await self.services.run(with_choices, due[:BATCH]) if due else []
        for notice, own in found:
            if notice.sent_at or notice.tries >= self.most_tries:
                continue  # it was being sent when the ids were read, and has arrived since
            choices = self._choices(notice, own)
            if choices or (self.settings.hook and not notice.tries):
                self._busy[notice.id] = asyncio.create_task(self._deliver(notice, choices))
            else:
                self._outcomes[notice.id] = Outcome(self.services.clock(), notice.tries)
        await self._write()
        if len(due) > BATCH:
            self.poke()

    async def close(self, seconds: float = 3.0) -> None:
        """Give what is being sent a moment to arrive; then stop."""
        if tasks := [*self._busy.values(), *self._for_admin]:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _choices(self, notice: Notice, own: Mapping[str, ChannelChoice]) -> list[ChannelChoice]:
        """Return the channels still to send by: after a try, only the failed ones."""
        choices = wanted(chosen(self.known, own, notice.user), notice)
        if not notice.tries:
            return choices
        failed = failing(notice.error)
        return [choice for choice in choices if choice.channel in failed]

    # One notice.

    async def _deliver(self, notice: Notice, choices: list[ChannelChoice]) -> None:
        try:
            await self._send_all(notice, choices)
        finally:
            del self._busy[notice.id]

    async def _send_all(self, notice: Notice, choices: list[ChannelChoice]) -> None:
        sends = [self._send(self.known[choice.channel], choice, notice) for choice in choices]
        if self.settings.hook and not notice.tries:
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
            return Outcome(self.services.clock(), notice.tries)
        tries, text = notice.tries + 1, errors_text(errors)
        if notice.kind is NoticeKind.TEST:
            tries = self.most_tries  # somebody tests the channels and waits for the result
        if tries < self.most_tries:
            pause = RETRY_SECONDS[tries - 1]
            self._not_before[notice.id] = asyncio.get_running_loop().time() + pause
        else:
            message = "The notice %r for %s is no longer sent: %s"
            self.log.warning(message, notice.key, notice.user, text.replace("\n", "; "))
        return Outcome(None, tries, text)

    async def _send(self, channel: Channel, choice: ChannelChoice, notice: Notice) -> str:
        """Send by one channel; returns why it failed, or ""."""
        name = channel.name
        async with self._senders[name]:
            try:
                if self._threads[name] >= MOST_HANGING:
                    raise Unavailable("Its server accepts connections but does not respond.")
                await self._in_thread(name, lambda: send(channel, choice.address, notice))
            except GPUSpawnerError as error:
                return self._note(f"Channel {name}", error.message)
            except Exception as error:
                self.log.exception("Channel %s: %r", name, error)
                return type(error).__name__
        self._note(f"Channel {name}", "")
        return ""

    async def _in_thread(self, name: str, work: Callable[[], None]) -> None:
        """Run blocking work. A hanging thread is abandoned: it ends with the process.

        The event loop's own executor is not used, because the program waits for its threads at the
        end. Raises Unavailable if the work is not done in time, and any error that the work raises.
        """

        def ended() -> None:
            self._threads[name] -= 1

        self._threads[name] += 1
        done = in_daemon_thread(f"notice-{name}", work, ended)
        await asyncio.wait([done], timeout=SEND_SECONDS)
        if not done.done():
            done.cancel()
            raise Unavailable(f"It did not finish within {SEND_SECONDS:g} s.")
        done.result()

    async def _run_hook(self, notice: Notice) -> str:
        async with self._hooks:
            try:
                await run(self.settings.hook, as_json(notice), HOOK_SECONDS)
            except GPUSpawnerError as error:
                self.log.warning("Hook for the notice %r: %s", notice.key, error)
            except Exception as error:
                self.log.exception("Hook for the notice %r: %r", notice.key, error)
        return ""

    # Recording results.

    async def _write(self) -> None:
        """Write the results to the store. Raises StoreUnavailable; then they are kept."""
        async with self._writing:
            if outcomes := dict(self._outcomes):
                await self.services.run(self.services.notifications.mark, outcomes)
                for number in outcomes:
                    del self._outcomes[number]

    def _note(self, part: str, sentence: str) -> str:
        """Log a problem when it begins or changes, and its end; returns the sentence."""
        if sentence and self._trouble.get(part) != sentence:
            self._trouble[part] = sentence
            self.log.warning("%s: %s", part, sentence)
        elif not sentence and self._trouble.pop(part, ""):
            self.log.info("%s: all is well again", part)
        return sentence
