"""What a card says, and what a choice would wait: all real, pure values."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import pytest

from gpuspawner.catalog.models import DeviceLimits, Environment, Framework
from gpuspawner.hub_pages.cards import (
    CardFilter,
    read_packages,
    said,
    sentence,
    usual_request,
    wait_tables,
)
from gpuspawner.leases.models import Request
from gpuspawner.queue.positions import Outlook

MINUTE = timedelta(minutes=1)
TORCH = Environment(
    slug="torch",
    display_name="PyTorch",
    description="Für *Kurse*",
    frameworks=(Framework("PyTorch", "2.5"),),
    devices=DeviceLimits(default=1, max=2),
    models=("A100",),
)
CPU = Environment(slug="cpu", display_name="Files", devices=DeviceLimits(default=0, max=0))


def busy(**known: object) -> Outlook:
    return Outlook(**{"free": 0, "total": 8, "at_once": False, **known})


@pytest.mark.parametrize(
    ("outlook", "card", "form"),
    [
        (Outlook(3, 8, at_once=True), "3 of 8 GPUs free now", "Starts at once."),
        (Outlook(1, 1, at_once=True), "1 of 1 GPU free now", "Starts at once."),
        (
            busy(likely=22 * MINUTE),
            "0 of 8 GPUs free now, about 25 min wait",
            "Not enough are free now: expect to wait about 25 min in line.",
        ),
        (
            busy(likely=timedelta(seconds=5), most=9 * MINUTE),
            "0 of 8 GPUs free now, about 1 min wait",
            "Not enough are free now: expect to wait about 1 min in line.",
        ),
        (
            busy(most=175 * MINUTE),
            "0 of 8 GPUs free now, at most 2 h 55 min wait",
            "Not enough are free now: expect to wait at most 2 h 55 min in line.",
        ),
        (
            busy(free=2, ahead=4),
            "2 of 8 GPUs free now, others wait",
            "Not enough are free now: you would wait in line.",
        ),
        (busy(), "0 of 8 GPUs free now", "Not enough are free now: you would wait in line."),
        (Outlook(0, 0, at_once=False), "No GPU here that fits", ""),
    ],
)
def test_what_is_free_in_words(outlook: Outlook, card: str, form: str) -> None:
    assert said(outlook) == card
    assert sentence(outlook) == form


def test_without_a_gpu_it_starts_at_once() -> None:
    assert usual_request(CPU) == Request()
    assert said(Outlook(0, 0, at_once=True), cpu_only=True) == "Starts at once"


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
def test_searching(wanted: CardFilter, found: list[str]) -> None:
    assert [e.slug for e in (TORCH, CPU) if wanted.takes(e)] == found


def test_each_choice_says_what_it_would_wait() -> None:
    asked: list[Request] = []

    def ask(requests: Mapping[str, Request]) -> dict[str, Outlook]:
        asked.extend(requests.values())
        return {
            name: Outlook(1, 8, at_once=request.devices < 2) for name, request in requests.items()
        }

    more = [TORCH, Environment(slug="other", display_name="O", models=("T4",)), CPU]
    found = wait_tables(more, range(4), ["A100", "T4"], ask)
    assert found.of == {"torch": 0, "other": 1}
    assert found.sentence(TORCH, "|") == found.sentence(TORCH, "1|A100") == "Starts at once."
    assert found.sentence(TORCH, "2|").startswith("Not enough are free now")
    assert found.sentence(TORCH, "3|") == found.sentence(TORCH, "0|") == "", "it cannot be chosen"
    assert found.sentence(CPU, "1|") == ""
    assert {request.models for request in asked} == {("A100",), ("T4",)}


def test_a_list_of_packages() -> None:
    text = """
# made by a tool
torch==2.5.1+cu124 \\
    --hash=sha256:abc
Jinja2 == 3.1.6 ; python_version > "3"
uvicorn[standard]==0.30
-e git+https://lab.example/x#egg=x
<script>==1
"""
    assert read_packages(text) == [
        ("Jinja2", "3.1.6"),
        ("torch", "2.5.1+cu124"),
        ("uvicorn", "0.30"),
    ]
