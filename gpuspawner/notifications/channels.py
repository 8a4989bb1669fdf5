"""Notification channels as an admin configured them, and members' choices. Pure.

A channel is an Apprise URL with placeholders: ``{address}`` is what a member types, ``{env:NAME}``
and ``{file:/path}`` are secrets. A member fills in the address and nothing else: it is checked,
quoted, and never part of the scheme or the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from ..core.errors import ConfigError, InvalidRequest
from .models import Notice, NoticeKind
from .repository import ChannelChoice

ADDRESS = "{address}"
KINDS = tuple(kind for kind in NoticeKind if kind is not NoticeKind.TEST)
"""What a member can choose to be notified of."""

LONGEST = 200
"""Maximum characters of an address."""

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,30}")
_PLACE = re.compile(r"\{([^{}]*)\}")
_SECRET = re.compile(r"\{((?:env|file):[^{}]+)\}")
_MAIL = re.compile(r"[A-Za-z0-9_+=][A-Za-z0-9._+=-]{0,63}@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")
_SHORT = re.compile(r"[A-Za-z0-9@#+_.:=-]{1,100}")
# Not allowed, whatever an admin's pattern accepts: some of these end a header or separate
# addresses, and double unquoting would take a percent sign for a quoted character.
_NEVER = re.compile(r"[\x00-\x20\x7f-\xa0\u2028\u2029%,;<>\"\\]")
_KEYS = {"url", "label", "pattern", "example"}


@dataclass(frozen=True, slots=True)
class Channel:
    """One way to notify members."""

    name: str
    label: str
    url: str
    """With its placeholders; it does not contain the secrets."""
    pattern: re.Pattern[str]
    """What the whole address must match."""
    example: str = ""
    """An example of an address, for members."""
    default: str | None = None
    """The address of members without a choice, with ``{user}`` for the name; None: not used."""

    @property
    def needs_address(self) -> bool:
        """True if members type an address for it."""
        return ADDRESS in self.url

    @property
    def mail(self) -> bool:
        """True if it sends mail."""
        return _is_mail(self.url)

    def check(self, address: str) -> str:
        """Return the address without surrounding spaces. Raises InvalidRequest."""
        address = address.strip()
        if not self.needs_address:
            if address:
                raise InvalidRequest(f"{self.label} needs no address.", field=self.name)
            return ""
        such_as = f" Write one like {self.example}." if self.example else ""
        if not address:
            sentence = f"{self.label} needs an address, or nothing chosen.{such_as}"
            raise InvalidRequest(sentence, field=self.name)
        fits = len(address) <= LONGEST and self.pattern.fullmatch(address)
        if not fits or _NEVER.search(address) or self._leaves_its_path(address):
            sentence = f"{address[:60]!r} is not an address for {self.label}.{such_as}"
            raise InvalidRequest(sentence, field=self.name)
        return address

    def _leaves_its_path(self, address: str) -> bool:
        """Return True if a segment of the URL's path would be ``.`` or ``..``."""
        path = re.split(r"[?#]", self.url.partition("://")[2], maxsplit=1)[0]
        filled = (s.replace(ADDRESS, address) for s in path.split("/") if ADDRESS in s)
        return any({".", ".."} & set(re.split(r"[/\\]", segment)) for segment in filled)

    def choice(self, address: Any, kinds: Any) -> ChannelChoice:
        """Return a member's checked choice. Raises InvalidRequest with the channel as ``field``."""
        if not isinstance(address, str):
            raise InvalidRequest(f"The address for {self.label} must be a text.", field=self.name)
        if not isinstance(kinds, (list, tuple)):
            raise InvalidRequest(f"The kinds for {self.label} must be a list.", field=self.name)
        known = {kind.value: kind for kind in KINDS}
        if unknown := [kind for kind in kinds if not isinstance(kind, str) or kind not in known]:
            sentence = f"{str(unknown[0])[:60]!r} is not a kind of notification: there are "
            raise InvalidRequest(sentence + ", ".join(known) + ".", field=self.name)
        chosen = frozenset(known[kind] for kind in kinds)
        if not chosen and not address.strip():
            return ChannelChoice(self.name)
        return ChannelChoice(self.name, self.check(address), chosen)

    def default_choice(self, user: str) -> ChannelChoice | None:
        """Return the choice of a member without one; None if there is no default or address."""
        if self.default is None:
            return None
        try:
            address = self.check(self.default.replace("{user}", user))
        except InvalidRequest:
            return None
        return ChannelChoice(self.name, address, frozenset(KINDS))

    def secrets(self) -> list[str]:
        """Return the secrets in the URL, such as ``env:SMTP_PASSWORD`` or ``file:/etc/token``."""
        return _SECRET.findall(self.url)

    def fill(self, address: str, secrets: Mapping[str, str]) -> str:
        """Return the URL to send to, all quoted, except a secret that is the whole URL."""
        whole = _SECRET.fullmatch(self.url)
        if whole:
            return secrets[whole[1]]

        def value(found: re.Match[str]) -> str:
            place = found[1]
            return quote(self.check(address) if place == "address" else secrets[place], safe="")

        return _PLACE.sub(value, self.url)


def read(channels: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Channel]:
    """Return the channels of ``c.GPUNotifications``, by name, in order. Raises ConfigError."""
    found = {name: _channel(name, value) for name, value in channels.items()}
    for name, template in defaults.items():
        what = f"c.GPUNotifications.default_channels[{name!r}]"
        if name not in found:
            there_are = ", ".join(found) or "none"
            raise ConfigError(what=f"{what} names no channel; there are: {there_are}")
        if not isinstance(template, str) or set(_PLACE.findall(template)) - {"user"}:
            raise ConfigError(what=f'{what} is {template!r}; write "{{user}}@lab.example" or ""')
        if bool(template) != found[name].needs_address:
            needs = "needs an address" if found[name].needs_address else 'needs none: write ""'
            raise ConfigError(what=f"{what} is {template!r}, but the channel {needs}")
        found[name] = replace(found[name], default=template)
    return found


def chosen(
    channels: Mapping[str, Channel], own: Mapping[str, ChannelChoice], user: str
) -> dict[str, ChannelChoice]:
    """Return a member's choice for each channel, or the default."""
    found = {name: own.get(name) or each.default_choice(user) for name, each in channels.items()}
    return {name: choice for name, choice in found.items() if choice is not None}


def wanted(choices: Mapping[str, ChannelChoice], notice: Notice) -> list[ChannelChoice]:
    """Return the choices that this notice is sent by; a test uses all with any kind."""
    if notice.kind is NoticeKind.TEST:
        return [choice for choice in choices.values() if choice.kinds]
    return [choice for choice in choices.values() if notice.kind in choice.kinds]


def _channel(name: Any, value: Any) -> Channel:
    what = f"c.GPUNotifications.channels[{name!r}]"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(what=f"{what} is not a name; use small letters, digits and hyphens")
    if isinstance(value, str):
        value = {"url": value}
    if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
        raise ConfigError(what=f"{what} must be a URL, or a dictionary of texts with one")
    if unknown := set(value) - _KEYS:
        names = ", ".join(sorted(_KEYS))
        raise ConfigError(what=f"{what} has {sorted(unknown)[0]!r}; there are {names}")
    url = value.get("url", "").strip()
    _check_url(what, url)
    mail = _is_mail(url)
    usual = _MAIL if mail else _SHORT
    channel = Channel(
        name=name,
        label=value.get("label") or name.capitalize(),
        url=url,
        pattern=_pattern(what, value["pattern"]) if "pattern" in value else usual,
        example=value.get("example", "ada@lab.example" if mail and ADDRESS in url else ""),
    )
    if channel.example:
        try:
            channel.check(channel.example)
        except InvalidRequest as error:
            raise ConfigError(what=f"the example of {what}: {error.message}") from None
    return channel


def _check_url(what: str, url: str) -> None:
    """Refuse a URL in which a member's address could be more than an address."""
    if _SECRET.fullmatch(url):
        return
    unknown = [place for place in _PLACE.findall(_SECRET.sub("", url)) if place != "address"]
    if unknown or set(_PLACE.sub("", url)) & set("{}"):
        places = "{address}, {env:NAME} and {file:/path}"
        raise ConfigError(what=f"the url of {what} may have the places {places}, and no others")
    for secret in _SECRET.findall(url):
        if secret.startswith("file:") and not secret.startswith("file:/"):
            raise ConfigError(what=f"the url of {what} names {secret!r}; write the whole path")
    scheme, mark, rest = _SECRET.sub("secret", url).partition("://")
    if not mark or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        example = "mailtos://USER:{file:/etc/gpuspawner/smtp}@smtp.lab.example?to={address}"
        raise ConfigError(what=f"the url of {what} is not a URL; write it like {example}")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    keys = [part.partition("=")[0] for part in rest.partition("?")[2].split("&")]
    if ADDRESS in host or any(ADDRESS in key for key in keys):
        where = "the path, or the value of a parameter"
        raise ConfigError(what=f"{{address}} in the url of {what} may only be in {where}")


def _pattern(what: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(
            what=f"the pattern of {what} is not a regular expression: {error}"
        ) from None


def _is_mail(url: str) -> bool:
    return url.startswith(("mailto:", "mailtos:"))


def names(channels: Mapping[str, Channel], some: Iterable[str]) -> str:
    """Join labels of channels for a sentence: ``Mail and Chat``."""
    labels = [channels[name].label if name in channels else name for name in some]
    return " and ".join([", ".join(labels[:-1]), labels[-1]]) if labels[1:] else "".join(labels)
