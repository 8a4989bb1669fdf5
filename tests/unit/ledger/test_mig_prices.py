"""What MIG instances cost, by every path that knows a price. Real: pure values."""

from __future__ import annotations

from datetime import datetime, timezone
from fractions import Fraction
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.catalog.models import DeviceLimits, Environment
from gpuspawner.core.units import MICRO
from gpuspawner.devices.mig_profiles import part_of_gpu, size_in_name
from gpuspawner.devices.models import Device
from gpuspawner.devices.snapshots import DeviceView, Overview, count_models, count_shares
from gpuspawner.hub_pages.prices import PriceList
from gpuspawner.leases.models import LeasedDevice
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


def leased(device: Device, *, whole: bool = True) -> LeasedDevice:
    held = device.slots if whole else 1
    memory = device.memory_bytes
    return LeasedDevice(device.uuid, 0, 0, device.model, memory, device.slots, held, device.part)


def rate_of(rates: Rates, model: str, slots: int = 1) -> int:
    return rates.card(NOON).price([leased(device_of(model, slots), whole=slots == 1)])


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
        whole, slot = card.price([leased(device)]), card.price([leased(device, whole=False)])
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


@given(st.integers(0, 10**9), st.integers(1, 4))
def test_instance_costs_its_part_rounded_up(amount: int, slots: int) -> None:
    card = Rates.of([Rate(amount=amount)]).card(NOON)
    for part in (Fraction(1, 7), Fraction(2, 7), Fraction(1, 2), Fraction(4, 7)):
        rate = card.rate_of("any", slots, part)
        assert rate == ceil(amount * part / slots)
    sevenths = 7 * card.rate_of("any", 1, Fraction(1, 7))
    assert amount <= sevenths < amount + 7
