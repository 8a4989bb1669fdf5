"""Markdown of a catalog as HTML that can do nothing: no scripts, no styles, no pictures.

What an admin writes is shown on the hub's own pages, so it goes through a parser that knows no
HTML of its own, and what comes out through a sanitiser with a short list of what may stay.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import nh3
from markdown_it import MarkdownIt
from markupsafe import Markup

_TAGS = {
    *("a", "blockquote", "br", "code", "em", "hr", "li", "ol", "p", "pre", "s", "strong", "ul"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "table", "tbody", "td", "th", "thead", "tr"),
}
_ATTRIBUTES = {"a": {"href", "title"}, "ol": {"start"}}
_SCHEMES = {"http", "https", "mailto"}

_parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


@lru_cache(maxsize=1024)
def to_html(text: str, heading: int = 3) -> Markup:
    """The text as HTML whose largest heading is ``<h{heading}>``.

    Links lead to the web, to mail or to the hub's own host, and open as they are; there are no
    pictures, which could ask another host for themselves.
    """
    tokens = _parser.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + heading - 1)}"
    html = _parser.renderer.render(tokens, _parser.options, {})
    return Markup(  # cleaned here  # nosec B704
        nh3.clean(
            html,
            tags=_TAGS,
            attributes=_ATTRIBUTES,
            url_schemes=_SCHEMES,
            link_rel="noopener noreferrer nofollow",
        )
    )


@lru_cache(maxsize=16384)
def first_words(text: str, most: int = 200) -> str:
    """The first paragraph without its markup, in at most so many characters; plain text."""
    tokens = _parser.parse(text)
    for before, token in pairwise(tokens):
        if before.type == "paragraph_open":
            parts = token.children or []
            words = "".join(
                " " if part.type in ("softbreak", "hardbreak") else part.content for part in parts
            )
            if words.strip():
                words = " ".join(words.split())
                if len(words) > most:
                    words = words[: most - 3].rpartition(" ")[0] + "..."
                return words
    return ""
