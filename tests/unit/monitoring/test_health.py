"""Symptoms in samples, and verdicts from symptoms. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpuspawner.monitoring.health import (
    CALM,
    CAUSES,
    XIDS,
    HealthPolicy,
    HealthState,
    HealthVerdict,
    Symptom,
    SymptomWindow,
    checked_actions,
    judge,
    needs_admin,
    probe_failed,
    returned,
    xid_class,
)
from gpuspawner.monitoring.models import Condition, Sample

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
POLICY = HealthPolicy({}, quiet=timedelta(minutes=10), most_falls=3)


def samples(count: int, since: datetime = NOW, **shows: Any) -> Iterator[Sample]:
    """One a second."""
    for second in range(count):
        at = since + timedelta(seconds=second)
        yield Sample(uuid="GPU-1", index=0, at=at, **shows)


def take(signs: SymptomWindow) -> tuple[Symptom, ...]:
    """What is found, and judged by that."""
    symptoms = signs.look()
    signs.judged()
    return symptoms


def found(*some: Sample) -> dict[str, str]:
    """What is wrong, by cause."""
    signs = SymptomWindow()
    signs.add(some)
    return {each.cause: each.said for each in take(signs)}


# Symptoms.


@pytest.mark.parametrize(
    ("shows", "cause", "said"),
    [
        *(
            ({"xids": (code,)}, cause, f"Xid {code}: {what}")
            for code, cause, what in (
                (31, "xid program", "a program's own mistake"),
                (63, "xid minor", "a lesser error"),
                (4711, "xid minor", "a lesser error"),
                (79, "xid link", "it lost power, NVLink or the bus"),
                (48, "xid memory", "its memory lost data"),
                (119, "xid stuck", "the card hangs"),
            )
        ),
        ({"ecc_errors": 1}, "ecc before", "1 memory error since the driver was loaded"),
        *(
            ({"condition": Condition(**{cause.replace(" ", "_"): True})}, cause, said)
            for cause, said in (
                ("remap pending", "rows of its memory wait to be replaced"),
                ("remap failed", "it has no spare rows of memory left"),
                ("pages pending", "pages of its memory wait to be retired"),
            )
        ),
    ],
)
def test_some_symptoms_are_found_in_one_sample(
    shows: dict[str, Any], cause: str, said: str
) -> None:
    assert found(*samples(1, **shows)) == {cause: said}


FULL: dict[str, Any] = {
    "link_width": 16,
    "link_most": 16,
    "limit_milliwatts": 400_000,
    "usual_milliwatts": 400_000,
}
NARROW = Condition(**FULL | {"link_width": 4})
WEAK = Condition(**FULL | {"limit_milliwatts": 200_000})


@pytest.mark.parametrize(
    ("shows", "seconds", "cause", "said"),
    [
        ({"error": "The GPU is lost."}, 30, "lost", "The GPU is lost"),
        ({"celsius": 95}, 60, "hot", "95 °C"),
        ({"throttle": 0x8 | 0x4}, 60, "slowed", "slowed down: hardware slowdown"),
        ({"condition": NARROW}, 60, "narrow", "4 of 16 lanes of PCIe"),
        ({"condition": WEAK}, 60, "weak", "limited to 200 of 400 W"),
    ],
)
def test_lasting_symptoms_are_reported_only_after_their_duration(
    shows: dict[str, Any], seconds: int, cause: str, said: str
) -> None:
    assert found(*samples(seconds, **shows)) == {}
    assert found(*samples(seconds + 1, **shows)) == {cause: said}
    later = NOW + timedelta(seconds=seconds + 1)
    well = samples(1, later, celsius=40, condition=Condition(**FULL))
    assert found(*samples(seconds + 1, **shows), *well) == {}


def test_healthy_or_brief_readings_are_not_symptoms() -> None:
    well = dict.fromkeys(("remap_pending", "remap_failed", "pages_pending"), False)
    condition = Condition(**well, **FULL)
    assert not found(*samples(90, use=100, celsius=84, ecc_errors=0, condition=condition))
    assert not found(*samples(90))  # one that tells nothing
    assert not found(*samples(90, celsius=181, throttle=0x4))  # nonsense; a limit by choice

    hot = list(samples(61, celsius=95))
    later = NOW + timedelta(seconds=61)
    assert "hot" in found(*hot, *samples(60, later, celsius=90))
    assert "hot" not in found(*hot, *samples(1, later, celsius=85))
    assert "hot" not in found(*samples(90, celsius=94))

    ahead = samples(2, NOW + timedelta(hours=3), celsius=99)
    back = samples(2, NOW - timedelta(hours=3), celsius=99)
    assert found(*samples(20, celsius=99), *ahead) == {}
    assert found(*samples(20, celsius=99), *back) == {}


def test_symptoms_reflect_new_and_repeated_errors() -> None:
    signs = SymptomWindow()
    signs.add(samples(3, ecc_errors=2))
    assert [each.cause for each in take(signs)] == ["ecc before"]
    signs.add(samples(3, ecc_errors=5))
    (new,) = (each for each in take(signs) if each.cause == "ecc")
    assert new.said == "3 memory errors that ECC could not correct"
    assert [each.cause for each in take(signs)] == ["ecc before"]
    signs.add(samples(3, ecc_errors=0))  # the driver was loaded anew
    assert take(signs) == ()

    signs = SymptomWindow()
    for minutes, expected in ((0, 1), (30, 1), (70, 1), (80, 2)):
        signs.add(samples(1, NOW + timedelta(minutes=minutes), xids=(63,)))
        causes = [each.cause for each in take(signs)]
        assert causes == ["xid minor", "xid often"][:expected]

    signs = SymptomWindow()
    for second in range(1000):
        signs.add(samples(1, NOW + timedelta(seconds=second), xids=(79, 48), ecc_errors=second))
    found = [(each.cause, each.at) for each in take(signs)]
    assert found == [("xid link", NOW), ("xid memory", NOW), ("ecc", NOW + timedelta(seconds=1))]
    assert take(signs) == ()


def test_xid_classes_are_unique_and_their_causes_exist() -> None:
    codes = [code for each in XIDS for code in each.codes]
    assert len(codes) == len(set(codes))
    assert {each.cause for each in XIDS} <= CAUSES.keys()
    assert xid_class(12345).cause == "xid minor"

    assert checked_actions({"hot": "watch", "xid 79": "ignore"})
    with pytest.raises(ValueError, match="'warm' is not a cause: write \"xid 79\""):
        checked_actions({"warm": "drain"})
    with pytest.raises(ValueError, match="'hot' is to 'burn'; write ignore, watch or drain"):
        checked_actions({"hot": "burn"})


# Verdicts.


class Device:
    """A device as it goes on."""

    def __init__(self, policy: HealthPolicy = POLICY) -> None:
        self.policy = policy
        self.now = NOW
        self.state = HealthState(since=NOW)

    def goes_on(self, *causes: str, minutes: float = 0.0, lasting: bool = False) -> str:
        """So many minutes pass, then these are found; what follows."""
        self.now += timedelta(minutes=minutes)
        symptoms = [Symptom(each, f"it is {each}", self.now, lasting) for each in causes]
        going_on = causes if lasting else ()
        verdict: HealthVerdict = judge(self.policy, self.state, symptoms, self.now, going_on)
        self.state = verdict.state
        return verdict.event

    def comes_back(self, by_hand: bool = False) -> None:
        self.state = returned(self.state, self.now, by_hand=by_hand)


def test_slowed_device_is_watched_and_then_fine() -> None:
    it = Device()
    assert it.goes_on("xid program") == "", "a program's mistake is nothing"
    assert it.goes_on("slowed", lasting=True) == "watch"
    assert it.goes_on("slowed", lasting=True, minutes=50) == ""
    assert it.goes_on(minutes=50) == ""
    assert it.goes_on(minutes=CALM.total_seconds() / 60) == "fine"
    assert it.state.reason == ""


def test_sick_device_is_probed_after_quiet_and_returns() -> None:
    it = Device()
    assert it.goes_on("slowed", "xid link") == "sick"
    assert (it.state.cause, it.state.fault_at) == ("xid link", NOW)
    assert it.goes_on("xid memory", minutes=5) == ""
    assert it.state.reason == "it is xid link"  # what it fell sick with
    assert it.goes_on(minutes=9) == ""
    assert it.goes_on(minutes=1) == "probe"
    it.state = probe_failed(it.state, it.now)
    assert it.goes_on(minutes=9) == ""
    assert it.goes_on(minutes=1) == "probe"
    it.comes_back()
    assert it.state.verdict == "watch"
    assert it.goes_on(minutes=61) == "fine"


def test_relapsing_device_waits_longer_and_then_needs_an_admin() -> None:
    it = Device()
    for quiet in (10, 20):
        assert it.goes_on("lost", lasting=True, minutes=1) == "sick"
        assert it.goes_on(minutes=quiet - 1) == ""
        assert it.goes_on(minutes=1) == "probe"
        it.comes_back()
    assert it.goes_on("lost", lasting=True, minutes=1) == "sick"
    assert needs_admin(it.policy, it.state)
    assert it.goes_on(minutes=100_000) == ""
    it.comes_back(by_hand=True)
    assert it.goes_on("lost", minutes=1) == "sick"
    assert it.goes_on(minutes=10) == "probe"


def test_relapses_expire_and_clock_changes_do_not_end_quarantine() -> None:
    it = Device()
    it.goes_on("lost")
    it.comes_back()
    assert it.goes_on("lost", minutes=24 * 60) == "sick"
    assert it.state.falls == 1

    it = Device()
    it.goes_on("lost")
    assert it.goes_on(minutes=-600) == ""
    assert it.goes_on(minutes=605) == ""
    assert it.goes_on(minutes=5) == "probe"


def test_admin_return_accepts_known_symptoms_but_not_new_ones() -> None:
    it = Device()
    assert it.goes_on("remap pending", lasting=True) == "sick"
    it.comes_back(by_hand=True)
    assert it.goes_on("remap pending", lasting=True, minutes=1) == ""
    assert it.goes_on("remap pending", "hot", lasting=True, minutes=1) == "sick"
    it.comes_back(by_hand=True)
    it.goes_on(minutes=1)  # it was reset
    assert it.goes_on("remap pending", lasting=True, minutes=1) == "sick"


def test_configured_actions_override_health_defaults() -> None:
    policy = replace(POLICY, actions={"hot": "watch", "xid 79": "watch", "xid program": "drain"})
    it = Device(policy)
    assert it.goes_on("hot", lasting=True) == "watch"
    signs = SymptomWindow()
    signs.add(samples(1, xids=(79,)))
    assert judge(policy, it.state, take(signs), NOW).event == "watch"
    signs.add(samples(1, xids=(79, 54)))
    assert judge(policy, it.state, take(signs), NOW).event == "sick"
    assert it.goes_on("xid program") == "sick"
