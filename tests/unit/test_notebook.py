"""A sample notebook on a page: all real, pure values."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.hub_pages.cards import MOST_CELLS, Cell, Output, read_notebook

PIXEL = base64.b64encode(b"\x89PNG a picture").decode()
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def notebook(*cells: dict[str, Any]) -> str:
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": list(cells)})


def code(*outputs: dict[str, Any], source: Any = "1 + 1") -> dict[str, Any]:
    return {"cell_type": "code", "source": source, "outputs": list(outputs)}


def test_cells_and_outputs() -> None:
    text = notebook(
        {"cell_type": "markdown", "source": ["# Train\n", "a *model*"]},
        code(
            {"output_type": "stream", "name": "stdout", "text": ["\x1b[31mred\x1b[0m\n", "two\n"]},
            {"output_type": "execute_result", "data": {"text/plain": "2", "text/html": EVIL}},
            {"output_type": "display_data", "data": {"image/png": PIXEL, "text/plain": "<Fig>"}},
            {"output_type": "error", "traceback": ["\x1b[1mValueError\x1b[0m", "no"]},
        ),
        {"cell_type": "raw", "source": "not shown"},
    )
    first, second = read_notebook(text).cells
    assert first.html == "<h3>Train</h3>\n<p>a <em>model</em></p>\n"
    assert second == Cell(
        code="1 + 1",
        outputs=(
            Output(text="red\ntwo\n"),
            Output(text="2"),
            Output(picture=f"data:image/png;base64,{PIXEL}"),
            Output(text="ValueError\nno\n"),
        ),
    )


def test_nothing_in_it_runs() -> None:
    text = notebook(
        {"cell_type": "markdown", "source": EVIL + "[x](javascript:alert(3))"},
        code({"output_type": "display_data", "data": {"text/html": EVIL}}, source=EVIL),
        code({"data": {"image/png": '"><script>', "image/svg+xml": EVIL, "text/plain": "text"}}),
    )
    shown = read_notebook(text).cells
    assert "<script" not in shown[0].html and "<img" not in shown[0].html
    assert 'href="javascript' not in shown[0].html
    assert shown[1] == Cell(code=EVIL), "as text, which the page escapes"
    assert shown[2].outputs == (Output(text="text"),)


def test_much_is_cut_short() -> None:
    large = base64.b64encode(b"x" * 60_000).decode()
    pictures = [code({"data": {"image/png": large, "text/plain": "a plot"}}) for _ in range(3)]
    shown = read_notebook(notebook(*pictures)).cells
    assert [bool(cell.outputs[0].picture) for cell in shown] == [True, False, False]
    assert shown[1].outputs == (Output(text="a plot"),)
    assert len(read_notebook(notebook(code(source="x" * 10**6))).cells[0].code) < 30_000
    many = read_notebook(notebook(*[code()] * (MOST_CELLS + 3)))
    assert (len(many.cells), many.left_out) == (MOST_CELLS, 3)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"cells": []}', '{"nbformat": 3, "worksheets": []}', "[" * 9**6],
)
def test_what_is_no_notebook_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"^is no notebook"):
        read_notebook(text)


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["source", "outputs", "data", "text", "cell_type", "image/png"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(_anything, max_size=5), st.sampled_from(["code", "markdown", "raw", None]))
def test_any_json_is_shown_or_left_out(cells: list[Any], kind: str | None) -> None:
    for cell in cells:
        if isinstance(cell, dict):
            cell["cell_type"] = kind
    for shown in read_notebook(json.dumps({"nbformat": 4, "cells": cells})).cells:
        assert "<script" not in shown.html
        assert isinstance(shown.code, str)
