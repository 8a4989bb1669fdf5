"""What pages with forms share: a change is shown first, then confirmed, and done once."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ..broker.admin import LONGEST_REASON
from .fields import key_of
from .pages import Page


class FormPage(Page):
    """A page whose forms change something."""

    def field(self, name: str) -> str:
        """A field of the form; empty when it is not there."""
        return str(self.get_body_argument(name, ""))

    @property
    def confirmed(self) -> bool:
        """Whether the member has seen what will be done, and wants it."""
        return self.field("confirm") == "yes"

    @property
    def key(self) -> str:
        """By which a form that is sent twice is known; empty when it has none. Raises
        InvalidRequest."""
        text = self.field("key")
        return f"page:{self.actor}:{key_of(text)}" if text else ""

    def ask(
        self,
        title: str,
        facts: Sequence[tuple[str, str]],
        *,
        action: str,
        button: str,
        back: str,
        fields: Mapping[str, str] | None = None,
        note: str = "",
        danger: bool = False,
        why: str | None = None,
        **values: Any,
    ) -> None:
        """Show what will be done, with a button that does it; ``action`` and ``back`` are paths
        below the service's own. ``why``: a reason is asked for, and this is in its field."""
        self.show(
            "confirm.html",
            user=self.user,
            admin=self.admin,
            title=title,
            facts=facts,
            action=action,
            button=button,
            back=back,
            fields={"key": secrets.token_hex(8), **(fields or {}), "confirm": "yes"},
            note=note,
            danger=danger,
            why=why,
            longest=LONGEST_REASON,
            xsrf=self.xsrf,
            **{"here": "mine", **values},
        )

    def go(self, path: str) -> None:
        """On to another page of ours, after something was done."""
        self.redirect(self.context.prefix + path, status=303)


def part(name: str) -> str:
    """A name as a part of a path."""
    return quote(name, safe=":")
