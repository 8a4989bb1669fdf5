"""What MIG instances and shares cost, by every path that knows a price. Real: pure values."""

from __future__ import annotations

import contextlib
from datetime import datetime, timezone
from fractions import Fraction
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.catalog.models import DeviceLimits, Environment
from gpuspawner.core.errors import NoDeviceFree, TooMuchAsked
from gpuspawner.core.units import MICRO, format_price
from gpuspawner.devices.mig_profiles import part_of_gpu, size_in_name
from gpuspawner.devices.models import Device
from gpuspawner.devices.placement import PlacementIndex
from gpuspawner.devices.slots import describe_share
from gpuspawner.devices.snapshots import (
    DeviceView,
    Overview,
    count_models,
    count_shares,
    device_views,
)
from gpuspawner.devices.suitability import suitable
from gpuspawner.hub_pages.prices import FREE, PriceList, most_shared
from gpuspawner.leases.models import SHARE, LeasedDevice, Request, Sharing, Slot
from gpuspawner.ledger.models import Account
from gpuspawner.ledger.pricing import Rate, Rates, rates_by_model
from gpuspawner.queue.kinds import kind_of, parts_of, pool_of

NOON = datetime(2026, 3, 2, 12, tzinfo=timezone.utc)
GIB = 2**30
A100 = "NVIDIA A100-SXM4-40GB"
LAB = Environment(
    slug="lab",
    display_name="Lab",
    image="lab",
    devices=DeviceLimits(default=1, max=4),
    sharing="any",
)


def device_of(model: str, slots: int = 1, number: int = 0) -> Device:
    """A GPU of 40 GB with seven slices, or an instance of one."""
    size = size_in_name(model)
    memory = size.memory_bytes if size else 40 * GIB
    part = part_of_gpu(size, 7, 40 * GIB) if size else 1
    uuid = f"GPU-{number}"
    return Device(uuid=uuid, index=0, model=model, memory_bytes=memory, slots=slots, part=part)


def leased(device: Device, held: int | None = None) -> LeasedDevice:
    """So many slots of a device, or all."""
    held, memory = held or device.slots, device.memory_bytes
    return LeasedDevice(device.uuid, 0, 0, device.model, memory, device.slots, held, device.part)


def rate_of(rates: Rates, model: str, slots: int = 1) -> int:
    return rates.card(NOON).price([leased(device_of(model, slots), 1)])


def test_instance_costs_its_part_unless_a_rate_names_it() -> None:
    rates = Rates.of(rates_by_model({"*": 1, "A100": 4}))
    assert rate_of(rates, A100) == 4 * MICRO
    assert rate_of(rates, f"{A100} MIG 1g.5gb") == 571_429
    assert rate_of(rates, f"{A100} MIG 3g.20gb") == 2 * MICRO
    assert rate_of(rates, "NVIDIA H100 MIG 1g.5gb") == 142_858
    assert rate_of(rates, f"{A100} MIG 3g.20gb", slots=4) == MICRO // 2
    for name in ("MIG 1g.5gb", "1g.5gb", "A100 MIG", "1g"):
        named = Rates.of(rates_by_model({"A100": 4, name: "0.6"}), [Rate(amount=9, model="H100")])
        assert rate_of(named, f"{A100} MIG 1g.5gb") == 600_000, name
        assert rate_of(named, A100) == 4 * MICRO
    long = Rates.of(rates_by_model({A100: 8, "MIG 1g.5gb": "0.6"}))
    assert rate_of(long, f"{A100} MIG 1g.5gb") == 600_000, "whatever the length of the names"
    quarter = Rates.of([Rate(amount=MICRO, model="A100", slots=4)])
    assert rate_of(quarter, f"{A100} MIG 3g.20gb", slots=4) == MICRO // 2, "of half a GPU"
    assert rate_of(Rates(), f"{A100} MIG 1g.5gb") == 142_858, "of 1 credit"


MODELS = [A100, "Tesla T4", *(f"{A100} MIG {p}" for p in ("1g.5gb", "1g.10gb", "3g.20gb"))]
PATTERNS = ["*", "A100", "T4", "A100 MIG", "MIG 1g", "1g.5gb", "A100 MIG 3g.20gb", "nvidia"]
RATES = st.lists(
    st.builds(
        Rate,
        amount=st.integers(0, 10**9),
        model=st.sampled_from(PATTERNS),
        environment=st.sampled_from(["*", "lab", "course"]),
        slots=st.none() | st.integers(1, 4),
        id=st.none() | st.integers(1, 9),
    ),
    max_size=8,
)


@given(RATES, st.lists(st.tuples(st.sampled_from(MODELS), st.integers(1, 4)), min_size=1))
def test_every_path_shows_the_price_that_a_grant_takes(
    found: list[Rate], kinds: list[tuple[str, int]]
) -> None:
    rates = Rates.of(found)
    card = rates.card(NOON, "lab")
    devices = [device_of(*kind, number) for number, kind in enumerate(kinds)]
    views = tuple(DeviceView(d, "free", "", free_slots=d.slots) for d in devices)
    models = count_models(views, rates.card(NOON))
    prices = PriceList(Overview(views, models, "", "", "", "", rates=rates), [LAB], NOON)
    shares = count_shares(views)
    for device in devices:
        whole, slot = card.price([leased(device)]), card.price([leased(device, 1)])
        (count,) = (c for c in models if c.model == device.model)
        assert prices.rate(LAB, count) == whole
        assert count.rate == rates.card(NOON).price([leased(device)])
        for kind in (kind_of(device), pool_of(kind_of(device))):  # as the queue prices requests
            of = parts_of(kind)
            assert card.rate_of(of.model, 1, of.part) == whole
            assert card.rate_of(of.model, of.slots, of.part) == slot
        share = [s for s in shares if (s.model, s.slots) == (device.model, device.slots)]
        assert [prices.rate(LAB, each) for each in share] == [slot] * (device.slots > 1)
        assert kind_of(device) == kind_of(leased(device))


KINDS = st.tuples(st.sampled_from(MODELS), st.integers(1, 6))


FLEETS = st.lists(st.tuples(KINDS, st.lists(st.integers(0, 6), min_size=1)), min_size=1)
"""Kinds of devices, and how many slots of each device are in use."""


@given(RATES, FLEETS, st.integers(0, 45))
def test_form_queue_and_grant_agree_on_shares_with_memory(
    found: list[Rate], fleet: list[tuple[tuple[str, int], list[int]]], gigabytes: int
) -> None:
    lab = LAB.model_copy(update={"min_memory": gigabytes * 10**9})
    each = [(kind, used) for kind, some in fleet for used in some]
    devices = [device_of(*kind, number) for number, (kind, _) in enumerate(each)]
    taken = {
        Slot(device.uuid, slot).text
        for device, (_, used) in zip(devices, each, strict=True)
        for slot in range(min(used, device.slots))
    }
    views = device_views(devices, {Slot.from_text(text): text for text in taken})
    prices = PriceList(Overview(views, (), "", "", "", "", rates=Rates.of(found)), [lab], NOON)
    card = prices.overview.rates.card(NOON, "lab")
    request = Request(devices=1, sharing=Sharing.SLOT, memory_bytes=lab.min_memory)
    shares = {(share.model, share.slots): share for share in prices.shares_of(lab)}
    free = dict.fromkeys(shares, 0)
    for device in devices:
        index, key = PlacementIndex([device], {}), (device.model, device.slots)
        try:
            held = len(index.choose(request, frozenset()))
        except TooMuchAsked:
            assert key not in shares
            continue
        share, lease = shares[key], leased(device, held)
        assert share.held_slots == held == parts_of(kind_of(device)).slots_for(lab.min_memory)
        assert prices.rate(lab, share) == card.price([lease])
        assert describe_share(lease) == f"{share.label}, {most_shared([share])}"
        assert share.share_bytes == lease.share_bytes >= lab.min_memory
        in_use = taken
        with contextlib.suppress(NoDeviceFree):
            while True:
                in_use = in_use | {slot.text for slot in index.choose(request, frozenset(in_use))}
                free[key] += 1
    assert {key: share.free for key, share in shares.items()} == free


@given(RATES, st.lists(KINDS, min_size=1))
def test_each_amount_of_memory_on_the_form_has_the_price_of_its_shares(
    found: list[Rate], kinds: list[tuple[str, int]]
) -> None:
    devices = [device_of(*kind, number) for number, kind in enumerate(kinds)]
    prices = PriceList(
        Overview(device_views(devices, {}), (), "", "", "", "", rates=Rates.of(found)), [LAB], NOON
    )
    card = prices.overview.rates.card(NOON, "lab")
    choices = prices.choices_by_memory(LAB, [SHARE], None)
    payer = Account(name="member:ada", balance=0)
    offers = prices.tables((), [("", payer)], by_memory={"lab": choices})
    for _, model, gigabytes in choices:
        memory = gigabytes * 10**9
        asked = Request(
            devices=1, sharing=Sharing.SLOT, model=model or None, memory_bytes=memory, smallest=True
        )
        fitting = suitable(asked, devices)
        rates = [card.price([leased(device, device.slots_for(memory))]) for device in fitting]
        offer = offers.find(LAB, f"share|{model}|{gigabytes}")
        assert offer and not offer.refusal
        assert prices_in(offer.price) == {*map(format_price, (min(rates), max(rates)))}
    held = {s.held_slots for share in prices.shares_of(LAB) for s in share.up()}
    assert held == {n for device in devices for n in range(1, device.slots)}


def prices_in(said: str) -> set[str]:
    """The lowest and the highest price of ``0.25 to 1.00 credits an hour``."""
    return {"0.00"} if said == FREE else set(said.removesuffix(" credits an hour").split(" to "))


@given(st.integers(0, 10**9), st.integers(1, 4))
def test_instance_costs_its_part_rounded_up(amount: int, slots: int) -> None:
    card = Rates.of([Rate(amount=amount)]).card(NOON)
    for part in (Fraction(1, 7), Fraction(2, 7), Fraction(1, 2), Fraction(4, 7)):
        rate = card.rate_of("any", slots, part)
        assert rate == ceil(amount * part / slots)
    sevenths = 7 * card.rate_of("any", 1, Fraction(1, 7))
    assert amount <= sevenths < amount + 7
