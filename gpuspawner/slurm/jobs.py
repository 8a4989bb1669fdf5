"""Slurm's jobs as ``squeue --json`` tells of them: everybody's, and also those that ended of
late, in one question."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ..errors import SlurmUnavailable
from .config import TESTED, is_tested
from .controller import Controller

HOLDER = "gpuspawner-"
"""What the name of a job begins with that holds devices for a ticket; its id follows."""

WAITS = "PENDING"
_LIVES = frozenset({WAITS, "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED",
                    "SIGNALING", "STAGE_OUT", "RESIZING", "REQUEUED", "REQUEUE_HOLD",
                    "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"})  # fmt: skip
"""States in which a job has, or may get, devices; every other one is an end."""
_AGAIN = frozenset({"NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED"})
"""Ends that the job had no part in: it may be handed in once more."""

GIVEN_BACK = "[gpuspawner: given back]"
"""Of the admin's comment of a job that was ended so that its ticket gets other devices."""

_JOBS = re.compile(r'"jobs"\s*:\s*\[\s*')
_BETWEEN = re.compile(r"\s*,\s*|\s+")
_DECODER = json.JSONDecoder()
AT_A_TIME = 32
"""Jobs that are read before another thread gets its turn: less than a millisecond."""

_GIVEN = re.compile(r"(gpu|shard)(?::[^,()]*)?\(IDX:([0-9,-]+)\)")

_REASONS = {
    "None": "",
    "Resources": "",
    "Priority": "others go first",
    "Dependency": "another job has to end first",
    "JobHeldAdmin": "an admin holds it back",
    "JobHeldUser": "it is held back",
    "BeginTime": "its time has not come yet",
    "PartitionDown": "the partition is closed",
    "PartitionInactive": "the partition is closed",
    "PartitionTimeLimit": "the session is longer than the partition allows",
    "PartitionNodeLimit": "the partition does not allow as many machines",
    "QOSMaxGRESPerUser": "you have as many GPUs as one member may have",
    "MaxGRESPerUser": "you have as many GPUs as one member may have",
    "QOSMaxJobsPerUserLimit": "you have as many servers as one member may have",
    "AssocGrpGRES": "your group has as many GPUs as it may have",
    "QOSGrpGRES": "your group has as many GPUs as it may have",
    "AssocMaxJobsLimit": "you have as many servers as one member may have",
    "ReqNodeNotAvail": "the machines that would do are closed or away",
    "Reservation": "the machines are reserved",
    "InvalidAccount": "your account in Slurm is closed",
    "InvalidQOS": "your account in Slurm may not use this QOS",
}
"""What Slurm's reasons for waiting mean to who waits; the others are said as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job at one moment."""

    id: int
    name: str
    user: str
    uid: int
    state: str
    reason: str = ""
    """Slurm's word for why it waits, or why it ended."""
    node: str = ""
    """Where it runs or ran; several as Slurm writes them."""
    kind: str = ""
    """``gpu`` or ``shard``: what it got; empty while it waits and once it has ended."""
    indices: tuple[int, ...] = ()
    """Slurm's numbers of its devices on that node."""
    priority: int = 0
    excluded: str = ""
    """The nodes that it must not run on, as Slurm writes them."""
    account: str = ""
    note: str = ""
    """An admin's comment: no member can write it."""
    submitted_at: datetime | None = None
    started_at: datetime | None = None
    """For a job that waits, when Slurm expects it to start."""
    ended_at: datetime | None = None
    """Only of a job that has ended."""

    @property
    def ticket_id(self) -> str:
        """The ticket that it holds devices for; empty for a job of others."""
        return self.name[len(HOLDER) :] if self.name.startswith(HOLDER) else ""

    @property
    def waits(self) -> bool:
        return self.state == WAITS

    @property
    def lives(self) -> bool:
        """Whether it waits, runs, or is still being cleared away: its devices are not free."""
        return self.state in _LIVES

    @property
    def may_come_again(self) -> bool:
        """Whether it ended for a reason that would not stop it a second time."""
        return self.state in _AGAIN or GIVEN_BACK in self.note

    @property
    def why(self) -> str:
        """What it waits for beside devices, in words."""
        return _REASONS.get(self.reason, f"Slurm says {self.reason}")

    @property
    def end(self) -> str:
        """How it ended, as a sentence for its member."""
        return _ENDS.get(self.state, f"Slurm ended its job ({self.state}: {self.reason})")


_ENDS = {
    "CANCELLED": "its job in Slurm was cancelled",
    "TIMEOUT": "its time in Slurm was over",
    "NODE_FAIL": "its machine was lost",
    "PREEMPTED": "its GPUs were given to somebody who goes first",
}


def read_jobs(slurm: Controller) -> list[Job]:
    """Every job that Slurm knows of. Blocks. Raises SlurmUnavailable."""
    return jobs_of(slurm.jobs(), slurm.notes)


def jobs_of(text: str, notes: str = "admin_comment") -> list[Job]:
    """The jobs in what ``squeue --json`` printed. Raises SlurmUnavailable for what is none of it:
    half an answer is no answer."""
    try:
        rows, rest = _taken_apart(text)
        found = json.loads(rest)
        _must_be_tested(found.get("meta") or {})
        if errors := found.get("errors"):
            raise SlurmUnavailable(why=f"squeue says {str(errors)[:200]}")
        return [_job(each, notes) for each in (*found["jobs"], *rows)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"squeue --json did not answer as Slurm 22.05 does ({error!r:.80})"
        raise SlurmUnavailable(why=why) from None


def _must_be_tested(meta: Mapping[str, Any]) -> None:
    """Raises SlurmUnavailable for a Slurm whose words may mean something else."""
    release = str(meta.get("Slurm", {}).get("release", ""))
    if release and not is_tested(release):
        why = f"it is Slurm {release}, and gpuspawner was tried with {' and '.join(TESTED)}"
        raise SlurmUnavailable(why=why)


def _taken_apart(text: str) -> tuple[list[Any], str]:
    """The jobs, and the text without them. Read at once, some thousand jobs would hold up every
    other thread for a tenth of a second: the event loop, too."""
    rows: list[Any] = []
    if (first := _JOBS.search(text)) is None:
        return rows, text
    at = first.end()
    while text.startswith("{", at):
        row, at = _DECODER.raw_decode(text, at)
        rows.append(row)
        gap = _BETWEEN.match(text, at)
        at = gap.end() if gap else at
        if not len(rows) % AT_A_TIME:
            time.sleep(0)  # others first
    return rows, text[: first.end()] + text[at:]


def _job(row: Mapping[str, Any], notes: str) -> Job:
    state = str(row["job_state"])
    kind, indices = given(row.get("gres_detail") or [])
    lives = state in _LIVES
    return Job(
        id=int(row["job_id"]),
        name=str(row["name"]),
        user=str(row.get("user_name") or ""),
        uid=int(row["user_id"]),
        state=state,
        reason=str(row.get("state_reason") or ""),
        node=str(row.get("nodes") or ""),
        kind=kind,
        indices=indices,
        priority=int(row.get("priority") or 0),
        excluded=str(row.get("excluded_nodes") or ""),
        account=str(row.get("account") or ""),
        note=str(row.get(notes) or ""),
        submitted_at=_time(row.get("submit_time")),
        started_at=_time(row.get("start_time")),
        ended_at=None if lives else _time(row.get("end_time")),
    )


def given(details: list[str]) -> tuple[str, tuple[int, ...]]:
    """What a job got, from entries such as ``gpu:a100:2(IDX:0-1)``: its kind and the indices."""
    found = [match for detail in details for match in _GIVEN.findall(detail)]
    kinds = {kind for kind, _ in found}
    if not found or len(kinds) > 1:
        return "", ()
    numbers: list[int] = []
    for _, listed in found:
        for part in listed.split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return kinds.pop(), tuple(numbers)


def _time(seconds: object) -> datetime | None:
    if not isinstance(seconds, int) or seconds <= 0:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc)
