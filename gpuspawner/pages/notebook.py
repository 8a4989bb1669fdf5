"""A sample notebook as values that a page can show: text, code and small pictures. Pure.

Nothing of a notebook runs, and no HTML of it is taken over: Markdown goes through the catalog's
sanitiser, and of an output only its text and its pictures are shown.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..catalog.markdown import to_html

MOST_CELLS = 200
MOST_TEXT = 20_000
"""Characters of one cell or output that are shown."""
MOST_PICTURES = 100_000
"""Characters of all pictures of a notebook together, in base64."""

_PICTURES = ("image/png", "image/jpeg", "image/gif")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Output:
    """What a cell printed: text, or the address of a picture that is in the address itself."""

    text: str = ""
    picture: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: Markdown as safe HTML, or code with its outputs."""

    html: str = ""
    code: str = ""
    outputs: tuple[Output, ...] = ()


@dataclass(frozen=True, slots=True)
class Notebook:
    """The cells that are shown, and how many are not."""

    cells: tuple[Cell, ...]
    left_out: int = 0


@lru_cache(maxsize=64)
def read_notebook(text: str) -> Notebook:
    """A notebook of format 4. Raises ValueError with the end of a sentence."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is no notebook: it is not JSON.") from None
    found = data.get("cells") if isinstance(data, dict) else None
    if not isinstance(found, list) or data.get("nbformat") != 4:
        raise ValueError("is no notebook of format 4. Open it in JupyterLab and save it.")
    shown = [cell for cell in found if isinstance(cell, dict)]
    room = [MOST_PICTURES]
    cells = (_cell(cell, room) for cell in shown[:MOST_CELLS])
    return Notebook(tuple(c for c in cells if c is not None), max(0, len(shown) - MOST_CELLS))


def _cell(cell: dict[str, Any], room: list[int]) -> Cell | None:
    source = _text(cell.get("source"))
    if cell.get("cell_type") == "markdown":
        return Cell(html=to_html(source, 3))
    if cell.get("cell_type") == "code":
        outputs = cell.get("outputs")
        return Cell(code=source, outputs=tuple(_outputs(outputs, room)))
    return None


def _outputs(outputs: object, room: list[int]) -> Iterable[Output]:
    for output in outputs if isinstance(outputs, list) else ():
        if not isinstance(output, dict):
            continue
        data = output.get("data")
        data = data if isinstance(data, dict) else {}
        picture = next((p for kind in _PICTURES if (p := _picture(kind, data.get(kind)))), "")
        if picture and len(picture) <= room[0]:
            room[0] -= len(picture)
            yield Output(picture=picture)
            continue
        lines = output.get("traceback") if output.get("output_type") == "error" else None
        if isinstance(lines, list):
            text = _text([f"{line}\n" for line in lines])
        else:
            text = _text(output.get("text") or data.get("text/plain"))
        if text.strip():
            yield Output(text=text)


def _picture(kind: str, value: object) -> str:
    """A picture as an address; empty for what is none."""
    try:
        data = base64.b64decode("".join(_text(value, MOST_PICTURES).split()), validate=True)
    except (binascii.Error, ValueError):
        return ""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}" if data else ""


def _text(value: object, most: int = MOST_TEXT) -> str:
    """The text of a field, which is a string or a list of lines; without what terminals obey."""
    parts = value if isinstance(value, list) else [value]
    text = "".join(part for part in parts if isinstance(part, str))
    text = _CONTROL.sub("", _ESCAPES.sub("", text))
    return text if len(text) <= most else text[:most] + "\n..."
