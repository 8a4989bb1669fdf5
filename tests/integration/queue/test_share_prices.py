"""Shares of several slots: form, queue, quote, receipt and reports agree on size and price. Real:
services, databases. Simulated: devices and clock."""

from __future__ import annotations

from fractions import Fraction

from gpuspawner.catalog.models import DeviceLimits, Environment, SessionHours
from gpuspawner.core.units import MICRO
from gpuspawner.hub_pages.prices import PriceList
from gpuspawner.leases.models import SHARE, Lease, ServerRef, Terms
from gpuspawner.ledger.models import Account
from gpuspawner.monitoring.cluster_views import ViewerScope, holder, look, summary
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from gpuspawner.spawners.options import parse, resolve
from gpuspawner.spawners.quotes import QuoteQuestion, RunQuote, quote_of
from gpuspawner.web.pages import device_names, lease_devices
from gpuspawner.web.schemas import instant
from tests.support.brokers import Clock, Make
from tests.support.parts import each_database

LAB = Environment(
    slug="lab", display_name="Lab", image="lab", sharing="any", devices=DeviceLimits(max=1)
)
TERMS = Terms(wait=True, seconds=2 * 3600)
SHARES = {4: (1, MICRO), 8: (2, 2 * MICRO), 10: (3, 3 * MICRO), 12: (3, 3 * MICRO)}
"""The slots of a T4 with four, and their price, for some GB of memory."""


def quote(services: Services, user: str, memory: int) -> RunQuote:
    request = resolve(parse({"gpus": SHARE, "gpu_memory": memory}), LAB, limit=1)
    question = QuoteQuestion(
        server=ServerRef(user),
        environment=LAB,
        request=request,
        terms=TERMS,
        engine="docker",
        hours=SessionHours(),
        most_gpus=1,
    )
    return quote_of(services, question)


def ask(services: Services, user: str, memory: int) -> Lease | Ticket:
    Clock.of(services).forward(seconds=1)
    request = resolve(parse({"gpus": SHARE, "gpu_memory": memory}), LAB, limit=1)
    return services.queue.ask(ServerRef(user), request, engine="docker", terms=TERMS)


@each_database
def test_price_shown_for_a_share_is_paid_and_everything_counts_its_slots(
    make: Make, clock: Clock
) -> None:
    services = make(device_source="simulated:4xT4", shared_devices={"T4": 4}, gpu_rates={"*": 4})
    services.positions.sync()
    prices = PriceList(services.monitoring.overview(), [LAB], clock())
    choices = [(SHARE, "", memory) for memory in SHARES]
    assert set(choices) <= set(prices.choices_by_memory(LAB, [SHARE], 10))
    payer = [("", Account(name="member:ada", balance=10 * MICRO))]
    offers = prices.tables((), payer, [("2", 2.0)], by_memory={"lab": choices})
    leases = {}
    for memory, (slots, rate) in SHARES.items():
        user, what = f"m{memory}", f"{slots}/4 of T4 (about {4 * slots} GB)"
        offer = offers.find(LAB, f"share||{memory}")
        quoted = quote(services, user, memory)
        request = resolve(parse({"gpus": SHARE, "gpu_memory": memory}), LAB, limit=1)
        assert offer and offer.what == quoted.what == what
        assert offer.price == quoted.price == f"{rate // MICRO}.00 credits an hour"
        assert offer.totals["2"] == quoted.total == f"{2 * rate // MICRO}.00 credits"
        assert services.queue.dearest(request, TERMS)[0] == rate
        lease = ask(services, user, memory)
        assert isinstance(lease, Lease)
        leases[memory] = services.leases.confirm(lease.id, started_at=clock())
        (device,) = lease.devices
        assert (device.held_slots, device.slots, lease.rate) == (slots, 4, rate)
        assert (
            device_names(lease.devices) == f"{slots}/4 of T4 (GPU\N{NO-BREAK SPACE}{device.index})"
        )
        others = f"{4 - slots} other{'s' if slots < 3 else ''}"
        assert lease_devices(lease.devices).startswith(
            f"{slots}/4 of T4, about {4 * slots} GB, shared with up to {others}, not isolated"
        )
    started = clock()
    clock.forward(hours=2)
    for memory, lease in leases.items():
        slots, rate = SHARES[memory]
        ended = services.leases.release(lease.id, stopped_at=clock(), reason="stopped")
        receipt = services.reports.receipt(lease.id).lease
        assert ended.charged == receipt.charged
        assert abs(ended.charged - 2 * rate) < rate // 100
        assert receipt.device_equivalents == Fraction(slots, 4)
    day = started.replace(hour=0)
    use = services.reports.use_by([day, clock.forward(days=1)], "user")[0]
    hours = {member: round(each.micros / 3_600_000_000, 2) for member, each in use.items()}
    assert hours == {f"m{memory}": slots / 2 for memory, (slots, _) in SHARES.items()}


def test_free_shares_on_the_form_are_those_that_start_at_once(make: Make, clock: Clock) -> None:
    services = make(device_source="simulated:2xT4", shared_devices={"T4": 4})
    first, second = (ask(services, user, 4) for user in ("ada", "bob"))
    assert isinstance(first, Lease) and isinstance(second, Lease)
    assert first.uuids == second.uuids
    half = LAB.model_copy(update={"min_memory": 8 * 10**9})

    def free() -> int:
        (share,) = PriceList(services.monitoring.overview(), [half], clock()).shares_of(half)
        assert (share.held_slots, share.total) == (2, 4)
        return share.free

    for number in range(3):
        assert (free(), quote(services, f"m{number}", 8).at_once) == (3 - number, True)
        assert isinstance(ask(services, f"m{number}", 8), Lease)
    assert (free(), quote(services, "eve", 8).at_once) == (0, False)
    assert isinstance(ask(services, "eve", 8), Ticket)

    picture = look(services, dict)
    assert summary(picture).startswith("0 of 2 free, 0 of 8 slots free, ")
    assert [holder(tile, ViewerScope.NAMES) for tile in picture.tiles] == [
        "ada, bob, m0 (2 slots)",
        "m1 (2 slots), m2 (2 slots)",
    ]
    tile = picture.tiles[0]
    own = picture.own["m0"][tile.device.uuid]
    assert (own.slots, own.words["who"]) == ((2, 3), "yours (2 slots)")
    assert own.words["since_at"] > (instant(tile.since) or ""), "not since the first lease on it"
