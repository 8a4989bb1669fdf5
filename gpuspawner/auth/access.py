"""Membership rules that the admin sets, and the messages for people who are refused."""

from __future__ import annotations

import asyncio
import html
import re
import traceback
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from jupyterhub.auth import Authenticator
from jupyterhub.utils import maybe_future
from tornado import web
from tornado.httpclient import HTTPClientError
from traitlets import Any as AnyTrait
from traitlets import Bool, Dict, Enum, Set, Unicode, default

from ..members.roster import RosterVerdict

_MAIL_ADDRESS = re.compile(r"[^\s@<>]+@[^\s@<>]+")
_TOKEN = re.compile(r"[\w.~+/=-]{24,}")
"""Matches text that may be a token, a code or a key."""

Link = tuple[str, str]
"""The text of a link, and its URL."""


class AuthPage(web.HTTPError):
    """An error page for people; JupyterHub shows its ``jupyterhub_html_message`` if it can."""

    def __init__(self, status: int, message: str, *, markup: str, headline: str) -> None:
        super().__init__(status, message, reason=HTTPStatus(status).phrase)
        self.jupyterhub_message = message  # JupyterHub 5 would show the phrase alone
        self.jupyterhub_html_message = markup
        self.headline = headline


class Refusal(AuthPage):
    """A 403 page: the account is known, but is not a member."""

    def __init__(self, message: str, *, why: str, markup: str, headline: str) -> None:
        super().__init__(403, message, markup=markup, headline=headline)
        self.why = why
        """The reason, without the rest of the message."""


class Sentences(Authenticator):
    """Messages that say what went wrong, whom to ask and how to try again."""

    contact = Unicode(
        config=True,
        help="""
        Whom to ask for membership: a mail address or a sentence. It ends the page that refuses a
        sign-in. Without it, the page says to ask the admin of this hub. It is shown as plain text:
        HTML in it has no effect.

        Example::

            c.MemberMixin.contact = "gpu-admin@lab.example"
            c.MemberMixin.contact = "Ask for a place in room 3.14, Tuesdays at noon."
        """,
    )

    @property
    def _service(self) -> str:
        return self.login_service or "The sign-in service"

    def _address(self, path: str) -> str:
        return str(getattr(self.parent, "hub_prefix", "/hub/")) + path

    def _try_again(self) -> Link:
        return "Try again", self._address("login")

    def _another_account(self) -> Link | None:
        """Return a link to sign in with another account; None if the sign-in form allows that."""
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
        """Return a page that names the account, why it is refused and what to do."""
        at = f" to {self.login_service}" if self.login_service else ""
        start = f"You signed in{at} as {name!r}, but {why}."
        sentences = [start, remedy or self._whom_to_ask("about it")]
        another = self._another_account()
        if self.login_service and another is None:
            sentences.append(f"To use another account, sign out of {self.login_service} first.")
        message = " ".join(sentences)
        markup = self._markup(message, *([another] if another else ()))
        return Refusal(message, why=why, markup=markup, headline="You are not a member here")

    def _no_start(self, name: str, why: str) -> Refusal:
        """Return the page for a former member who tries to start a server."""
        message = (
            f"No new server for {name!r}: this account is no longer a member of this hub. "
            f"Reason: {why}. Files and credits are kept. {self._membership_remedy()}"
        )
        headline = "Your membership has ended"
        return Refusal(message, why=why, markup=self._markup(message), headline=headline)

    def _sentence_for(self, failure: Exception) -> web.HTTPError:
        """Convert any exception of an authenticator to an ``HTTPError`` with a useful message."""
        is_page = isinstance(failure, AuthPage)
        if isinstance(failure, web.HTTPError) and (is_page or failure.status_code < 500):
            return failure
        if is_silence(failure):
            self.log.warning("%s is not responding: %s", self._service, failure)
            return self._not_working()
        if isinstance(failure, HTTPClientError) and failure.code < 500:
            self.log.warning("%s did not accept a sign-in: %s", self._service, failure)
            return self._failed(
                403,
                f"{self._service} did not accept this sign-in: it may have waited too long or "
                f"been used already. Start again from the sign-in page. {self._lasting()}",
            )
        lines = traceback.format_exception(type(failure), failure, failure.__traceback__)
        self.log.error("Sign-in failed:\n%s", _TOKEN.sub("(left out)", "".join(lines)))
        return self._unusable()

    def _not_working(self) -> AuthPage:
        return self._failed(
            503,
            f"{self._service} is not working, so the hub cannot tell who you are. "
            f"Running servers continue. Try again in a moment. {self._lasting()}",
        )

    def _unusable(self) -> AuthPage:
        """Return the page for an error that only the admin can fix."""
        return self._failed(
            502,
            f"This hub cannot use the answer of {self._service}, so you are not signed in. "
            + self._whom_to_ask("to look at the hub's log"),
        )

    def _failed(self, status: int, message: str) -> AuthPage:
        """Return the page for a sign-in that failed for a reason other than the account."""
        markup = self._markup(message, self._try_again())
        return AuthPage(status, message, markup=markup, headline="You are not signed in")

    def _lasting(self) -> str:
        return "Still not working? " + self._whom_to_ask("to look at the hub's log")

    def _markup(self, message: str, *links: Link) -> str:
        """Return the message as HTML, with the contact address linked and ``links`` below it."""
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
    """Return True if an identity provider did not respond or reported an error of its own."""
    if isinstance(failure, HTTPClientError):
        return bool(failure.code >= 500)  # 599 is tornado's own code for a timeout
    return isinstance(failure, (OSError, asyncio.TimeoutError))


Mail = tuple[str, bool]
"""A mail address, and True if its provider has confirmed it."""

LONGEST_GROUP = 255
"""Maximum number of characters of a group's name in JupyterHub's database."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The result of one membership rule for an account."""

    holds: bool
    why: str
    """Why the rule does not hold, as the end of a sentence after "but"."""


class Rules(Sentences):
    """Membership by groups, mail addresses, the roster or the rules of the base class."""

    membership = Enum(
        ["any", "all"],
        default_value="any",
        config=True,
        help="""
        Which rules an account must meet to be a member: `any` one of them (the default) or `all`.
        The rules are those that are set: the base class's own (an organisation, a project, a
        filter), `allowed_groups`, `allowed_mail_domains` and `roster`.

        Admins and users in `allowed_users` need to meet none of them. Users in `blocked_users` are
        refused whatever rules they meet.

        Example::

            c.MemberMixin.membership = "all"
        """,
    )

    allowed_groups = Set(
        Unicode(),
        config=True,
        help="""
        Groups whose members may sign in, in addition to the users in `allowed_users`. Membership of
        one of the groups is enough.

        With `manage_groups`, these are the groups that the authenticator reports, such as an
        identity provider's groups claim. Without it, they are JupyterHub's own groups, from
        `c.JupyterHub.load_groups`, the admin page or the REST API. An OAuthenticator refuses to
        start in the latter case, as it does without this package.

        Example::

            c.JupyterHub.load_groups = {"ml-course": {"users": ["ada", "grace"]}}
            c.MemberSharedPasswordAuthenticator.allowed_groups = {"ml-course"}
        """,
    )

    allowed_mail_domains = Set(
        Unicode(),
        config=True,
        help="""
        People with a mail address in one of these domains may sign in. `*.lab.example` matches
        every subdomain of `lab.example`, but not `lab.example` itself. An address counts only if
        the identity provider reports it as confirmed (or with `mail_is_confirmed`).

        Example::

            c.MemberMixin.allowed_mail_domains = {"lab.example", "*.lab.example"}
        """,
    )

    mail_is_confirmed = Bool(
        False,
        config=True,
        help="""
        Trust the mail addresses of an identity provider that does not report which of them it has
        confirmed. Off by default. Turn it on only if people cannot enter any address they like at
        the provider.

        Example::

            c.MemberMixin.mail_is_confirmed = True
        """,
    )

    roster = Bool(
        False,
        config=True,
        help="""
        People on the roster may sign in, from the start of their entry to its end. With
        `manage_groups`, they also get the groups of their entry. Off by default. See
        `gpuspawner roster import`.

        Example::

            c.MemberMixin.roster = True
        """,
    )

    group_names = Dict(
        Unicode(),
        Unicode(),
        config=True,
        help="""
        The names on this hub of the identity provider's groups, with `manage_groups`. An empty name
        leaves a group out. `"*"` names all groups that are not listed; without it, they keep their
        names.

        Example::

            c.MemberMixin.group_names = {
                "CN=GPU Lab,OU=Groups,DC=lab,DC=example": "gpu-lab",
                "4f1c2a7e-3b0e-4f5d-9a51-0e2f6c1d7b90": "ml-course",
                "*": "",
            }
        """,
    )

    services = AnyTrait(help="The :class:`gpuspawner.services.Services` that open accounts.")

    @default("services")
    def _services_default(self) -> Any:
        from ..services import Services

        return Services(self.config)

    # Overridden by the classes for specific providers.

    def _own_rule(self) -> str:
        """Return why an account fails the base class's rules; empty if none of them is set."""
        return ""

    def _mail_of(self, model: dict[str, Any]) -> Mail | Awaitable[Mail]:
        """Return the mail address of an account, and True if its provider has confirmed it."""
        return "", False

    # Rules.

    async def _each_rule(
        self, model: dict[str, Any], own: bool, roster: RosterVerdict | None
    ) -> AsyncIterator[Rule]:
        """Yield the result of each rule that is set. ``own``: the result of the base class."""
        if own or self._own_rule():
            yield Rule(own, self._own_rule())
        groups = set(model.get("groups") or ())
        if self.allowed_groups:
            yield Rule(bool(groups & self.allowed_groups), _why_not_by(groups))
        if self.allowed_mail_domains:
            mail, confirmed = await maybe_future(self._mail_of(model))
            yield self._by_mail(mail, confirmed or self.mail_is_confirmed)
        if roster is not None:
            yield Rule(roster.member, roster.why)

    def _by_mail(self, mail: str, confirmed: bool) -> Rule:
        if not mail:
            return Rule(False, f"{self._service} reports no mail address for it")
        if not _in_domains(mail, self.allowed_mail_domains):
            return Rule(False, f"its mail address ({mail}) is in no domain that may use this hub")
        unconfirmed = f"{self._service} has not confirmed its mail address ({mail})"
        return Rule(confirmed, unconfirmed)

    def _best_mail(self, mails: Sequence[str]) -> str:
        """Return a confirmed address that meets the rule if there is one, else the first."""
        fitting = (mail for mail in mails if self._by_mail(mail, True).holds)
        return next(fitting, mails[0] if mails else "")

    def _makes_member(self, rules: Sequence[Rule]) -> bool:
        held = [rule.holds for rule in rules]
        return bool(held) and (all(held) if self.membership == "all" else any(held))

    def _why_no_member(self, rules: Sequence[Rule]) -> str:
        """Return why an account is refused, without naming the groups that are allowed."""
        failed = [rule.why for rule in rules if not rule.holds]
        if self.membership == "all" and rules:
            return "this account does not meet all rules of membership: " + "; ".join(failed)
        return "; ".join(["this account is not on the list of members", *failed])

    # Groups.

    def _hub_groups_from(self, found: Iterable[object]) -> set[str]:
        """Return the hub's names for groups of the provider."""
        rest = self.group_names.get("*")
        named = set()
        for group in found:
            name = str(group)
            name = self.group_names.get(name, name if rest is None else rest)
            if len(name) > LONGEST_GROUP:
                self.log.warning("A group's name is too long for the hub: %s...", name[:60])
            elif name:
                named.add(name)
        return named


def _why_not_by(groups: Iterable[str]) -> str:
    if not groups:
        return "it is in no group that may use this hub"
    return f"none of its groups may use this hub ({', '.join(sorted(groups))})"


def _in_domains(mail: str, domains: Iterable[str]) -> bool:
    name, at, domain = mail.strip().rpartition("@")
    # Lower case turns some letters beyond ASCII into ASCII letters.
    if not name or not at or not domain.isascii() or "@" in name:
        return False
    domain = domain.lower()
    for allowed in domains:
        allowed = allowed.lower()
        if domain == allowed or (allowed.startswith("*.") and domain.endswith(allowed[1:])):
            return True
    return False
