"""The host's memory and CPU in the queue's decisions: never too much, and nobody starves. Real: the
scheduler; sessions are entries of a heap."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuspawner.core.units import DeviceCount
from gpuspawner.leases.host_resources import NOTHING, UNLIMITED, HostAmount, HostBudget
from gpuspawner.queue.host_admission import HostUse
from gpuspawner.queue.kinds import CPU_ONLY
from gpuspawner.queue.models import Decision, Priority, QueuePolicy, WaitingTicket
from gpuspawner.queue.scheduler import Scheduler
from tests.support.tier import examples
from tests.unit.queue.site import DAY, HOUR, T0, Site, scheduler_of, ticket

PATIENCE = 600.0


def of_host(name: str, devices: int = 1, memory: int = 1, cpus: int = 0, **more: Any) -> Any:
    """A ticket for memory and CPU in small units."""
    host = HostAmount(memory, cpus)
    if not devices:
        return replace(ticket(name, 0, **more), kinds=frozenset({CPU_ONLY}), host=host)
    return replace(ticket(name, devices, **more), host=host)


class HostSite(Site):
    """A site whose host has a budget. What runs without a device is no lease to the scheduler."""

    def __init__(self, budget: HostBudget, devices: int, policy: QueuePolicy | None = None) -> None:
        super().__init__(Scheduler(policy, host=budget), {"a": devices})
        self.budget = budget
        self.reserved = NOTHING
        self._hosts: dict[str, HostAmount] = {}
        self._cpu_only: list[tuple[float, str]] = []

    def decide(self) -> Decision:
        use = HostUse(self.reserved, self.free["a"])
        return self.scheduler.decide(self.now, self.free, reasons=True, host=use)

    def start(
        self, name: str, held: Mapping[str, DeviceCount], lasts: float, known: bool = True
    ) -> None:
        waiting = self.scheduler.waiting[name]
        left = self.budget.left(self.reserved, self.free["a"], has_devices=waiting.devices > 0)
        assert waiting.host.fits(left), "more than there is"
        self.reserved += waiting.host
        self._hosts[name] = waiting.host
        if waiting.devices:
            super().start(name, held, lasts, known)
            return
        self.started_at[name] = self.now
        heapq.heappush(self._cpu_only, (self.now + lasts, name))
        self.scheduler.withdraw(name)

    def go_to(self, now: float) -> None:
        before = set(self.scheduler.running)
        super().go_to(now)
        over = before - set(self.scheduler.running)
        while self._cpu_only and self._cpu_only[0][0] <= now:
            over.add(heapq.heappop(self._cpu_only)[1])
        for name in over:
            self.reserved -= self._hosts[name]

    @property
    def next_end(self) -> float | None:
        ends = [heap[0][0] for heap in (self._ends, self._cpu_only) if heap]
        return min(ends, default=None)


def site_of(memory: int, devices: int = 2, per_free_gpu: int = 0, **policy: Any) -> HostSite:
    """A site with so much memory, and any number of CPU cores."""
    budget = HostBudget(HostAmount(memory, UNLIMITED), HostAmount(per_free_gpu))
    return HostSite(budget, devices, QueuePolicy(host_patience_seconds=PATIENCE, **policy))


def test_ticket_waits_until_enough_memory_is_returned() -> None:
    site = site_of(10)
    for each in (of_host("one", memory=6, seconds=HOUR), of_host("two", memory=6, at=T0 + 1)):
        site.scheduler.submit(each)
    assert site.step().starts == ("one",)
    site.go_to(T0 + 60)
    decision = site.step()
    assert decision.starts == () and decision.held_back == {}
    assert decision.waits_for_host == {"two": "6 bytes of memory (4 bytes free)"}
    assert decision.planned == {} and decision.latest == {}
    site.go_to(T0 + HOUR)
    assert site.step().starts == ("two",)


def test_smaller_request_goes_first_only_for_a_while() -> None:
    site = site_of(10, devices=4)
    site.scheduler.submit(of_host("running", memory=6, seconds=4 * HOUR))
    site.step()
    site.scheduler.submit(of_host("large", memory=8, at=T0))
    site.go_to(T0 + 1)
    site.scheduler.submit(of_host("small", memory=2, at=T0 + 1, seconds=4 * HOUR))
    assert site.step().starts == ("small",)
    site.go_to(T0 + 1 + PATIENCE)
    site.scheduler.submit(of_host("late", memory=2, at=T0 + 1))
    site.scheduler.submit(of_host("none", memory=0, at=T0 + 1))
    decision = site.step()
    assert decision.starts == ("none",), "it takes nothing of what is kept"
    assert set(decision.waits_for_host) == {"large", "late"}
    site.go_to(T0 + 4 * HOUR)
    assert site.step().starts == ("large",)


def test_servers_without_a_gpu_leave_memory_for_free_gpus() -> None:
    site = site_of(10, devices=2, per_free_gpu=3)
    for name in ("cpu1", "cpu2"):
        site.scheduler.submit(of_host(name, 0, memory=3))
    assert site.step().starts == ("cpu1",), "4 are not kept for two free GPUs"
    site.scheduler.submit(of_host("gpu1", memory=3))
    site.scheduler.submit(of_host("gpu2", memory=3))
    assert set(site.step().starts) == {"gpu1", "gpu2"}
    assert site.reserved == HostAmount(9)
    site.go_to(T0 + HOUR)
    assert site.step().starts == ("cpu2",)


def test_server_without_a_gpu_keeps_nothing_of_the_part_of_a_free_gpu() -> None:
    """It waits too long, and yet a member gets a free GPU."""
    site = site_of(12, devices=2, per_free_gpu=3)
    site.scheduler.submit(of_host("cpu1", 0, memory=5, seconds=9 * HOUR))
    site.step()
    site.scheduler.submit(of_host("cpu2", 0, memory=6))
    site.step()
    site.go_to(T0 + PATIENCE)
    site.scheduler.submit(of_host("large", memory=4))
    site.scheduler.submit(of_host("fair", memory=3))
    assert site.step().starts == ("fair",)


demands = st.builds(HostAmount, st.integers(0, 9), st.integers(0, 9))


@st.composite
def moments(draw: st.DrawFn) -> tuple[list[WaitingTicket], HostBudget, HostUse, int]:
    """Tickets, and a host that is partly in use."""
    waiting = []
    for number in range(draw(st.integers(0, 12))):
        each = of_host(
            f"t{number}",
            draw(st.integers(0, 3)),
            at=T0 - draw(st.integers(0, 99)) * 900.0,
            member=draw(st.sampled_from(("ada", "bob"))),
            seconds=draw(st.integers(1, 9)) * HOUR,
            priority=draw(st.sampled_from(Priority)),
        )
        waiting.append(replace(each, host=draw(demands)))
    total = HostAmount(draw(st.integers(1, 30)), draw(st.integers(1, 30)))
    budget = HostBudget(total, draw(st.builds(HostAmount, st.integers(0, 3), st.integers(0, 3))))
    free = draw(st.integers(0, 4))
    return waiting, budget, HostUse(draw(demands), free), free


@given(moments(), st.booleans())
def test_starts_of_one_decision_fit_the_budget(
    moment: tuple[list[WaitingTicket], HostBudget, HostUse, int], is_late: bool
) -> None:
    waiting, budget, use, free = moment
    scheduler = scheduler_of(*waiting, capacity={"a": 4}, host=budget)
    decision = scheduler.decide(T0, {"a": free}, reasons=True, host=use)
    if is_late:  # some are kept something for
        decision = scheduler.decide(T0 + HOUR, {"a": free}, reasons=True, host=use)
    reserved = use.reserved
    for name in decision.starts:
        found = scheduler.waiting[name]
        left = budget.left(reserved, free, has_devices=found.devices > 0)
        assert found.host.fits(left)
        reserved += found.host
        free -= int(found.devices)
    assert free >= 0 and not set(decision.starts) & set(decision.waits_for_host)
    assert decision == scheduler.decide(
        T0 + HOUR * is_late, {"a": use.free_devices}, reasons=True, host=use
    )


@given(moments())
def test_budget_that_is_never_reached_changes_no_decision(
    moment: tuple[list[WaitingTicket], HostBudget, HostUse, int],
) -> None:
    waiting, _, use, free = moment
    waiting = [each for each in waiting if each.devices]
    plain = scheduler_of(*(replace(x, host=NOTHING) for x in waiting), capacity={"a": 4})
    ample = HostBudget(HostAmount(UNLIMITED, UNLIMITED))
    scheduler = scheduler_of(*waiting, capacity={"a": 4}, host=ample)
    expected = plain.decide(T0, {"a": free}, reasons=True)
    found = scheduler.decide(T0, {"a": free}, reasons=True, host=use)
    assert (found.starts, found.takes, found.left) == (
        expected.starts,
        expected.takes,
        expected.left,
    )
    assert found.waits_for_host == {}


@settings(max_examples=examples(40))
@given(
    devices=st.integers(1, 4),
    memory=st.integers(9, 20),
    share=st.integers(0, 2),
    wide=st.integers(0, 4),
    part=st.floats(0.1, 1.0),
    first=st.booleans(),
)
def test_oldest_ticket_starts_although_smaller_ones_keep_coming(
    devices: int, memory: int, share: int, wide: int, part: float, first: bool
) -> None:
    """A crowd wants every device and all memory at every moment, and is preferred or not."""
    wide = min(wide, devices)
    most = memory if wide else memory - share * devices
    old = of_host("old", wide, memory=max(1, int(part * most)), seconds=HOUR)
    site = site_of(memory, devices, share, overdue_seconds=DAY)
    number = 0

    def crowd() -> None:
        nonlocal number
        while len(site.scheduler.waiting) < 4 * devices + 4:
            number += 1
            each = of_host(
                f"c{number}",
                number % 2,
                memory=1 + number % max(1, share),
                seconds=HOUR * (1 + number % 3),
                at=site.now,
                priority=Priority.ADMIN if first else Priority.NORMAL,
            )
            site.scheduler.submit(each)

    crowd()
    site.step()
    site.scheduler.submit(old)
    bound = T0 + DAY + 2 * PATIENCE + 20 * HOUR
    while "old" not in site.started_at:
        assert site.now <= bound, "it starves"
        crowd()
        site.step()
        site.go_to(min(site.next_end or site.now + PATIENCE, site.now + PATIENCE))


def test_withdrawn_ticket_keeps_nothing() -> None:
    site = site_of(10)
    site.scheduler.submit(of_host("running", memory=6, seconds=9 * HOUR))
    site.step()
    site.scheduler.submit(of_host("large", memory=8))
    site.step()
    site.go_to(T0 + PATIENCE)
    site.scheduler.withdraw("large")
    site.scheduler.submit(of_host("small", memory=4))
    assert site.step().starts == ("small",)
