"""Prices on the form and the welcome page. Real: pure values."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from gpuspawner.catalog.models import DeviceLimits, Environment
from gpuspawner.core.units import MICRO
from gpuspawner.devices.models import Device
from gpuspawner.devices.snapshots import DeviceView, ModelCount, Overview, count_models
from gpuspawner.hub_pages.handlers import Price, prices
from gpuspawner.hub_pages.prices import PriceLine, PriceList
from gpuspawner.ledger.models import Account
from gpuspawner.ledger.pricing import Rate, Rates, WeekHours

NOON = datetime(2026, 3, 2, 12, tzinfo=timezone.utc)
"""A Monday."""
ADA = Account(name="member:ada", balance=10 * MICRO)


def environment(slug: str, name: str, usual: int, most: int) -> Environment:
    devices = DeviceLimits(default=usual, max=most)
    return Environment(slug=slug, display_name=name, image="lab", devices=devices)


TORCH = environment("torch", "PyTorch", 1, 2)
LAB = environment("lab", "Lab", 2, 4)
OLD = LAB.model_copy(update={"slug": "old", "display_name": "Old", "models": ("T4",)})
CPU = environment("cpu", "No GPU", 0, 0)
TWO_PRICES = (Rate(amount=MICRO), Rate(amount=4 * MICRO, model="A100"))
NIGHT = WeekHours.parse("20-8", "Europe/Vienna")


def overview(*rates: Rate, now: datetime = NOON) -> Overview:
    """Two A100 and a T4."""
    devices = [
        Device(uuid=f"GPU-{n}", index=n, model=model, memory_bytes=memory * 2**30)
        for n, (model, memory) in enumerate([("A100-80GB", 80), ("A100-80GB", 80), ("T4", 16)])
    ]
    views = tuple(DeviceView(device, "free", "") for device in devices)
    every = Rates.of(rates)
    models = count_models(views, every.card(now))
    return Overview(views, models, "simulated", "", "", "", rates=every)


def lines(*rates: Rate, now: datetime = NOON) -> list[tuple[str, str, str, str]]:
    found = PriceList(overview(*rates), [TORCH, LAB, OLD, CPU], now).lines(ADA)
    return [(line.label, line.where, line.price, line.lasts) for line in found]


def test_price_list_has_one_line_per_model_and_price() -> None:
    assert lines(*TWO_PRICES) == [
        ("A100-80GB", "", "4.00", "2 h 30 min"),
        ("T4, 16 GB", "", "1.00", "10 h"),
    ]

    rates = [Rate(amount=MICRO), Rate(amount=0, environment="lab"), Rate(amount=9, model="A100")]
    assert lines(*rates) == [
        ("A100-80GB", "in PyTorch", "0.00", "46296 d 7 h"),
        ("A100-80GB", "in Lab", "0.00", ""),
        ("T4, 16 GB", "in PyTorch and Old", "1.00", "10 h"),
        ("T4, 16 GB", "in Lab", "0.00", ""),
    ]

    (line, _) = PriceList(overview(Rate(amount=MICRO)), [CPU], NOON).lines(replace(ADA, balance=0))
    assert line == PriceLine("A100-80GB", 2, 2, "", MICRO, "less than a minute")


def test_price_list_shows_current_rate_and_when_it_changes() -> None:
    rates = [Rate(amount=4 * MICRO), Rate(amount=MICRO, hours=NIGHT)]
    evening = (NOON + timedelta(hours=7)).astimezone()
    assert [line[2] for line in lines(*rates, now=evening)] == ["1.00", "1.00"]
    assert [line[2] for line in lines(*rates)] == ["4.00", "4.00"]
    until = PriceList(overview(*rates), [TORCH], NOON).until()
    assert until == f"{evening:%H:%M} ({evening:%Z})"
    assert PriceList(overview(Rate(amount=MICRO)), [TORCH], NOON).until() == ""


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("torch||A100-80GB|", "1 GPU: 4.00 credits an hour. Your balance lasts 2 h 30 min."),
        ("torch|2|A100-80GB|", "2 GPUs: 8.00 credits an hour. Your balance lasts 1 h 15 min."),
        ("lab|||", "2 GPUs: 2.00 to 8.00 credits an hour. Your balance lasts 1 h 15 min."),
        ("torch|0||", "Without a GPU: free of charge."),
        ("torch|3||", "PyTorch allows 2 GPUs."),
        ("old|1||", "1 GPU: 1.00 credits an hour. Your balance lasts 10 h."),
        ("old|1|A100-80GB|", "Old does not run on that model."),
        (
            "lab|1|T4|group:ml",
            "1 GPU: 1.00 credits an hour. The balance of the group ml lasts 1 h.",
        ),
    ],
)
def test_each_choice_states_its_price(key: str, sentence: str) -> None:
    prices = PriceList(overview(*TWO_PRICES), [TORCH, LAB, OLD, CPU], NOON)
    group = Account(name="group:ml", balance=MICRO)
    found = prices.tables(range(4), [("", ADA), ("group:ml", group)])
    slug, _, choice = key.partition("|")
    [chosen] = [e for e in (TORCH, LAB, OLD) if e.slug == slug]
    assert found.sentence(chosen, choice) == sentence
    assert [len(table) for table in found.tables] == [5 * 3 * 2] * 3
    assert found.sentence(CPU, choice) == ""


def test_environments_with_equal_terms_share_price_tables() -> None:
    names = [{"slug": f"torch-{n}", "display_name": f"Torch {n}"} for n in range(50)]
    more = [TORCH.model_copy(update=each) for each in names]
    dear = Rate(amount=2 * MICRO, environment="torch-7")
    found = PriceList(overview(Rate(amount=MICRO), dear), more, NOON).tables(range(4), [("", ADA)])
    assert len(found.tables) == 2
    assert found.sentence(more[3], "3||") == "Torch 3 allows 2 GPUs."
    assert found.sentence(more[7], "1||").startswith("1 GPU: 2.00 credits an hour.")


def test_price_text_covers_free_gpu_only_and_many_choices() -> None:
    prices = PriceList(overview(Rate(amount=0)), [TORCH], NOON)
    assert prices.tables([1], [("", ADA)]).sentence(TORCH, "1||") == "1 GPU: free of charge."
    assert prices.of(TORCH) == prices.of(CPU) == "free of charge"
    assert prices.tables(range(2000), [("", ADA)]).tables == ()
    only = TORCH.model_copy(update={"cpu_variant": False})
    found = PriceList(overview(Rate(amount=MICRO)), [only], NOON).tables(range(2), [("", ADA)])
    assert found.sentence(only, "0||") == "PyTorch needs a GPU."
    nowhere = OLD.model_copy(update={"models": ("H200",)})
    prices = PriceList(overview(*TWO_PRICES), [TORCH, OLD, nowhere], NOON)
    assert prices.of(TORCH) == "1.00 to 4.00 credits a GPU-hour"
    assert prices.of(OLD) == "1.00 credits a GPU-hour"
    assert prices.of(nowhere) == ""


def test_expiring_credits_count_until_they_expire() -> None:
    """6 of 10 credits end in 2 hours, and 1 of the 4 of a group in 30 minutes."""
    group = Account(name="group:ml", balance=4 * MICRO)
    ending = {
        ADA.name: [(NOON + timedelta(hours=2), 6 * MICRO)],
        group.name: [(NOON + timedelta(minutes=30), MICRO)],
    }
    prices = PriceList(overview(*TWO_PRICES), [TORCH, LAB], NOON, ending)
    assert [(line.price, line.lasts) for line in prices.lines(ADA)] == [
        ("4.00", "2 h 30 min"),  # spent before their end
        ("1.00", "6 h"),  # 4 of them are lost
    ]
    costs = prices.tables([1, 2], [("", ADA), (group.name, group)])
    assert costs.sentence(TORCH, "1|T4|").endswith("Your balance lasts 6 h.")
    assert costs.sentence(TORCH, "2|T4|").endswith("Your balance lasts 4 h.")
    assert costs.sentence(TORCH, f"1|T4|{group.name}").endswith("group ml lasts 3 h 30 min.")
    assert costs.sentence(TORCH, f"1|A100-80GB|{group.name}").endswith("group ml lasts 1 h.")


# The welcome page.


def count(model: str, credits: int, memory: int = 1) -> ModelCount:
    return ModelCount(model, memory, total=1, free=1, rate=credits * MICRO)


def test_welcome_page_lists_four_cheapest_models_once() -> None:
    account = Account(name="member:ada", balance=10 * MICRO, held=MICRO)
    models = [count("H100", 10), count("A100", 4, 80), count("A100", 3, 40), count("T4", 0)]
    assert prices(account, models) == [
        Price("T4", "0.00", None),
        Price("A100", "3.00", 3),
        Price("H100", "10.00", 0),
    ]

    account = Account(name="member:ada", balance=-MICRO)
    found = prices(account, [count(f"GPU {number}", number) for number in range(9, 0, -1)])
    assert [price.model for price in found] == ["GPU 1", "GPU 2", "GPU 3", "GPU 4"]
    assert {price.hours for price in found} == {0}
