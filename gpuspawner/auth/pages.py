"""What somebody reads who is not let in, or whose sign-in failed: sentences, and ways on."""

from __future__ import annotations

import asyncio
import html
import re
import traceback
from urllib.parse import quote

from jupyterhub.auth import Authenticator
from tornado import web
from tornado.httpclient import HTTPClientError
from traitlets import Unicode

_MAIL_ADDRESS = re.compile(r"[^\s@<>]+@[^\s@<>]+")
_TOKEN = re.compile(r"[\w.~+/=-]{24,}")
"""What a token, a code or a key looks like."""

Link = tuple[str, str]
"""The words of a link, and where it leads."""


class Page(web.HTTPError):
    """An error page in words; JupyterHub shows ``jupyterhub_html_message`` where it can."""

    def __init__(
        self, status: int, reason: str, message: str, *, markup: str, headline: str = ""
    ) -> None:
        super().__init__(status, message, reason=reason)
        self.jupyterhub_html_message = markup
        self.headline = headline


class Refusal(Page):
    """403: somebody is known, and is no member."""

    def __init__(self, message: str, *, why: str, markup: str, headline: str) -> None:
        super().__init__(403, "Forbidden", message, markup=markup, headline=headline)
        self.why = why
        """The reason alone."""


class Sentences(Authenticator):
    """Whom to ask, what went wrong, and how to try again."""

    contact = Unicode(
        config=True,
        help="""
        Whom to ask for membership: a mail address, or a sentence. It ends the page that
        someone reads who may not sign in. Shown as text: HTML in it has no effect.

        Example::

            c.MemberMixin.contact = "gpu-admin@lab.example"
            c.MemberMixin.contact = "Ask for a place in room 3.14, Tuesdays at noon."
        """,
    )

    @property
    def _service(self) -> str:
        return self.login_service or "The sign-in service"

    def _address(self, path: str) -> str:
        """Where a page of the hub is."""
        return str(getattr(self.parent, "hub_prefix", "/hub/")) + path

    def _try_again(self) -> Link:
        return "Try again", self._address("login")

    def _another_account(self) -> Link | None:
        """The way to sign in with another account; None where the sign-in form is one."""
        return None

    def _membership_remedy(self) -> str:
        return self._whom_to_ask("to let you in")

    def _whom_to_ask(self, what: str) -> str:
        if not self.contact:
            return f"Ask the admin of this hub {what}."
        if _MAIL_ADDRESS.fullmatch(self.contact):
            return f"Ask {self.contact} {what}."
        return self.contact

    def _refusal(self, name: str, why: str, remedy: str = "") -> Refusal:
        """Which account was used, why it does not suffice, what to do."""
        at = f" to {self.login_service}" if self.login_service else ""
        sentences = [f"You signed in{at} as {name!r}, but {why}."]
        sentences.append(remedy or self._whom_to_ask("about it"))
        another = self._another_account()
        if self.login_service and another is None:
            sentences.append(f"To use another account, sign out of {self.login_service} first.")
        message = " ".join(sentences)
        markup = self._markup(message, *([another] if another else ()))
        return Refusal(message, why=why, markup=markup, headline="You are not a member here")

    def _no_start(self, name: str, why: str) -> Refusal:
        """Who was a member and wants to start a server."""
        message = (
            f"No new server for {name!r}: this account is no member of this hub any more. "
            f"Why: {why}. Files and credits are kept. {self._membership_remedy()}"
        )
        markup = self._markup(message)
        return Refusal(message, why=why, markup=markup, headline="Your membership has ended")

    def _sentence_for(self, failure: Exception) -> web.HTTPError:
        """Whatever an authenticator raises, as an ``HTTPError`` that a person can act on."""
        if isinstance(failure, web.HTTPError) and failure.status_code < 500:
            return failure
        if isinstance(failure, Page):
            return failure
        if is_silence(failure):
            self.log.warning("%s does not answer: %s", self._service, failure)
            return self._not_working()
        if isinstance(failure, HTTPClientError) and failure.code < 500:
            self.log.warning("%s did not accept a sign-in: %s", self._service, failure)
            return self._failed(
                403,
                f"{self._service} did not accept this sign-in: it may have waited too long or "
                f"been used already. Start again from the sign-in page. {self._lasting()}",
            )
        lines = traceback.format_exception(type(failure), failure, failure.__traceback__)
        self.log.error("Sign-in failed:\n%s", without_tokens("".join(lines)))
        return self._unusable()

    def _not_working(self) -> Page:
        return self._failed(
            503,
            f"{self._service} is not working, so the hub cannot tell who you are. "
            f"Running servers go on. Try again in a moment. {self._lasting()}",
        )

    def _unusable(self) -> Page:
        """For what only the admin can mend."""
        return self._failed(
            502,
            f"{self._service} gave an answer that this hub cannot use, so you are not signed in. "
            + self._whom_to_ask("to look at the hub's log"),
        )

    def _failed(self, status: int, message: str) -> Page:
        """A sign-in that came to nothing, for no fault of the account."""
        reasons = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}
        reason = reasons.get(status, "Service Unavailable")
        markup = self._markup(message, self._try_again())
        return Page(status, reason, message, markup=markup, headline="You are not signed in")

    def _lasting(self) -> str:
        return "It stays that way? " + self._whom_to_ask("to look at the hub's log")

    def _markup(self, message: str, *links: Link) -> str:
        """The message as HTML, with a link to the mail and further ones below."""
        markup = html.escape(message)
        if _MAIL_ADDRESS.fullmatch(self.contact):
            shown = html.escape(self.contact)
            mail = f'<a href="mailto:{quote(self.contact, safe="@")}">{shown}</a>'
            markup = markup.replace(shown, mail)
        for words, address in links:
            button = f'<a class="btn btn-jupyter" href="{html.escape(address)}">'
            markup += f"</p><p>{button}{html.escape(words)}</a>"
        return markup


def is_silence(failure: Exception) -> bool:
    """Whether an identity provider gave no answer, or said that it is broken itself."""
    if isinstance(failure, HTTPClientError):
        return bool(failure.code >= 500)  # 599 is tornado's own code for a timeout
    return isinstance(failure, (OSError, asyncio.TimeoutError))


def without_tokens(text: str) -> str:
    """Text for the log: what may be a token in it is left out."""
    return _TOKEN.sub("(left out)", text)
