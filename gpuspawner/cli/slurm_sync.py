"""``gpuspawner slurm sync`` and ``gpuspawner slurm audit``: members and groups in Slurm, and what
Slurm says of our sessions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from ..broker import Broker
from ..broker.cluster_audit import Difference
from ..errors import InvalidRequest
from ..ledger.pricing import parse_moment
from ..slurm import syncing
from ..store.batch import BatchJob
from .config import Settings
from .grammar import Add
from .output import count, exact, local, note, printable, show, table, utc

TRIES = 3
"""How often Slurm is told the same, when its database does not keep it."""

DAYS = 7
"""How far back an audit looks unless somebody says it."""


def grammar(add: Add) -> None:
    """The two words after ``gpuspawner slurm``."""
    telling = add("sync", sync, "Make Slurm's accounts, shares and limits what the hub's are.")
    telling.add_argument("--dry-run", action="store_true", help="say what would be done")
    looking = add("audit", audit, "Hold sessions against Slurm's jobs, to the second.")
    looking.add_argument(
        "--since",
        default="",
        metavar="WHEN",
        help=f"of sessions that ended since, such as 2026-10-01 (default: {DAYS} days ago)",
    )


def sync(arguments: argparse.Namespace, settings: Settings) -> int:
    """Bring Slurm to what the configuration and the store say; 1 when a part cannot be done."""
    broker = settings.open_broker()
    plan = broker.plan_for_cluster()
    problems = plan.problems
    if plan.steps and not arguments.dry_run:
        problems = _done(broker, plan)
    value = {
        "done": not arguments.dry_run,
        "steps": [{"what": s.what, "sacctmgr": list(s.words)} for s in plan.steps],
        "problems": list(problems),
    }
    lines = [printable(step.what) for step in plan.steps]
    if not plan.steps:
        lines.append("Slurm knows every member and group as the hub does: nothing to do.")
    else:
        steps = count(len(plan.steps), "step")
        lines += ["", f"{'Would do' if arguments.dry_run else 'Did'} {steps}."]
    show(arguments.json, value, "\n".join(lines))
    for problem in problems:
        note(printable(problem))
    return 1 if problems else 0


def _done(broker: Broker, plan: syncing.Plan) -> tuple[str, ...]:
    """Do it, and see that it is so: Slurm's database may forget a part of what it is told while
    others tell it something, too. What could not be done."""
    for _ in range(TRIES):
        syncing.apply(broker.slurm(), plan.steps)
        plan = broker.plan_for_cluster()
        if not plan.steps:
            return plan.problems
    return (*plan.problems, "Slurm's database does not keep what it was told: run it again.")


def audit(arguments: argparse.Namespace, settings: Settings) -> int:
    """Compare sessions with Slurm's jobs for them; 1 when some differ."""
    broker = settings.open_broker()
    until = broker.clock()
    since = _since(arguments.since, broker.rate_zone, until)
    sessions, found = broker.audit_cluster(since, until)
    jobs = broker.jobs_since(broker.nodes().name, since)
    strangers = [job for job in jobs if job.member is None]
    value = {
        "ok": not found,
        "since": utc(since),
        "sessions": sessions,
        "differences": [
            {"subject": d.subject, "what": d.what, "ours": d.ours, "slurm": d.theirs} for d in found
        ],
        "batch_jobs": len(jobs) - len(strangers),
        "batch_charged": exact(sum(job.charged for job in jobs)),
        "of_nobody": [_plain(job) for job in strangers],
    }
    show(arguments.json, value, _text(sessions, found, jobs, strangers, since))
    return 1 if found else 0


def _text(
    sessions: int,
    found: Sequence[Difference],
    jobs: Sequence[BatchJob],
    strangers: Sequence[BatchJob],
    since: datetime,
) -> str:
    lines = [f"DIFFERS  {printable(str(each))}" for each in found]
    if strangers:
        rows = [
            (j.label, j.user, j.devices, str(j.seconds), local(j.started_at)) for j in strangers
        ]
        headers = ("JOB", "USER", "DEVICES", "SECONDS", "STARTED")
        lines += ["Jobs of users who are no members; nobody was charged:"]
        lines += [table(headers, rows, right=("SECONDS",)), ""]
    said = f"{len(found)} differ from Slurm's jobs" if found else "all as Slurm's jobs say"
    charged = exact(sum(job.charged for job in jobs))
    lines.append(
        f"{count(sessions, 'session')} since {local(since)}: {said}. "
        f"{count(len(jobs) - len(strangers), 'batch job')} of members paid {charged} credits."
    )
    return "\n".join(lines)


def _plain(job: BatchJob) -> dict[str, Any]:
    return {
        "job": job.label,
        "user": job.user,
        "devices": job.devices,
        "seconds": job.seconds,
        "started_at": utc(job.started_at),
    }


def _since(text: str, zone: str, now: datetime) -> datetime:
    """Raises InvalidRequest."""
    if not text:
        return now - timedelta(days=DAYS)
    try:
        moment = parse_moment(text, zone)
    except ValueError as error:
        raise InvalidRequest(f"--since: {error}", field="since") from None
    if moment >= now:
        raise InvalidRequest(f"--since: {text} is still to come.", field="since")
    return moment
