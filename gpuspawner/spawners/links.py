"""Links that choose: ``/hub/spawn?opt-environment=pytorch`` opens the form with that chosen.

JupyterHub itself starts a server for whoever follows such a link. Here a link starts nothing: it
may stand in a course page, or come from somebody who likes others to spend their credits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from jupyterhub.handlers.pages import SpawnHandler
from jupyterhub.spawner import SpawnException
from jupyterhub.utils import maybe_future
from traitlets import Any as AnyTrait
from traitlets import Dict

from ..errors import GPUSpawnerError
from ..ledger.payers import check_payer
from . import options
from .base import GPUSpawnerBase, spawn_exception
from .data import with_data

PREFIX = "opt-"

_NOT_SET_BY_LINKS = ("hidden", "file", "password", "submit", "button", "image", "reset")
"""Types of fields that no link fills in."""

_LIMITS = ("gpu_limit", "default_hours", "most_hours", "workspace_quota")
"""Traits that decide what the form offers."""


class GPUSpawnerLinks(GPUSpawnerBase):
    """The part of the mixin that reads links. Use :class:`GPUSpawnerMixin`, not this."""

    asked = AnyTrait(None, allow_none=True, help="What the link chose by which the form is open.")

    asked_beside = Dict(
        help="What the link says beside that: texts by name, of the admin's fields."
    )

    async def run_auth_state_hook(self, auth_state: Any) -> None:
        """The admin's hook; when the form is asked for, the link's choice is taken then.

        It is the last thing of a spawner's that JupyterHub calls before it would start a server
        with what the link says. A choice that cannot be had is left for
        :meth:`options_from_query`, whose refusal JupyterHub shows above the form.
        """
        await super().run_auth_state_hook(auth_state)
        handler = getattr(self, "handler", None)
        if not isinstance(handler, SpawnHandler) or handler.request.method != "GET":
            return
        query = handler.request.query_arguments
        self.asked = None
        fields = _fields(query)
        self.asked_beside = _fields_beside(query)
        try:
            if fields:
                choice = self._choice_of(fields)
                await self._check_choice(choice)
                self.asked = choice
        except GPUSpawnerError:
            return
        for name in [name for name in query if name not in ("next", "display_name")]:
            del query[name]

    def asked_of(self, names: Collection[str]) -> dict[str, list[str]]:
        """Return what the link says of these fields of the admin's."""
        return {name: texts for name, texts in self.asked_beside.items() if name in names}

    async def options_from_query(self, query_data: Mapping[str, list[Any]]) -> dict[str, Any]:
        """Never options: why what a link chose cannot be had."""
        try:
            choice = self._choice_of(query_data)
            await self._check_choice(choice)
        except GPUSpawnerError as error:
            raise spawn_exception(error) from None
        self.asked = choice
        sentence = "Look at what the link chose, and press Start."
        raise SpawnException(sentence, reason="link", status_code=400)

    def run_options_from_form(self, form_data: Mapping[str, list[Any]]) -> Any:
        """What the member chose now counts, and no link any more."""
        self.asked, self.asked_beside = None, {}
        return super().run_options_from_form(form_data)

    def last_choice(self) -> options.Choice:
        """What this server was started with last time, and what a link says over it."""
        try:
            stored = self.orm_spawner.user_options or {}
            last = options.parse(stored, foreign=True)
        except GPUSpawnerError:  # written by an older version, or by somebody else
            last = options.Choice()
        if self.asked is None:
            return last
        if self.asked.environment not in (None, last.environment):
            last = options.Choice(account=last.account, wait=last.wait)
        return replace(last, **self.asked.as_user_options())

    def _choice_of(self, fields: Mapping[str, list[Any]]) -> options.Choice:
        """What a link chose of ours; what else it says, an admin's own form may read."""
        return self.parse_options(fields)

    async def _check_choice(self, choice: options.Choice) -> None:
        """Whether this member may have it here, at all and not now. Raises Refused."""
        await self.refresh_catalog()
        catalog, groups = self.load_catalog(), self.group_names
        if choice.environment:
            environment = catalog.get_for(choice.environment, groups)
        else:
            environment = catalog.default_for(groups)
        environment.with_options(choice.options_in(environment))
        with_data(catalog, environment, choice.data, groups)
        if choice.account:
            check_payer(choice.account, self.user.name, groups)
        with self._set_for_now(await self._limits_of_groups()):
            request = options.resolve(choice, environment, self.most_gpus())
            if request.devices:
                options.session_seconds(choice, self.session_hours(environment), environment)
        if choice.gpus:
            await self.broker.read(self.broker.must_fit, request)

    # What group_overrides will set.

    async def _limits_of_groups(self) -> dict[str, Any]:
        """What ``group_overrides`` will set at the start, of what the form shows."""
        overrides = self.group_overrides
        if callable(overrides):
            overrides = await maybe_future(overrides(self))
        found = {}
        for name in sorted(overrides):
            if self.group_names & set(overrides[name]["groups"]):
                settings = overrides[name]["spawner_override"]
                found.update({trait: settings[trait] for trait in _LIMITS if trait in settings})
        return {trait: value(self) if callable(value) else value for trait, value in found.items()}

    @contextmanager
    def _set_for_now(self, values: Mapping[str, Any]) -> Iterator[None]:
        before = {trait: getattr(self, trait) for trait in values}
        try:
            for trait, value in values.items():
                self.set_trait(trait, value)
            yield
        finally:
            for trait, value in before.items():
                self.set_trait(trait, value)


def _fields(query: MutableMapping[str, list[bytes]]) -> dict[str, list[str]]:
    """The options of an address, as JupyterHub would read them, but for strangers' additions.

    Values are mended in place where they are no UTF-8: JupyterHub reads them after us.
    """
    for name, values in query.items():
        query[name] = [value.decode("utf-8", "replace").encode() for value in values]
    said = {name: [value.decode() for value in values] for name, values in query.items()}
    ours = {name[len(PREFIX) :]: said[name] for name in said if name.startswith(PREFIX)}
    # Without the prefix only what is known: mail programs and course pages add things.
    return ours or {name: said[name] for name in said if name in options.FIELDS}


def _fields_beside(query: Mapping[str, list[bytes]]) -> dict[str, list[str]]:
    """The fields of an address that are not ours, with or without the prefix."""
    said = {
        name.removeprefix(PREFIX): [value.decode("utf-8", "replace") for value in values]
        for name, values in query.items()
    }
    return {name: texts for name, texts in said.items() if name not in options.FIELDS}


def names_in(form: str) -> set[str]:
    """Return the names of the fields of a form, which is HTML."""
    reader = _FieldNames()
    reader.feed(form)
    return reader.names


class _FieldNames(HTMLParser):
    """Collects the names of the controls that a member can set."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("select", "input", "textarea") and given.get("type") not in _NOT_SET_BY_LINKS:
            self.names.add(given.get("name") or "")
