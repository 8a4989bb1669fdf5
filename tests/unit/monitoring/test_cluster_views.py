"""What the page of the cluster tells whom, and what is sent to who watches. No parts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from typing import Any

import pytest

from gpuspawner.devices.models import Device, DeviceStatus
from gpuspawner.devices.snapshots import DeviceView
from gpuspawner.leases.host_resources import UNLIMITED, HostAmount, HostBudget, HostSnapshot
from gpuspawner.leases.models import Lease, LeaseState, ServerRef
from gpuspawner.monitoring.cluster_views import (
    ClusterSnapshot,
    DeviceActivity,
    OwnPlace,
    SerializedSnapshot,
    Tile,
    Viewer,
    ViewerScope,
    as_text,
    device,
    doing_of,
    holder,
    summary,
    words,
)
from gpuspawner.monitoring.models import DeviceUse, Sample
from gpuspawner.monitoring.schemas import HostAnswer
from tests.support.leases import lease_of

NOW = datetime(2026, 3, 2, 12, 0, tzinfo=timezone.utc)
GPU = Device(uuid="GPU-1", index=0, model="A100-80GB", memory_bytes=80 * 2**30)


def lease() -> Lease:
    server = ServerRef("ada", "training")
    times = {"granted_at": NOW - timedelta(hours=2), "started_at": NOW - timedelta(hours=1)}
    return lease_of("ada", id="abc123", server=server, state=LeaseState.RUNNING, **times)


def tile(
    doing: DeviceActivity | None = None,
    *,
    state: str = "leased",
    detail: str = "",
    held: bool = True,
) -> Tile:
    some = (lease(),) if held else ()
    ids = tuple(each.id for each in some)
    view = DeviceView(GPU, state, detail, next(iter(ids), None), leases=ids)
    return Tile(view, some, doing or DeviceActivity())


# Who is told what.


def test_holder_name_shown_depends_on_the_viewer() -> None:
    some = tile()
    assert holder(some, ViewerScope.ADMIN) == "ada/training"
    assert holder(some, ViewerScope.NAMES) == "ada"
    assert holder(some, ViewerScope.PLAIN) == "in use"
    assert holder(tile(held=False, state="free"), ViewerScope.ADMIN) == ""
    for sight in (ViewerScope.PLAIN, ViewerScope.NAMES):
        assert "training" not in json.dumps(words(some, sight, NOW))
    assert "abc123" not in json.dumps(words(some, ViewerScope.ADMIN, NOW))

    own = {"ada": {"GPU-1": OwnPlace("training", (0,), "", "since 11:00", "11:00")}}
    picture = ClusterSnapshot(NOW, (tile(),), 1, 0, 2, "", own)
    plain, full = (as_text(picture, sight) for sight in (ViewerScope.PLAIN, ViewerScope.ADMIN))
    assert "\n" not in plain
    assert "ada" not in plain and "training" not in plain
    assert json.loads(plain)["tiles"]["GPU-1"]["who"] == "in use"
    assert json.loads(full)["tiles"]["GPU-1"]["who"] == "ada/training"


GPU2 = "the machine gpu2 does not report the use of its GPUs: Connection refused"
USED = "used without a lease by x (pid 4711)"
LOST = DeviceActivity(error="GPU is lost (pid 4711).", xids=(79,))
WARM = DeviceActivity(slowed=("too warm (hardware)",), warm=True)
DRAINS = "lease abc123; drained by kim: a loud fan."


@pytest.mark.parametrize(
    ("some", "member", "admin"),
    [
        (tile(), "", ""),
        (tile(LOST), "is not responding", "is not responding: GPU is lost (pid 4711); Xid 79"),
        (tile(WARM), "too warm", "slowed: too warm (hardware)"),
        (tile(DeviceActivity(slowed=("power cap",))), "", "slowed: power cap"),
        (tile(DeviceActivity(silent=GPU2)), "no measurements from its machine", GPU2),
        (tile(state="draining", detail=DRAINS), "", "drained by kim: a loud fan"),
        (tile(state="occupied", detail=USED, held=False), "", USED),
    ],
)
def test_device_faults_are_detailed_only_for_admins(some: Tile, member: str, admin: str) -> None:
    assert some.health(ViewerScope.PLAIN) == some.health(ViewerScope.NAMES) == member
    assert some.health(ViewerScope.ADMIN) == admin


def test_everybody_reads_for_whom_a_device_is_reserved() -> None:
    some = replace(GPU, reserved_for=("lab", "staff"))
    for sight in ViewerScope:
        told = words(Tile(DeviceView(some, "free", ""), (), DeviceActivity()), sight, NOW)
        assert told["reserved"] == "reserved for lab and staff"
    assert words(tile(), sight, NOW)["reserved"] == ""


def test_powered_off_machine_is_not_reported_as_faulty() -> None:
    off = replace(GPU, reason="off (power saving)")
    silent = DeviceActivity(silent="the machine gpu2 is off (power saving)", resting=True)
    some = Tile(DeviceView(off, "free", off.reason), (), silent)
    for sight in ViewerScope:
        told = words(some, sight, NOW)
        assert (told["health"], told["note"]) == ("", "off (power saving)")
    drained = Tile(DeviceView(off, "drained", "off (power saving); drained by kim"), (), silent)
    assert drained.health(ViewerScope.ADMIN) == "off (power saving); drained by kim"
    broken = replace(GPU, status=DeviceStatus.UNKNOWN, reason="the machine gpu2 gets no work")
    assert words(Tile(DeviceView(broken, "unknown", ""), (), silent), sight, NOW)["note"] == ""


# What is known of it.


def second(ago: float, **fields: Any) -> Sample:
    return Sample(uuid="GPU-1", index=0, at=NOW - timedelta(seconds=ago), **fields)


def test_newest_sample_wins_and_xid_errors_persist() -> None:
    counts: dict[str, Any] = {"samples": 60, "known": 60, "measured": 60, "use_sum": 600}
    minute = DeviceUse(uuid="GPU-1", since=NOW, seconds=60, **counts)
    fresh, old, ahead = second(2, use=73, celsius=61), second(120, use=73), second(-3600, use=73)
    assert doing_of([old, fresh], minute, NOW).use == 73
    assert doing_of([old], minute, NOW).use == 10
    assert doing_of([old], None, NOW) == doing_of([], None, NOW) == DeviceActivity()
    silent = second(0, silent="nobody asked it")
    assert doing_of([fresh, silent], minute, NOW) == DeviceActivity(silent="nobody asked it")
    assert doing_of([ahead], minute, NOW).use == 10, "the clock was set back"

    # The driver reports it once.
    seconds = [second(180, xids=(79, 13)), second(0, use=1, xids=(13,))]
    minute = DeviceUse(uuid="GPU-1", since=NOW, seconds=60, xids=(48,))
    assert doing_of(seconds, minute, NOW).xids == (79, 13, 48)


@pytest.mark.parametrize(
    ("doing", "use", "memory"),
    [
        (DeviceActivity(), "not known", "80 GB"),
        (DeviceActivity(use=73, used_bytes=13 * 2**29), "73 %", "6.5 of 80 GB"),
        (DeviceActivity(busy=True, used_bytes=2**30), "has processes", "1.0 of 80 GB"),
        (DeviceActivity(busy=False), "no process", "80 GB"),
        (DeviceActivity(use=100, used_bytes=2**50), "100 %", "1048576.0 of 80 GB"),
    ],
)
def test_device_use_and_memory_are_formatted(doing: DeviceActivity, use: str, memory: str) -> None:
    told = words(tile(doing), ViewerScope.PLAIN, NOW)
    assert (told["use"], told["memory"]) == (use, memory)
    assert 0 <= told["level"] <= 100
    assert 0 <= told["filled"] <= 100


def test_tile_start_time_and_queue_summary_are_formatted() -> None:
    at = (NOW - timedelta(hours=1)).astimezone()
    assert words(tile(), ViewerScope.PLAIN, NOW)["since"] == f"since {at:%H:%M}"
    later = NOW + timedelta(days=2)
    assert words(tile(), ViewerScope.PLAIN, later)["since"] == f"since {at:%-d %b %H:%M}"
    assert words(tile(held=False, state="free"), ViewerScope.PLAIN, NOW)["since"] == ""
    for count, said in ((0, "the queue is empty"), (1, "1 in the queue"), (7, "7 in the queue")):
        assert summary(ClusterSnapshot(NOW, (), 8, 3, count, "")) == f"3 of 8 free, {said}"


def test_summary_tells_what_is_reserved_of_the_host() -> None:
    budget = HostBudget(HostAmount(2**35, 8000))
    host = HostSnapshot(budget, HostAmount(2**34, 2500))
    assert summary(ClusterSnapshot(NOW, (), 8, 3, 0, "", host=host)) == (
        "3 of 8 free, 16.0 GB of 32.0 GB of memory and 2.5 of 8 CPU cores reserved, "
        "the queue is empty"
    )
    only = HostBudget(HostAmount(UNLIMITED, 8000))
    assert only.summary(HostAmount()) == "0 of 8 CPU cores reserved"


def test_answer_has_the_budget_of_the_host_and_what_is_left() -> None:
    budget = HostBudget(HostAmount(2**35, UNLIMITED), HostAmount(2**33, 1000))
    found = HostAnswer.of_snapshot(HostSnapshot(budget, HostAmount(2**34, 2500), Fraction(3, 2)))
    assert found.as_json() == {
        "budget": {"memory_bytes": 2**35, "cpus": None},
        "reserved": {"memory_bytes": 2**34, "cpus": None},
        "left": {"memory_bytes": 2**34, "cpus": None},
        "left_without_gpu": {"memory_bytes": 2**32, "cpus": None},
    }
    full = HostSnapshot(HostBudget(HostAmount(UNLIMITED, 8000)), HostAmount(0, 9500))
    told = HostAnswer.of_snapshot(full)
    assert (told.reserved.cpus, told.left.cpus, told.left.memory_bytes) == (9.5, 0, None)


def test_shared_device_shows_which_slots_are_taken_and_by_whom() -> None:
    some = (lease(), lease_of("bob", id="def456", server=ServerRef("bob")))
    ids = ("abc123", None, "def456", None)
    shared = Tile(
        DeviceView(replace(GPU, slots=4), "partly_leased", "", leases=ids, free_slots=2),
        some,
        DeviceActivity(),
    )
    picture = ClusterSnapshot(NOW, (shared, tile()), 2, 0, 0, "")
    assert summary(picture) == "0 of 2 free, 2 of 4 slots free, the queue is empty"
    told = words(shared, ViewerScope.NAMES, NOW)
    assert told["share"] == "2 of 4 slots in use"
    assert told["slots"] == (True, False, True, False)
    assert told["who"] == "ada, bob"
    assert words(shared, ViewerScope.PLAIN, NOW)["who"] == "in use"
    assert holder(shared, ViewerScope.ADMIN) == "ada/training, bob"
    view = replace(shared.view, leases=("abc123", "abc123", "def456", None))
    several = replace(shared, view=view)
    assert holder(several, ViewerScope.NAMES) == "ada (2 slots), bob"
    assert holder(several, ViewerScope.ADMIN) == "ada/training (2 slots), bob"
    whole = replace(shared, view=replace(view, leases=("abc123",) * 4), leases=some[:1])
    assert holder(whole, ViewerScope.NAMES) == "ada"
    unknown = Tile(DeviceView(replace(GPU, slots=2), "unknown", ""), (), DeviceActivity())
    assert words(unknown, ViewerScope.PLAIN, NOW)["slots"] == (False, False)
    assert "share" not in words(tile(), ViewerScope.PLAIN, NOW)


def test_api_names_only_the_own_lease_among_several_on_a_device() -> None:
    some = (lease(), lease_of("bob", id="def456", server=ServerRef("bob", "lab")))
    view = DeviceView(
        replace(GPU, slots=4), "partly_leased", "", leases=("abc123", "def456", None, None)
    )
    shared = Tile(view, some, DeviceActivity())
    own = device(shared, "bob", ViewerScope.PLAIN)
    assert (own.mine, own.user, own.server, own.slots) == (True, "bob", "lab", 4)
    other = device(shared, "eve", ViewerScope.ADMIN)
    assert (other.mine, other.user, other.server) == (False, None, None)


# What is sent.


def frame(
    at: str, text: str = "{}", trouble: str = "", **own: dict[str, OwnPlace]
) -> SerializedSnapshot:
    return SerializedSnapshot(at, {ViewerScope.PLAIN: text}, own, trouble)


TRAINING = {"GPU-1": OwnPlace("training", (2, 3), " (2 slots)", "since 11:00", "11:00")}


def events(text: str | None) -> dict[str, Any]:
    parts = [line for line in (text or "").split("\n") if line]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {
        name.removeprefix("event: "): json.loads(data.removeprefix("data: "))
        for name, data in pairs
    }


async def test_viewer_receives_only_changed_events() -> None:
    viewer = Viewer("ada", ViewerScope.PLAIN)
    bob = {"GPU-2": OwnPlace("x", (0,), "", "since 10:00", "10:00")}
    viewer.offer(frame("12:00:00", '{"a":1}', ada=TRAINING, bob=bob))
    assert events(await viewer.next(5)) == {
        "picture": {"a": 1},
        "mine": {
            "GPU-1": {
                "who": "yours: training (2 slots)",
                "since": "since 11:00",
                "since_at": "11:00",
                "slots": [2, 3],
            }
        },
        "trouble": "",
        "time": "12:00:00",
    }
    viewer.offer(frame("12:00:02", '{"a":1}', ada=TRAINING))
    assert events(await viewer.next(5)) == {"time": "12:00:02"}
    viewer.offer(SerializedSnapshot("12:00:04", {}, trouble="Database unavailable."))
    told = events(await viewer.next(5))
    assert told == {"trouble": "Database unavailable.", "time": "12:00:04"}
    viewer.offer(frame("12:00:06", '{"a":1}'))
    assert events(await viewer.next(5)) == {"mine": {}, "trouble": "", "time": "12:00:06"}


async def test_viewer_gets_only_the_newest_picture_until_it_leaves() -> None:
    viewer = Viewer("ada", ViewerScope.PLAIN)
    for number in range(1000):
        viewer.offer(frame(str(number), json.dumps({"number": number})))
    assert events(await viewer.next(5))["picture"] == {"number": 999}
    assert await viewer.next(0.01) is None
    waiting = asyncio.ensure_future(viewer.next(60))
    await asyncio.sleep(0)
    viewer.offer(frame("12:00:00"))
    viewer.go()
    assert await waiting is None
