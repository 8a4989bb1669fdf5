"""The guides for members, as the Hub shows them. Real: the documentation's own files."""

from __future__ import annotations

import re

import pytest

from gpuspawner.hub_pages.members_help import guides, to_html
from tests.support.doc_blocks import DOCS

BASE = "/hub/help"


def test_every_guide_of_the_documentation_is_there() -> None:
    pages = {page.stem for page in (DOCS / "how-to/members").iterdir()}
    assert guides().keys() == pages - {"index"} and len(guides()) > 10
    titles = [guide.title for guide in guides().values()]
    assert titles == sorted(set(titles))


@pytest.mark.parametrize("name", guides())
def test_guide_has_its_words_and_links_only_to_guides(name: str) -> None:
    html = to_html(name, BASE)
    assert "<h2>" in html and "<h1>" not in html
    links = re.findall(r'href="([^"]*)"', html)
    assert {link.removeprefix(f"{BASE}/") for link in links} <= guides().keys()
    # What only Sphinx understands.
    assert not [mark for mark in ("not run:", "{doc}", "```", ":::") if mark in html]
    assert html.count("<a ") == html.count("</a>") == len(links)


def test_link_out_of_the_guides_is_only_text() -> None:
    html = to_html("wait-in-the-queue", BASE)
    assert f'<a href="{BASE}/be-told-by-mail-or-chat">mail or chat</a>' in html
    assert "The queue explains the\npoints" in html
