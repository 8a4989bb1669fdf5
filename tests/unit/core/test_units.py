"""Amounts as people read them."""

from __future__ import annotations

import pytest

from gpuspawner.core.units import format_price


@pytest.mark.parametrize(
    ("micro", "text"),
    [(0, "0.00"), (4_000_000, "4.00"), (5_000, "0.01"), (4_999, "0.0050"), (49, "0.000049")],
)
def test_low_price_is_never_shown_as_nothing(micro: int, text: str) -> None:
    assert format_price(micro) == text
