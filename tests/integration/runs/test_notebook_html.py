"""Notebooks as HTML. Real: nbconvert, in processes of its own."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from gpuspawner.runs import notebook_html
from gpuspawner.runs.notebook_html import NotRendered, render


def notebook(*outputs: dict[str, Any], source: str = "print(1)") -> bytes:
    cell = {"cell_type": "code", "metadata": {}, "execution_count": 1, "source": source}
    cells = [
        {**cell, "outputs": outputs},
        {"cell_type": "markdown", "metadata": {}, "source": "# T"},
    ]
    kept = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(kept).encode()


def rendered(data: bytes) -> str:
    return asyncio.run(render(data)).decode()


def test_notebook_is_shown_without_anything_from_elsewhere() -> None:
    shown = {"output_type": "stream", "name": "stdout", "text": "one <b>\n"}
    widget = {"output_type": "display_data", "metadata": {}, "data": {"image/png": "aGVyZQ=="}}
    html = rendered(notebook(shown, widget))
    assert "one &lt;b&gt;" in html and "data:image/png;base64,aGVyZQ==" in html
    assert re.search(r"<h1[^>]*>T", html)
    assert not re.findall(r"<(?:script|link|img)[^>]+https?://", html)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"5", b"\xff", b'{"cells": 5}', b"[" * 10**6])
def test_what_is_no_notebook_is_told(data: bytes) -> None:
    with pytest.raises(NotRendered):
        rendered(data)


def test_notebook_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_html, "SECONDS", 0.2)
    with pytest.raises(NotRendered):
        rendered(notebook())
