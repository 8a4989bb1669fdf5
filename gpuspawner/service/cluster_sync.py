"""The service's duties for a Slurm cluster: its members, billing of batch jobs, and an audit.

Once a day Slurm's records of our sessions are compared with ours. Everything is read again each
time: a round can be late, doubled or killed at any point.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from ..core.errors import ConfigError, SlurmRefused, SlurmUnavailable
from ..core.units import format_credits
from ..ledger.rules import ACTOR_ACCOUNTING
from ..slurm import account_sync
from .worker import Round, Tick, TickDuty

AUDIT_EVERY = timedelta(days=1)
TELL_EVERY = timedelta(days=1)
SETTLED = timedelta(minutes=10)
"""After this time both sides know the end of a session."""


def cluster_rounds(tick: Tick) -> list[Round]:
    """Return these duties; none without a cluster."""
    if not tick.services.settings.slurm.cluster_file:
        return []
    duties, every = ClusterDuty(tick), tick.services.settings.slurm.sync_seconds
    return [
        (every, "Members in Slurm", duties.members),
        (every, "Jobs beside servers", duties.jobs),
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
        await asyncio.to_thread(account_sync.apply_plan, services.slurm(), plan.steps)
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
            self.log.info("Jobs beside servers: %d paid %s credits", done.jobs, credits)
        await self._tell_late()

    async def _tell_late(self) -> None:
        """Report once a day that Slurm's database lags behind: a single message is missed."""
        since = await self.services.run(self.services.job_billing.unread_since)
        now = self.services.clock()
        if since and (self._told_late is None or now - self._told_late >= TELL_EVERY):
            self._told_late = now
            self.log.warning(
                "Jobs beside servers that ended since %s may not be paid yet: Slurm's accounting "
                "database does not answer, or was not told everything (sdiag: DBD Agent queue "
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
        self.log.info("Sessions held against Slurm's jobs: %d, %s", count, said)
