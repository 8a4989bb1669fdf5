"""The admin's choices: from options, the environment or an earlier run, or by asking."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import click

from ..core.errors import Refused
from . import rules
from .models import (
    CLIENT_SECRET,
    DATABASE_VARIABLE,
    PROXY_VARIABLE,
    SUBNET,
    Answers,
    Question,
    Record,
    Secret,
    SignIn,
)
from .sign_in import DEFAULT, SIGN_INS

CRYPT_KEY = "JUPYTERHUB_CRYPT_KEY"
CALLBACK_VARIABLE = "OAUTH_CALLBACK_URL"
FIRST_ADMIN = "admin"
"""The admin of a hub with shared passwords, unless another is named."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; None or empty where it says nothing."""

    auth: str | None = None
    domain: str | None = None
    database: str | None = None
    """Empty for SQLite."""
    admins: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    subnet: str | None = None


class Interview:
    """Finds each answer: on the command line, else in the environment.

    If ``asks`` is true, it asks for all others, with the earlier answer as the default. Otherwise
    the earlier answer or the default counts; without one, the answer is missing.
    """

    def __init__(
        self,
        options: Options,
        record: Record,
        known: Mapping[str, str],
        environment: Mapping[str, str],
        *,
        asks: bool,
    ) -> None:
        self.options = options
        self.before = record.answers
        self.known = known
        self.environment = environment
        self.asks = asks
        self._missing: list[str] = []
        self._is_other = False
        """True if another sign-in was chosen before.

        Its ids and secrets do not count, and its admins' names may be those of strangers here.
        """

    def answers(self) -> tuple[Answers, dict[str, str], tuple[str, ...]]:
        """Return the answers, the hub's variables, and those that it must not have.

        Raises Refused naming what is missing.
        """
        options, before = self.options, self.before
        auth = options.auth or self._choose_sign_in(before.auth if before else DEFAULT)
        sign_in = SIGN_INS[auth]
        self._is_other = before is not None and before.auth != auth
        domain = self._domain(sign_in)
        settings, variables = self._settings(sign_in)
        admins = self._admins(auth)
        if self._missing:
            raise Refused(
                f"For the sign-in {auth}, this is missing: {'; '.join(self._missing)}. Or run this "
                "on a terminal, without --defaults: it asks."
            )
        _require_different(sign_in, variables)
        for name in (PROXY_VARIABLE, CRYPT_KEY):
            variables[name] = self.known.get(name) or secrets.token_hex(32)
        if domain and sign_in.needs_domain and sign_in.secrets:
            variables[CALLBACK_VARIABLE] = self._callback(domain)
        database = self._database()
        if database:
            variables[DATABASE_VARIABLE] = database
        subnet = options.subnet or (before.subnet if before else SUBNET)
        without = {DATABASE_VARIABLE}
        if before and self._is_other:
            without |= {CALLBACK_VARIABLE, *_variables_of(SIGN_INS[before.auth])}
        left = tuple(sorted(without - variables.keys()))
        return Answers(auth, domain, admins, settings, subnet), variables, left

    def _settings(self, sign_in: SignIn) -> tuple[dict[str, str], dict[str, str]]:
        """Return the settings of a sign-in, and the variables that it needs."""
        names = [each.name for each in sign_in.questions]
        if unknown := self.options.settings.keys() - set(names):
            raise Refused(
                f"--set {min(unknown)} is no setting of the sign-in {sign_in.name}. It has: "
                f"{', '.join(names) or 'none'}."
            )
        settings = {each.name: self._setting(each) for each in sign_in.questions}
        variables = {e.variable: settings[e.name] for e in sign_in.questions if e.variable}
        for secret in sign_in.secrets:
            variables[_place(sign_in, secret)] = self._secret(sign_in, secret)
        return settings, variables

    def _callback(self, domain: str) -> str:
        """Return where the provider sends people back; an admin may have changed its path."""
        known = self.known.get(CALLBACK_VARIABLE, "")
        is_same = rules.host_of(known) == domain
        return known if is_same else f"https://{domain}/hub/oauth_callback"

    def _choose_sign_in(self, default: str) -> str:
        if not self.asks:
            return default
        width = max(map(len, SIGN_INS))
        for each in SIGN_INS.values():
            click.echo(f"  {each.name:<{width}}  {each.title}", err=True)
        return str(
            click.prompt("Sign-in", type=click.Choice(list(SIGN_INS)), default=default, err=True)
        )

    def _domain(self, sign_in: SignIn) -> str:
        if self.options.domain is not None:
            return self.options.domain
        default = self.before.domain if self.before else ""
        if not self.asks:
            return default
        needs = sign_in.needs_domain
        text = "The hub's domain name, such as gpu.example.org"
        text += "" if needs else " (empty: for this machine alone)"
        return _ask(text, default, lambda value: rules.parse_domain(value) if value else "", needs)

    def _setting(self, question: Question) -> str:
        before = None if self._is_other else self.before
        name, variable = question.name, question.variable
        given = self.options.settings.get(name)
        if given is None and variable:
            given = self.environment.get(variable)
        if given is not None:
            try:
                return rules.check_setting(question, given)
            except ValueError as error:
                raise Refused(f"The setting {name} is not valid: {error}.") from None
        default = before.settings.get(name) if before else None
        if variable and variable in self.known and not self._is_other:
            default = self.known[variable]
        if default is None:
            default = question.default
        if self.asks:
            is_needed = question.default is None
            return _ask(
                question.prompt,
                default or "",
                lambda value: rules.check_setting(question, value),
                is_needed,
            )
        if default is None:
            self._missing.append(f"--set {name}=... ({question.prompt})")
            return ""
        return default

    def _secret(self, sign_in: SignIn, secret: Secret) -> str:
        given = self.environment.get(secret.variable)
        if given is not None:
            return _checked_secret(secret, given)
        known = self.known.get(_place(sign_in, secret))
        if known and not self._is_other:
            return known
        if self.asks:
            text = secret.prompt + (" (empty: a random one)" if secret.can_be_made else "")
            answer = click.prompt(text, hide_input=True, default="", show_default=False, err=True)
            if answer or not secret.can_be_made:
                return _checked_secret(secret, answer)
        if secret.can_be_made:
            return secrets.token_urlsafe(24)[: max(secret.least, 16)]
        self._missing.append(f"{secret.variable} in this command's environment ({secret.prompt})")
        return ""

    def _admins(self, auth: str) -> tuple[str, ...]:
        if self.options.admins:
            return tuple(sorted(set(self.options.admins)))
        default: tuple[str, ...] = (FIRST_ADMIN,) if auth == DEFAULT else ()
        if self.before and not self._is_other:
            default = self.before.admins
        if not self.asks:
            return default
        text = _ask(
            "User names of admins, with commas between them",
            ",".join(default),
            lambda value: ",".join(map(rules.parse_admin, rules.words(value))),
            is_needed=False,
        )
        return tuple(sorted(set(rules.words(text))))

    def _database(self) -> str:
        if self.options.database is not None:
            return self.options.database
        given = self.environment.get(DATABASE_VARIABLE, self.known.get(DATABASE_VARIABLE, ""))
        if given.startswith("sqlite"):
            raise Refused(
                f"{DATABASE_VARIABLE} names an SQLite file: leave it out, and the hub keeps one in "
                "its own folder."
            )
        try:
            found = rules.parse_database(given or "sqlite")
        except ValueError as error:
            raise Refused(f"{DATABASE_VARIABLE} is not valid: {error}.") from None
        if found or not self.asks:
            return found
        return _ask(
            "Database (sqlite, or a PostgreSQL URL without a password)",
            "sqlite",
            parse_open_database,
            is_needed=False,
        )


def parse_open_database(text: str) -> str:
    """Return a database's URL that others may read. Raises ValueError if it has a password."""
    url = rules.parse_database(text)
    if rules.has_password(url):
        raise ValueError(
            "it contains a password, which others can read on a command line: set "
            f"{DATABASE_VARIABLE} in this command's environment instead"
        )
    return url


def _place(sign_in: SignIn, secret: Secret) -> str:
    """Return where a secret is kept: the name of a variable, or the path of its own file."""
    return CLIENT_SECRET if sign_in.name == "oauth" else secret.variable


def _variables_of(sign_in: SignIn) -> list[str]:
    """Return the variables that a sign-in needs."""
    asked = [each.variable for each in sign_in.questions if each.variable]
    return asked + [each.variable for each in sign_in.secrets]


def _require_different(sign_in: SignIn, variables: Mapping[str, str]) -> None:
    """Raise Refused if two secrets of a sign-in are the same: JupyterHub would not start."""
    names = [_place(sign_in, secret) for secret in sign_in.secrets]
    if len({variables[name] for name in names}) < len(names):
        raise Refused(f"These have to differ: {' and '.join(names)}.")


def _checked_secret(secret: Secret, text: str) -> str:
    try:
        value = rules.check_line(text)
    except ValueError as error:
        raise Refused(f"{secret.variable} is not valid: {error}.") from None
    if len(value) < secret.least:
        raise Refused(
            f"{secret.variable} is too short: {secret.prompt.lower()} has at least "
            f"{secret.least} characters."
        )
    return value


def _ask(text: str, default: str, parse: Callable[[str], str], is_needed: bool) -> str:
    """Ask until the answer is valid."""

    def read(value: str) -> str:
        try:
            if is_needed and not value.strip():
                raise ValueError("an answer is needed")
            return parse(value)
        except ValueError as error:
            raise click.UsageError(f"{error}.") from None

    shown = default if default or not is_needed else None
    return str(
        click.prompt(text, default=shown, value_proc=read, show_default=bool(default), err=True)
    )
