"""A real SMTP server on a port of this machine, which can refuse, be away and come back."""

from __future__ import annotations

import email
import email.policy
import ssl
from contextlib import suppress
from dataclasses import dataclass
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, LoginPassword

from tests.support.processes import PATIENCE, free_port


@dataclass(frozen=True)
class Mail:
    """A mail as it came in."""

    sender: str
    to: tuple[str, ...]
    """Of the envelope: who gets it, whatever its headers say."""
    raw: bytes

    @property
    def message(self) -> EmailMessage:
        return email.message_from_bytes(self.raw, policy=email.policy.default)

    @property
    def subject(self) -> str:
        return str(self.message["Subject"])

    @property
    def text(self) -> str:
        """The plain text in it."""
        part = self.message.get_body(("plain",))
        assert part is not None
        return str(part.get_content()).replace("\r\n", "\n").strip()


class MailServer:
    """``with MailServer() as mail``: what it took is in ``mail.received``.

    With a ``certificate`` (a file as :func:`certificate` makes) it takes mail after STARTTLS and
    a login only: user ``gpu``, with ``password``.
    """

    def __init__(self, certificate: Path | None = None, password: str = "") -> None:
        self.port = free_port()
        self.password = password
        self.options: dict[str, Any] = {}
        if certificate:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificate)
            self.options = {
                "tls_context": context,
                "require_starttls": True,
                "auth_required": True,
                "authenticator": self.authenticate,
            }
        self.received: list[Mail] = []
        self.refused: set[str] = set()
        """Addresses that it does not know."""
        self._controller: Controller | None = None

    def __enter__(self) -> MailServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """A channel that sends through it."""
        return f"mailto://127.0.0.1:{self.port}?from=gpu@lab.example&to={{address}}"

    def start(self) -> None:
        self._controller = Controller(
            self,
            hostname="127.0.0.1",
            port=self.port,
            ready_timeout=15.0 * PATIENCE,
            **self.options,
        )
        self._controller.start()

    def stop(self) -> None:
        if self._controller:
            with suppress(AssertionError):  # as aiosmtpd says that it was stopped before
                self._controller.stop()
            self._controller = None

    # What aiosmtpd calls.

    async def handle_RCPT(
        self, server: Any, session: Any, envelope: Any, address: str, options: Any
    ) -> str:
        if address in self.refused:
            return "550 nobody here has that name"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    def authenticate(self, server: Any, session: Any, envelope: Any, how: str, data: Any) -> Any:
        expected = LoginPassword(b"gpu", self.password.encode())
        success = session.ssl is not None and data == expected
        return AuthResult(success=success, handled=False)

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.received.append(Mail(envelope.mail_from, tuple(envelope.rcpt_tos), envelope.content))
        return "250 OK"
