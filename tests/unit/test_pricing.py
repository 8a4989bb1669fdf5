"""The rate card and its words for models: all real, pure values."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.errors import ConfigError
from gpuspawner.core.units import MICRO
from gpuspawner.devices.models import model_matches
from gpuspawner.ledger.pricing import MAX_RATE, RateCard

MODELS = [
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA A10",
    "Tesla T4",
    "NVIDIA L4",
    "NVIDIA L40S",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 2080 Ti",
    "NVIDIA H100 PCIe",
]


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("A100", MODELS[:2]),
        ("a100-80gb", MODELS[:1]),
        ("80GB A100", MODELS[:1]),
        ("A10", MODELS[2:3]),
        ("L4", MODELS[4:5]),
        ("L40", []),
        ("RTX4090", MODELS[6:7]),
        ("rtx 4090", MODELS[6:7]),
        ("MIG 1g.5gb", MODELS[1:2]),
        ("nvidia", [m for m in MODELS if m != "Tesla T4"]),
    ],
)
def test_a_pattern_names_models_by_whole_words(pattern: str, named: list[str]) -> None:
    assert [model for model in MODELS if model_matches(pattern, model)] == named


def test_rates_in_credits_become_microcredits() -> None:
    card = RateCard.from_config(
        {"*": 1, "A100": 4, "T4": "0.5", "L4": 0.75, "H100": Decimal("9.000001")}
    )
    assert card.rate_of("NVIDIA A100-SXM4-80GB") == 4 * MICRO
    assert card.rate_of("Tesla T4") == MICRO // 2
    assert card.rate_of("NVIDIA L4") == 750_000
    assert card.rate_of("NVIDIA H100 PCIe") == 9 * MICRO + 1
    assert card.rate_of("NVIDIA GeForce RTX 4090") == MICRO


def test_the_longest_pattern_wins_whatever_the_order() -> None:
    rates: dict[str, Any] = {
        "A100": 4,
        "A100 SXM4": 5,
        "A100 SXM4 80GB": 6,
        "A100 MIG 1g.5gb": "0.6",
    }
    for config in (rates, dict(reversed(rates.items()))):
        card = RateCard.from_config(config)
        assert [card.rate_of(m) for m in MODELS[:2]] == [6 * MICRO, 600_000]
        assert card.rate_of("NVIDIA A100-SXM4-40GB") == 5 * MICRO
        assert card.rate_of("NVIDIA A100-PCIE-40GB") == 4 * MICRO


def test_the_default_is_one_credit_unless_it_is_given() -> None:
    assert RateCard.from_config({}).rate_of("Tesla T4") == MICRO
    assert RateCard.from_config({"A100": 4}).rate_of("Tesla T4") == MICRO
    assert RateCard.from_config({"*": 0}).rate_of("Tesla T4") == 0


def test_a_lease_costs_the_sum_of_its_devices() -> None:
    card = RateCard.from_config({"A100": 4, "T4": "0.5"})
    assert card.lease_rate(["Tesla T4", "Tesla T4", "NVIDIA A100"]) == 5 * MICRO
    assert card.lease_rate([]) == 0


@pytest.mark.parametrize(
    "value",
    [
        -1, "-0.5", "four", "", "1e3", "nan", "inf", float("nan"), float("inf"), True, None, [],
        "0.0000001", 1e-7, MAX_RATE // MICRO + 1, "1_000", "9" * 400, 1e30,
    ],
)  # fmt: skip
def test_a_rate_that_is_none_is_refused_by_its_key(value: Any) -> None:
    with pytest.raises(ConfigError, match="rate of 'A100' is not valid") as caught:
        RateCard.from_config({"A100": value})
    assert "such as 4 or '0.5'" in caught.value.message


@pytest.mark.parametrize("key", ["", "  ", "--", 100, None])
def test_a_key_that_names_no_model_is_refused(key: Any) -> None:
    with pytest.raises(ConfigError, match="names no device model"):
        RateCard.from_config({key: 1})


def test_two_keys_for_one_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="'A100-80GB' and '80gb a100' name the same"):
        RateCard.from_config({"A100-80GB": 1, "80gb a100": 2})


def test_a_card_is_a_mapping() -> None:
    pairs: Any = [("A100", 1)]
    with pytest.raises(ConfigError, match="is no mapping"):
        RateCard.from_config(pairs)


@given(st.decimals(0, 1_000_000, places=6))
def test_every_rate_of_six_decimals_is_kept_exactly(credits: Decimal) -> None:
    card = RateCard.from_config({"*": f"{credits:f}"})
    assert card.rate_of("any") == int(credits.scaleb(6))
