"""Who may use the cluster in Slurm's eyes, with which share and which limits.

What a site's configuration says of groups and members becomes accounts, associations and QOS:

- an account for each group that has a say, below ``gpuspawner``, with its weight as share;
- for each member one association that is open, in the account of the group that they count on;
- a QOS for each priority.

Whatever is not below ``gpuspawner`` is the site's own. :mod:`~gpuspawner.slurm.syncing` brings
Slurm there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from . import names
from .commands import Slurm

QOS = "gpuspawner-"
"""How the names of our QOS begin; the priority follows."""

SHARES = 100
"""Slurm's shares of a group of weight 1: Slurm knows no fractions of one."""

_FORMAT = (
    "account,user,partition,parentname,share,grptres,grptresrunmins,grpsubmit,maxsubmit,qos,"
    "defaultqos"
)
_SHOW = ("-n", "-P", "show")
GPU, SHARD = "gres/gpu", "gres/shard"
"""What devices, and shares of one, are called in Slurm's limits."""

MOST = 2**31 - 1
"""The greatest number that Slurm keeps."""


# What is wanted.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a member or a group may have; None is no limit."""

    devices: int | None = None
    tickets: int | None = None
    """Requests that wait. Slurm counts those that run with them."""
    gpu_hours: float | None = None
    """Devices times the rest of their sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group that has a say."""

    weight: float = 1.0
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A member, or a former one."""

    member: str
    group: str = ""
    """The one that they count on; empty for none."""
    priority: str = "normal"
    closed: bool = False
    """Whether they are no member any more: no job of theirs is taken or begins."""
    dry: bool = False
    """Whether the account that pays for them is empty: no job of theirs gets a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What Slurm is to know of an account, or of somebody in it; None is no limit."""

    share: int = 1
    gpus: int | None = None
    shards: int | None = None
    gpu_minutes: int | None = None
    submits: int | None = None
    """Jobs that wait and run."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """All that the configuration asks for."""

    qos: Mapping[str, int]
    """Priority by name."""
    accounts: Mapping[str, Row]
    users: Mapping[str, tuple[str, Row, str]]
    """Account, row and QOS of each user."""


def wanted(
    people: Iterable[Person],
    groups: Mapping[str, Group],
    member_limits: Limits,
    priorities: Mapping[str, float],
) -> Wanted:
    """What these people and groups are to be in Slurm.

    ``priorities`` are points by the name of a priority; Slurm's begin at 0.
    """
    least = min(priorities.values(), default=0.0)
    people = list(people)
    named = {*groups, *(person.group for person in people), ""}
    return Wanted(
        qos={QOS + name: round(points - least) for name, points in priorities.items()},
        accounts={
            names.account_of(name): _group_row(groups.get(name, Group())) for name in sorted(named)
        },
        users={
            names.user_of(person.member): (
                names.account_of(person.group),
                _person_row(person, member_limits),
                QOS + person.priority,
            )
            for person in people
        },
    )


def _group_row(group: Group) -> Row:
    share = min(max(1, round(group.weight * SHARES)), MOST)
    return replace(_row(group.limits), share=share)


def _person_row(person: Person, limits: Limits) -> Row:
    row = _row(limits)
    if person.closed or person.dry:
        row = replace(row, gpus=0, shards=0)
    return replace(row, submits=0) if person.closed else row


def _row(limits: Limits) -> Row:
    both = limits.devices is not None and limits.tickets is not None
    return Row(
        gpus=limits.devices,
        gpu_minutes=None if limits.gpu_hours is None else int(limits.gpu_hours * 60),
        submits=(limits.devices or 0) + (limits.tickets or 0) if both else None,
    )


# What is there.


@dataclass(frozen=True, slots=True)
class Place:
    """Somebody in one of our accounts."""

    row: Row
    qos: tuple[str, ...]
    default_qos: str


@dataclass(frozen=True, slots=True)
class Found:
    """What Slurm knows, as far as it concerns us."""

    qos: Mapping[str, int]
    parents: Mapping[str, str]
    """The account above each one."""
    accounts: Mapping[str, Row]
    places: Mapping[tuple[str, str], Place]
    """By account and user."""
    defaults: Mapping[str, str]
    """Each user's default account."""

    def is_ours(self, account: str) -> bool:
        """Whether an account is below ours, or is ours itself."""
        seen: set[str] = set()
        while account and account not in seen:
            if account == names.ROOT_ACCOUNT:
                return True
            seen.add(account)
            account = self.parents.get(account, "")
        return False


def read(slurm: Slurm, cluster: str) -> Found:
    """What Slurm's database says. Raises SlurmUnavailable or SlurmRefused."""
    return parse(
        slurm.run("sacctmgr", *_SHOW, "assoc", f"cluster={cluster}", f"format={_FORMAT}"),
        slurm.run("sacctmgr", *_SHOW, "qos", "format=name,priority"),
        slurm.run("sacctmgr", *_SHOW, "user", "format=user,defaultaccount"),
    )


def read_places(slurm: Slurm, cluster: str, users: Collection[str]) -> Found:
    """The places of these users alone, of what there is."""
    which = (f"cluster={cluster}", f"user={','.join(users)}")
    return parse(slurm.run("sacctmgr", *_SHOW, "assoc", *which, f"format={_FORMAT}"), "", "")


def parse(associations: str, qos: str, users: str) -> Found:
    """What sacctmgr's three tables say."""
    parents: dict[str, str] = {}
    accounts: dict[str, Row] = {}
    places: dict[tuple[str, str], Place] = {}
    for cells in _lines(associations, 11):
        account, user, partition, parent = cells[:4]
        if partition:
            continue  # none of ours has one
        if user:
            many = tuple(word for word in cells[9].split(",") if word)
            places[account, user] = Place(_read_row(cells, cells[8]), many, cells[10])
        else:
            parents[account], accounts[account] = parent, _read_row(cells, cells[7])
    return Found(
        qos={name: _number(priority) or 0 for name, priority in _lines(qos, 2)},
        parents=parents,
        accounts=accounts,
        places=places,
        defaults={row[0]: row[1] for row in _lines(users, 2)},
    )


def _lines(text: str, width: int) -> list[list[str]]:
    rows = [line.split("|") for line in text.splitlines()]
    return [row for row in rows if len(row) == width]


def _read_row(cells: list[str], submits: str) -> Row:
    tres, minutes = _tres(cells[5]), _tres(cells[6])
    return Row(
        share=_number(cells[4]) or 0,  # "parent", too, is none of ours
        gpus=tres.get(GPU),
        shards=tres.get(SHARD),
        gpu_minutes=minutes.get(GPU),
        submits=_number(submits),
    )


def _tres(text: str) -> dict[str, int]:
    """``cpu=4,gres/gpu=2``."""
    pairs = (part.rpartition("=") for part in text.split(",") if part)
    return {name: int(amount) for name, _, amount in pairs if amount.isdecimal()}


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
