"""Notices and the choice of notification channels, as a page and JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tornado import web

from ..core.errors import InvalidRequest
from ..web.api import APIHandler, operation, refusals
from ..web.base import ServiceHandler
from ..web.pages import Page
from .channels import KINDS, Channel, chosen, names
from .models import Notice, NoticeKind
from .repository import ChannelChoice, failing
from .schemas import ChannelAnswer, NoticeAnswer, NoticesAnswer, choices_body
from .service import TOO_OLD, compose

SHOWN = 20
"""Notices on the page."""

TEST_EVERY = 20
"""Seconds in which a member can send one test."""

TEST_WAIT = 8.0
"""Maximum seconds that the page waits for a test to be delivered."""

LONGEST = 64 * 1024
"""Maximum bytes of a request that changes choices."""

TOO_MANY = f"A test was sent a moment ago. Wait {TEST_EVERY} seconds before the next one."
NO_CHANNEL = "Nothing is chosen yet, so there is nowhere to send a test. Choose and save first."


@dataclass(frozen=True, slots=True)
class ChannelForm:
    """One channel as the form shows it."""

    channel: Channel
    address: str
    kinds: frozenset[str]
    error: str = ""


class NoticesHandler(ServiceHandler):
    """What the page and the API have in common."""

    async def shown(self) -> tuple[dict[str, ChannelChoice], list[Notice]]:
        """Return the member's choice for each channel, and their newest notices."""
        channels = self.context.channels
        own = await self.read(self.services.notifications.choices, self.user)
        told = await self.read(self.services.notifications.notices_of, self.user, SHOWN)
        nothing = {name: ChannelChoice(name) for name in channels}
        return nothing | chosen(channels, own, self.user), told

    async def test(self) -> Notice:
        """Send a test through every channel that the member chose.

        Returns the notice, which may not be delivered yet. Raises InvalidRequest if no test can be
        sent now.
        """
        choices, _ = await self.shown()
        if not any(choice.kinds for choice in choices.values()):
            raise InvalidRequest(NO_CHANNEL, field="test")
        now = self.services.clock()
        key = f"test:{self.user}:{int(now.timestamp()) // TEST_EVERY}"
        notice = compose("test", NoticeKind.TEST, key, self.user, now)
        if not await self.read(self.services.notifications.add_notice, notice):
            raise InvalidRequest(TOO_MANY, field="test")
        self.context.poke()
        end = asyncio.get_running_loop().time() + TEST_WAIT
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.1)
            told = await self.read(self.services.notifications.notices_of, self.user, SHOWN)
            found = next((some for some in told if some.key == notice.key), notice)
            if found.sent_at or found.error:
                return found
        return notice


class NoticesPage(NoticesHandler, Page):
    """The form for notification channels and the newest notices."""

    @web.authenticated
    async def get(self) -> None:
        """Send the page."""
        await self.show_forms()

    @web.authenticated
    async def post(self) -> None:
        """Store the choices, if all of them are valid."""
        forms, found = self._sent_forms()
        if len(found) == len(forms):
            await self.read(self.services.notifications.choose, self.user, found)
            self.redirect(f"{self.context.prefix}notices?saved=1", status=303)
            return
        self.set_status(400)
        await self.show_forms(forms)

    async def show_forms(self, refused: Sequence[ChannelForm] = (), error: str = "") -> None:
        """Send the page, with refused forms as they were sent."""
        choices, told = await self.shown()
        now = self.services.clock()
        newest = next((some for some in told if some.kind is NoticeKind.TEST), None)
        tested = newest if self.get_query_argument("tested", "") else None
        self.show(
            "notices.html",
            now=now,
            forms=refused or [_form(some, choices) for some in self.context.channels.values()],
            kinds=[kind.value for kind in KINDS],
            told=[(some, *state(some, self.context.channels, now)) for some in told],
            saved=bool(self.get_query_argument("saved", "")),
            tested=(tested, *state(tested, self.context.channels, now)) if tested else None,
            error=error,
            xsrf=self.xsrf,
        )

    def _sent_forms(self) -> tuple[list[ChannelForm], list[ChannelChoice]]:
        """Return the sent form with its errors, and the choices without errors."""
        channels = self.context.channels
        fields = {f"{part}-{name}" for part in ("address", "kinds") for name in channels}
        if unknown := set(self.request.body_arguments) - fields - {"_xsrf"}:
            sentence = f"{sorted(unknown)[0][:60]!r} is not an option."
            raise web.HTTPError(400) from InvalidRequest(sentence)
        forms, found = [], []
        for channel in channels.values():
            address = self.get_body_argument(f"address-{channel.name}", "")
            kinds = self.get_body_arguments(f"kinds-{channel.name}")
            error = ""
            try:
                found.append(channel.choice(address, kinds))
            except InvalidRequest as refusal:
                error = refusal.message
            forms.append(ChannelForm(channel, address[:300], frozenset(kinds), error))
        return forms, found


class TestPage(NoticesPage):
    """The button that sends a test."""

    async def get(self) -> None:
        """Redirect to the notices."""
        self.redirect(f"{self.context.prefix}notices")

    @web.authenticated
    async def post(self) -> None:
        """Send a test."""
        try:
            await self.test()
        except InvalidRequest as refusal:
            self.set_status(400)
            await self.show_forms(error=refusal.message)
            return
        self.redirect(f"{self.context.prefix}notices?tested=1", status=303)


class AnyAPI(NoticesHandler, APIHandler):
    """The base of handlers that answer with notices and choices as JSON."""

    async def answer_all(self) -> None:
        """Send the choices and the newest notices."""
        choices, told = await self.shown()
        now, channels = self.services.clock(), self.context.channels
        self.answer(
            NoticesAnswer,
            as_of=now,
            channels=[channel_answer(channel, choices) for channel in channels.values()],
            kinds=[kind.value for kind in KINDS],
            notices=[notice_answer(some, channels, now) for some in told],
        )


class NoticesAPI(AnyAPI):
    """Notices and choices as JSON."""

    @operation("notices", NoticesAnswer)
    @web.authenticated
    async def get(self) -> None:
        """List my notices and my choices for each channel."""
        await self.answer_all()


class ChoicesAPI(AnyAPI):
    """The API operation that changes the choices."""

    @operation("notices/choices", NoticesAnswer, name="choose", body=choices_body)
    @web.authenticated
    async def put(self) -> None:
        """Change my choices: ``{"mail": {"address": "ada@lab.example", "kinds": ["turn"]}}``.

        Channels that are not named stay as they are.
        """
        with refusals():
            found = self._choices()
        await self.read(self.services.notifications.choose, self.user, found)
        await self.answer_all()

    def _choices(self) -> list[ChannelChoice]:
        channels = self.context.channels
        try:
            sent = json.loads(self.request.body) if len(self.request.body) <= LONGEST else None
        except (ValueError, RecursionError):
            sent = None
        if not isinstance(sent, dict) or not all(isinstance(v, dict) for v in sent.values()):
            example = '{"mail": {"address": "ada@lab.example", "kinds": ["turn"]}}'
            raise InvalidRequest(f"Send one JSON object of channels, such as {example}.")
        found = []
        for name, choice in sent.items():
            if name not in channels:
                there_are = ", ".join(channels) or "none"
                sentence = f"There is no channel {name[:60]!r}; there are: {there_are}."
                raise InvalidRequest(sentence, field=name)
            if unknown := set(choice) - {"address", "kinds"}:
                sentence = f"{sorted(unknown)[0][:60]!r} is not an option."
                raise InvalidRequest(sentence, field=name)
            address, kinds = choice.get("address", ""), choice.get("kinds", [])
            found.append(channels[name].choice(address, kinds))
        return found


class TestAPI(AnyAPI):
    """The API operation that sends a test."""

    @operation("notices/test", NoticeAnswer)
    @web.authenticated
    async def post(self) -> None:
        """Send me a test notice."""
        try:
            notice = await self.test()
        except InvalidRequest as refusal:
            status = 429 if refusal.message == TOO_MANY else 409
            raise web.HTTPError(status) from refusal
        channels, now = self.context.channels, self.services.clock()
        self.finish(notice_answer(notice, channels, now).as_json())


# Formatting of values.


def state(notice: Notice, channels: Mapping[str, Channel], now: datetime) -> tuple[str, str]:
    """Return a notice's state (``done``, ``waiting`` or ``failed``) and a message unless done.

    The cause is only in the service's log, because it can name hosts that members must not see.
    """
    if notice.error:
        by = names(channels, failing(notice.error))
        return "failed", f"Not sent by {by}. Check the address; your admin's log says why."
    if notice.sent_at:
        return "done", ""
    if now - notice.at > TOO_OLD:
        return "failed", "Not sent in time: it is on this page only."
    return "waiting", "Not sent yet."


def notice_answer(notice: Notice, channels: Mapping[str, Channel], now: datetime) -> NoticeAnswer:
    """Return a notice as JSON."""
    became, sentence = state(notice, channels, now)
    return NoticeAnswer.of(notice, state=became, error=sentence)


def channel_answer(channel: Channel, choices: Mapping[str, ChannelChoice]) -> ChannelAnswer:
    """Return a channel and the member's choice for it as JSON."""
    choice = choices[channel.name]
    kinds = [kind.value for kind in KINDS if kind in choice.kinds]
    return ChannelAnswer.of(channel, address=choice.address, kinds=kinds)


def _form(channel: Channel, choices: Mapping[str, ChannelChoice]) -> ChannelForm:
    choice = choices[channel.name]
    return ChannelForm(channel, choice.address, frozenset(kind.value for kind in choice.kinds))


HANDLERS: list[tuple[str, type[ServiceHandler]]] = [
    ("notices", NoticesPage),
    ("notices/test", TestPage),
    ("api/notices", NoticesAPI),
    ("api/notices/choices", ChoicesAPI),
    ("api/notices/test", TestAPI),
]
