"""Real here: SQL, SMTP and HTTP servers of this machine, Apprise, the service's process."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tornado import web
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from gpuspawner.core.errors import ConfigError, StoreUnavailable
from gpuspawner.notifications.models import NoticeKind
from gpuspawner.notifications.repository import ChannelChoice, failing
from gpuspawner.service import notifier
from gpuspawner.service.notifier import GPUNotifications, Notifier
from gpuspawner.services import Broker
from tests.support.mail import MailServer, certificate
from tests.support.processes import REPO, free_port
from tests.support.rounds import Clock, open_broker
from tests.support.telling import choose, hanging, notifying, now, sent, tell, tried, until

FROM_TO = "from=gpu@lab.example&to={address}"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(database_url: str, clock: Clock) -> Iterator[Broker]:
    broker = open_broker(database_url, clock)
    yield broker
    broker.store.close()


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


async def test_a_notice_arrives_as_mail_once(broker: Broker, mail: MailServer) -> None:
    choose(broker, "ada", address="ada+gpu@lab.example")
    title, body = "Deine GPU ist frei: Josés Platz \N{ROCKET}", "Größe <b>80 GB</b>\nbis 14:20"
    async with notifying(broker, channels={"mail": mail.url}) as notifier:
        notice = await sent(broker, tell(broker, title=title, body=body))
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


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\u2028", "\x85", "\x0b"])
async def test_names_cannot_add_to_the_header(broker: Broker, mail: MailServer, end: str) -> None:
    """Names of servers are members' own words, and so are parts of titles."""
    choose(broker, "ada")
    trick = f"x{end}Bcc: eve@evil.example{end}{end}<script>"
    async with notifying(broker, channels={"mail": mail.url}):
        await sent(broker, tell(broker, title=f"Your server {trick} starts", body=f"{trick}!"))
    (got,) = mail.received
    assert got.to == ("ada@lab.example",)
    assert got.message["Bcc"] is None
    assert got.subject == "Your server x Bcc: eve@evil.example <script> starts"
    assert "Bcc: eve@evil.example" in got.text


async def test_who_chose_nothing_is_told_by_the_default(broker: Broker, mail: MailServer) -> None:
    settings = {
        "channels": {"mail": mail.url},
        "default_channels": {"mail": "{user}@lab.example"},
    }
    broker.notifications.choose("bob", [ChannelChoice("mail")])
    async with notifying(broker, **settings):
        for user in ("bob", "a b", "ada"):
            await sent(broker, tell(broker, user))
    assert [got.to for got in mail.received] == [("ada@lab.example",)]


async def test_only_the_kinds_that_were_chosen(broker: Broker, mail: MailServer) -> None:
    choose(broker, "ada", kinds=[NoticeKind.STOPPED, NoticeKind.CREDITS_LOW])
    async with notifying(broker, channels={"mail": mail.url}):
        for kind in NoticeKind:
            await sent(broker, tell(broker, kind=kind, title=kind.value))
    # A test goes wherever anything goes.
    assert {got.subject for got in mail.received} == {"stopped", "credits_low", "test"}


async def test_many_arrive_once_each(broker: Broker, mail: MailServer) -> None:
    users = [f"user{n}" for n in range(60)]
    for user in users:
        choose(broker, user)
        tell(broker, user)
    async with notifying(broker, channels={"mail": mail.url}):
        await until(lambda: len(mail.received) >= 60, "all of them", timeout=40)
        await until(lambda: not broker.notifications.unsent(99), "all of them to be noted")
    assert sorted(got.to[0] for got in mail.received) == sorted(f"{u}@lab.example" for u in users)


async def test_mail_goes_encrypted_to_a_server_that_proves_its_name(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``mailtos://``: STARTTLS, the server's certificate is checked, and then the login."""
    proof = certificate(tmp_path)
    secret = tmp_path / "smtp"
    secret.write_text("p@ss/w:rd?#")
    secret.chmod(0o600)
    choose(broker, "ada")
    with MailServer(proof, "p@ss/w:rd?#") as mail:
        start = f"mailtos://gpu:{{file:{secret}}}@127.0.0.1:{mail.port}"
        settings = {"retry_seconds": [0.05] * 400, "channels": {"mail": f"{start}?{FROM_TO}"}}
        async with notifying(broker, **settings):
            failed = await tried(broker, tell(broker))
            assert "certificate" in failing(failed.error)["mail"].lower()
            assert mail.received == []
            monkeypatch.setenv("SSL_CERT_FILE", str(proof))
            await sent(broker, failed)
            secret.write_text("another password")
            wrong = await tried(broker, tell(broker))
            assert "another" not in wrong.error
    assert [got.to for got in mail.received] == [("ada@lab.example",)]


# What does not arrive, yet or ever.


async def test_a_server_that_is_down_and_comes_back(
    broker: Broker, mail: MailServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    choose(broker, "ada")
    mail.stop()
    settings = {"channels": {"mail": mail.url}, "retry_seconds": [0.05] * 200}
    async with notifying(broker, **settings):
        notices = [tell(broker) for _ in range(3)]
        for notice in notices:
            failed = await tried(broker, notice, 2)
            assert failed.sent_at is None
            assert "127.0.0.1" in failing(failed.error)["mail"]
        mail.start()
        for notice in notices:
            assert (await sent(broker, notice)).error == ""
    assert len(mail.received) == 3
    said = [r.getMessage() for r in caplog.records if "Channel mail" in r.getMessage()]
    assert "refused" in said[0].lower()
    assert said[-1] == "Channel mail: all is well again"
    assert len(said) == 2, "it is said when it begins and when it ends"


async def test_an_address_that_nobody_knows_is_given_up(
    broker: Broker, mail: MailServer, caplog: pytest.LogCaptureFixture
) -> None:
    mail.refused.add("ada@lab.example")
    for user in ("ada", "bob"):
        choose(broker, user)
    async with notifying(broker, channels={"mail": mail.url}):
        bad, good = tell(broker, "ada"), tell(broker, "bob")
        await sent(broker, good)
        await tried(broker, bad, 4)
        await sent(broker, tell(broker, "bob"))
    assert now(broker, bad).sent_at is None
    assert now(broker, bad).tries == 4
    assert [got.to for got in mail.received] == [("bob@lab.example",)] * 2
    (line,) = [r.getMessage() for r in caplog.records if "not sent any more" in r.getMessage()]
    assert bad.key in line and "ada" in line


async def test_a_test_is_tried_once(broker: Broker, mail: MailServer) -> None:
    mail.stop()
    choose(broker, "ada")
    async with notifying(broker, channels={"mail": mail.url}) as notifier:
        test = await tried(broker, tell(broker, kind=NoticeKind.TEST))
        assert test.tries == notifier.most_tries
        assert broker.notifications.unsent(notifier.most_tries) == []


async def test_a_channel_that_hangs_holds_up_no_other(
    broker: Broker, mail: MailServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "SEND_SECONDS", 2.0)
    with hanging() as port:
        dead = f"mailto://127.0.0.1:{port}?from=gpu@lab.example&cto=60&to={{address}}"
        for n in range(30):
            choose(broker, f"user{n}", "dead")
            tell(broker, f"user{n}")
        choose(broker, "ada")
        choose(broker, "ada", "dead")
        settings: dict[str, Any] = {"retry_seconds": [0.05] * 400}
        async with notifying(broker, channels={"mail": mail.url, "dead": dead}, **settings):
            both = tell(broker, "ada")
            await until(lambda: mail.received, "the mail by the other channel")
            assert now(broker, both).tries == 0, "the other channel had its turn yet"
            await sent(broker, tell(broker, "bob"))
            # Senders that hang are not added to without end.
            failed = await tried(broker, both, 2)
            assert failing(failed.error) == {
                "dead": "Its server takes messages and does not answer."
            }
            assert sum(thread.name == "notice-dead" for thread in threading.enumerate()) <= 16
    assert len(mail.received) == 1, "what has arrived is not sent again"


async def test_after_a_restart_only_what_failed_is_sent_again(
    broker: Broker, mail: MailServer, chat: Chat
) -> None:
    channels = {"mail": mail.url, "chat": f"json://127.0.0.1:{chat.port}/hook"}
    choose(broker, "ada")
    broker.notifications.choose("ada", [ChannelChoice("chat", "", frozenset({NoticeKind.TURN}))])
    chat.status = 500
    async with notifying(broker, channels=channels, retry_seconds=[3600, 3600]):
        notice = await tried(broker, tell(broker))
    assert set(failing(notice.error)) == {"chat"}
    chat.status = 200
    async with notifying(broker, channels=channels):
        await sent(broker, notice)
    assert (len(mail.received), len(chat.posted)) == (1, 2)


async def test_a_store_that_does_not_write_sends_nothing_twice(
    broker: Broker, mail: MailServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: reading works, writing does not. The failure is put in by hand."""
    mark, failures = broker.notifications.mark, []

    def fail(outcomes: Any) -> None:
        if len(failures) < 5:
            failures.append(outcomes)
            raise StoreUnavailable()
        mark(outcomes)

    monkeypatch.setattr(broker.notifications, "mark", fail)
    choose(broker, "ada")
    notice = tell(broker)
    notifier = Notifier(GPUNotifications(channels={"mail": mail.url}), broker, broker.log)
    await notifier.round()
    await until(lambda: failures, "the first attempt to note it")
    for _ in range(4):
        with pytest.raises(StoreUnavailable):
            await notifier.round()
    await notifier.round()
    assert now(broker, notice).sent_at
    assert len(mail.received) == 1


async def test_old_news_is_not_sent_and_stays_on_the_page(
    broker: Broker, mail: MailServer, clock: Clock
) -> None:
    choose(broker, "ada")
    old = tell(broker)
    clock.now += timedelta(days=1, seconds=1)
    async with notifying(broker, channels={"mail": mail.url}):
        new = await sent(broker, tell(broker))
    assert now(broker, old).sent_at is None
    assert [some.key for some in broker.notifications.notices_of("ada")] == [new.key, old.key]
    assert len(mail.received) == 1


async def test_choices_that_the_admin_took_away(broker: Broker, mail: MailServer) -> None:
    choose(broker, "ada", "gone")
    choose(broker, "bob", address="#bob")
    async with notifying(broker, channels={"mail": mail.url}):
        await sent(broker, tell(broker, "ada"))
        failed = await tried(broker, tell(broker, "bob"))
        assert "'#bob' is no address for Mail." in failing(failed.error)["mail"]
        choose(broker, "bob", address="bob@lab.example")
        await sent(broker, failed)
    assert [got.to for got in mail.received] == [("bob@lab.example",)]


async def test_a_url_that_apprise_does_not_know(broker: Broker) -> None:
    choose(broker, "ada", "odd", "x")
    async with notifying(broker, channels={"odd": "nosuchthing://host/{address}"}):
        failed = await tried(broker, tell(broker))
    assert failing(failed.error)["odd"]


def test_a_mistake_in_the_settings_is_a_sentence(broker: Broker) -> None:
    with pytest.raises(ConfigError, match=r"c\.GPUNotifications\.channels\['mail'\] is no URL"):
        Notifier(GPUNotifications(channels={"mail": "smtp.lab.example"}), broker, broker.log)
    environment = {
        "GPUSPAWNER_CONFIG": '{"GPUNotifications": {"channels": {"mail": "smtp.lab.example"}}}',
        "GPUSPAWNER_DATABASE_URL": broker.settings.database.url,
        "JUPYTERHUB_API_URL": "http://127.0.0.1:1/hub/api",
        "JUPYTERHUB_API_TOKEN": "none",
    }
    service = subprocess.run(
        [sys.executable, "-m", "gpuspawner.service"],
        env={**os.environ, **environment},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert service.returncode == 1
    assert "c.GPUNotifications.channels['mail'] is no URL; write it like" in service.stderr
    assert "Traceback" not in service.stderr


# Secrets.


async def test_a_secret_comes_from_a_file_of_mode_600(
    broker: Broker, chat: Chat, tmp_path: Path
) -> None:
    secret = tmp_path / "token"
    url = f"json://127.0.0.1:{chat.port}/{{file:{secret}}}/{{address}}"
    choose(broker, "ada", "chat", "@ada")
    settings = {"channels": {"chat": url}, "retry_seconds": [0.05] * 400}
    async with notifying(broker, **settings):
        notice = await tried(broker, tell(broker))
        assert "cannot be read: No such file" in notice.error
        secret.write_text(" s3cr/t?#x\n")
        secret.chmod(0o644)
        await until(lambda: "chmod 600" in now(broker, notice).error, "the mode to be seen")
        assert chat.posted == []
        secret.chmod(stat.S_IRUSR | stat.S_IWUSR)
        await sent(broker, notice)
        ((path, posted),) = chat.posted
        assert path.startswith("/s3cr")
        assert posted["title"] == "Your server starts"

        chat.status = 500
        failed = await tried(broker, tell(broker))
        assert failed.error
        for form in ("s3cr/t", "s3cr%2Ft", "s3cr"):
            assert form not in failed.error


async def test_a_secret_comes_from_a_variable(
    broker: Broker, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(broker, "ada", "chat", "ada")
    url = f"json://127.0.0.1:{chat.port}/{{env:CHAT_TOKEN}}/{{address}}"
    async with notifying(broker, channels={"chat": url}, retry_seconds=[0.05] * 400):
        notice = await tried(broker, tell(broker))
        assert "CHAT_TOKEN is not set" in notice.error
        monkeypatch.setenv("CHAT_TOKEN", "abc")
        await sent(broker, notice)
    assert [path for path, _ in chat.posted] == ["/abc/ada"]


async def test_a_secret_is_in_no_error(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIL_HOST", "127.0.0.1")
    choose(broker, "ada")
    url = f"mailto://{{env:MAIL_HOST}}:{free_port()}?{FROM_TO}"
    async with notifying(broker, channels={"mail": url}):
        failed = await tried(broker, tell(broker))
    assert '"(secret)"' in failed.error
    assert "127.0.0.1" not in failed.error


async def test_a_whole_url_can_be_a_secret(broker: Broker, chat: Chat, tmp_path: Path) -> None:
    secret = tmp_path / "url"
    secret.write_text(f"json://127.0.0.1:{chat.port}/T0/B1/x?:key=a%20b\n")
    secret.chmod(0o600)
    broker.notifications.choose("ada", [ChannelChoice("team", "", frozenset({NoticeKind.TURN}))])
    async with notifying(broker, channels={"team": f"{{file:{secret}}}"}):
        await sent(broker, tell(broker))
    assert chat.posted[0][0].startswith("/T0/B1/x")
