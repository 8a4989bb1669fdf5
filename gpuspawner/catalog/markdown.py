"""Convert Markdown in a catalog to inert HTML, without scripts, styles and pictures.

The hub's own pages show the admin's text. Therefore the parser accepts no HTML, and a sanitiser
only keeps a short list of tags and attributes of its output.
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
    """Return the text as HTML whose largest heading is ``<h{heading}>``.

    Links may lead to the web, to mail or to the hub's own host. Pictures are removed, because a
    browser could load them from another host.
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
    """Return the first paragraph as plain text, cut to at most ``most`` characters."""
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
