"""Who uses more than their share of a shared device. Real: the rules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.sharing.memory_rules import (
    END_SECONDS,
    LEAST_FREE,
    TELL_SECONDS,
    Judgement,
    LeasedProcess,
    Overuse,
    SharedMemory,
    judge,
)

GB = 2**30


def seen(*used: tuple[str, int, int], free: int = 40 * GB, leases: str = "ab") -> SharedMemory:
    """A device of 80 GB with four slots; ``used`` are (lease, pid, bytes)."""
    return SharedMemory(
        uuid="GPU-1",
        total_bytes=80 * GB,
        free_bytes=free,
        shares=dict.fromkeys(leases, 20 * GB),
        processes=tuple(LeasedProcess(lease, pid, size) for lease, pid, size in used),
    )


def test_lease_over_its_share_is_told_and_then_loses_its_largest_process() -> None:
    now = seen(("a", 7, 18 * GB), ("a", 8, 12 * GB), ("b", 9, 19 * GB))
    first = judge(100.0, now, {})
    assert first == Judgement({"a": Overuse(100.0)})
    second = judge(100.0 + TELL_SECONDS, now, first.over)
    assert [each.lease_id for each in second.to_tell] == ["a"] and second.to_end is None
    assert second.to_tell[0].used_bytes == 30 * GB and second.to_tell[0].share_bytes == 20 * GB
    third = judge(100.0 + TELL_SECONDS + 1, now, second.over)
    assert not third.to_tell, "told once"
    last = judge(100.0 + END_SECONDS, now, third.over)
    assert last.to_end and last.to_end.process.pid == 7 and not last.to_end.device_is_full


def test_full_device_ends_the_worst_at_once() -> None:
    used = (("a", 7, 30 * GB), ("b", 8, 25 * GB), ("c", 9, 20 * GB))
    found = judge(1.0, seen(*used, free=3 * GB, leases="abc"), {})
    assert found.to_end and found.to_end.lease_id == "a" and found.to_end.device_is_full
    assert found.to_end.others == 2


def test_member_alone_on_a_device_may_use_all_of_it() -> None:
    alone = seen(("a", 7, 79 * GB), free=GB // 2, leases="a")
    assert judge(1000.0, alone, {"a": Overuse(0.0)}) == Judgement()


def test_time_over_a_share_counts_again_after_it_was_within() -> None:
    over, within = seen(("a", 7, 21 * GB)), seen(("a", 7, 20 * GB))
    first = judge(0.0, over, {})
    second = judge(30.0, within, first.over)
    assert not second.over
    third = judge(70.0, over, second.over)
    assert third.to_end is None and third.over == {"a": Overuse(70.0)}


LEASES = "abcd"
USES = st.lists(
    st.tuples(st.sampled_from(LEASES), st.integers(1, 30), st.integers(0, 40).map(GB.__mul__)),
    max_size=8,
    unique_by=lambda each: each[1],
)


@given(
    st.lists(
        st.tuples(st.floats(0.1, 90), USES, st.integers(0, 80).map(GB.__mul__)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, len(LEASES)),
)
def test_guard_never_ends_a_process_of_a_lease_within_its_share(
    looks: list[tuple[float, list[tuple[str, int, int]], int]], count: int
) -> None:
    now, before = 0.0, Judgement()
    within_at = dict.fromkeys(LEASES[:count], 0.0)
    for passed, used, free in looks:
        now += passed
        mine = [each for each in used if each[0] in LEASES[:count]]
        device = seen(*mine, free=free, leases=LEASES[:count])
        found = judge(now, device, before.over)
        sums = dict.fromkeys(within_at, 0)
        for lease, _, size in mine:
            sums[lease] += size
        for lease, total in sums.items():
            if total <= device.shares[lease]:
                within_at[lease] = now
        if found.to_end:
            lease = found.to_end.lease_id
            assert count > 1 and sums[lease] > device.shares[lease]
            assert found.to_end.process.lease_id == lease
            full = free < LEAST_FREE * device.total_bytes
            assert full or now - within_at[lease] >= END_SECONDS
        elif count > 1 and free < LEAST_FREE * device.total_bytes:
            assert all(total <= device.shares[lease] for lease, total in sums.items())
        before = found
