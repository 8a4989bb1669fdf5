"""What jobs used, as Slurm's accounting database has it: to the second, by device model."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from ..errors import SlurmUnavailable
from .cluster import Cluster
from .commands import Slurm
from .jobs import HOLDER

AT_ONCE = timedelta(days=7)
"""The longest stretch of time of which all jobs are asked for at once."""

NAMES_AT_ONCE = 200

_COLUMNS = (
    *("jobidraw", "jobid", "user", "account", "state", "submit", "start", "end", "elapsedraw"),
    *("alloctres", "nodelist", "exitcode", "jobname"),
)
_BEHIND = re.compile(r"^DBD Agent queue size:\s*(\d+)\s*$", re.MULTILINE)
_GRES = re.compile(r"gres/(gpu|shard)(?::([^=]+))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_HOST = re.compile(r"([^,\[\]]+)(?:\[([0-9,-]+)\])?")
_HOSTS = re.compile(rf"{_HOST.pattern}(?:,{_HOST.pattern})*")
_MOST_NODES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job from its start to its end; one that is queued again has another run later."""

    id: str
    """Slurm's number of it, of an array's element too."""
    label: str
    """The same as people see it: ``12_3``."""
    name: str
    """Whatever its owner wrote."""
    user: str
    account: str
    state: str
    submitted_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    """None while it runs."""
    seconds: int
    """It ran so long, as far as is known; without the time for which it was suspended."""
    gpus: Mapping[str, int]
    """Whole devices by Slurm's word for the model; under an empty one, those of no known model."""
    shards: Mapping[str, int]
    """Shares of devices, the same way."""
    nodes: tuple[str, ...]
    exit: str
    """Exit status and signal: ``0:0``."""
    told: bool = True
    """Whether the database says already what it had."""

    @property
    def key(self) -> str:
        """What tells it from every other run: a number can come again, a start cannot."""
        return f"{self.id}:{_epoch(self.started_at)}"

    @property
    def ticket_id(self) -> str:
        """The ticket that it holds devices for, if it says the truth; empty when it says none."""
        return self.name.removeprefix(HOLDER) if self.name.startswith(HOLDER) else ""

    @property
    def devices(self) -> int:
        """How many whole devices it has."""
        return sum(self.gpus.values())

    @property
    def uses_devices(self) -> bool:
        """Whether it has any device, or a share of one, and ran."""
        return bool(self.started_at and (self.devices or sum(self.shards.values())))


@dataclass(frozen=True, slots=True)
class Part:
    """Devices that are alike."""

    count: int
    models: tuple[str, ...]
    """The one that they are of; several when nobody can say which."""
    slots: int = 1
    """Each is one of so many shares of a device."""


# Reading.


def read_usage(slurm: Slurm, since: datetime, until: datetime) -> list[Run]:
    """Every run of which a part lies between the two moments, those that go on included, a
    week at a time. Raises SlurmUnavailable or SlurmRefused."""
    runs: list[Run] = []
    start = since
    while start < until:
        end = min(start + AT_ONCE, until)
        runs += _ask(slurm, start, end)
        start = end
    return _newest(runs)


def read_holders(
    slurm: Slurm, tickets: Collection[str], since: datetime, until: datetime
) -> dict[str, list[Run]]:
    """The same of the holders of these tickets, the first submitted first, by ticket."""
    names = sorted(tickets)
    runs: list[Run] = []
    for first in range(0, len(names), NAMES_AT_ONCE):
        some = ",".join(HOLDER + ticket for ticket in names[first : first + NAMES_AT_ONCE])
        runs += _ask(slurm, since, until, f"--name={some}")
    found: dict[str, list[Run]] = {}
    for run in _newest(runs):
        found.setdefault(run.ticket_id, []).append(run)
    return found


def read_runs(slurm: Slurm, numbers: Collection[str], since: datetime) -> list[Run]:
    """Every run of these jobs since a moment, however long ago."""
    words = ("-j", ",".join(sorted(numbers)))
    return _newest(_ask(slurm, since, datetime.now(timezone.utc), *words)) if numbers else []


def living(slurm: Slurm) -> frozenset[str]:
    """The numbers of the jobs that the controller knows. What the database believes to run and
    the controller does not know was lost in a crash: it used nothing more."""
    return frozenset(slurm.run("squeue", "-h", "-a", "-r", "-o", "%A").split())


def behind(slurm: Slurm) -> int:
    """How many messages of the controller the accounting database has not taken yet: with none,
    it knows of all that happened. Raises SlurmUnavailable or SlurmRefused."""
    found = _BEHIND.search(slurm.run("sdiag"))
    if found is None:
        why = "sdiag does not say how far the accounting database is behind, as Slurm 22.05 does"
        raise SlurmUnavailable(why=why)
    return int(found[1])


def stays_behind(slurm: Slurm) -> bool:
    """Whether the database lacks something for more than a moment, as it always may on a cluster
    where a lot happens. Raises as :func:`behind`."""
    for _ in range(2):
        if not behind(slurm):
            return False
        time.sleep(0.5)
    return bool(behind(slurm))


def _ask(slurm: Slurm, since: datetime, until: datetime, *more: str) -> list[Run]:
    # A job's name can hold anything but what nobody can guess.
    delimiter = secrets.token_hex(8)
    said = slurm.run(
        "sacct",
        *("-a", "-X", "-D", "-P", "-n", f"--delimiter={delimiter}"),
        *("-S", _moment(since), "-E", _moment(until + timedelta(seconds=1))),
        *more,
        *("-o", ",".join(_COLUMNS)),
    )
    return parse(said, delimiter)


def _newest(runs: Iterable[Run]) -> list[Run]:
    """Each run once, as it was read last, in the order of their submission."""
    found = {run.key: run for run in runs}
    return sorted(found.values(), key=lambda run: (run.submitted_at, len(run.id), run.id))


def parse(said: str, delimiter: str) -> list[Run]:
    """The runs in what sacct printed. Raises SlurmUnavailable for what is none of it: half an
    answer is no answer."""
    if not said.strip():
        return []
    cells, width = said.split(delimiter), len(_COLUMNS) - 1
    if len(cells) % width != 1 or len(cells) == 1:
        raise _strange(said)
    runs = []
    first = cells[0]
    for at in range(0, len(cells) - 1, width):
        # The name, which comes last, and the next row's number are parted by a new line.
        last = at + width == len(cells) - 1
        name, _, following = (
            (cells[at + width].removesuffix("\n"), "", "")
            if last
            else cells[at + width].rpartition("\n")
        )
        try:
            runs.append(_run(first, *cells[at + 1 : at + width], name))
        except ValueError:
            raise _strange(first) from None
        first = following
    return runs


def _run(*cells: str) -> Run:
    number, label, user, account, state, submit, start, end, elapsed, tres, nodes, status, name = (
        cells
    )
    started, ended = _time(start), _time(end)
    submitted = _time(submit)
    if not number.isdecimal() or submitted is None:
        raise ValueError(number)
    gpus, shards = _gres(tres)
    return Run(
        id=number,
        label=label,
        name=name,
        user=user,
        account=account,
        state=state.partition(" ")[0],
        submitted_at=submitted,
        started_at=started,
        ended_at=ended,
        seconds=max(0, int(elapsed or 0)) if started else 0,
        gpus=gpus,
        shards=shards,
        nodes=hosts(nodes) if "assigned" not in nodes else (),
        exit=status,
        told=bool(tres.strip()),
    )


def _gres(tres: str) -> tuple[dict[str, int], dict[str, int]]:
    """Devices and shares by type, of ``gres/gpu=2,gres/gpu:a100=2``."""
    found: dict[str, dict[str, int]] = {"gpu": {}, "shard": {}}
    for part in tres.split(","):
        name, _, amount = part.partition("=")
        if (match := _GRES.fullmatch(name)) and amount.isdecimal():
            found[match[1]][match[2] or ""] = int(amount)
    for kind in found.values():
        # All of them are counted without a type, and some of them by type once more.
        if "" in kind:
            rest = kind.pop("") - sum(kind.values())
            if rest > 0:
                kind[""] = rest
    return found["gpu"], found["shard"]


def hosts(text: str) -> tuple[str, ...]:
    """The nodes of ``gpu[1-3,07],box``. Raises ValueError for what is no such list."""
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


def _time(text: str) -> datetime | None:
    return datetime.fromtimestamp(int(text), timezone.utc) if text.isdecimal() else None


def _moment(moment: datetime) -> str:
    return f"{moment.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%S}"


def _epoch(moment: datetime | None) -> int:
    return int(moment.timestamp()) if moment else 0


def _strange(row: str) -> SlurmUnavailable:
    return SlurmUnavailable(why=f"sacct did not answer as Slurm 22.05 does ({row[:80]!r})")


# What it was that a run had.


def parts_of(run: Run, cluster: Cluster) -> tuple[Part, ...]:
    """The devices of a run by their models, as far as anybody can say."""
    slots = max(1, cluster.shards)
    return tuple(
        Part(count, _models(run, kind, cluster), each)
        for kinds, each in ((run.gpus, 1), (run.shards, slots))
        for kind, count in sorted(kinds.items())
        if count
    )


def _models(run: Run, kind: str, cluster: Cluster) -> tuple[str, ...]:
    here = [node for node in cluster.nodes if node.name in run.nodes]
    # Where the file knows neither the type nor the node, it may be any device.
    for nodes, type_ in ((here, kind), (cluster.nodes, kind), (here, ""), (cluster.nodes, "")):
        found = (d.model for node in nodes for d in node.devices if type_ in ("", d.gres))
        if models := tuple(dict.fromkeys(found)):
            return models
    return ()
