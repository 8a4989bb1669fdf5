"""Markdown of a catalog: whatever is written, what comes out can do nothing."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.catalog.markdown import first_words, to_html

HARMLESS = {"a": {"href", "title", "rel"}, "ol": {"start"}}
SCHEMES = ("http:", "https:", "mailto:")


class Reader(HTMLParser):
    """Every tag and attribute of a page as a browser would see it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def tags(html: str) -> list[tuple[str, dict[str, str | None]]]:
    reader = Reader()
    reader.feed(html)
    reader.close()
    return reader.seen


def assert_harmless(html: str) -> None:
    for tag, attributes in tags(html):
        assert tag not in ("script", "style", "img", "iframe", "svg", "form", "input", "object")
        assert attributes.keys() <= HARMLESS.get(tag, set())
        link = (attributes.get("href") or "").strip().lower()
        assert ":" not in link.split("/")[0].split("?")[0].split("#")[0] or link.startswith(SCHEMES)


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](java\tscript:alert(1))",
        "[x](data:text/html,<script>alert(1)</script>)",
        "<javascript:alert(1)>",
        "![x](https://example.org/spy.png)",
        "[x]: vbscript:x\n\n[x]",
        '[x](https://example.org "a\\" onmouseover=alert(1)")',
        "<svg/onload=alert(1)>",
        "<!--><script>alert(1)</script>-->",
        "`<script>`\n\n```html\n<script>alert(1)</script>\n```",
        "<style>body{display:none}</style>",
        "<a href='javascript:x'>y</a>",
        "|<script>|\n|---|\n|<b onclick=x>|",
    ],
)
def test_hostile_markdown_renders_as_harmless_html(text: str) -> None:
    assert_harmless(to_html(text))


PIECES = """
< > script [ ]( ) javascript: ` " ' on= &# ; img_src ![ x / \\ // data: | - #
"""


@given(st.lists(st.sampled_from(["\n", " ", "\x00", "\u202e", *PIECES.split()]), max_size=25))
def test_arbitrary_markdown_renders_as_harmless_html(pieces: list[str]) -> None:
    text = "".join(pieces).replace("_", " ")
    assert_harmless(to_html(text))
    assert len(first_words(text)) <= 200


def test_markdown_renders_to_html_and_a_plain_summary() -> None:
    html = to_html(
        "# New\n\nWith **CUDA**, see [the guide](https://example.org/guide).\n\n- a\n- b"
    )
    assert "<h3>New</h3>" in html
    assert "<strong>CUDA</strong>" in html
    assert '<a href="https://example.org/guide" rel="noopener noreferrer nofollow">' in html
    assert [tag for tag, _ in tags(html)].count("li") == 2
    assert "<td>" in to_html("|a|\n|---|\n|b|")
    assert "<h6>" in to_html("###### Deep")
    assert "<h2>New</h2>" in to_html("# New", heading=2)

    text = "# PyTorch\n\nWith **CUDA** and `torch`,\nsee [this](https://example.org).\n\nMore."
    assert first_words(text) == "With CUDA and torch, see this."
    assert first_words("") == ""
    assert first_words("# Only a heading") == ""
    assert first_words("word " * 100).endswith("word...")
