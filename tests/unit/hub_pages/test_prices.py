"""Prices on the form and the welcome page. Real: pure values."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpuspawner.catalog.models import DeviceLimits, Environment
from gpuspawner.core.units import MICRO
from gpuspawner.devices.models import Device
from gpuspawner.devices.snapshots import (
    DeviceView,
    ModelCount,
    Overview,
    ShareCount,
    count_models,
)
from gpuspawner.hub_pages.choice_tables import MOST_CHOICES, MemoryChoice
from gpuspawner.hub_pages.handlers import Price, prices
from gpuspawner.hub_pages.prices import Offer, PriceLine, PriceList, most_shared, share_choice
from gpuspawner.leases.models import SHARE
from gpuspawner.ledger.credit_policy import OVERDRAFT, SESSION, CreditPolicy
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
        ("A100-80GB", "in PyTorch", "0.000009", "46296 d 7 h"),
        ("A100-80GB", "in Lab", "0.00", ""),
        ("T4, 16 GB", "in PyTorch and Old", "1.00", "10 h"),
        ("T4, 16 GB", "in Lab", "0.00", ""),
    ]

    (line, _) = PriceList(overview(Rate(amount=MICRO)), [CPU], NOON).lines(replace(ADA, balance=0))
    assert line == PriceLine(
        label="A100-80GB", free=2, total=2, rate=MICRO, lasts="less than a minute"
    )


def test_price_list_shows_current_rate_and_when_it_changes() -> None:
    rates = [Rate(amount=4 * MICRO), Rate(amount=MICRO, hours=NIGHT)]
    evening = (NOON + timedelta(hours=7)).astimezone()
    assert [line[2] for line in lines(*rates, now=evening)] == ["1.00", "1.00"]
    assert [line[2] for line in lines(*rates)] == ["4.00", "4.00"]
    until = PriceList(overview(*rates), [TORCH], NOON).until()
    assert until == f"{evening:%H:%M} ({evening:%Z})"
    assert PriceList(overview(Rate(amount=MICRO)), [TORCH], NOON).until() == ""


HOURS = [("2", 2.0), ("8", 8.0)]


def offered(key: str, *payers: tuple[str, Account], **terms: Any) -> Offer:
    prices = PriceList(overview(*TWO_PRICES), [TORCH, LAB, OLD, CPU], NOON)
    found = prices.tables(range(5), payers or [("", ADA)], HOURS, **terms)
    slug, _, choice = key.partition("|")
    [chosen] = [e for e in (TORCH, LAB, OLD) if e.slug == slug]
    assert found.find(CPU, choice) is None
    offer = found.find(chosen, choice)
    assert offer
    return offer


@pytest.mark.parametrize(
    ("key", "what", "price", "total"),
    [
        ("torch|1|A100-80GB", "A100-80GB", "4.00 credits an hour", "8.00 credits"),
        ("torch|2|A100-80GB", "2 x A100-80GB", "8.00 credits an hour", "16.00 credits"),
        ("torch|1|", "1 GPU", "1.00 to 4.00 credits an hour", "2.00 to 8.00 credits"),
        ("torch|2|", "2 x A100-80GB", "8.00 credits an hour", "16.00 credits"),
        ("old|1|", "T4", "1.00 credits an hour", "2.00 credits"),
    ],
)
def test_each_choice_states_its_price_and_total(
    key: str, what: str, price: str, total: str
) -> None:
    """There is one T4 only, so two GPUs are always A100."""
    offer = offered(key)
    assert (offer.what, offer.price, offer.totals["2"]) == (what, price, total)
    assert (offer.refusal, offer.poor) == ("", {})
    without = offered("torch|0|")
    assert (without.price, without.totals) == ("free of charge", {})


@pytest.mark.parametrize(
    ("key", "refusal"),
    [
        ("torch|2|T4", "This hub has 1 T4."),
        ("old|2|", "This hub has at most 1 GPU of one model."),
    ],
)
def test_impossible_choice_states_its_reason(key: str, refusal: str) -> None:
    offer = offered(key)
    assert (offer.refusal, offer.totals) == (refusal, {})


def test_devices_of_one_model_count_together_whatever_their_memory() -> None:
    devices = [
        Device(uuid=f"GPU-{n}", index=n, model="A100", memory_bytes=memory * 2**30)
        for n, memory in enumerate([40, 80])
    ]
    views = tuple(DeviceView(device, "free", "") for device in devices)
    rates = Rates.of([Rate(amount=MICRO)])
    known = Overview(
        views, count_models(views, rates.card(NOON)), "simulated", "", "", "", rates=rates
    )
    prices = PriceList(known, [TORCH], NOON)
    offer = prices.tables(range(3), [("", ADA)]).find(TORCH, "2|A100")
    assert prices.most_gpus(TORCH) == 2
    assert offer and (offer.what, offer.refusal) == ("2 x A100", "")


def test_choice_states_when_credits_end_and_who_cannot_pay() -> None:
    group = Account(name="group:ml", balance=MICRO)
    broke = Account(name="member:eve", balance=0)
    offer = offered("torch|1|T4", ("", ADA), ("group:ml", group), ("eve", broke))
    assert offer.lasts == {
        "": (10, "10 h"),
        "group:ml": (1, "1 h"),
        "eve": (0, "less than a minute"),
    }
    assert offer.poor == {"eve": "Your balance of 0.00 credits does not pay for the start."}
    later = offered("torch|1|T4", ("group:ml", group), lead=timedelta(hours=2))
    why = "The group ml's balance of 1.00 credits does not pay for the start."
    assert later.poor == {"group:ml": why}
    cheap = offered("torch|1|", ("group:ml", group), lead=timedelta(hours=1))
    assert cheap.poor == {}, "the T4 can be paid"


def test_default_session_length_has_a_total_of_its_own() -> None:
    offer = offered("torch|1|T4", usual_hours={"torch": 4.0, "lab": None})
    assert offer.totals == {"2": "2.00 credits", "8": "8.00 credits", "": "4.00 credits"}
    assert "" not in offered("lab|1|T4", usual_hours={"torch": 4.0, "lab": None}).totals


def test_environments_with_equal_terms_share_price_tables() -> None:
    names = [{"slug": f"torch-{n}", "display_name": f"Torch {n}"} for n in range(50)]
    more = [TORCH.model_copy(update=each) for each in names]
    dear = Rate(amount=2 * MICRO, environment="torch-7")
    found = PriceList(overview(Rate(amount=MICRO), dear), more, NOON).tables(range(4), [("", ADA)])
    assert len(found.tables) == 2
    one = found.find(more[7], "1|")
    assert found.find(more[3], "3|") is None, "it cannot be chosen"
    assert one and one.price == "2.00 credits an hour"


EITHER = TORCH.model_copy(update={"sharing": "any"})
SHARED = TORCH.model_copy(update={"slug": "shared", "display_name": "Shared", "sharing": "slot"})


def shared_overview() -> Overview:
    """An A100 that is whole, and two T4 of four slots, of which three are taken."""
    shapes = [("A100-80GB", 80, 1, 1), ("T4", 16, 4, 4), ("T4", 16, 4, 1)]
    views = tuple(
        DeviceView(
            Device(uuid=f"GPU-{n}", index=n, model=model, memory_bytes=memory * 2**30, slots=slots),
            "free" if free == slots else "partly_leased",
            "",
            free_slots=free,
        )
        for n, (model, memory, slots, free) in enumerate(shapes)
    )
    rates = Rates.of(TWO_PRICES)
    models = count_models(views, rates.card(NOON))
    return Overview(views, models, "simulated", "", "", "", rates=rates)


def test_whole_device_costs_the_full_rate_and_a_share_its_part() -> None:
    prices = PriceList(shared_overview(), [TORCH, EITHER, SHARED], NOON)
    found = [(line.label, line.availability, line.price) for line in prices.lines(ADA)]
    assert found == [
        ("A100-80GB", "1 of 1", "4.00"),
        ("T4, 16 GB", "1 of 2", "1.00"),
        ("1/4 of T4, about 4 GB", "5 of 8 shares", "0.25"),
    ]
    assert prices.of(TORCH) == "1.00 to 4.00 credits a GPU-hour"
    assert prices.of(EITHER) == "1.00 to 4.00 credits a GPU-hour, 0.25 for a share"
    assert prices.of(SHARED) == "0.25 credits an hour for a share"
    assert [line.label for line in prices.of_models(SHARED)] == ["1/4 of T4, about 4 GB"]
    assert (prices.most_gpus(SHARED), prices.model_names(SHARED)) == (0, ["T4"])
    assert PriceList(shared_overview(), [TORCH], NOON).lines(ADA)[-1].label == "T4, 16 GB"


def test_reserved_devices_are_those_of_the_group() -> None:
    some = shared_overview()
    views = tuple(
        replace(view, device=replace(view.device, reserved_for=("lab", "x") if n < 2 else ()))
        for n, view in enumerate(some.devices)
    )
    some = replace(some, devices=views, models=count_models(views, some.rates.card(NOON)))

    def of(*groups: str) -> list[tuple[str, str]]:
        prices = PriceList(some.usable_by(groups, NOON), [EITHER], NOON)
        return [(line.availability, line.reserved) for line in prices.lines(ADA)]

    assert of() == [("0 of 1", ""), ("1 of 4 shares", "")], "without a model that is all reserved"
    assert of("x", "y") == [
        ("1 of 1", "reserved for lab and x"),
        ("1 of 2", "1 reserved for lab and x"),
        ("5 of 8 shares", "1 reserved for lab and x"),
    ]
    lent = tuple(replace(view, device=replace(view.device, lent=True)) for view in views)
    lent_overview = replace(some, devices=lent)
    assert len(lent_overview.usable_by((), NOON, preemptible=True).devices) == 3
    assert len(lent_overview.usable_by((), NOON).devices) == 1
    assert (open_one := shared_overview()).usable_by((), NOON) is open_one
    assert PriceList(some.usable_by("x", NOON), [EITHER], NOON).most_gpus(EITHER) == 1, (
        "not one of each"
    )


def test_environment_is_free_only_if_both_devices_and_shares_are() -> None:
    free_share = Rate(amount=0, model="T4", slots=4)
    for rates, said in (
        ((*TWO_PRICES, free_share), "1.00 to 4.00 credits a GPU-hour, 0.00 for a share"),
        (
            (Rate(amount=0), Rate(amount=MICRO, slots=4)),
            "0.00 credits a GPU-hour, 1.00 for a share",
        ),
        ((Rate(amount=0), free_share), "free of charge"),
    ):
        shown = replace(shared_overview(), rates=Rates.of(rates))
        assert PriceList(shown, [EITHER], NOON).of(EITHER) == said


def test_share_has_an_offer_where_the_environment_allows_one() -> None:
    either = EITHER.model_copy(update={"slug": "either"})
    prices = PriceList(shared_overview(), [TORCH, either, SHARED], NOON)
    tables = prices.tables([0, 1, 2, SHARE], [("", ADA)], HOURS)
    for environment in (either, SHARED):
        offer = tables.find(environment, "share|")
        assert offer
        assert offer.what == "1/4 of T4 (about 4 GB)"
        assert (offer.price, offer.totals["8"]) == ("0.25 credits an hour", "2.00 credits")
    none = tables.find(either, "share|A100-80GB")
    assert none
    assert none.refusal == "No A100-80GB of this hub has a share for {name}."
    assert tables.find(TORCH, "share|") is None


def test_choice_by_memory_is_offered_where_it_makes_a_difference() -> None:
    either = EITHER.model_copy(update={"slug": "either"})
    counts: list[int | str] = [0, 1, 2, SHARE]
    prices = PriceList(shared_overview(), [TORCH, either, OLD, CPU], NOON)
    of_whole: list[MemoryChoice] = [(1, "", 16), (1, "", 80), (2, "", 16), (2, "", 80)]
    assert prices.choices_by_memory(TORCH, counts, None) == of_whole
    of_shares: list[MemoryChoice] = [
        (SHARE, model, size) for model in ("", "T4") for size in (4, 8, 12)
    ]
    assert prices.choices_by_memory(either, counts, None) == of_whole + of_shares
    assert prices.choices_by_memory(TORCH, [1], 20) == [(1, "", 16), (1, "", 20), (1, "", 80)]
    assert prices.choices_by_memory(TORCH, [1], 90) == of_whole[:2]
    assert prices.choices_by_memory(OLD, counts, 10) == []
    assert prices.choices_by_memory(CPU, counts, 10) == []
    asked = {e.slug: prices.choices_by_memory(e, counts, 20) for e in prices.environments}
    found = prices.tables((), [("", ADA)], HOURS, by_memory=asked)
    for key in ("1||20", "1||80"):
        offer = found.find(TORCH, key)
        assert offer
        assert (offer.what, offer.price) == ("A100-80GB", "4.00 credits an hour")
    small = found.find(TORCH, "1||16")
    assert small
    assert (small.what, small.totals["2"]) == ("1 GPU", "2.00 to 8.00 credits")
    two = found.find(TORCH, "2||80")
    assert two
    assert two.refusal == "This hub has at most 1 GPU of one model with 80 GB."
    assert found.find(TORCH, "1|") is None


def test_share_has_as_many_slots_as_the_environment_needs() -> None:
    """Of the two T4, four slots of one are free and one of the other."""
    half = EITHER.model_copy(update={"slug": "half", "min_memory": 8 * 10**9})
    large = EITHER.model_copy(update={"slug": "large", "min_memory": 12 * 10**9})
    whole = EITHER.model_copy(update={"slug": "whole", "min_memory": 13 * 10**9})
    prices = PriceList(shared_overview(), [half, TORCH, SHARED, large, whole], NOON)
    found = [(line.label, line.availability, line.price) for line in prices.lines(ADA)]
    assert found[2:] == [
        ("3/4 of T4, about 12 GB", "1 of 2 shares", "0.75"),
        ("2/4 of T4, about 8 GB", "2 of 4 shares", "0.50"),
        ("1/4 of T4, about 4 GB", "5 of 8 shares", "0.25"),
    ]
    assert prices.of(half) == "1.00 to 4.00 credits a GPU-hour, 0.50 for a share"
    assert prices.of(whole) == "1.00 to 4.00 credits a GPU-hour"
    assert prices.shares_of(whole) == prices.shares_of(TORCH) == []
    assert [share.label for share in prices.smallest_shares()] == ["1/4 of T4, about 4 GB"]
    tables = prices.tables([SHARE], [("", ADA)], HOURS)
    offer = tables.find(half, "share|T4")
    assert offer
    assert (offer.what, offer.price) == ("2/4 of T4 (about 8 GB)", "0.50 credits an hour")
    assert offer.shared == "shared with up to 2 others, not isolated"
    none = tables.find(whole, "share|")
    assert none and none.refusal == "No GPU of this hub has a share for {name}."


def test_share_with_an_amount_of_memory_has_the_price_of_its_slots() -> None:
    half = EITHER.model_copy(update={"slug": "half", "min_memory": 8 * 10**9})
    prices = PriceList(shared_overview(), [EITHER, half], NOON)
    asked = {
        EITHER.slug: prices.choices_by_memory(EITHER, [SHARE], 10),
        half.slug: prices.choices_by_memory(half, [SHARE], None),
    }
    assert [memory for _, model, memory in asked["torch"] if not model] == [4, 8, 10, 12]
    assert [memory for _, model, memory in asked["half"] if not model] == [8, 12]
    found = prices.tables((), [("", ADA)], HOURS, by_memory=asked)
    shares = {memory: found.find(EITHER, f"share||{memory}") for memory in (4, 8, 10, 12)}
    assert {memory: (o.what, o.totals["2"], o.shared) for memory, o in shares.items() if o} == {
        4: ("1/4 of T4 (about 4 GB)", "0.50 credits", "shared with up to 3 others, not isolated"),
        8: ("2/4 of T4 (about 8 GB)", "1.00 credits", "shared with up to 2 others, not isolated"),
        10: ("3/4 of T4 (about 12 GB)", "1.50 credits", "shared with up to 1 other, not isolated"),
        12: ("3/4 of T4 (about 12 GB)", "1.50 credits", "shared with up to 1 other, not isolated"),
    }
    many = [(str(number), ADA) for number in range(MOST_CHOICES // 10)]
    assert prices.tables((), many, HOURS, by_memory=asked).tables == ()


def test_shares_of_several_sizes_are_named_together() -> None:
    shares = [ShareCount("A10", 24 * 2**30, 2, (1,)), ShareCount("T4", 16 * 2**30, 4, (4,))]
    assert share_choice(shares) == (
        "a share of a GPU: 1/4 of T4 (about 4 GB), or 1/2 of A10 (about 12 GB)"
    )
    assert share_choice([]) == ""
    assert most_shared(shares) == "shared with up to 3 others, not isolated"
    assert most_shared(shares[:1]) == "shared with up to 1 other, not isolated"


def test_price_text_covers_free_gpu_only_and_many_choices() -> None:
    prices = PriceList(overview(Rate(amount=0)), [TORCH], NOON)
    free = prices.tables([1], [("", ADA)], HOURS).find(TORCH, "1|")
    assert free and (free.price, free.totals, free.lasts) == ("free of charge", {}, {})
    assert prices.of(TORCH) == prices.of(CPU) == "free of charge"
    assert prices.tables(range(3), [(str(n), ADA) for n in range(500)]).tables == ()
    only = TORCH.model_copy(update={"cpu_variant": False})
    found = PriceList(overview(Rate(amount=MICRO)), [only], NOON).tables(range(2), [("", ADA)])
    none = found.find(only, "0|")
    assert none and none.refusal == "{name} needs a GPU."
    nowhere = OLD.model_copy(update={"models": ("H200",)})
    prices = PriceList(overview(*TWO_PRICES), [TORCH, OLD, nowhere], NOON)
    assert prices.of(TORCH) == "1.00 to 4.00 credits a GPU-hour"
    assert prices.of(OLD) == "1.00 credits a GPU-hour"
    assert prices.of(nowhere) == ""
    assert [prices.most_gpus(e) for e in (TORCH, LAB, OLD, nowhere)] == [2, 2, 1, 0]
    assert prices.model_names(OLD) == ["T4"]
    (line,) = prices.of_models(OLD)
    assert (line.label, line.availability, line.price) == ("T4, 16 GB", "1 of 1", "1.00")
    assert prices.of_models(CPU) == []
    gone = prices.tables([1], [("", ADA)]).find(nowhere, "1|")
    assert gone and gone.refusal == "{name} does not run on a GPU of this hub."


def test_form_says_for_whom_the_gpus_of_an_environment_are_reserved() -> None:
    """The sentence is about the usual request: of a whole GPU, or of a share."""
    says = "All H200 GPUs here are reserved for vision-lab."
    reserved = OLD.model_copy(update={"models": ("H200",)})
    alike = reserved.model_copy(update={"slug": "alike"})
    shared = reserved.model_copy(update={"slug": "shared", "sharing": "slot"})
    both = reserved.model_copy(update={"slug": "both", "sharing": "any"})
    some = [reserved, alike, shared, both]
    told = {each.slug: says for each in (reserved, shared, both)}
    prices = PriceList(overview(*TWO_PRICES), some, NOON, reserved=told)
    tables = prices.tables([1, SHARE], [("", ADA)])

    def refusal(environment: Environment, count: int | str) -> str:
        offer = tables.find(environment, f"{count}|")
        assert offer
        return offer.refusal

    assert [refusal(each, 1) for each in (reserved, both)] == [says, says]
    assert refusal(alike, 1) == "{name} does not run on a GPU of this hub."
    assert refusal(shared, SHARE) == says
    assert refusal(both, SHARE) == "No GPU of this hub has a share for {name}."


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
    (t4, a100) = costs.find(TORCH, "1|T4"), costs.find(TORCH, "1|A100-80GB")
    assert t4 and t4.lasts == {"": (6, "6 h"), group.name: (3.5, "3 h 30 min")}
    assert a100 and a100.lasts[group.name] == (1, "1 h")


@pytest.mark.parametrize(
    ("policy", "ends_in", "words"),
    [
        (CreditPolicy(), 2.5, "2 h"),  # with the grace of half an hour
        (CreditPolicy(OVERDRAFT, 5 * MICRO), 3, "3 h"),
        (CreditPolicy(SESSION), None, "2 h"),  # it goes on to its time limit
    ],
)
def test_choice_states_the_end_that_the_policy_brings(
    policy: CreditPolicy, ends_in: float | None, words: str
) -> None:
    """Another server that costs 4 credits an hour runs already, with a hold."""
    ada = replace(ADA, held=MICRO)
    running, half_an_hour = {ADA.name: 4 * MICRO}, timedelta(minutes=30)
    prices = PriceList(
        overview(*TWO_PRICES), [TORCH], NOON, {}, running, {ADA.name: policy}, half_an_hour
    )
    offer = prices.tables([1], [("", ada)]).find(TORCH, "1|T4")
    assert offer and offer.lasts == {"": (ends_in, words)}


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
