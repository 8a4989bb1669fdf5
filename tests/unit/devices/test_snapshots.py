"""What pages and forms show of devices. Real: everything, it is pure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpuspawner.core.times import clock
from gpuspawner.core.units import MICRO
from gpuspawner.devices.closures import GRANTING, Closure
from gpuspawner.devices.models import Device, DeviceProcess, DeviceStatus
from gpuspawner.devices.snapshots import (
    ModelCount,
    Overview,
    ShareCount,
    count_models,
    credit_ends,
    device_views,
)
from gpuspawner.leases.models import Lease, LeaseState, Slot
from gpuspawner.ledger.models import Account
from gpuspawner.ledger.pricing import RateCard, Rates, rates_by_model
from tests.support.leases import lease_of

GIB = 2**30
NOW = datetime(2025, 3, 1, 12, tzinfo=timezone.utc)
GRACE = timedelta(minutes=5)
HOUR = timedelta(hours=1)


def device(index: int, model: str = "A100", gib: int = 80, **fields: Any) -> Device:
    return Device(uuid=f"GPU-{index}", index=index, model=model, memory_bytes=gib * GIB, **fields)


# Devices and their state.

COMPUTES = DeviceProcess(4711, name="python")
TWO = (DeviceProcess(1), DeviceProcess(2))
USED = "used without a lease by"
DRAWS = DeviceProcess(12, kind="graphics", name="Xorg")
LOST: dict[str, Any] = {"status": DeviceStatus.UNKNOWN, "reason": "The GPU is lost."}
TAKEN_OUT: dict[str, Any] = {"status": DeviceStatus.DRAINED, "reason": "drained by root: a new fan"}


@pytest.mark.parametrize(
    ("fields", "taken", "state", "detail"),
    [
        ({}, False, "free", ""),
        ({"processes": (DRAWS,)}, False, "free", ""),
        ({"compute_mode": "exclusive_process"}, False, "free", ""),
        ({}, True, "leased", "lease lease-1"),
        ({"processes": (COMPUTES,)}, True, "leased", "lease lease-1"),
        ({"processes": (COMPUTES, DRAWS)}, False, "occupied", f"{USED} python (pid 4711)"),
        ({"processes": TWO}, False, "occupied", f"{USED} process (pid 1), process (pid 2)"),
        (LOST, False, "unknown", "The GPU is lost."),
        (LOST, True, "leased", "lease lease-1; not answering: The GPU is lost."),
        (TAKEN_OUT, False, "drained", "drained by root: a new fan"),
        (TAKEN_OUT, True, "draining", "lease lease-1; drained by root: a new fan"),
        ({"reason": "off (power saving)"}, False, "free", "off (power saving)"),
        (
            {"status": DeviceStatus.PARENT, "reason": "In MIG mode."},
            False,
            "parent",
            "In MIG mode.",
        ),
        (
            {"compute_mode": "prohibited"},
            False,
            "prohibited",
            "Its compute mode is prohibited. Set it back with nvidia-smi --compute-mode=0.",
        ),
    ],
)
def test_device_view_shows_state_and_detail(
    fields: dict[str, Any], taken: bool, state: str, detail: str
) -> None:
    one = device(0, **fields)
    seen, other = device_views([one, device(1)], {Slot("GPU-0"): "lease-1"} if taken else {})
    assert (seen.state, seen.detail) == (state, detail)
    assert seen.device is one and seen.lease_id == ("lease-1" if taken else None)
    assert other.state == "free"


CLOSED = Closure("GPU-0", NOW, "kim", "a new fan")


@pytest.mark.parametrize(
    ("fields", "taken", "state", "before"),
    [
        ({}, False, "drained", ""),
        ({}, True, "draining", "lease lease-1; "),
        (LOST, False, "unknown", "The GPU is lost; "),
        (TAKEN_OUT, False, "drained", ""),
        (TAKEN_OUT, True, "draining", "lease lease-1; "),
        ({"processes": (COMPUTES,)}, False, "occupied", f"{USED} python (pid 4711); "),
    ],
)
@pytest.mark.parametrize("reason", ["a new fan", ""])
def test_drained_device_shows_its_reason_and_is_not_free(
    fields: dict[str, Any], taken: bool, state: str, before: str, reason: str
) -> None:
    leased = {Slot("GPU-0"): "lease-1"} if taken else {}
    closed = {"GPU-0": replace(CLOSED, reason=reason), GRANTING: replace(CLOSED, subject=GRANTING)}
    views = device_views([device(0, **fields), device(1)], leased, closed)
    why = f"drained by kim: {reason}" if reason else "drained by kim"
    assert (views[0].state, views[0].detail) == (state, before + why)
    assert views[1].state == "free"
    (count,) = count_models(views, RateCard())
    assert (count.total, count.free) == (1, 1), "out of service, it counts in neither"


@pytest.mark.parametrize(
    ("fields", "held", "state", "detail", "lease_id", "free_slots"),
    [
        ({}, {}, "free", "", None, 3),
        ({}, {1: "one"}, "partly_leased", "lease one", "one", 2),
        ({}, {0: "one", 2: "two"}, "partly_leased", "leases one, two", None, 1),
        ({}, {0: "one", 1: "two", 2: "six"}, "leased", "leases one, two, six", None, 0),
        ({}, dict.fromkeys(range(3), "one"), "leased", "lease one", "one", 0),
        (LOST, {1: "one"}, "leased", "lease one; not answering: The GPU is lost.", "one", 0),
    ],
)
def test_shared_device_shows_the_lease_of_each_slot(
    fields: dict[str, Any],
    held: dict[int, str],
    state: str,
    detail: str,
    lease_id: str | None,
    free_slots: int,
) -> None:
    shared = device(0, slots=3, **fields)
    taken = {Slot("GPU-0", slot): lease for slot, lease in held.items()}
    (view,) = device_views([shared], taken)
    assert (view.state, view.detail, view.lease_id) == (state, detail, lease_id)
    assert view.leases == tuple(held.get(slot) for slot in range(3))
    assert view.free_slots == free_slots
    (count,) = count_models([view], RateCard())
    assert count.free == (state == "free") and count.free_slots == free_slots
    assert count.total == (shared.status is DeviceStatus.OK)


def test_drained_shared_device_has_no_free_slot() -> None:
    taken = {Slot("GPU-0", 0): "one", Slot("GPU-0", 1): "two"}
    (view,) = device_views([device(0, slots=3)], taken, {"GPU-0": CLOSED})
    assert (view.state, view.free_slots) == ("draining", 0)
    assert view.detail == "leases one, two; drained by kim: a new fan"
    machine = device(0, slots=3, **TAKEN_OUT)
    (view,) = device_views([machine], taken, {"GPU-0": CLOSED})
    assert view.detail == "leases one, two; drained by kim: a new fan"


def test_model_counts_include_rates_and_skip_unusable_devices() -> None:
    rates = Rates.of(rates_by_model({"*": 1, "A100": 4, "T4": "0.5"})).card(NOW)
    devices = [
        device(0, "T4", 16),
        device(1, "A100"),
        device(2, "A100"),
        device(3, "A100", 40),
        device(4, "A100", processes=(COMPUTES,)),
        device(5, "A100", **LOST),
        device(6, "A100", status=DeviceStatus.PARENT),
        device(7, "T4", 16, compute_mode="prohibited"),
    ]
    counts = count_models(device_views(devices, {Slot("GPU-1"): "lease-1"}), rates)
    assert counts == (
        ModelCount("A100", 80 * GIB, total=2, free=1, rate=4 * MICRO),
        ModelCount("A100", 40 * GIB, total=1, free=1, rate=4 * MICRO),
        ModelCount("T4", 16 * GIB, total=1, free=1, rate=MICRO // 2),
    )
    overview = Overview((), counts, "nvml", "", "", "")
    assert (overview.total, overview.free) == (4, 3)


# When credits run out.


def lease(number: int, user: str, rate: int = 4 * MICRO, **changes: Any) -> Lease:
    """One that has run for an hour, which is charged."""
    running: dict[str, Any] = {
        "id": f"lease-{number}",
        "rate": rate,
        "granted_at": NOW - HOUR,
        "started_at": NOW - HOUR,
        "charged": rate,
        "state": LeaseState.RUNNING,
    }
    return lease_of(user, **running | changes)


def accounts(**balances: float) -> dict[str, Account]:
    return {
        f"member:{name}": Account(name=f"member:{name}", balance=int(credits * MICRO))
        for name, credits in balances.items()
    }


@pytest.mark.parametrize(
    ("balance", "changes", "hours"),
    [(8, {}, 2), (8, {"charged": 0}, 1), (-3, {}, 0)],
    ids=["until it is dry", "what is not charged yet is gone already", "dry"],
)
def test_credit_end_is_when_credits_and_grace_run_out(
    balance: float, changes: dict[str, Any], hours: float
) -> None:
    ends = credit_ends([lease(1, "anna", **changes)], accounts(anna=balance), GRACE, NOW)
    assert ends == {"lease-1": NOW + hours * HOUR + GRACE}


def test_leases_of_one_account_share_its_balance() -> None:
    several = [lease(1, "anna"), lease(2, "anna", rate=12 * MICRO), lease(3, "bert")]
    ends = credit_ends(several, accounts(anna=8, bert=4), GRACE, NOW)
    hours = {"lease-1": 0.5, "lease-2": 0.5, "lease-3": 1}
    assert ends == {name: NOW + each * HOUR + GRACE for name, each in hours.items()}


def test_leases_without_a_predictable_end_are_left_out() -> None:
    free = lease(1, "anna", rate=0)
    starting = lease(2, "bert", state=LeaseState.GRANTED, started_at=None, charged=0)
    strange = lease(3, "nobody")
    assert credit_ends([free, starting, strange], accounts(anna=1, bert=1), GRACE, NOW) == {}
    rich = {"member:anna": Account(name="member:anna", balance=2**62)}
    assert credit_ends([lease(1, "anna", rate=1, charged=0)], rich, GRACE, NOW) == {}


# How that is said.


@pytest.fixture(autouse=True)
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hub's own zone is neither UTC nor the same all year."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        (NOW, "07:00"),
        (NOW + timedelta(microseconds=1), "07:01"),
        (NOW + timedelta(seconds=60), "07:01"),
        (NOW + timedelta(hours=16, minutes=59), "23:59"),
        (NOW + timedelta(hours=16, minutes=59, seconds=1), "00:00 on 2 March"),
        (datetime(2025, 3, 9, 7, 30, tzinfo=timezone.utc), "03:30 on 9 March"),
    ],
)
def test_shown_time_rounds_up_in_the_hub_time_zone(moment: datetime, said: str) -> None:
    assert clock(moment, NOW) == said


def test_share_of_several_slots_is_free_where_one_device_has_them() -> None:
    small = ShareCount("T4", 16 * GIB, 4, free_slots=(3, 3, 1))
    assert (small.free, small.total) == (7, 12)
    half = small.with_memory(8 * 10**9)
    assert half and (half.label, half.free, half.total) == ("2/4 of T4, about 8 GB", 2, 6)
    large = small.with_memory(12 * GIB)
    assert large and (large.held_slots, large.free, large.total) == (3, 2, 3)
    assert small.with_memory(12 * GIB + 1) is None, "all of its slots are the whole device"
    assert [share.held_slots for share in half.up()] == [2, 3]
