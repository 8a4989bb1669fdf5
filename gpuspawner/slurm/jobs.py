"""Slurm's jobs: those in the queue, and the use of ended ones."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from ..core.errors import SlurmUnavailable
from .cluster import Cluster
from .config import TESTED, is_tested
from .programs import Slurm

HOLDER = "gpuspawner-"
"""Prefix of the name of a job that holds devices for a ticket; the ticket's id follows."""

WAITS = "PENDING"
_LIVES = frozenset({WAITS, "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED",
                    "SIGNALING", "STAGE_OUT", "RESIZING", "REQUEUED", "REQUEUE_HOLD",
                    "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"})  # fmt: skip
"""States in which a job has, or may get, devices; every other one is an end."""
_AGAIN = frozenset({"NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED"})
"""Ends that the job did not cause: it may be submitted once more."""

GIVEN_BACK = "[gpuspawner: given back]"
"""Part of the admin's comment of a job that was ended so that its ticket gets other devices."""

BAD_CONSTRAINTS = "BadConstraints"
"""Slurm's reason for a job that no machine can run.

Slurm 22.05 says so of jobs with shards, too, until their machine has reported to a controller that
was started anew.
"""
NO_REPORT = "no suitable machine has reported to Slurm yet"
"""Why such a job waits, for its member."""

_JOBS = re.compile(r'"jobs"\s*:\s*\[\s*')
_BETWEEN = re.compile(r"\s*,\s*|\s+")
_DECODER = json.JSONDecoder()
AT_A_TIME = 32
"""How many jobs are parsed before another thread gets its turn: less than a millisecond."""

_GIVEN = re.compile(r"(gpu|shard)(?::[^,()]*)?\(IDX:([0-9,-]+)\)")
_ASKED = re.compile(r"\bgres:(?:gpu|shard)\b")
_NONE_GIVEN = re.compile(r"(?:gpu|shard)(?::[^,()]*)?:0\(IDX:(?:N/A)?\)")

_REASONS = {
    "None": "",
    "Resources": "",
    "Priority": "other requests go first",
    "Dependency": "another job has to end first",
    "JobHeldAdmin": "an admin holds it back",
    "JobHeldUser": "it is held back",
    "BeginTime": "it is set to start later",
    "PartitionDown": "the partition is closed",
    "PartitionInactive": "the partition is closed",
    "PartitionTimeLimit": "the session is longer than the partition allows",
    "PartitionNodeLimit": "the partition does not allow that many machines",
    "QOSMaxGRESPerUser": "you have as many GPUs as one member may have",
    "MaxGRESPerUser": "you have as many GPUs as one member may have",
    "QOSMaxJobsPerUserLimit": "you have as many servers as one member may have",
    "AssocGrpGRES": "your group has as many GPUs as it may have",
    "AssocGrpBilling": "your group has as many GPUs as it may have",
    "QOSGrpGRES": "your group has as many GPUs as it may have",
    "AssocMaxJobsLimit": "you have as many servers as one member may have",
    "ReqNodeNotAvail": "the suitable machines are closed or down",
    "Reservation": "the machines are reserved",
    BAD_CONSTRAINTS: NO_REPORT,
    "InvalidAccount": "your account in Slurm is closed",
    "InvalidQOS": "your account in Slurm may not use this QOS",
}
"""Slurm's reasons for waiting, in words for members; others are shown as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """A job at one moment."""

    id: int
    name: str
    uid: int
    state: str
    reason: str = ""
    """Slurm's word for why it waits, or why it ended."""
    node: str = ""
    """Where it runs or ran; several in Slurm's notation."""
    indices: tuple[int, ...] = ()
    """Slurm's numbers of its devices on that node; empty while it waits and after its end."""
    is_share: bool = False
    """True if it has shards of its device, which other jobs may use at the same time."""
    has_none: bool = False
    """True if it runs and got none of the devices that it asked for.

    Slurm 22.05 starts such jobs until a node has registered with a controller that was restarted,
    and for shares as long as jobs with shares run that are older than that.
    """
    priority: int = 0
    excluded: str = ""
    """The nodes that it must not run on, in Slurm's notation."""
    note: str = ""
    """An admin's comment: no member can write it."""
    submitted_at: datetime | None = None
    started_at: datetime | None = None
    """For a waiting job, when Slurm expects it to start."""
    ended_at: datetime | None = None
    """Only for an ended job."""

    @property
    def ticket_id(self) -> str:
        """The ticket that it holds devices for; empty for other jobs."""
        return _ticket_of(self.name)

    @property
    def waits(self) -> bool:
        """True if it waits."""
        return self.state == WAITS

    @property
    def lives(self) -> bool:
        """True if it waits, runs, or is being cleaned up: its devices are not free."""
        return self.state in _LIVES

    @property
    def may_come_again(self) -> bool:
        """True if it ended for a reason that would not stop it a second time."""
        if self.state == "FAILED" and self.reason == BAD_CONSTRAINTS:
            return True  # it was never accepted: the submission that made it was told why
        return self.state in _AGAIN or GIVEN_BACK in self.note

    @property
    def is_given_up(self) -> bool:
        """True if it waits, and Slurm does not try to start it until it is released."""
        return self.waits and not self.priority and self.reason == BAD_CONSTRAINTS

    @property
    def why(self) -> str:
        """What it waits for besides devices, in words."""
        return _REASONS.get(self.reason, f"Slurm says {self.reason}")

    @property
    def end(self) -> str:
        """How it ended, as a sentence for its member."""
        return _ENDS.get(self.state, f"Slurm ended its job ({self.state}: {self.reason})")


_ENDS = {
    "CANCELLED": "its job in Slurm was cancelled",
    "TIMEOUT": "it reached its time limit in Slurm",
    "NODE_FAIL": "its machine was lost",
    "PREEMPTED": "preempted by a job with higher priority",
}
ENDS_BY_SLURM = frozenset(text for state, text in _ENDS.items() if state != "CANCELLED")
"""Ends that no cancellation of ours causes."""


def read_jobs(slurm: Slurm) -> list[SlurmJob]:
    """Return every job that Slurm knows. Blocks. Raises SlurmUnavailable."""
    return jobs_of(slurm.jobs())


def jobs_of(text: str) -> list[SlurmJob]:
    """Parse the output of ``squeue --json``.

    Raises SlurmUnavailable if the output is truncated or malformed.
    """
    try:
        rows, rest = _taken_apart(text)
        found = json.loads(rest)
        _must_be_tested(found.get("meta") or {})
        if errors := found.get("errors"):
            raise SlurmUnavailable(why=f"squeue says {str(errors)[:200]}")
        return [_job(each) for each in (*found["jobs"], *rows)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"squeue --json did not answer in Slurm 22.05's format ({error!r:.80})"
        raise SlurmUnavailable(why=why) from None


def _must_be_tested(meta: Mapping[str, Any]) -> None:
    release = str(meta.get("Slurm", {}).get("release", ""))
    if release and not is_tested(release):
        why = f"this is Slurm {release}, but gpuspawner is tested with {' and '.join(TESTED)}"
        raise SlurmUnavailable(why=why)


def _taken_apart(text: str) -> tuple[list[Any], str]:
    """Return the jobs, and the text without them.

    Parsed at once, some thousand jobs would block every other thread for a tenth of a second,
    including the event loop.
    """
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
            time.sleep(0)  # let others run
    return rows, text[: first.end()] + text[at:]


def _job(row: Mapping[str, Any]) -> SlurmJob:
    state, details = str(row["job_state"]), row.get("gres_detail") or []
    return SlurmJob(
        id=int(row["job_id"]),
        name=str(row["name"]),
        uid=int(row["user_id"]),
        state=state,
        reason=str(row.get("state_reason") or ""),
        node=str(row.get("nodes") or ""),
        indices=given(details),
        is_share=any(kind == "shard" for each in details for kind, _ in _GIVEN.findall(each)),
        has_none=state == "RUNNING" and _has_none(row, details),
        priority=int(row.get("priority") or 0),
        excluded=str(row.get("excluded_nodes") or ""),
        note=str(row.get("admin_comment") or ""),
        submitted_at=_time_of_job(row.get("submit_time")),
        started_at=_time_of_job(row.get("start_time")),
        ended_at=None if state in _LIVES else _time_of_job(row.get("end_time")),
    )


def _has_none(row: Mapping[str, Any], details: list[str]) -> bool:
    if not details:
        return _ASKED.search(str(row.get("tres_per_node") or "")) is not None
    return any(map(_NONE_GIVEN.search, details))


def given(details: list[str]) -> tuple[int, ...]:
    """Parse the indices of a job's devices from entries such as ``gpu:a100:2(IDX:0-1)``."""
    found = [match for detail in details for match in _GIVEN.findall(detail)]
    if len({kind for kind, _ in found}) > 1:
        return ()  # whole devices and shares
    numbers: list[int] = []
    for _, listed in found:
        for part in listed.split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def _time_of_job(seconds: object) -> datetime | None:
    if not isinstance(seconds, int) or seconds <= 0:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc)


AT_ONCE = timedelta(days=7)
"""The longest period for which all jobs are queried at once."""

NAMES_AT_ONCE = 200

_COLUMNS = (
    *("jobidraw", "jobid", "user", "submit", "start", "end", "elapsedraw"),
    *("alloctres", "nodelist", "jobname"),
)
_BEHIND = re.compile(r"^DBD Agent queue size:\s*(\d+)\s*$", re.MULTILINE)
_GRES = re.compile(r"gres/(gpu|shard)(?::([^=]+))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_HOST = re.compile(r"([^,\[\]]+)(?:\[([0-9,-]+)\])?")
_HOSTS = re.compile(rf"{_HOST.pattern}(?:,{_HOST.pattern})*")
_MOST_NODES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """A job from its start to its end; one that is queued again has another run later."""

    id: str
    """Slurm's number of it, also for an array's element."""
    label: str
    """The same number as people see it: ``12_3``."""
    name: str
    """The name, chosen by its owner."""
    user: str
    submitted_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    """None while it runs."""
    seconds: int
    """How long it ran, as far as known; without the time for which it was suspended."""
    gpus: Mapping[str, int]
    """Whole devices by Slurm's type; with an empty type, those of unknown models."""
    shards: Mapping[str, int]
    """Shares of devices, in the same way."""
    nodes: tuple[str, ...]
    told: bool = True
    """True if the database already shows what it had."""

    @property
    def key(self) -> str:
        """A key that is unique among all runs: numbers can repeat, starts cannot."""
        return f"{self.id}:{int(self.started_at.timestamp()) if self.started_at else 0}"

    @property
    def ticket_id(self) -> str:
        """The ticket that it claims to hold devices for; empty if none."""
        return _ticket_of(self.name)

    @property
    def devices(self) -> int:
        """The number of whole devices it has."""
        return sum(self.gpus.values())

    @property
    def uses_devices(self) -> bool:
        """True if it ran and has any device or a share of one."""
        return bool(self.started_at and (self.devices or sum(self.shards.values())))


def _ticket_of(name: str) -> str:
    return name.removeprefix(HOLDER) if name.startswith(HOLDER) else ""


@dataclass(frozen=True, slots=True)
class UsagePart:
    """Devices of the same kind."""

    count: int
    models: tuple[str, ...]
    """Their model; several if it is unknown which."""
    slots: int = 1
    """Each is one of this many shares of a device."""


# Reading.


def read_usage(slurm: Slurm, since: datetime, until: datetime) -> list[JobRun]:
    """Return every run that overlaps the period, including running ones, a week at a time.

    Raises SlurmUnavailable or SlurmRefused.
    """
    runs: list[JobRun] = []
    start = since
    while start < until:
        end = min(start + AT_ONCE, until)
        runs += _ask(slurm, start, end)
        start = end
    return _newest(runs)


def read_holders(
    slurm: Slurm, tickets: Collection[str], since: datetime, until: datetime
) -> dict[str, list[JobRun]]:
    """Return the runs of these tickets' jobs by ticket, first submitted first."""
    names = sorted(tickets)
    runs: list[JobRun] = []
    for first in range(0, len(names), NAMES_AT_ONCE):
        some = ",".join(HOLDER + ticket for ticket in names[first : first + NAMES_AT_ONCE])
        runs += _ask(slurm, since, until, f"--name={some}")
    found: dict[str, list[JobRun]] = defaultdict(list)
    for run in _newest(runs):
        found[run.ticket_id].append(run)
    return found


def read_runs(slurm: Slurm, numbers: Collection[str], since: datetime) -> list[JobRun]:
    """Return every run of these jobs since a moment, however long ago."""
    words = ("-j", ",".join(sorted(numbers)))
    return _newest(_ask(slurm, since, datetime.now(timezone.utc), *words)) if numbers else []


def living(slurm: Slurm) -> frozenset[str]:
    """Return the numbers of the jobs that the controller knows.

    A job that runs according to the database only was lost in a crash, and uses nothing more.
    """
    return frozenset(slurm.run("squeue", "-h", "-a", "-r", "-o", "%A").split())


def behind(slurm: Slurm) -> int:
    """Return how many of the controller's messages the accounting database has not processed.

    With none, it knows everything that happened. Raises SlurmUnavailable or SlurmRefused.
    """
    found = _BEHIND.search(slurm.run("sdiag"))
    if found is None:
        why = "sdiag does not report the accounting database's backlog, as in Slurm 22.05"
        raise SlurmUnavailable(why=why)
    return int(found[1])


def stays_behind(slurm: Slurm) -> bool:
    """Return True if the database lags behind for more than a moment.

    On a busy cluster it always may for a moment. Raises as :func:`behind`.
    """
    for _ in range(2):
        if not behind(slurm):
            return False
        time.sleep(0.5)
    return bool(behind(slurm))


def _ask(slurm: Slurm, since: datetime, until: datetime, *more: str) -> list[JobRun]:
    # A job's name can contain anything except what nobody can guess.
    delimiter = secrets.token_hex(8)
    said = slurm.run(
        "sacct",
        *("-a", "-X", "-D", "-P", "-n", f"--delimiter={delimiter}"),
        *("-S", _moment(since), "-E", _moment(until + timedelta(seconds=1))),
        *more,
        *("-o", ",".join(_COLUMNS)),
    )
    return parse_runs(said, delimiter)


def _newest(runs: Iterable[JobRun]) -> list[JobRun]:
    """Return each run once, as last read, in the order of their submission."""
    found = {run.key: run for run in runs}
    return sorted(found.values(), key=lambda run: (run.submitted_at, len(run.id), run.id))


def parse_runs(said: str, delimiter: str) -> list[JobRun]:
    """Parse the output of sacct.

    Raises SlurmUnavailable if the output is truncated or malformed.
    """
    if not said.strip():
        return []
    cells, width = said.split(delimiter), len(_COLUMNS) - 1
    if len(cells) % width != 1 or len(cells) == 1:
        raise _strange(said)
    runs = []
    first = cells[0]
    cells[-1] = cells[-1].removesuffix("\n") + "\n"
    for at in range(0, len(cells) - 1, width):
        # The name is last, and a new line separates it from the next row's number.
        name, _, following = cells[at + width].rpartition("\n")
        try:
            runs.append(_run(first, *cells[at + 1 : at + width], name))
        except ValueError:
            raise _strange(first) from None
        first = following
    return runs


def _run(*cells: str) -> JobRun:
    number, label, user, submit, start, end, elapsed, tres, nodes, name = cells
    submitted, started = _time_of_run(submit), _time_of_run(start)
    if not number.isdecimal() or submitted is None:
        raise ValueError(number)
    gpus, shards = _gres(tres)
    return JobRun(
        id=number,
        label=label,
        name=name,
        user=user,
        submitted_at=submitted,
        started_at=started,
        ended_at=_time_of_run(end),
        seconds=max(0, int(elapsed or 0)) if started else 0,
        gpus=gpus,
        shards=shards,
        nodes=hosts(nodes) if "assigned" not in nodes else (),
        told=bool(tres.strip()),
    )


def _gres(tres: str) -> tuple[dict[str, int], dict[str, int]]:
    """Parse devices and shares by type: ``gres/gpu=2,gres/gpu:a100=2``."""
    found: dict[str, dict[str, int]] = {"gpu": {}, "shard": {}}
    for part in tres.split(","):
        name, _, amount = part.partition("=")
        if (match := _GRES.fullmatch(name)) and amount.isdecimal():
            found[match[1]][match[2] or ""] = int(amount)
    for kind in found.values():
        # All of them are counted without a type, and some again by type.
        if "" in kind:
            rest = kind.pop("") - sum(kind.values())
            if rest > 0:
                kind[""] = rest
    return found["gpu"], found["shard"]


def hosts(text: str) -> tuple[str, ...]:
    """Parse nodes such as ``gpu[1-3,07],box``. Raises ValueError if the list is invalid."""
    if text and not _HOSTS.fullmatch(text):
        raise ValueError(text)
    found: list[str] = []
    for before, inside in _HOST.findall(text):
        for word in inside.split(",") if inside else ():
            match = _RANGE.fullmatch(word)
            if match is None or int(match[2] or match[1]) - int(match[1]) > _MOST_NODES:
                raise ValueError(text)
            numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
            found += (f"{before}{number:0{len(match[1])}d}" for number in numbers)
        if not inside:
            found.append(before)
    return tuple(found)


def _time_of_run(text: str) -> datetime | None:
    return datetime.fromtimestamp(int(text), timezone.utc) if text.isdecimal() else None


def _moment(moment: datetime) -> str:
    return f"{moment.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%S}"


def _strange(row: str) -> SlurmUnavailable:
    return SlurmUnavailable(why=f"sacct did not answer in Slurm 22.05's format ({row[:80]!r})")


# The devices of a run.


def parts_of(run: JobRun, cluster: Cluster) -> tuple[UsagePart, ...]:
    """Return the number of devices per model for a run, as far as known."""
    found = []
    for kinds, is_shard in ((run.gpus, False), (run.shards, True)):
        for kind, count in sorted(kinds.items()):
            if count:
                found.append(_part(run, count, kind, cluster, is_shard=is_shard))
    return tuple(found)


def _part(run: JobRun, count: int, kind: str, cluster: Cluster, *, is_shard: bool) -> UsagePart:
    """Return the devices of one type; for shards of unknown size, the smallest ones there are."""
    some = _candidates(run, kind, cluster, is_shard=is_shard)
    slots = max((each for _, each in some), default=1) if is_shard else 1
    models = (model for model, each in some if not is_shard or each == slots)
    return UsagePart(count, tuple(dict.fromkeys(models)), slots)


def _candidates(
    run: JobRun, kind: str, cluster: Cluster, *, is_shard: bool
) -> list[tuple[str, int]]:
    """Return the models of devices that a run may have, each with its slots."""
    here = [node for node in cluster.nodes if node.name in run.nodes]
    # If the file knows neither the type nor the node, it may be any device; and one that is no
    # longer shared may have been.
    for of_shared in (True, False) if is_shard else (False,):
        for nodes, type_ in ((here, kind), (cluster.nodes, kind), (here, ""), (cluster.nodes, "")):
            found = [
                (device.model, node.slots_of(device))
                for node in nodes
                for device in node.devices
                if type_ in ("", device.gres) and (node.slots_of(device) > 1 or not of_shared)
            ]
            if found:
                return found
    return []
