"""What a card says, how long a choice would wait, and sample notebooks. Real: pure values."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.catalog.models import DeviceLimits, Environment
from gpuspawner.hub_pages.cards import (
    MOST_CELLS,
    CardFilter,
    Cell,
    Output,
    icon_of,
    read_notebook,
    read_packages,
    said,
    sentence,
    usual_request,
    wait_tables,
)
from gpuspawner.leases.host_resources import HostAmount
from gpuspawner.leases.models import Request
from gpuspawner.queue.models import Estimate
from gpuspawner.queue.positions import Outlook
from gpuspawner.spawners.options import FormChoice, resolve

MINUTE = timedelta(minutes=1)
NOW = datetime(2026, 3, 2, 12, tzinfo=timezone.utc)
CLOSE = "Not enough are free now. "
WAIT = "You would wait in the queue."
TORCH = Environment(
    image="lab",
    slug="torch",
    display_name="PyTorch",
    description="Für *Kurse*",
    frameworks={"PyTorch": "2.5"},
    devices=DeviceLimits(default=1, max=2),
    models=("A100",),
)
CPU = Environment(
    slug="cpu", display_name="Files", image="lab", devices=DeviceLimits(default=0, max=0)
)


def busy(**known: Any) -> Outlook:
    return Outlook(**{"free": 0, "total": 8, "at_once": False, **known})


def test_card_and_form_state_what_the_host_lacks() -> None:
    lacking = "8.0 GB of memory (1.0 GB free)"
    found = Outlook(2, 8, at_once=False, lacking=lacking)
    assert said(found, NOW) == f"2 of 8 GPUs free now, waits for {lacking}"
    assert sentence(found, NOW) == f"You would wait in the queue for {lacking}."
    none = Outlook(0, 0, at_once=False, lacking=lacking)
    assert said(none, NOW, cpu_only=True) == f"Waits for {lacking}"
    kept = CPU.model_copy(update={"mem_guarantee": 2**33, "cpu_guarantee": 1.5})
    assert usual_request(kept) == Request(host_memory_bytes=2**33, host_milli_cpus=1500)
    wide = TORCH.model_copy(update={"cpu_guarantee": 4.0})
    asked = usual_request(wide)
    assert (asked.devices, asked.host_milli_cpus) == (1, 4000)


def test_card_and_form_ask_for_the_usual_guarantee_as_a_start_does() -> None:
    usual = HostAmount(2**33, 500)
    limited = TORCH.model_copy(update={"mem_limit": 2**30, "slug": "limited"})
    own = TORCH.model_copy(update={"mem_guarantee": 2**34, "slug": "own"})
    asked: list[Request] = []

    def ask(requests: Mapping[str, Request]) -> dict[str, Outlook]:
        asked.extend(requests.values())
        return dict.fromkeys(requests, busy())

    wait_tables([TORCH, limited, own], [1], [], ask, NOW, guaranteed=usual)
    for environment, request in zip([TORCH, limited, own], asked, strict=True):
        start = resolve(FormChoice(), environment, 1, usual)
        assert request.host == usual_request(environment, usual).host == start.host
    assert [request.host_memory_bytes for request in asked] == [2**33, 2**30, 2**34]
    assert usual_request(CPU, usual).host == resolve(FormChoice(gpus=0), CPU, 1, usual).host


def test_card_and_form_state_the_expected_start() -> None:
    at = NOW + 22 * MINUTE
    found = busy(planned=at, latest=at)
    assert said(found, NOW) == "0 of 8 GPUs free now, start by 12:22 UTC at the latest"
    parts = Outlook(Fraction(7, 4), 2, at_once=True)
    assert said(parts, NOW) == "1 3/4 of 2 GPUs free now"
    assert sentence(found, NOW) == f"{CLOSE}Expected start: by 12:22 UTC at the latest."
    low, high = at.timestamp(), (at + 9 * MINUTE).timestamp()
    found = busy(estimate=Estimate(low, low, high), planned=at, latest=NOW + 60 * MINUTE)
    start = "about 12:22 UTC to 12:31 UTC (8 of 10 starts), by 13:00 UTC at the latest"
    assert said(found, NOW) == f"0 of 8 GPUs free now, start {start}"
    assert sentence(found, NOW) == f"{CLOSE}Expected start: {start}."


@pytest.mark.parametrize(
    ("outlook", "card", "form"),
    [
        (busy(free=2, ahead=4), "2 of 8 GPUs free now, others wait", CLOSE + WAIT),
        (busy(), "0 of 8 GPUs free now", CLOSE + WAIT),
        (Outlook(3, 8, at_once=True), "3 of 8 GPUs free now", "Starts now."),
        (Outlook(1, 1, at_once=True), "1 of 1 GPU free now", "Starts now."),
        (Outlook(0, 0, at_once=False), "No suitable GPU in service", ""),
    ],
)
def test_card_and_form_state_free_gpus(outlook: Outlook, card: str, form: str) -> None:
    assert (said(outlook, NOW), sentence(outlook, NOW)) == (card, form)
    assert usual_request(CPU) == Request()
    assert said(Outlook(0, 0, at_once=True), NOW, cpu_only=True) == "Available now"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (CardFilter(), ["torch", "cpu"]),
        (CardFilter(words="PYTORCH 2.5"), ["torch"]),
        (CardFilter(words="FÜR kurse"), ["torch"]),
        (CardFilter(words="torch files"), []),
        (CardFilter(gpu="without"), ["cpu"]),
        (CardFilter(framework="PyTorch"), ["torch"]),
        (CardFilter(framework="JAX"), []),
    ],
)
def test_card_filter_finds_matching_environments(wanted: CardFilter, found: list[str]) -> None:
    assert [e.slug for e in (TORCH, CPU) if wanted.takes(e)] == found


@pytest.mark.parametrize(
    ("fields", "icon"),
    [
        ({"slug": "lab-24", "display_name": "PyTorch 2.5"}, "flame"),
        ({"slug": "one", "frameworks": {"JAX": "0.4"}}, "graph"),
        ({"slug": "editor", "default_url": "/vscode/"}, "terminal"),
        ({"slug": "files", "devices": DeviceLimits(default=0, max=0)}, "notebook"),
        ({"slug": "barcode"}, "chip"),
    ],
)
def test_environment_without_a_logo_gets_an_icon_of_its_kind(
    fields: dict[str, Any], icon: str
) -> None:
    assert icon_of(Environment(image="lab", **fields)) == icon


def test_each_choice_shows_its_expected_wait() -> None:
    asked: list[Request] = []

    def ask(requests: Mapping[str, Request]) -> dict[str, Outlook]:
        asked.extend(requests.values())
        return {
            name: Outlook(1, 8, at_once=request.devices < 2) for name, request in requests.items()
        }

    more = [TORCH, Environment(slug="other", display_name="O", image="lab", models=("T4",)), CPU]
    found = wait_tables(more, range(4), ["A100", "T4"], ask, NOW)
    assert found.of == {"torch": 0, "other": 1}
    assert found.find(TORCH, "1|") == found.find(TORCH, "1|A100") == "Starts now."
    assert str(found.find(TORCH, "2|")).startswith("Not enough are free now")
    assert found.find(TORCH, "3|") is found.find(TORCH, "0|") is None, "it cannot be chosen"
    assert found.find(CPU, "1|") is None
    assert {request.models for request in asked} == {("A100",), ("T4",)}


def test_package_list_is_parsed_and_sorted() -> None:
    text = """
# made by a tool
torch==2.5.1+cu124 \\
    --hash=sha256:abc
Jinja2 == 3.1.6 ; python_version > "3"
uvicorn[standard]==0.30
-e git+https://lab.example/x#egg=x
<script>==1
"""
    found = [("Jinja2", "3.1.6"), ("torch", "2.5.1+cu124"), ("uvicorn", "0.30")]
    assert read_packages(text) == found


# Sample notebooks.

PIXEL = base64.b64encode(b"\x89PNG a picture").decode()
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def notebook(*cells: dict[str, Any]) -> str:
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": list(cells)})


def code(*outputs: dict[str, Any], source: Any = "1 + 1") -> dict[str, Any]:
    return {"cell_type": "code", "source": source, "outputs": list(outputs)}


def test_notebook_cells_and_outputs_are_read() -> None:
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


def test_notebook_preview_contains_no_active_content() -> None:
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


def test_large_notebooks_are_truncated() -> None:
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
def test_invalid_notebook_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"^is not a notebook"):
        read_notebook(text)


_KEYS = ["source", "outputs", "data", "text", "cell_type", "image/png"]
_names = st.sampled_from(_KEYS) | st.text(max_size=3)
_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(_anything, max_size=5), st.sampled_from(["code", "markdown", "raw", None]))
def test_arbitrary_notebook_cells_are_shown_or_skipped(cells: list[Any], kind: str | None) -> None:
    for cell in cells:
        if isinstance(cell, dict):
            cell["cell_type"] = kind
    for shown in read_notebook(json.dumps({"nbformat": 4, "cells": cells})).cells:
        assert "<script" not in shown.html
        assert isinstance(shown.code, str)
