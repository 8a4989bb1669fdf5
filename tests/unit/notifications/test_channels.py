"""Channels as an admin sets them, and addresses as members type them. Nothing real is needed."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuspawner.core.errors import ConfigError, InvalidRequest
from gpuspawner.notifications.channels import KINDS, Channel, chosen, names, read, wanted
from gpuspawner.notifications.models import Notice, NoticeKind
from gpuspawner.notifications.repository import ChannelChoice, errors_text, failing
from tests.support.rounds import START

MAIL = "mailtos://gpu:{file:/etc/smtp}@smtp.lab.example:587?from=gpu@lab.example&to={address}"
CHAT = "mmosts://chat.lab.example/{env:CHAT_TOKEN}?channels={address}"

URLS = (
    MAIL,
    "mailto://mail.example/{address}?from=gpu@lab.example",
    CHAT,
    "ntfys://ntfy.lab.example/{address}",
    "pover://{address}@{env:PUSHOVER}",
    "json://lab.example/a/{address}/b?-x={address}&y=1#{address}",
)


BOTH = {"mail": MAIL, "team": "{env:TEAM}"}


def one(value: Any, default: str | None = None) -> Channel:
    return read({"one": value}, {} if default is None else {"one": default})["one"]


def notice(kind: NoticeKind = NoticeKind.TURN) -> Notice:
    return Notice(key="k", user="ada", kind=kind, title="t", body="b", at=START)


# What an admin writes.


def test_channel_can_be_configured_by_url_alone() -> None:
    channel = one(MAIL)
    assert (channel.label, channel.needs_address, channel.mail) == ("One", True, True)
    assert channel.secrets() == ["file:/etc/smtp"]
    assert channel.example
    assert channel.default is None
    team = one({"url": "{file:/etc/team-url}", "label": "The lab's chat"})
    assert (team.label, team.needs_address, team.mail) == ("The lab's chat", False, False)

    channels = read({"mail": {"url": MAIL, "label": "Mail"}, "chat": CHAT}, {})
    assert names(channels, []) == ""
    assert names(channels, ["mail"]) == "Mail"
    assert names(channels, ["mail", "chat", "gone"]) == "Mail, Chat and gone"

    channel = one("{env:TEAM}")
    assert channel.check(" ") == ""
    with pytest.raises(InvalidRequest, match="needs no address"):
        channel.check("json://evil.example")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({}, "is not a URL; write it like mailtos://"),
        (5, "must be a URL, or a dictionary of texts"),
        ({"url": 5}, "must be a URL, or a dictionary of texts"),
        ({"url": MAIL, "adress": "x"}, "has 'adress'; there are example, label, pattern, url"),
        ("mail.lab.example", "is not a URL"),
        ("json://{address}/path", "may only be in the path, or the value of a parameter"),
        ("json://{address}:80/path", "may only be in the path"),
        ("json://me@x.{address}", "may only be in the path"),
        ("{address}://host/path", "places|is not a URL|may only be"),
        ("json://host/?{address}=smtp.example", "may only be in the path"),
        ("mailto://host?smtp=x&a{address}b=c", "may only be in the path"),
        ("json://host/{user}", r"may have the places \{address\}, \{env:NAME\}"),
        ("json://host/{}", "may have the places"),
        ("json://host/{address", "may have the places"),
        ("json://host/{file:secret}", "write the whole path"),
        ({"url": MAIL, "pattern": "("}, "is not a regular expression"),
        ({"url": MAIL, "example": "ada"}, "the example of .*'ada' is not an address"),
        ({"url": CHAT, "pattern": "@.+", "example": "#ada"}, "'#ada' is not an address"),
    ],
)
def test_invalid_channel_is_rejected_by_name(value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        one(value)
    assert "'one'" in raised.value.message


@pytest.mark.parametrize(
    ("channels", "default", "sentence"),
    [
        *(
            ({name: MAIL}, {}, "is not a name")
            for name in ("", "Mail", "a b", "a:b", "1st", "x" * 40, 5)
        ),
        (BOTH, {"two": "{user}@lab.example"}, "names no channel; there are: mail, team"),
        (BOTH, {"mail": "{name}@lab.example"}, "write"),
        (BOTH, {"mail": 5}, "write"),
        (BOTH, {"mail": ""}, "the channel needs an address"),
        (BOTH, {"team": "{user}"}, 'the channel needs none: write ""'),
    ],
)
def test_invalid_channel_names_and_defaults_are_rejected(
    channels: Any, default: Any, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(channels, default)


# What a member types.


def test_addresses_are_trimmed_and_unsafe_characters_rejected() -> None:
    fine = ["ada@lab.example", " ada.lovelace+gpu@sub.lab-1.example ", "a_b=c@localhost"]
    assert [one(MAIL).check(address) for address in fine] == [each.strip() for each in fine]

    channel = one({"url": CHAT, "pattern": "(?s).+"})
    assert channel.check("@ada/x?y#z&a=b") == "@ada/x?y#z&a=b"
    for bad in ("a\nb", "a\rb", "a\0b", "a b", "a%41", "a,b", "a;b", "<a", 'a"', "a\\b", "a\x85b"):
        with pytest.raises(InvalidRequest):
            channel.check(bad)


ADA = "ada@lab.example"


@pytest.mark.parametrize(
    "address",
    [
        *("", "ada", "@lab.example", "ada@", "ada@lab..example", "äda@lab.example"),
        *(f"{ADA}\nBcc: eve@evil.example", f"{ADA}\r\nSubject: x", f"{ADA}\x00"),
        *(f"{ADA}{between}eve@evil.example" for between in ",; "),
        *(f"Ada <{ADA}>", '"ada"@lab.example', "ada@[127.0.0.1]", "mailto://evil.example"),
        *("ada%40evil.example@lab.example", "ada%2Ceve@evil.example"),
        *(f"{ADA}?smtp=evil.example", f"{ADA}&smtp=evil.example", f"{ADA}/../x"),
        *("a" * 65 + "@lab.example", "ada@" + "x" * 300 + ".example"),
    ],
)
def test_invalid_mail_address_is_rejected_with_an_example(address: str) -> None:
    with pytest.raises(InvalidRequest, match="address") as raised:
        one(MAIL).check(address)
    assert raised.value.fields["field"] == "one"
    assert ADA in raised.value.message, "what an address looks like"


@pytest.mark.parametrize("address", [".", "..", "../x", "x/..", "x/./y", "/..", "x/../../y"])
def test_address_cannot_change_the_url_path(address: str) -> None:
    channel = one({"url": "json://chat.example/hook/{address}", "pattern": ".+"})
    with pytest.raises(InvalidRequest, match="is not an address"):
        channel.check(address)
    with pytest.raises(InvalidRequest, match="is not an address"):
        channel.fill(address, {})
    prefixed = one({"url": "json://chat.example/hook/.{address}", "pattern": ".+"})
    with pytest.raises(InvalidRequest, match="is not an address"):
        prefixed.check("." if address != "." else "/x")
    for fine in ("...", ".x", "x..y", "a.b/c"):
        assert channel.check(fine) == fine
    in_a_parameter = one({"url": "json://chat.example/hook?to={address}", "pattern": ".+"})
    assert in_a_parameter.check(address) == address


@given(
    url=st.sampled_from(URLS),
    address=st.text(min_size=1, max_size=60),
    secret=st.text(min_size=1, max_size=30),
)
@example(url=URLS[0], address="x@evil.example/?a", secret="p@ss/word:#?%41")
@example(url=URLS[5], address="http://evil.example", secret="x")
def test_address_changes_no_other_part_of_the_url(url: str, address: str, secret: str) -> None:
    """Whatever a pattern allows: scheme, host, port and the names of parameters stay."""
    channel = one({"url": url, "pattern": "(?s).*", "example": ""})
    try:
        clean = channel.check(address)
    except InvalidRequest:
        return
    secrets = dict.fromkeys(channel.secrets(), secret)
    filled = channel.fill(address, secrets)
    plain = channel.fill("a", dict.fromkeys(secrets, "s"))
    assert re.fullmatch(r"[!-~]+", filled)
    found, usual = urlsplit(filled), urlsplit(plain)
    assert found.scheme == usual.scheme
    if "{env:PUSHOVER}" not in url:  # whose host is the secret
        assert (found.hostname, found.port) == (usual.hostname, usual.port)
    for part in ("path", "query", "fragment"):
        ours, theirs = (re.sub(r"[^/&=?#]", "", getattr(url, part)) for url in (found, usual))
        assert ours == theirs
    assert clean in unquote(filled)
    assert unquote(clean) == clean, "who unquotes twice reads the same"


# Who is told how.


def test_invalid_notice_kinds_and_addresses_are_rejected() -> None:
    channel = one(MAIL)
    choice = channel.choice("ada@lab.example", ["turn", "stopped"])
    assert choice.kinds == {NoticeKind.TURN, NoticeKind.STOPPED}
    assert channel.choice("", []) == ChannelChoice("one")
    assert channel.choice("ada@lab.example", []).address == "ada@lab.example"
    for address, kinds in (
        ("", ["turn"]),
        ("ada@lab.example", ["test"]),
        ("ada@lab.example", ["everything"]),
        ("ada@lab.example", [["turn"]]),
        ("ada@lab.example", "turn"),
        ("ada@lab.example", None),
        (None, ["turn"]),
        ("x", []),
    ):
        with pytest.raises(InvalidRequest):
            channel.choice(address, kinds)


def test_member_without_a_choice_gets_default_channels() -> None:
    channels = read(BOTH, {"mail": "{user}@lab.example"})
    usual = ChannelChoice("mail", "ada@lab.example", frozenset(KINDS))
    assert chosen(channels, {}, "ada") == {"mail": usual}
    assert chosen(channels, {}, "a b") == {}, "a name that makes no address"
    own = {"mail": ChannelChoice("mail")}
    assert chosen(channels, own, "ada") == own
    team = ChannelChoice("team", "", frozenset({NoticeKind.TURN}))
    own = {"team": team, "gone": ChannelChoice("gone", "x")}
    assert set(chosen(channels, own, "ada")) == {"mail", "team"}


def test_notice_goes_to_channels_that_want_its_kind() -> None:
    choices = {
        "mail": ChannelChoice("mail", "ada@lab.example", frozenset({NoticeKind.TURN})),
        "chat": ChannelChoice("chat", "@ada", frozenset({NoticeKind.STOPPED})),
        "push": ChannelChoice("push", "ada"),
    }
    assert [c.channel for c in wanted(choices, notice(NoticeKind.TURN))] == ["mail"]
    assert [c.channel for c in wanted(choices, notice(NoticeKind.STOPPED))] == ["chat"]
    assert wanted(choices, notice(NoticeKind.CREDITS_LOW)) == []
    assert [c.channel for c in wanted(choices, notice(NoticeKind.TEST))] == ["mail", "chat"]


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9_-]{0,30}", fullmatch=True), st.text(max_size=3000), max_size=40
    )
)
def test_channel_errors_are_kept_as_bounded_text(errors: dict[str, str]) -> None:
    text = errors_text(errors)
    assert set(failing(text)) == set(errors)
    assert len(text) <= 2000 + 34 * len(errors)
