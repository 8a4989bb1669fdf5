"""One message by one channel, through Apprise. Blocks. The only import of apprise."""

from __future__ import annotations

import logging
import os
import re
from contextvars import ContextVar
from pathlib import Path
from urllib.parse import quote

from apprise import Apprise, AppriseAsset, NotifyFormat, NotifyType

from ..broker.channels import Channel
from ..errors import Unavailable
from ..model import Notice, NoticeKind

TITLE, BODY = 200, 4000
"""The most characters of a message's two parts."""

_TYPES = {
    NoticeKind.TURN: NotifyType.SUCCESS,
    NoticeKind.SESSION_ENDS: NotifyType.WARNING,
    NoticeKind.CREDITS_LOW: NotifyType.WARNING,
    NoticeKind.GPU_SICK: NotifyType.WARNING,
    NoticeKind.DISK_LOW: NotifyType.WARNING,
    NoticeKind.STOPPED: NotifyType.WARNING,
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def send(channel: Channel, address: str, notice: Notice) -> None:
    """Send a notice. Raises Unavailable with what Apprise said, and no secret in it.

    It may block for as long as the other side keeps the connection busy: use a thread that
    can be left alone.
    """
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
            notify_type=_TYPES.get(notice.kind, NotifyType.INFO),
            body_format=NotifyFormat.TEXT,
        )
    finally:
        _said.reset(token)
    if not sent:
        raise Unavailable(_reason(channel, secrets, said) or "The message was not taken.")


def read_secret(place: str) -> str:
    """What ``env:NAME`` or ``file:/path`` holds, without space around it.

    Raises Unavailable: it is read anew for each message, so it may be there for the next one.
    """
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
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise Unavailable(f"The secret in {path} cannot be read: {why}.") from None
    return value


def one_line(text: str) -> str:
    """A title: no line ends and no control characters, whatever a name in it holds."""
    return " ".join(_readable(text).split())[:TITLE]


def plain(text: str) -> str:
    """A body: lines and tabs, and no other control characters."""
    return _readable(text.replace("\r\n", "\n")).strip()[:BODY]


def _readable(text: str) -> str:
    return _CONTROL.sub(" ", text).encode("utf-8", "replace").decode("utf-8")


# What Apprise says goes to its logger. It is kept with the message that it is about.

_said: ContextVar[list[str] | None] = ContextVar("said", default=None)
_CAUSE = "Socket Exception: "


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said = _said.get()
        if said is not None:
            text = " ".join(record.getMessage().split())
            if record.levelno >= logging.WARNING or text.startswith(_CAUSE):
                said.append(text)


def _listen() -> None:
    logger = logging.getLogger("apprise")
    logger.addHandler(_Listener())
    logger.propagate = False
    logger.setLevel(logging.DEBUG)  # where Apprise 2 says why a mail server did not take it


_listen()


def _asset() -> AppriseAsset:
    asset = AppriseAsset(async_mode=False, app_id="gpuspawner", app_desc="gpuspawner")
    # Apprise 2 would send from a few threads that all channels share: a server that hangs would
    # hold up the others. Our own limit is in the notifier.
    asset._service_timeout = 0
    return asset


def _reason(channel: Channel, secrets: dict[str, str], said: list[str]) -> str:
    """What was said, without the secrets in it."""
    if not channel.mail:  # the cause may hold the address of a web hook, which is a secret
        said = [line for line in said if not line.startswith(_CAUSE)]
    text = " ".join(line.removeprefix(_CAUSE) for line in said)
    for secret in secrets.values():
        for form in (secret, quote(secret, safe="")):
            text = text.replace(form, "(secret)")
    return text
