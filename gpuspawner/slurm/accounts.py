"""Users and accounts in Slurm: their names, shares and limits.

Each configured group has an account below ``gpuspawner``, each member one open association in the
account of the group that they count against, and each priority a QOS. Everything outside of
``gpuspawner`` is the site's own.
"""

from __future__ import annotations

import base64
import hashlib
import pwd
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..core.errors import SlurmRefused
from ..queue.models import QueueLimits
from .config import GPU_BILLING, TESTED, is_tested
from .programs import Slurm

LONGEST_NAME = 32
"""Maximum characters of a user's name, for ``useradd`` and Slurm alike."""

ROOT_ACCOUNT = "gpuspawner"
"""The account above all of ours; everything outside of it is the site's own."""

EVERYBODY = "gpuspawner-members"
"""The account of members without a configured group."""

FIRST_UID = 1000
"""Users below it are system users, as in ``login.defs`` everywhere."""

_PLAIN = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_KEPT = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-")

# Of Debian, Ubuntu and Red Hat, and of common cluster software.
_SYSTEM = """
    root toor bin daemon adm lp sync shutdown halt mail news uucp operator games gopher ftp man
    proxy www-data backup list irc gnats nobody nogroup sys sshd messagebus dbus polkitd avahi
    syslog tss ntp chrony landscape pollinate lxd statd rpc rpcuser nfsnobody postfix exim
    dnsmasq systemd nginx apache redis postgres mysql mariadb mongodb docker dockerroot
    containerd libvirt qemu slurm slurmdbd slurmrestd munge nvidia-persistenced jupyterhub
    jupyter gpuspawner telegraf grafana prometheus admin sudo wheel staff users
"""
SYSTEM_USERS = frozenset(_SYSTEM.split())
"""Names of system users: no member gets one of these on a node."""


def user_of(member: str) -> str:
    """Return a member's user on the nodes: at most 32 of ``a-z 0-9 _ -``, a letter first.

    A name that Linux and Slurm accept stays as it is. Any other is encoded after ``u-``, or becomes
    a digest after ``h-`` if that is too long. No two members get the same user.
    """
    plain = _PLAIN.fullmatch(member) and not member.startswith(("u-", "h-", "systemd-"))
    if plain and member not in SYSTEM_USERS:
        return member
    return _written("u-", "h-", member)


def account_of(group: str) -> str:
    """Return a group's account in Slurm; for "" that of members without a group.

    It begins with ``g-`` or ``gh-``, so that it is never an account made by the site itself.
    """
    return _written("g-", "gh-", group) if group else EVERYBODY


def by_user(members: Iterable[str]) -> dict[str, str]:
    """Return these members by their users on the nodes."""
    return {user_of(member): member for member in members}


def is_system_user(user: str) -> bool:
    """Return True if this machine has a system user with this name."""
    try:
        return pwd.getpwnam(user).pw_uid < FIRST_UID
    except KeyError:
        return False


def _written(prefix: str, digest: str, name: str) -> str:
    data = name.encode("utf-8", "surrogatepass")
    found = prefix + "".join(chr(b) if b in _KEPT else f"_{b:02x}" for b in data)
    if len(found) <= LONGEST_NAME:
        return found
    bits = base64.b32encode(hashlib.sha256(data).digest()).decode("ascii").lower()
    return digest + bits[: LONGEST_NAME - len(digest)]


QOS = "gpuspawner-"
"""Prefix of our QOS; the priority follows."""

SHARES = 100
"""Slurm's shares of a group with weight 1, because Slurm has no fractions."""

_FORMAT = (
    "account,user,partition,parentname,share,grptres,grptresrunmins,grpsubmit,maxsubmit,qos,"
    "defaultqos"
)
_SHOW = ("-n", "-P", "show")
GPU, SHARD = "gres/gpu", "gres/shard"
"""The names of devices, and of shares of one, in Slurm's limits."""
BILLING = "billing"
"""The name of both together, a share as its part of a device; see GPU_BILLING."""

MOST_ASSOCIATIONS = 2**31 - 1
"""The largest number that Slurm stores."""


# The wanted state.


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group with settings."""

    weight: float = 1.0
    limits: QueueLimits = field(default_factory=QueueLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A member, or a former one."""

    member: str
    group: str = ""
    """The group that they count against; empty for none."""
    priority: str = "normal"
    closed: bool = False
    """True for a former member: none of their jobs is accepted or starts."""
    dry: bool = False
    """True if their paying account is empty: none of their jobs gets a GPU."""


class Admission(NamedTuple):
    """How a member may submit jobs."""

    account: str = ""
    """The account that their jobs count against; empty for their default."""
    is_late: bool = False
    """True if Slurm's database did not say in time whether it knows the member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssociationRow:
    """Slurm's settings of an account or association; None means no limit."""

    share: int = 1
    gpus: int | None = None
    shards: int | None = None
    billing: int | None = None
    """Devices and shares together, a device as GPU_BILLING."""
    gpu_minutes: int | None = None
    shard_minutes: int | None = None
    submits: int | None = None
    """Waiting and running jobs."""


@dataclass(frozen=True, slots=True)
class WantedAssociations:
    """Everything that the configuration requires."""

    qos: Mapping[str, int]
    """Priority by name."""
    accounts: Mapping[str, AssociationRow]
    users: Mapping[str, tuple[str, AssociationRow, str]]
    """Account, row and QOS of each user."""


def wanted_associations(
    people: Iterable[Person],
    groups: Mapping[str, Group],
    member_limits: QueueLimits,
    priorities: Mapping[str, float],
    most_shards: int = 1,
) -> WantedAssociations:
    """Return what these people and groups should be in Slurm.

    ``priorities`` are points by the name of a priority; Slurm's begin at 0. ``most_shards``: of any
    device; 1 if none is shared.
    """
    least = min(priorities.values(), default=0.0)
    people = list(people)
    named = {*groups, *(person.group for person in people), ""}
    return WantedAssociations(
        qos={QOS + name: round(points - least) for name, points in priorities.items()},
        accounts={
            account_of(name): _group_row(groups.get(name, Group()), most_shards)
            for name in sorted(named)
        },
        users={
            user_of(person.member): (
                account_of(person.group),
                _person_row(person, member_limits, most_shards),
                QOS + person.priority,
            )
            for person in people
        },
    )


def _group_row(group: Group, most_shards: int) -> AssociationRow:
    share = min(max(1, round(group.weight * SHARES)), MOST_ASSOCIATIONS)
    return replace(_row(group.limits, most_shards), share=share)


def _person_row(person: Person, limits: QueueLimits, most_shards: int) -> AssociationRow:
    row = _row(limits, most_shards)
    if person.closed or person.dry:
        row = replace(row, gpus=0, shards=0)
    return replace(row, submits=0) if person.closed else row


def _row(limits: QueueLimits, most_shards: int) -> AssociationRow:
    # Slurm counts running jobs among the submitted ones.
    both = limits.devices is not None and limits.tickets is not None
    running = (limits.devices or 0) * most_shards
    minutes = None if limits.gpu_hours is None else int(limits.gpu_hours * 60)
    row = AssociationRow(
        gpus=limits.devices,
        gpu_minutes=minutes,
        submits=running + (limits.tickets or 0) if both else None,
    )
    if most_shards == 1:
        return row
    return replace(
        row,
        billing=None if limits.devices is None else limits.devices * GPU_BILLING,
        shard_minutes=None if minutes is None else minutes * most_shards,
    )


# The existing state.


@dataclass(frozen=True, slots=True)
class UserAssociation:
    """A user in one of our accounts."""

    row: AssociationRow
    qos: tuple[str, ...]
    default_qos: str


@dataclass(frozen=True, slots=True)
class FoundAssociations:
    """What exists in Slurm, as far as it concerns us."""

    qos: Mapping[str, int]
    parents: Mapping[str, str]
    """The parent of each account."""
    accounts: Mapping[str, AssociationRow]
    places: Mapping[tuple[str, str], UserAssociation]
    """By account and user."""
    defaults: Mapping[str, str]
    """Each user's default account."""

    def is_ours(self, account: str) -> bool:
        """Return True if an account is ours or below ours."""
        seen: set[str] = set()
        while account and account not in seen:
            if account == ROOT_ACCOUNT:
                return True
            seen.add(account)
            account = self.parents.get(account, "")
        return False


def read_associations(slurm: Slurm, cluster: str) -> FoundAssociations:
    """Read Slurm's database. Raises SlurmUnavailable or SlurmRefused."""
    return parse_associations(
        slurm.run("sacctmgr", *_SHOW, "assoc", f"cluster={cluster}", f"format={_FORMAT}"),
        slurm.run("sacctmgr", *_SHOW, "qos", "format=name,priority"),
        slurm.run("sacctmgr", *_SHOW, "user", "format=user,defaultaccount"),
    )


def read_places(slurm: Slurm, cluster: str, users: Collection[str]) -> FoundAssociations:
    """Read only the associations of these users."""
    which = (f"cluster={cluster}", f"user={','.join(users)}")
    return parse_associations(
        slurm.run("sacctmgr", *_SHOW, "assoc", *which, f"format={_FORMAT}"), "", ""
    )


def parse_associations(associations: str, qos: str, users: str) -> FoundAssociations:
    """Parse sacctmgr's three tables."""
    parents: dict[str, str] = {}
    accounts: dict[str, AssociationRow] = {}
    places: dict[tuple[str, str], UserAssociation] = {}
    for cells in _lines(associations, 11):
        account, user, partition, parent = cells[:4]
        if partition:
            continue  # none of ours has one
        if user:
            many = tuple(word for word in cells[9].split(",") if word)
            places[account, user] = UserAssociation(_read_row(cells, cells[8]), many, cells[10])
        else:
            parents[account], accounts[account] = parent, _read_row(cells, cells[7])
    return FoundAssociations(
        qos={name: _number(priority) or 0 for name, priority in _lines(qos, 2)},
        parents=parents,
        accounts=accounts,
        places=places,
        defaults={row[0]: row[1] for row in _lines(users, 2)},
    )


def _lines(text: str, width: int) -> list[list[str]]:
    rows = [line.split("|") for line in text.splitlines()]
    return [row for row in rows if len(row) == width]


def _read_row(cells: list[str], submits: str) -> AssociationRow:
    tres, minutes = _tres(cells[5]), _tres(cells[6])
    return AssociationRow(
        share=_number(cells[4]) or 0,  # "parent" is not one of ours either
        gpus=tres.get(GPU),
        shards=tres.get(SHARD),
        billing=tres.get(BILLING),
        gpu_minutes=minutes.get(GPU),
        shard_minutes=minutes.get(SHARD),
        submits=_number(submits),
    )


def _tres(text: str) -> dict[str, int]:
    """Parse ``cpu=4,gres/gpu=2``."""
    pairs = (part.rpartition("=") for part in text.split(",") if part)
    return {name: int(amount) for name, _, amount in pairs if amount.isdecimal()}


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


_DO = ("-i", "-Q")
_NOTHING_NEW = "nothing new added"

AT_ONCE = 100
"""How many users one step covers: the database takes as long for a single one."""


@dataclass(frozen=True, slots=True)
class SyncStep:
    """One call of sacctmgr."""

    words: tuple[str, ...]
    what: str
    """What it does, for people."""


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The steps that bring Slurm to the wanted state."""

    steps: tuple[SyncStep, ...] = ()
    problems: tuple[str, ...] = ()
    """What cannot be done, as sentences; the rest can."""


def plan_sync(
    asked: WantedAssociations,
    found: FoundAssociations,
    cluster: str,
    is_system: Callable[[str], bool] = lambda user: False,
) -> SyncPlan:
    """Return the steps from the existing state to the wanted one.

    ``is_system`` returns True for a system user, whatever a member is called.
    """
    steps = [*_qos_steps(asked, found)]
    problems = []
    if ROOT_ACCOUNT not in found.accounts:
        steps.append(_add_account(ROOT_ACCOUNT, cluster))
    theirs = {name for name in asked.accounts if name in found.accounts and not found.is_ours(name)}
    for name in sorted(theirs):
        problems.append(
            f"Slurm has an account {name} outside {ROOT_ACCOUNT}, which was left unchanged. Rename "
            f"the group, or let gpuspawner manage the account: sacctmgr modify account {name} "
            f"set parent={ROOT_ACCOUNT}."
        )
    for name, row in asked.accounts.items():
        if name not in theirs:
            steps += _account_steps(name, row, found, cluster)
    changes: list[_Change] = []
    for user, (account, row, qos) in asked.users.items():
        if (account, user) not in found.places and is_system(user):
            problems.append(
                f"The member {user} cannot have jobs: {user} is a system user on this machine. "
                "Give the member another name in the hub."
            )
        elif account not in theirs:
            changes += _changes(user, account, row, qos, found)
    steps += _together(changes, cluster)
    return SyncPlan(tuple(steps), tuple(problems))


def apply_plan(slurm: Slurm, steps: Iterable[SyncStep]) -> None:
    """Carry out the steps in order. Raises SlurmUnavailable or SlurmRefused.

    Earlier steps stay done, and the rest is in the next plan.
    """
    for step in steps:
        try:
            slurm.run("sacctmgr", *_DO, *step.words)
        except SlurmRefused as error:
            if _NOTHING_NEW not in error.message.lower():
                raise  # else another process has just done the same


def check_version(slurm: Slurm) -> None:
    """Raise SlurmRefused for an untested version of Slurm, whose syntax may differ."""
    said = slurm.run("sacctmgr", "--version").strip()
    if not is_tested(said):
        why = f"this is {said}, but gpuspawner is tested with {' and '.join(TESTED)}"
        raise SlurmRefused(why=f"{why}. Install a tested version")


def is_there(slurm: Slurm, cluster: str, asked: WantedAssociations) -> bool:
    """Return True if these people already have their associations, with a single query.

    That is so before every start of theirs except the first.
    """
    found = read_places(slurm, cluster, asked.users)
    return not any(
        change
        for user, (account, row, qos) in asked.users.items()
        for change in _changes(user, account, row, qos, found)
    )


def read_plan(slurm: Slurm, cluster: str, asked: WantedAssociations) -> SyncPlan:
    """Return the steps from Slurm's present state to the wanted one."""
    found = read_associations(slurm, cluster)
    return plan_sync(asked, found, cluster, is_system_user)


def _qos_steps(asked: WantedAssociations, found: FoundAssociations) -> Iterable[SyncStep]:
    for name, priority in asked.qos.items():
        said = f"QOS {name}: priority {priority}"
        if name not in found.qos:
            new = (f"priority={priority}", "description=gpuspawner")
            yield SyncStep(("add", "qos", name, *new), f"{said}, new")
        elif found.qos[name] != priority:
            words = ("where", f"name={name}", "set", f"priority={priority}")
            yield SyncStep(("modify", "qos", *words), f"{said} (was {found.qos[name]})")


def _add_account(name: str, cluster: str, parent: str = "", *settings: str) -> SyncStep:
    words: tuple[str, ...] = ("description=gpuspawner", "organization=gpuspawner")
    words += (f"parent={parent}",) if parent else ()
    what = ", ".join((f"account {name}: new", *settings))
    return SyncStep(("add", "account", name, f"cluster={cluster}", *words, *settings), what)


def _account_steps(
    name: str, row: AssociationRow, found: FoundAssociations, cluster: str
) -> Iterable[SyncStep]:
    if name not in found.accounts:
        settings = _settings(row, AssociationRow(share=0), "Grp")
        yield _add_account(name, cluster, ROOT_ACCOUNT, *settings)
    elif changes := _settings(row, found.accounts[name], "Grp"):
        where = ("where", f"name={name}", f"cluster={cluster}")
        what = f"account {name}: {', '.join(changes)}"
        yield SyncStep(("modify", "account", *where, "set", *changes), what)


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of a user, the same for many."""

    stage: int
    """Changes of lower stages are done first."""
    user: str
    verb: str
    words: tuple[str, ...]
    what: str


def _changes(
    user: str, account: str, row: AssociationRow, qos: str, found: FoundAssociations
) -> Iterator[_Change]:
    there = found.places.get((account, user))
    if there is None:
        settings = _settings(row, AssociationRow(), "Max")
        many = (f"qos={qos}", f"defaultqos={qos}")
        said = f", {', '.join(settings)}" if settings else ""
        words = (f"account={account}", "fairshare=1", *settings, *many)
        yield _Change(0, user, "add", words, f"in {account} with {qos}{said}, new")
    else:
        # What an admin added stays; of ours there is one.
        right = (*(name for name in there.qos if not name.startswith(QOS)), qos)
        changes = _settings(replace(row, share=there.row.share), there.row, "Max")
        if set(right) != set(there.qos):
            changes += (f"qos={','.join(right)}",)
        if there.default_qos != qos:
            changes += (f"defaultqos={qos}",)
        if changes:
            yield _in_account(1, user, account, changes)
    default = found.defaults.get(user, account)
    if default != account and found.is_ours(default):
        # It is set automatically for a new user; one of the site's own stays.
        words = ("set", f"defaultaccount={account}")
        yield _Change(2, user, "modify", words, f"{account} by default (was {default})")
    for (other, name), place in found.places.items():
        if name == user and other != account and found.is_ours(other):
            over = replace(row, share=place.row.share, submits=0)
            if changes := _settings(over, place.row, "Max"):
                yield _in_account(3, user, other, changes)


def _in_account(stage: int, user: str, account: str, changes: tuple[str, ...]) -> _Change:
    words = (f"account={account}", "set", *changes)
    return _Change(stage, user, "modify", words, f"in {account}: {', '.join(changes)}")


def _together(changes: Iterable[_Change], cluster: str) -> Iterator[SyncStep]:
    """Yield the steps: the same change for many users is one step."""
    alike: dict[_Change, list[str]] = {}
    for change in sorted(changes, key=lambda change: change.stage):
        alike.setdefault(replace(change, user=""), []).append(change.user)
    for change, users in alike.items():
        for first in range(0, len(users), AT_ONCE):
            some = users[first : first + AT_ONCE]
            named = ",".join(some)
            which = (named,) if change.verb == "add" else ("where", f"name={named}")
            words = (change.verb, "user", *which, f"cluster={cluster}", *change.words)
            yield SyncStep(words, f"{', '.join(some)}: {change.what}")


def _settings(row: AssociationRow, there: AssociationRow, submits: str) -> tuple[str, ...]:
    """Return the differences as sacctmgr takes them; -1 removes a limit."""
    words = []
    if row.share != there.share:
        words.append(f"fairshare={row.share}")
    limits = [
        (GPU, row.gpus, there.gpus),
        (SHARD, row.shards, there.shards),
        (BILLING, row.billing, there.billing),
    ]
    if changed := _changed(limits):
        words.append(f"GrpTRES={changed}")
    limits = [
        (GPU, row.gpu_minutes, there.gpu_minutes),
        (SHARD, row.shard_minutes, there.shard_minutes),
    ]
    if changed := _changed(limits):
        words.append(f"GrpTRESRunMins={changed}")
    if row.submits != there.submits:
        words.append(f"{submits}SubmitJobs={_limit(row.submits)}")
    return tuple(words)


def _changed(limits: Iterable[tuple[str, int | None, int | None]]) -> str:
    return ",".join(f"{tres}={_limit(most)}" for tres, most, now in limits if most != now)


def _limit(most: int | None) -> int:
    return -1 if most is None else min(most, MOST_ASSOCIATIONS)
