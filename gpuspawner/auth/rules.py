"""Who is a member: the rules that an admin can set, and what they say of an account."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jupyterhub.utils import maybe_future
from traitlets import Any as AnyTrait
from traitlets import Bool, Dict, Enum, Set, Unicode, default

from ..broker.roster import OnRoster
from .pages import Sentences

Mail = tuple[str, bool]
"""A mail address, and whether its provider says that it is confirmed."""

LONGEST_GROUP = 255
"""Characters of a group's name that JupyterHub's database holds."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What one rule says of an account."""

    holds: bool
    why: str
    """Why it does not, to go on after "but"."""


class Rules(Sentences):
    """Membership by groups, mail addresses, the roster, or whatever the base class knows."""

    membership = Enum(
        ["any", "all"],
        default_value="any",
        config=True,
        help="""
        Whether one rule that holds makes a member, or only all of them that are set together:
        the base class's own (an organisation, a project, a filter), `allowed_groups`,
        `allowed_mail_domains` and `roster`.

        Whoever is named in `allowed_users` or is an admin needs none of them, and
        `blocked_users` come in by none of them.

        Example::

            c.MemberMixin.membership = "all"
        """,
    )

    allowed_groups = Set(
        Unicode(),
        config=True,
        help="""
        Members of any of these groups may sign in, beside those in `allowed_users`.

        With `manage_groups` the groups are those that the authenticator reports, such as an
        identity provider's groups claim. Without it they are JupyterHub's own groups, from
        `c.JupyterHub.load_groups`, the admin page or the REST API; an OAuthenticator refuses
        to start in that case, as it does without this package.

        Example::

            c.JupyterHub.load_groups = {"ml-course": {"users": ["ada", "grace"]}}
            c.MemberSharedPasswordAuthenticator.allowed_groups = {"ml-course"}
        """,
    )

    allowed_mail_domains = Set(
        Unicode(),
        config=True,
        help="""
        Whoever has a mail address in one of these domains may sign in. `*.lab.example` stands
        for every domain below `lab.example`, and not for that itself. Only an address counts
        that the identity provider says it has confirmed.

        Example::

            c.MemberMixin.allowed_mail_domains = {"lab.example", "*.lab.example"}
        """,
    )

    mail_is_confirmed = Bool(
        False,
        config=True,
        help="""
        Believe the mail addresses of an identity provider that does not say which of them it
        has confirmed. Only for one where people cannot write any address they like.

        Example::

            c.MemberMixin.mail_is_confirmed = True
        """,
    )

    roster = Bool(
        False,
        config=True,
        help="""
        Whoever is on the roster may sign in, from the start of their time on it to its end.
        With `manage_groups` they are in its groups, too. See `gpuspawner roster import`.

        Example::

            c.MemberMixin.roster = True
        """,
    )

    group_names = Dict(
        Unicode(),
        Unicode(),
        config=True,
        help="""
        What groups of the identity provider are called on this hub, with `manage_groups`. An
        empty name leaves a group out, `"*"` stands for all that are not named, and without it
        these keep their names.

        Example::

            c.MemberMixin.group_names = {
                "CN=GPU Lab,OU=Groups,DC=lab,DC=example": "gpu-lab",
                "4f1c2a7e-3b0e-4f5d-9a51-0e2f6c1d7b90": "ml-course",
                "*": "",
            }
        """,
    )

    broker = AnyTrait(
        help="The :class:`gpuspawner.broker.Broker` that opens accounts, set up by `c.Broker`.",
    )

    @default("broker")
    def _broker_default(self) -> Any:
        from ..broker import Broker

        return Broker(parent=self)

    # What classes of certain providers know.

    def _own_rule(self) -> str:
        """Why somebody fails the base class's own rules; nothing when none of them is set."""
        return ""

    def _mail_of(self, model: dict[str, Any]) -> Mail | Awaitable[Mail]:
        """The mail address of an account, and whether its provider has confirmed it."""
        return "", False

    # The rules.

    async def _each_rule(
        self, model: dict[str, Any], own: bool, roster: OnRoster | None
    ) -> AsyncIterator[Rule]:
        """What each rule that is set says of an account. ``own``: what the base class says."""
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
            return Rule(False, f"{self._service} gives no mail address of it")
        if not _in_domains(mail, self.allowed_mail_domains):
            return Rule(False, f"its mail address ({mail}) is in no domain that may use this hub")
        unconfirmed = f"{self._service} has not confirmed its mail address ({mail})"
        return Rule(confirmed, unconfirmed)

    def _makes_member(self, rules: Sequence[Rule]) -> bool:
        held = [rule.holds for rule in rules]
        return bool(held) and (all(held) if self.membership == "all" else any(held))

    def _why_no_member(self, rules: Sequence[Rule]) -> str:
        """Names only what is the person's own: which groups are let in is not theirs to know."""
        failed = [rule.why for rule in rules if not rule.holds]
        if self.membership == "all" and rules:
            return "this account has not all that membership needs: " + "; ".join(failed)
        return "; ".join(["this account is not on the list of members", *failed])

    # Groups.

    def _hub_groups_from(self, found: Iterable[object]) -> set[str]:
        """Groups of the provider as they are called here."""
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
    # Some letters beyond ASCII become others in small ones.
    if not name or not at or not domain.isascii() or "@" in name:
        return False
    domain = domain.lower()
    for allowed in domains:
        allowed = allowed.lower()
        if domain == allowed or (allowed.startswith("*.") and domain.endswith(allowed[1:])):
            return True
    return False
