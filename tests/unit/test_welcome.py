"""What the welcome page says of prices. Real: everything, it is pure."""

from __future__ import annotations

from gpuspawner.core.units import MICRO
from gpuspawner.devices.snapshots import ModelCount
from gpuspawner.hub_pages.welcome import Price, prices
from gpuspawner.ledger.models import Account


def count(model: str, credits: int, memory: int = 1) -> ModelCount:
    return ModelCount(model, memory, total=1, free=1, rate=credits * MICRO)


def test_the_cheapest_first_each_once_and_what_the_balance_is_enough_for() -> None:
    account = Account(name="member:ada", balance=10 * MICRO, held=MICRO)
    models = [count("H100", 10), count("A100", 4, 80), count("A100", 3, 40), count("T4", 0)]
    assert prices(account, models) == [
        Price("T4", "0.00", None),
        Price("A100", "3.00", 3),
        Price("H100", "10.00", 0),
    ]


def test_a_few_are_enough_and_no_balance_is_enough_for_nothing() -> None:
    account = Account(name="member:ada", balance=-MICRO)
    found = prices(account, [count(f"GPU {number}", number) for number in range(9, 0, -1)])
    assert [price.model for price in found] == ["GPU 1", "GPU 2", "GPU 3", "GPU 4"]
    assert {price.hours for price in found} == {0}
