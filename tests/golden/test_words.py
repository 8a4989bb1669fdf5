"""Members' pages and messages name no settings; admins' pages do so in help details only.

Real: the recorded pages and messages, the templates, and the names of all settings.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.golden.conftest import RECORDED, configurables
from tests.support.page_text import text_of
from tests.support.processes import REPO

FOR_ADMINS = re.compile(
    r"admin-|navigation-admin|spawn-admin|confirm-(?!ada|eve|folders|.*restart)"
)
TEMPLATES = sorted(
    path for path in REPO.glob("gpuspawner/**/*templates/**/*") if path.suffix in (".html", ".txt")
)
SETTINGS = {
    word
    for cls in configurables()
    for word in (
        cls.__name__,
        *(name for name in cls.class_trait_names(config=True) if "_" in name),
    )
}


def jargon_in(text: str) -> set[str]:
    """Return the settings, command-line flags and standards that a text names."""
    named = re.findall(r"\bc\.[A-Z]\w+|(?<![-\w])--[a-z][\w-]*|\bRFC\b|\bgpuspawner [a-z]+", text)
    return {*named, *SETTINGS.intersection(re.findall(r"\w+", text))}


def recorded_for_members() -> list[Path]:
    """Pages and notices. `make golden` writes them before this is asked."""
    pages = [*RECORDED.glob("pages/*.html"), *RECORDED.glob("hub/*.html")]
    return [RECORDED / "notices.txt", *(p for p in pages if not FOR_ADMINS.match(p.name))]


def test_no_page_or_message_for_members_has_jargon() -> None:
    text = "Set c.GPUCredits or grace_seconds (RFC 5545), or type `gpuspawner grant --open`."
    found = {"c.GPUCredits", "GPUCredits", "grace_seconds", "RFC", "gpuspawner grant", "--open"}
    assert jargon_in(text) == found
    texts = {path: text_of(path.read_text(encoding="utf-8")) for path in recorded_for_members()}
    assert len(texts) > 30
    assert {path: words for path, text in texts.items() if (words := jargon_in(text))} == {}


def test_no_template_has_jargon_outside_of_help_details() -> None:
    found = {}
    for path in TEMPLATES:
        text = re.sub(r"\{#.*?#\}", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        text = re.sub(r"<details\b.*?</details>", "", text, flags=re.DOTALL)
        text = re.sub(r"\{[{%](?:[^\"}]|\"[^\"]*\")*?[%}]\}", lambda tag: words_in(tag[0]), text)
        if words := jargon_in(text_of(text)):
            found[path] = words
    assert len(TEMPLATES) > 50 and found == {}


def words_in(tag: str) -> str:
    """Return the sentences in a tag of Jinja: its texts with more than one word."""
    return " ".join(text for text in re.findall(r'"([^"]*)"', tag) if " " in text.strip())
