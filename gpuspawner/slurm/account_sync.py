"""Synchronizes Slurm's accounts: plans the steps to the wanted state, and carries them out.

Nothing outside of ``gpuspawner`` is touched, and nothing is deleted: an obsolete association takes
no more jobs, and keeps its use. Each step is independent, so a killed process continues next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..core.errors import SlurmRefused
from . import accounts
from .accounts import (
    GPU,
    MOST_ASSOCIATIONS,
    QOS,
    SHARD,
    AssociationRow,
    FoundAssociations,
    WantedAssociations,
    read_associations,
    read_places,
)
from .config import TESTED, is_tested
from .programs import Slurm

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
    if accounts.ROOT_ACCOUNT not in found.accounts:
        steps.append(_add_account(accounts.ROOT_ACCOUNT, cluster))
    theirs = {name for name in asked.accounts if name in found.accounts and not found.is_ours(name)}
    for name in sorted(theirs):
        problems.append(
            f"Slurm has an account {name} that is not below {accounts.ROOT_ACCOUNT}: it is not "
            f"ours, and stays as it is. Give it another name, or another parent: sacctmgr modify "
            f"account {name} set parent={accounts.ROOT_ACCOUNT}."
        )
    for name, row in asked.accounts.items():
        if name not in theirs:
            steps += _account_steps(name, row, found, cluster)
    changes: list[_Change] = []
    for user, (account, row, qos) in asked.users.items():
        if (account, user) not in found.places and is_system(user):
            problems.append(
                f"The member {user} cannot have jobs: on this machine {user} is a user of the "
                "system. Give the member another name in the hub."
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
        why = f"it is {said}, and gpuspawner was tried with {' and '.join(TESTED)}"
        raise SlurmRefused(why=f"{why}. Install that one")


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
    return plan_sync(asked, found, cluster, accounts.is_system_user)


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
        yield _add_account(name, cluster, accounts.ROOT_ACCOUNT, *settings)
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
    limits = [(GPU, row.gpus, there.gpus), (SHARD, row.shards, there.shards)]
    if changed := [f"{tres}={_limit(most)}" for tres, most, now in limits if most != now]:
        words.append(f"GrpTRES={','.join(changed)}")
    if row.gpu_minutes != there.gpu_minutes:
        words.append(f"GrpTRESRunMins={GPU}={_limit(row.gpu_minutes)}")
    if row.submits != there.submits:
        words.append(f"{submits}SubmitJobs={_limit(row.submits)}")
    return tuple(words)


def _limit(most: int | None) -> int:
    return -1 if most is None else min(most, MOST_ASSOCIATIONS)
