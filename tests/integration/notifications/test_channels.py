"""Notices by mail, chat and the admin's command. Real here: SQL, SMTP and HTTP servers of this
machine, Apprise, processes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from tornado import web
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from gpuspawner.core.errors import StoreUnavailable
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.notifications.repository import ChannelChoice, failing
from gpuspawner.service import notifier
from gpuspawner.service.notifier import GPUNotifications, Notifier
from gpuspawner.services import Services
from tests.support.brokers import Clock, Make
from tests.support.mail import MailServer
from tests.support.preloaded import ENVIRONMENT, PRELOADED, READ_BY_SERVICE
from tests.support.processes import PATIENCE, command_of, free_port
from tests.support.rounds import SITE
from tests.support.telling import choose, hanging, notifying, now, sent, tell, tried, until
from tests.support.tls import self_signed

FROM_TO = "from=gpu@lab.example&to={address}"


@pytest.fixture
def services(make: Make) -> Services:
    return make(**SITE)


@pytest.fixture
def mail() -> Iterator[MailServer]:
    with MailServer() as mail:
        yield mail


class Chat:
    """A web hook of this machine, as chats have them."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        chat = self

        class Hook(web.RequestHandler):
            def post(self) -> None:
                chat.posted.append((self.request.uri or "", json.loads(self.request.body)))
                self.set_status(chat.status)

        listening, self.port = bind_unused_port()
        self.server = HTTPServer(web.Application([("/.*", Hook)]))
        self.server.add_socket(listening)


@pytest.fixture
async def chat() -> Any:
    chat = Chat()
    yield chat
    chat.server.stop()


# What arrives.


async def test_notice_is_mailed_exactly_once(services: Services, mail: MailServer) -> None:
    choose(services, "ada", address="ada+gpu@lab.example")
    title, body = "Deine GPU ist frei: Josés Platz \N{ROCKET}", "Größe <b>80 GB</b>\nbis 14:20"
    async with notifying(services, channels={"mail": mail.url}) as notifier:
        notice = await sent(services, tell(services, title=title, body=body))
        for _ in range(5):
            await notifier.round()
    (got,) = mail.received
    assert got.to == ("ada+gpu@lab.example",)
    assert got.sender == "gpu@lab.example"
    assert (got.subject, got.text) == (title, body)
    assert got.message["To"] == "ada+gpu@lab.example"
    assert (notice.tries, notice.error) == (0, "")
    html = got.message.get_body(("html",))
    assert html is None or "<b>" not in html.get_content()


async def test_line_breaks_cannot_inject_mail_headers(services: Services, mail: MailServer) -> None:
    """Names of servers are members' own words, and so are parts of titles."""
    choose(services, "ada")
    ends = ["\n", "\r\n", "\r", "\u2028", "\x85", "\x0b"]
    async with notifying(services, channels={"mail": mail.url}):
        for end in ends:
            trick = f"x{end}Bcc: eve@evil.example{end}{end}<script>"
            title = f"Your server {trick} starts"
            await sent(services, tell(services, title=title, body=f"{trick}!"))
    assert len(mail.received) == len(ends)
    for got in mail.received:
        assert got.to == ("ada@lab.example",)
        assert got.message["Bcc"] is None
        assert got.subject == "Your server x Bcc: eve@evil.example <script> starts"
        assert "Bcc: eve@evil.example" in got.text


async def test_default_channel_serves_members_without_a_choice(
    services: Services, mail: MailServer
) -> None:
    settings = {"channels": {"mail": mail.url}, "default_channels": {"mail": "{user}@lab.example"}}
    services.notifications.choose("bob", [ChannelChoice("mail")])
    async with notifying(services, **settings):
        for user in ("bob", "a b", "ada"):
            await sent(services, tell(services, user))
    assert [got.to for got in mail.received] == [("ada@lab.example",)]


async def test_only_chosen_kinds_and_tests_are_mailed(services: Services, mail: MailServer) -> None:
    choose(services, "ada", kinds=[NoticeKind.STOPPED, NoticeKind.CREDITS_LOW])
    async with notifying(services, channels={"mail": mail.url}):
        for kind in NoticeKind:
            await sent(services, tell(services, kind=kind, title=kind.value))
    # A test goes wherever anything goes.
    assert {got.subject for got in mail.received} == {"stopped", "credits_low", "test"}


async def test_many_notices_are_each_mailed_once(services: Services, mail: MailServer) -> None:
    users = [f"user{n}" for n in range(60)]
    for user in users:
        choose(services, user)
        tell(services, user)
    async with notifying(services, channels={"mail": mail.url}):
        await until(lambda: len(mail.received) >= 60, "all of them")
        await until(lambda: not services.notifications.unsent(99), "all of them to be noted")
    assert sorted(got.to[0] for got in mail.received) == sorted(f"{u}@lab.example" for u in users)


async def test_mail_requires_a_verified_tls_certificate(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``mailtos://``: STARTTLS, the server's certificate is checked, and then the login."""
    proof = self_signed(tmp_path)
    secret = tmp_path / "smtp"
    secret.write_text("p@ss/w:rd?#")
    secret.chmod(0o600)
    choose(services, "ada")
    with MailServer(proof, "p@ss/w:rd?#") as mail:
        start = f"mailtos://gpu:{{file:{secret}}}@127.0.0.1:{mail.port}"
        settings = {"retry_seconds": [0.05] * 400, "channels": {"mail": f"{start}?{FROM_TO}"}}
        async with notifying(services, **settings):
            failed = await tried(services, tell(services))
            assert "certificate" in failing(failed.error)["mail"].lower()
            assert mail.received == []
            monkeypatch.setenv("SSL_CERT_FILE", str(proof))
            await sent(services, failed)
            secret.write_text("another password")
            wrong = await tried(services, tell(services))
            assert "another" not in wrong.error
    assert [got.to for got in mail.received] == [("ada@lab.example",)]


# What does not arrive, yet or ever.


async def test_mail_is_retried_until_the_server_returns(
    services: Services, mail: MailServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    choose(services, "ada")
    mail.stop()
    settings = {"channels": {"mail": mail.url}, "retry_seconds": [0.05] * 200}
    async with notifying(services, **settings):
        notices = [tell(services) for _ in range(3)]
        for notice in notices:
            failed = await tried(services, notice, 2)
            assert failed.sent_at is None
            assert "127.0.0.1" in failing(failed.error)["mail"]
        mail.start()
        for notice in notices:
            assert (await sent(services, notice)).error == ""
    assert len(mail.received) == 3
    said = [r.getMessage() for r in caplog.records if "Channel mail" in r.getMessage()]
    assert "refused" in said[0].lower()
    assert said[-1] == "Channel mail: all is well again"
    assert len(said) == 2, "it is said when it begins and when it ends"


async def test_rejected_address_is_given_up_after_retries(
    services: Services, mail: MailServer, caplog: pytest.LogCaptureFixture
) -> None:
    mail.refused.add("ada@lab.example")
    for user in ("ada", "bob"):
        choose(services, user)
    async with notifying(services, channels={"mail": mail.url}):
        bad, good = tell(services, "ada"), tell(services, "bob")
        await sent(services, good)
        await tried(services, bad, 4)
        await sent(services, tell(services, "bob"))
    assert now(services, bad).sent_at is None
    assert now(services, bad).tries == 4
    assert [got.to for got in mail.received] == [("bob@lab.example",)] * 2
    (line,) = [r.getMessage() for r in caplog.records if "no longer sent" in r.getMessage()]
    assert bad.key in line and "ada" in line


async def test_failed_test_notice_is_not_retried(services: Services, mail: MailServer) -> None:
    mail.stop()
    choose(services, "ada")
    async with notifying(services, channels={"mail": mail.url}) as notifier:
        test = await tried(services, tell(services, kind=NoticeKind.TEST))
        assert test.tries == notifier.most_tries
        assert services.notifications.unsent(notifier.most_tries) == []


async def test_hanging_channel_does_not_delay_others(
    services: Services, mail: MailServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asyncio.Event()
    in_thread = Notifier._in_thread

    async def send(self: Notifier, name: str, work: Callable[[], None]) -> None:
        seconds = 1.0 if name == "dead" else 60.0 * PATIENCE
        monkeypatch.setattr(notifier, "SEND_SECONDS", seconds)
        try:
            await in_thread(self, name, work)
        finally:
            if name == "dead":
                await seen.wait()

    monkeypatch.setattr(Notifier, "_in_thread", send)
    with hanging() as port:
        dead = f"mailto://127.0.0.1:{port}?from=gpu@lab.example&cto=60&to={{address}}"
        for n in range(30):
            choose(services, f"user{n}", "dead")
            tell(services, f"user{n}")
        choose(services, "ada")
        choose(services, "ada", "dead")
        settings: dict[str, Any] = {"retry_seconds": [0.05] * 400}
        async with notifying(services, channels={"mail": mail.url, "dead": dead}, **settings):
            both = tell(services, "ada")
            await until(lambda: mail.received, "the mail by the other channel")
            assert now(services, both).tries == 0, "the other channel had its turn yet"
            seen.set()
            await sent(services, tell(services, "bob"))
            # Senders that hang are not added to without end.
            failed = await tried(services, both, 2)
            why = "Its server accepts connections but does not respond."
            assert failing(failed.error) == {"dead": why}
            assert sum(thread.name == "notice-dead" for thread in threading.enumerate()) <= 16
    assert len(mail.received) == 1, "what has arrived is not sent again"


async def test_restart_resends_only_failed_channels(
    services: Services, mail: MailServer, chat: Chat
) -> None:
    channels = {"mail": mail.url, "chat": f"json://127.0.0.1:{chat.port}/hook"}
    choose(services, "ada")
    services.notifications.choose("ada", [ChannelChoice("chat", "", frozenset({NoticeKind.TURN}))])
    chat.status = 500
    async with notifying(services, channels=channels, retry_seconds=[3600, 3600]):
        notice = await tried(services, tell(services))
    assert set(failing(notice.error)) == {"chat"}
    chat.status = 200
    async with notifying(services, channels=channels):
        await sent(services, notice)
    assert (len(mail.received), len(chat.posted)) == (1, 2)


async def test_failing_store_writes_cause_no_duplicate_mail(
    services: Services, mail: MailServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: reading works, writing does not. The failure is put in by hand."""
    mark, failures = services.notifications.mark, []

    def fail(outcomes: Any) -> None:
        if len(failures) < 5:
            failures.append(outcomes)
            raise StoreUnavailable()
        mark(outcomes)

    monkeypatch.setattr(services.notifications, "mark", fail)
    choose(services, "ada")
    notice = tell(services)
    notifier = Notifier(GPUNotifications(channels={"mail": mail.url}), services, services.log)
    await notifier.round()
    await until(lambda: failures, "the first attempt to note it")
    for _ in range(4):
        with pytest.raises(StoreUnavailable):
            await notifier.round()
    await notifier.round()
    assert now(services, notice).sent_at
    assert len(mail.received) == 1


async def test_outdated_notice_is_kept_but_not_sent(
    services: Services, mail: MailServer, clock: Clock
) -> None:
    choose(services, "ada")
    old = tell(services)
    clock.now += timedelta(days=1, seconds=1)
    async with notifying(services, channels={"mail": mail.url}):
        new = await sent(services, tell(services))
    assert now(services, old).sent_at is None
    assert [some.key for some in services.notifications.notices_of("ada")] == [new.key, old.key]
    assert len(mail.received) == 1


async def test_unusable_channels_and_addresses_are_reported(
    services: Services, mail: MailServer
) -> None:
    choose(services, "ada", "gone")
    choose(services, "bob", address="#bob")
    choose(services, "cleo", "odd", "x")
    channels = {"mail": mail.url, "odd": "nosuchthing://host/{address}"}
    async with notifying(services, channels=channels):
        await sent(services, tell(services, "ada"))
        assert failing((await tried(services, tell(services, "cleo"))).error)["odd"]
        failed = await tried(services, tell(services, "bob"))
        assert "'#bob' is not an address for Mail." in failing(failed.error)["mail"]
        choose(services, "bob", address="bob@lab.example")
        await sent(services, failed)
    assert [got.to for got in mail.received] == [("bob@lab.example",)]


def test_invalid_channel_url_is_a_config_error(services: Services, tmp_path: Path) -> None:
    """The service ends with a sentence, and not with a traceback."""
    environment = {
        **ENVIRONMENT,
        "GPUSPAWNER_CONFIG": '{"GPUNotifications": {"channels": {"mail": "smtp.lab.example"}}}',
        "GPUSPAWNER_DATABASE_URL": services.settings.database.url,
        "JUPYTERHUB_API_URL": "http://127.0.0.1:1/hub/api",
        "JUPYTERHUB_API_TOKEN": "none",
    }
    said = tmp_path / "said"
    streams = (os.devnull, os.devnull, str(said))
    arguments = ["-m", "gpuspawner.service"]
    service = PRELOADED.start(arguments, tmp_path, environment, streams, READ_BY_SERVICE)
    assert service.wait(timeout=60) == 1
    what = "c.GPUNotifications.channels['mail'] is not a URL; write it like"
    assert what in said.read_text() and "Traceback" not in said.read_text()


# Secrets.


async def test_channel_secret_file_requires_mode_600(
    services: Services, chat: Chat, tmp_path: Path
) -> None:
    secret = tmp_path / "token"
    url = f"json://127.0.0.1:{chat.port}/{{file:{secret}}}/{{address}}"
    choose(services, "ada", "chat", "@ada")
    settings = {"channels": {"chat": url}, "retry_seconds": [0.05] * 400}
    async with notifying(services, **settings):
        notice = await tried(services, tell(services))
        assert "cannot be read: No such file" in notice.error
        secret.write_text(" s3cr/t?#x\n")
        secret.chmod(0o644)
        await until(lambda: "chmod 600" in now(services, notice).error, "the mode to be seen")
        assert chat.posted == []
        secret.chmod(stat.S_IRUSR | stat.S_IWUSR)
        await sent(services, notice)
        ((path, posted),) = chat.posted
        assert path.startswith("/s3cr")
        assert posted["title"] == "Your server starts"

        chat.status = 500
        failed = await tried(services, tell(services))
        assert failed.error
        for form in ("s3cr/t", "s3cr%2Ft", "s3cr"):
            assert form not in failed.error


async def test_environment_secret_is_used_and_hidden_in_errors(
    services: Services, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(services, "ada", "chat", "ada")
    whole = tmp_path / "url"
    whole.write_text(f"json://127.0.0.1:{chat.port}/T0/B1/x?:key=a%20b\n")
    whole.chmod(0o600)
    channels = {
        "chat": f"json://{{env:CHAT_HOST}}:{chat.port}/{{env:CHAT_TOKEN}}/{{address}}",
        "mail": f"mailto://{{env:CHAT_HOST}}:{free_port()}?{FROM_TO}",
        "team": f"{{file:{whole}}}",
    }
    monkeypatch.setenv("CHAT_HOST", "127.0.0.1")
    async with notifying(services, channels=channels, retry_seconds=[0.05] * 400):
        notice = await tried(services, tell(services))
        assert "CHAT_TOKEN is not set" in notice.error
        monkeypatch.setenv("CHAT_TOKEN", "abc")
        await sent(services, notice)
        assert [path for path, _ in chat.posted] == ["/abc/ada"]
        choose(services, "bob")
        failed = await tried(services, tell(services, "bob"))
        assert '"(secret)"' in failed.error and "127.0.0.1" not in failed.error
        turns = frozenset({NoticeKind.TURN})
        services.notifications.choose("cleo", [ChannelChoice("team", "", turns)])
        await sent(services, tell(services, "cleo"))
    assert chat.posted[1][0].startswith("/T0/B1/x"), "a URL that is a secret as a whole"


# The admin's command, run for each notice.


async def test_hook_receives_each_notice_once(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "a secret of the service")
    monkeypatch.setenv("GPUSPAWNER_DATABASE_URL", "a secret of the service")
    said = tmp_path / "said"
    script = f"import os, sys; open({str(said)!r}, 'a').write(sys.stdin.read() + repr(os.environ))"
    choose(services, "ada")
    settings = {
        "channels": {"mail": f"mailto://127.0.0.1:{free_port()}?from=a@b.example&to={{address}}"},
        "hook": [sys.executable, "-c", script],
    }
    async with notifying(services, **settings):
        told = tell(services, "bob", title="Größe", body="zwei\nZeilen")
        await sent(services, told)
        text = said.read_text()
        assert json.loads(text.splitlines()[0]) == {
            "key": told.key,
            "user": "bob",
            "kind": "turn",
            "title": "Größe",
            "body": "zwei\nZeilen",
            "at": "2025-03-01T12:00:00.000+00:00",
        }
        assert "a secret of the service" not in text
        await tried(services, tell(services, "ada"), 4)  # by mail, which does not go
    assert said.read_text().count('"user": "ada"') == 1


FAILING_HOOKS = {
    "cannot be started": ["/no/such/command"],
    "ended with 3: broken pipe": ["/bin/sh", "-c", "echo broken pipe of mine >&2; exit 3"],
    "did not finish within 0.3 s and was killed": [
        "/bin/sh",
        "-c",
        "sleep 1000.25 & sleep 1000.25",
    ],
    "ended with -9": ["/bin/sh", "-c", "kill -9 $$"],
}


async def test_failing_hook_is_logged_once_and_leaves_no_process(
    services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    for sentence, command in FAILING_HOOKS.items():
        caplog.clear()
        seconds = 0.3 if "sleep" in command[-1] else 15.0 * PATIENCE
        async with notifying(services, hook_seconds=seconds, hook=command):
            await sent(services, tell(services))
        (line,) = [r.getMessage() for r in caplog.records if "Hook for" in r.getMessage()]
        assert sentence in line
    children = psutil.Process().children(recursive=True)
    assert not [p for p in children if "1000.25" in command_of(p)], "what it started is gone too"


async def test_a_service_that_stops_leaves_no_hook_behind(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "HOOK_SECONDS", 60.0 * PATIENCE)
    command = ["/bin/sh", "-c", "sleep 4712.25 & sleep 4712.25"]
    stopping = Notifier(GPUNotifications(hook=command), services, services.log)

    def hooks() -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [p for p in children if command_of(p)[-1:] == ["4712.25"]]

    stopping.tell_admin(tell(services))  # a notice, and what only the admin is told
    await stopping.round()
    await until(lambda: len(hooks()) == 4, "both hooks")
    started = hooks()
    await stopping.close(0.1)
    await until(lambda: not any(command_of(p) for p in started), "the end of what they started")
