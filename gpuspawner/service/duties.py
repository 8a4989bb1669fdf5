"""The duties for sessions, members and a Slurm cluster."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from traitlets import Float, List
from traitlets.config import LoggingConfigurable

from ..core.errors import ConfigError, SlurmRefused, SlurmUnavailable, Unavailable
from ..core.units import format_credits
from ..engines.base import (
    EngineWithJobs,
    EngineWithLimits,
    EngineWithLogs,
    EngineWithSignals,
    EngineWithUse,
)
from ..leases.models import EndReason, Lease, LeaseKind, LeaseState, SessionEnd, Sighting
from ..ledger.credit_policy import OVERDRAFT
from ..ledger.exhaustion import CreditEvent, credits_back
from ..ledger.refills import Refill
from ..ledger.rules import ACTOR_ACCOUNTING
from ..monitoring.last_sample import last_sample
from ..notifications.models import Notice
from ..runs.models import RunState
from ..runs.run_program import WARNING_SECONDS, YIELD
from ..services import utcnow
from ..slurm import accounts
from ..web.view_models import session_ends
from .worker import Round, Tick, TickDuty


class CreditDuty(TickDuty):
    """Warns of low credits, and stops what nobody pays for."""

    def __init__(
        self,
        tick: Tick,
        *,
        warn_minutes: Sequence[float],
        poke: Callable[[], None] = lambda: None,
        tell_admin: Callable[[Notice], None] = lambda notice: None,
    ) -> None:
        super().__init__(tick, poke)
        self.warn_minutes = tuple(warn_minutes)
        self.tell_admin = tell_admin

    async def round(self) -> None:
        """Handle every account with something due about its servers."""
        for account in await self.services.run(
            self.services.exhaustion.accounts_to_see_to, self.warn_minutes
        ):
            # Whatever goes wrong, other accounts are handled all the same.
            with self.tick.going_on(f"Credits of {account}", Exception):
                await self._see_to(account)

    async def _see_to(self, account: str) -> None:
        happened = await self.services.run(
            self.services.exhaustion.see_to, account, self.warn_minutes
        )
        for each in happened:
            self._log(each)
            if each.event == "back":
                self.tell_admin(credits_back(each.lease, each.purse, self.services.clock()))
        if happened:
            self.poke()

    def _log(self, it: CreditEvent) -> None:
        lease, left = it.lease, format_credits(it.purse.balance)
        match it.event:
            case "low":
                what = "%s has %s credits left: %s was warned that less than %g min are left"
                self.log.info(what, lease.account, left, lease.server, it.minutes)
            case "back":
                self.log.info("%s has credits again: %s continues", lease.account, lease.server)
            case "dry":
                until = f"until {it.stops_at:%Y-%m-%d %H:%M:%S %Z}" if it.stops_at else "on"
                what = "%s has no credits left (%s): %s continues %s, unless credits are granted"
                self.log.warning(what, lease.account, left, lease.server, until)
            case "stop":
                why = (
                    "its overdraft is used up"
                    if lease.when_dry == OVERDRAFT
                    else "its credits ran out"
                )
                what = "%s has %s credits: %s is to be stopped, %s"
                self.log.warning(what, lease.account, left, lease.server, why)


class Members(TickDuty):
    """Ends memberships, and stops what former members still run."""

    async def round(self) -> None:
        """Expire memberships and stop the servers of former members."""
        told = await self.services.run(self.services.roster.see_to_roster)
        for user in await self.services.run(self.services.members.former_holding):
            with self.tick.going_on(f"Membership of {user}"):
                told += await self.services.run(self.services.members.see_to_former, user)
        if told:
            self.poke()


class FolderOwnerDuty(TickDuty):
    """Removes members from shared folders when the Hub no longer has them."""

    async def round(self) -> None:
        """Check all of them once. Raises Unavailable if the Hub is not responding."""
        services = self.services
        for user in await services.run(services.shared_folders.folder_people):
            if not await self.tick.hub.has_member(user):
                await services.run(services.shared_folders.member_left, user)
                self.tick.log.info("%s left the hub and was removed from all shared folders", user)


class RefillDuty(TickDuty):
    """Grants what is due, and takes back what has expired."""

    async def round(self) -> None:
        """Take back what is left of expired credits, and grant every due refill.

        After a day without the service there may be many occurrences: each is granted, in order. A
        refill that cannot be granted now does not delay others.
        """
        await self.services.run(self.services.ledger.end_lots)
        for refill in await self.services.run(self.services.refills.due_refills):
            with self.tick.going_on(f"Refill {refill.id}"):
                members = await self._members(refill)
                give = self.services.refills.give_refill
                while await self.services.run(give, refill.id, members):
                    pass

    async def _members(self, refill: Refill) -> dict[str, frozenset[str]]:
        """Return the members of the refill's groups, from the Hub. Raises Unavailable.

        Nothing is granted while a group does not exist: its members would miss it for good.
        """
        found = {}
        for group in refill.groups:
            members = await self.tick.hub.members_of(group)
            if members is None:
                raise Unavailable(
                    f"The Hub has no group {group!r}, whose members are to get {refill.reason!r}. "
                    f"Make the group, or end it: gpuspawner refills remove {refill.id}."
                )
            found[group] = members
        return found


AT_ONCE = 10
"""How many stops are requested from the Hub at the same time."""

AGAIN = 10.0
"""Seconds after which the Hub is asked again for a stop that it accepted."""

LONGEST_PAUSE = 60.0
"""Maximum seconds between two tries, however often it failed."""


class GPUSessions(LoggingConfigurable):
    """Warnings before a session ends."""

    warn_minutes = List(
        Float(min=0.0),
        default_value=[30.0, 10.0, 2.0],
        config=True,
        help="""
        Minutes before the end of a session at which its member is warned, once each.

        Example::

            c.GPUSessions.warn_minutes = [60, 10]
        """,
    )


@dataclass(slots=True)
class Stop:
    """How far this process has carried out one order to stop a server."""

    task: asyncio.Task[None] | None = None
    tries: int = 0
    not_before: float = 0.0
    """When the Hub may be asked again, by the event loop's clock."""

    @property
    def under_way(self) -> bool:
        """True while the Hub is being asked."""
        return self.task is not None and not self.task.done()


class SessionDuty(TickDuty):
    """Rounds of this duty, one after the other; stops run beside them."""

    def __init__(
        self, tick: Tick, *, warn_minutes: Sequence[float], poke: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(tick, poke)
        self.warn_minutes = tuple(warn_minutes)
        self._stops: dict[str, Stop] = {}
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def round(self) -> None:
        """Give due warnings, end sessions that are over, and carry out the stops."""
        due = await self.services.run(self.services.sessions.due_sessions, self.warn_minutes)
        for lease in due.warn:
            if await self.services.run(
                self.services.sessions.warn_session, lease.id, self.warn_minutes
            ):
                self.poke()
                end = lease.ends_at
                self.log.info("%s was told that its session ends at %s", lease.server, end)
        stops = list(due.stop)
        for lease in due.over:
            if ended := await self.services.run(self.services.sessions.end_session, lease.id):
                self.poke()
                stops.append(ended)
        self._carry_out(stops)

    async def close(self) -> None:
        """Leave everything as it is: the next service continues."""
        tasks = [stop.task for stop in self._stops.values() if stop.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _carry_out(self, ordered: Sequence[Lease]) -> None:
        now = asyncio.get_running_loop().time()
        ordered = [lease for lease in ordered if lease.server.kind is LeaseKind.SERVER]
        wanted = {lease.id for lease in ordered}
        for gone in [name for name, stop in self._stops.items() if name not in wanted]:
            if not self._stops[gone].under_way:
                del self._stops[gone]
        for lease in ordered:
            stop = self._stops.setdefault(lease.id, Stop())
            if not stop.under_way and now >= stop.not_before:
                stop.task = asyncio.ensure_future(self._stop(lease, stop))

    async def _stop(self, lease: Lease, stop: Stop) -> None:
        part = f"Stop of {lease.server}"
        async with self._gate:
            pause = AGAIN
            try:
                known = await self._ask(lease)
            except Exception as error:  # whatever went wrong, it is tried again
                self.tick.trouble(part, error)
                stop.tries += 1
                pause = min(LONGEST_PAUSE, 2.0 ** min(stop.tries, 10))
            else:
                stop.tries = 0
                self.tick.well(part)
                if known is False:
                    # The lease is settled when an engine proves the end, and not before.
                    self.log.warning(
                        "%s is to be stopped, but the Hub does not have it", lease.server
                    )
            stop.not_before = asyncio.get_running_loop().time() + pause

    async def _ask(self, lease: Lease) -> bool | None:
        """Ask the Hub; returns True if it has the server, None if that is gone meanwhile."""
        # The member may have started another one with this name since the round began.
        newest = await self.services.run(self.services.leases.get, lease.id)
        if newest.state is LeaseState.ENDED:
            return None
        known = await self.tick.hub.stop_server(lease.server)
        if known:
            self.log.warning("Stopping %s: %s", lease.server, newest.end_reason)
        return known


MEMBER_GONE = "the member was removed at the Hub"

FORMER_MEMBERS_SECONDS = 60.0
"""Seconds between two checks for runs whose member the Hub does not have."""

MEMBER_GONE_SECONDS = 600.0
"""Seconds until the runs of a member missing at the Hub are stopped; a rename takes time."""


class RunDuty(TickDuty):
    """Settles runs that have ended, carries out stops, and has the Hub start waiting runs."""

    def __init__(self, tick: Tick, poke: Callable[[], None] = lambda: None) -> None:
        super().__init__(tick, poke)
        self._missing: dict[str, float] = {}
        """Since when the Hub does not have a member, by the event loop's clock."""
        self._due: set[tuple[str, str]] = set()
        """Leases of runs that end soon, each with the signal that tells its program."""
        self._warned: set[tuple[str, str]] = set()
        """The signals that this process has already sent, with their leases."""

    async def end_gone(self) -> None:
        """Stop the runs of members who were removed at the Hub. Raises Unavailable."""
        now = asyncio.get_running_loop().time()
        followed = await self.services.run(self.services.runs.open_runs)
        missing = {}
        for user in {each.run.user for each in followed}:
            if not await self.tick.hub.has_member(user):
                missing[user] = self._missing.get(user, now)
        self._missing = missing
        for each in followed:
            since = missing.get(each.run.user, now)
            if each.run.user in missing and now - since >= MEMBER_GONE_SECONDS:
                stop = partial(self.services.runs.stop, actor=ACTOR_ACCOUNTING, reason=MEMBER_GONE)
                await self.services.run(stop, each.run.id)

    async def round(self) -> None:
        """Handle every open run once. Raises Unavailable if an engine or the Hub does not respond.

        The Hub starts the runs whose turn it is: it has the members' environments and settings.
        """
        if not await self.services.run(self.services.runs.are_active):
            return
        followed = await self.services.run(self.services.runs.open_runs)
        opened = await self.services.run(self.services.leases.open_leases)
        leases = [lease for lease in opened if lease.server.kind is LeaseKind.RUN]
        strays = await self.services.run(self.services.runs.strays, leases)
        ended = {lease.id for lease in strays}
        now = self.services.clock()
        for lease in leases:
            if lease.yields_at and now >= lease.yields_at and not lease.outcome:
                await self.services.run(self.services.runs.preempt, lease.id)
        ends = await self.services.run(session_ends, self.services, leases, now)
        signals = {lease.id: _signal(lease, ends.get(lease.id), now) for lease in leases}
        self._due = {(lease_id, name) for lease_id, name in signals.items() if name}
        self._warned &= self._due
        for name in sorted({lease.engine for lease in leases}):
            with self.tick.going_on(f"Runs on {name}"):
                here = [lease for lease in leases if lease.engine == name]
                await self._see_to(name, here, ended)
        if await self.services.run(self.services.runs.settle):
            self.poke()
        if any(x.state in (RunState.WAITING, RunState.STARTING) for x in followed):
            await self.tick.hub.starting_runs()

    async def _see_to(self, engine: str, leases: Sequence[Lease], ended: Collection[str]) -> None:
        """Stop and settle runs on an engine; ``ended`` are leases of runs that have ended."""
        found = await asyncio.to_thread(self.tick.engines[engine].sightings)
        by_lease = {sighting.lease_id: sighting for sighting in found}
        # A run without a sighting is still starting, or somebody removed its container, which
        # reconciliation settles. Runs are handled at the same time: a program may take ten seconds
        # to stop.
        todo = [(lease, by_lease[lease.id]) for lease in leases if lease.id in by_lease]
        await asyncio.gather(*(self._see_to_one(engine, *each, ended) for each in todo))

    async def _see_to_one(
        self, engine: str, lease: Lease, sighting: Sighting, ended: Collection[str]
    ) -> None:
        end = partial(self.tick.engines[engine].end, sighting)
        with self.tick.going_on(f"Run {lease.server}"):
            for due in self._due - self._warned:
                if sighting.alive and due[0] == lease.id:
                    await self._warn(engine, lease, sighting, due[1])
            # On a cluster it counts as alive until its job has ended, which may remove it.
            if (code := sighting.exit_code) is not None:
                said, runs_on = "", self.tick.engines[engine]
                if code and isinstance(runs_on, EngineWithLogs):
                    said = await asyncio.to_thread(runs_on.last_line, sighting.ref)
                if code and sighting.out_of_memory:
                    await self._note_memory(engine, lease, sighting)
                await self._note_report(engine, lease, sighting)
                note = self.services.runs.note_exit
                await self.services.run(note, lease.server.run_id, code, said)
                if sighting.alive and isinstance(runs_on, EngineWithJobs):
                    await asyncio.to_thread(runs_on.end_job, sighting)
                    return  # the next round finds it gone
            if sighting.alive and (lease.outcome or lease.id in ended):
                self.log.warning("Stopping %s: %s", lease.server, lease.end_reason)
                async with self._last_sample(engine, lease, sighting):
                    await asyncio.to_thread(end)
                await self._release(lease, sighting)
            elif not sighting.alive:
                await self._release(lease, sighting)
                await asyncio.to_thread(end)

    def _last_sample(
        self, engine: str, lease: Lease, sighting: Sighting
    ) -> AbstractAsyncContextManager[None]:
        runs_on = self.tick.engines[engine]
        if not isinstance(runs_on, EngineWithUse):
            return nullcontext()
        return last_sample(self.services, runs_on, lease.id, sighting.ref)

    async def _note_memory(self, engine: str, lease: Lease, sighting: Sighting) -> None:
        """Record that the system ended a program of a run, before the run's end is reported."""
        runs_on, limit = self.tick.engines[engine], None
        if isinstance(runs_on, EngineWithLimits):
            limit = await asyncio.to_thread(runs_on.memory_limit, sighting.ref)
        ended_at = sighting.ended_at or utcnow()
        await self.services.run(self.services.resources.note_end, lease.id, ended_at, limit)

    async def _note_report(self, engine: str, lease: Lease, sighting: Sighting) -> None:
        """Add what a run's program reported at its end: the engine has no figures any more."""
        runs_on = self.tick.engines[engine]
        if isinstance(runs_on, EngineWithUse) and (
            told := await asyncio.to_thread(runs_on.reported_use, sighting.ref)
        ):
            note = self.services.resources.note_report
            await self.services.run(note, lease.id, sighting.ref, told)

    async def _warn(self, engine: str, lease: Lease, sighting: Sighting, name: str) -> None:
        """Send the signal before the end; after a restart of this service possibly again."""
        runs_on = self.tick.engines[engine]
        if isinstance(runs_on, EngineWithSignals):
            await asyncio.to_thread(runs_on.signal, sighting.ref, name)
            self.log.info("%s was warned by %s that it ends soon", lease.server, name)
        self._warned.add((lease.id, name))

    async def _release(self, lease: Lease, sighting: Sighting) -> None:
        """Settle the lease of a run whose container is proven to have ended."""
        if lease.state is LeaseState.GRANTED and sighting.started_at:
            # It ended before the hub saw it run, perhaps while the hub was down: its time counts.
            confirm = partial(self.services.leases.confirm, started_at=sighting.started_at)
            await self.services.run(confirm, lease.id, sighting.ref)
        await self.services.run(
            self.services.leases.release,
            lease.id,
            ended_at=sighting.ended_at,
            stopped_at=self.services.clock(),
            reason=sighting.detail or lease.end_reason or "the run ended",
        )


def _signal(lease: Lease, end: SessionEnd | None, now: datetime) -> str:
    """Return the signal that warns a run of its end within two minutes; empty if none is due.

    The time limit is not among these ends: the program in its container warns of that.
    """
    if lease.outcome:
        return ""
    if lease.yields_at:
        return YIELD.name
    if end is None or end.reason is EndReason.TIME:
        return ""
    is_soon = end.at - now <= timedelta(seconds=WARNING_SECONDS)
    return signal.SIGUSR1.name if is_soon else ""


CLUSTER_SECONDS = 60.0
"""Seconds between two looks at a cluster's members and batch jobs: often enough for people, with
little load on Slurm. The cost of jobs does not depend on it."""
AUDIT_EVERY = timedelta(days=1)
TELL_EVERY = timedelta(days=1)
SETTLED = timedelta(minutes=10)
"""How long after the end of a session both Slurm and the store know of it."""


def cluster_rounds(tick: Tick) -> list[Round]:
    """Return these duties; none without a cluster."""
    if not tick.services.settings.slurm.cluster_file:
        return []
    duties, every = ClusterDuty(tick), CLUSTER_SECONDS
    return [
        (every, "Members in Slurm", duties.members),
        (every, "Batch jobs", duties.jobs),
        (every, "Audit with Slurm", duties.audit),
    ]


class ClusterDuty(TickDuty):
    """Rounds of these duties, one after the other each."""

    def __init__(self, tick: Tick) -> None:
        super().__init__(tick)
        self._told_late: datetime | None = None

    async def members(self) -> None:
        """Tell Slurm who may use it. Raises ConfigError for what only an admin can do."""
        services, found = self.services.cluster_members, {}
        for group in sorted(await self.services.run(services.groups_with_a_say)):
            found[group] = await self.tick.hub.members_of(group) or frozenset()
        await self.services.run(services.note_groups, found)
        plan = await asyncio.to_thread(services.plan_for_cluster)
        await asyncio.to_thread(accounts.apply_plan, services.slurm(), plan.steps)
        for step in plan.steps:
            self.log.info("Slurm: %s", step.what)
        if plan.problems:
            raise ConfigError(" ".join(plan.problems))

    async def jobs(self) -> None:
        """Charge batch jobs for their use. Raises SlurmUnavailable or SlurmRefused."""
        try:
            done = await asyncio.to_thread(self.services.job_billing.debit_cluster)
        except (SlurmUnavailable, SlurmRefused):
            await self._tell_late()
            raise
        if done.jobs:
            credits = format_credits(done.amount)
            self.log.info("Batch jobs: %d paid %s credits", done.jobs, credits)
        await self._tell_late()

    async def _tell_late(self) -> None:
        """Report every day that Slurm's database lags behind: a single message is easily missed."""
        since = await self.services.run(self.services.job_billing.unread_since)
        now = self.services.clock()
        if since and (self._told_late is None or now - self._told_late >= TELL_EVERY):
            self._told_late = now
            self.log.warning(
                "Batch jobs that ended since %s may not be paid yet: Slurm's accounting "
                "database is not responding, or was not told everything (sdiag: DBD Agent queue "
                "size). On the controller: systemctl status slurmctld slurmdbd mariadb",
                f"{since:%Y-%m-%d %H:%M} UTC",
            )

    async def audit(self) -> None:
        """Compare Slurm's seconds of each ended session with ours, once a day."""
        services = self.services
        since = await services.run(services.cluster_audit.audited_until)
        until = services.clock() - SETTLED
        if until - since < AUDIT_EVERY:
            return
        count, found = await asyncio.to_thread(services.cluster_audit.audit_cluster, since, until)
        await services.run(services.cluster_audit.note_audit, found, until, actor=ACTOR_ACCOUNTING)
        said = f"{len(found)} differ" if found else "all agree"
        self.log.info("Sessions compared with Slurm's jobs: %d, %s", count, said)
