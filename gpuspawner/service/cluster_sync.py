"""The service's part in a cluster: its scheduler knows the members, jobs beside servers are paid,
and once a day Slurm's word on our sessions is held against ours.

Everything is read anew each time: a round can be late, doubled or killed at any point.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from traitlets.config import SingletonConfigurable

from ..core.errors import ConfigError, SlurmRefused, SlurmUnavailable
from ..core.units import format_credits
from ..ledger.rules import ACTOR_ACCOUNTING
from ..services import Broker
from ..slurm import account_sync
from .worker import Round, Tick

AUDIT_EVERY = timedelta(days=1)
TELL_EVERY = timedelta(days=1)
SETTLED = timedelta(minutes=10)
"""After so long both sides know the end of a session."""


class LooksAtCluster(SingletonConfigurable):
    """A service that keeps a cluster's scheduler and the books in agreement."""

    def cluster_rounds(self, tick: Tick) -> list[Round]:
        """The duties of this kind; none where there is no cluster."""
        if not tick.broker.settings.slurm.cluster_file:
            return []
        if not tick.broker.settings.slurm.has_programs():
            tick.log.warning(
                "Slurm's database is not asked: sacctmgr is not on this machine. Members' places "
                "in Slurm stay as they are, and jobs beside servers cost nothing."
            )
            return []
        duties, every = OnCluster(tick), tick.broker.settings.slurm.sync_seconds
        return [
            (every, "Members in Slurm", duties.members),
            (every, "Jobs beside servers", duties.jobs),
            (every, "Audit with Slurm", duties.audit),
        ]


class OnCluster:
    """Rounds of these duties, one after the other each."""

    def __init__(self, tick: Tick) -> None:
        self.tick = tick
        self.broker: Broker = tick.broker
        self._told_late: datetime | None = None

    async def members(self) -> None:
        """Tell Slurm of members who came, left, changed groups, or have no credits.

        Raises ConfigError for what only an admin can do.
        """
        found = {}
        for group in sorted(await self.broker.run(self.broker.cluster_members.groups_with_a_say)):
            found[group] = await self.tick.hub.members_of(group) or frozenset()
        await self.broker.run(self.broker.cluster_members.note_groups, found)
        plan = await asyncio.to_thread(self.broker.cluster_members.plan_for_cluster)
        await asyncio.to_thread(
            account_sync.apply_plan, self.broker.cluster_members.slurm(), plan.steps
        )
        for step in plan.steps:
            self.tick.log.info("Slurm: %s", step.what)
        if plan.problems:
            raise ConfigError(" ".join(plan.problems))

    async def jobs(self) -> None:
        """Charge jobs beside servers for what they used.

        Raises SlurmUnavailable or SlurmRefused.
        """
        try:
            done = await asyncio.to_thread(self.broker.job_billing.debit_cluster)
        except (SlurmUnavailable, SlurmRefused):
            await self._tell_late()
            raise
        if done.jobs:
            credits = format_credits(done.amount)
            self.tick.log.info("Jobs beside servers: %d paid %s credits", done.jobs, credits)
        await self._tell_late()

    async def _tell_late(self) -> None:
        """Say once a day that Slurm's database stays behind: what is said when that begins is
        easily missed."""
        since, now = (
            await self.broker.run(self.broker.job_billing.unread_since),
            self.broker.clock(),
        )
        if since and (self._told_late is None or now - self._told_late >= TELL_EVERY):
            self._told_late = now
            self.tick.log.warning(
                "Jobs beside servers that ended since %s may not be paid yet: Slurm's accounting "
                "database does not answer, or was not told everything (sdiag: DBD Agent queue "
                "size). On the controller: systemctl status slurmctld slurmdbd mariadb",
                f"{since:%Y-%m-%d %H:%M} UTC",
            )

    async def audit(self) -> None:
        """Once a day: do Slurm's seconds of each session that ended agree with ours?"""
        broker = self.broker
        since = await broker.run(broker.cluster_audit.audited_until)
        until = broker.clock() - SETTLED
        if until - since < AUDIT_EVERY:
            return
        count, found = await asyncio.to_thread(broker.cluster_audit.audit_cluster, since, until)
        await broker.run(broker.cluster_audit.note_audit, found, until, actor=ACTOR_ACCOUNTING)
        said = f"{len(found)} differ" if found else "all agree"
        self.tick.log.info("Sessions held against Slurm's jobs: %d, %s", count, said)
