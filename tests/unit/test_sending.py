"""What is sent is readable text, whatever names are in it. Nothing real is needed."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuspawner.service.notifier import BODY, TITLE, one_line, plain

ANY = st.text(st.characters(codec=None, categories=None), max_size=300)


def control(text: str) -> list[str]:
    """Characters that end lines or do worse, and halves of characters."""
    return [c for c in text if unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs")]


@given(ANY)
@example("Your server x\r\nBcc: eve@evil.example\r\n\r\nbody")
@example("a\u2028b\u2029c\x85d\x0be\x1cf\ud800g\x00h")
def test_a_title_is_one_line(text: str) -> None:
    line = one_line(text)
    assert control(line) == []
    assert len(line.splitlines()) <= 1
    assert len(line) <= TITLE
    line.encode("utf-8")


@given(ANY)
@example("one\r\ntwo\n\nthree\tfour\x1b[31m")
def test_a_body_has_lines_and_no_other_control_characters(text: str) -> None:
    body = plain(text)
    assert set(control(body)) <= {"\n", "\t"}
    assert len(body) <= BODY
    body.encode("utf-8")


@pytest.mark.parametrize("text", ["Größe: 80 GB", "José \N{ROCKET} 日本", "a <b> & 'c'"])
def test_what_people_write_stays(text: str) -> None:
    assert one_line(text) == text
    assert plain(f"{text}\n{text}") == f"{text}\n{text}"
