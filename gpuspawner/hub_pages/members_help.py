"""The members' help at ``/hub/help``: the guides of the documentation, without another host."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup
from tornado import web

from .handlers import HubPageHandler

_parser = MarkdownIt("commonmark", {"html": False}).enable("table")
_GUIDE = re.compile(r"([a-z-]+)\.md")


@dataclass(frozen=True, slots=True)
class Guide:
    """One guide."""

    name: str
    """Its name in the address."""
    title: str
    tokens: tuple[Token, ...]
    """Its Markdown without the title."""


@cache
def guides() -> Mapping[str, Guide]:
    """Return every guide by its name."""
    folder = importlib.resources.files(__package__) / "help"
    found = (_read(each.name, each.read_text("utf-8")) for each in folder.iterdir())
    in_order = sorted(found, key=lambda each: each.title)
    return {each.name: each for each in in_order if each.name != "index"}


def _read(file: str, text: str) -> Guide:
    _, title, _, *rest = _parser.parse(text)  # the first three are the heading
    for token in rest:
        if token.type == "th_open":
            token.attrSet("scope", "col")
    return Guide(file.removesuffix(".md"), title.content, tuple(rest))


@cache
def to_html(name: str, base: str) -> Markup:
    """Return a guide as HTML; ``base`` is the address of the help. Raises KeyError."""
    tokens = [_with_links(token, base) for token in guides()[name].tokens]
    html = _parser.renderer.render(tokens, _parser.options, {})
    return Markup(html)  # our own texts  # nosec B704


def _with_links(token: Token, base: str) -> Token:
    """Return a part of a page with links to other guides. What else is linked is only text."""
    return token.copy(children=list(_linked(token.children, base))) if token.children else token


def _linked(tokens: list[Token], base: str) -> Iterator[Token]:
    is_kept = True
    for token in tokens:
        if token.type == "link_open":
            guide = _GUIDE.fullmatch(str(token.attrs["href"]))
            is_kept = guide is not None
            if guide:
                yield token.copy(attrs={"href": f"{base}/{guide[1]}"})
        elif token.type != "link_close" or is_kept:
            yield token


class Help(HubPageHandler):
    """The pages ``/hub/help`` and ``/hub/help/GUIDE``."""

    async def get(self, name: str = "") -> None:
        """Show the list of guides, or one of them."""
        base = f"{self.hub.base_url}help"
        guide = guides().get(name)
        if name and guide is None:
            raise web.HTTPError(404, "There is no guide %r. All guides: %s", name[:60], base)
        text = to_html(guide.name, base) if guide else ""
        await self.show("help.html", guides=guides().values(), guide=guide, text=text, url=base)
