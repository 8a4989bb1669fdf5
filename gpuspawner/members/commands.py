"""The commands ``gpuspawner roster`` and ``gpuspawner members``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..cli.command import group
from ..cli.config import Settings
from ..cli.output import actor, confirmed, count, local, note, read_input, show, table, utc
from ..cli.parameters import argument, flag, option, reason_option, yes_option
from ..core.errors import Refused
from ..core.units import format_credits
from ..ledger.grant_files import MOST_BYTES
from ..services import Services
from ..storage import directories as storage_directories
from ..storage.commands import LABEL
from .renames import Belongings
from .repository import Membership, RosterEntry
from .roster import RosterChange, RosterImport

if TYPE_CHECKING:
    from ..cli.hub import HubSettings


_SAID = {"same": "as before", "ended": "not in the file: ends now"}


@group()
@flag("--former", "list former members and why they left")
def roster(settings: Settings, former: bool) -> None:
    """List the roster, or the former members."""
    services = settings.open_services()
    if former:
        _show_former(services.members.former_members())
        return
    entries = services.roster.entries()
    headers = ("NAME", "COURSE", "GROUPS", "STARTS", "ENDS", "MAIL", "NOW")
    rows = [(*_cells(services, entry), _now(services, entry)) for entry in entries]
    text = table(headers, rows) if rows else _empty_roster(services.members.count_members())
    show([plain_entry(services, entry) for entry in entries], text)


roster.add_same("show", "List who is on the roster, and until when.")


@roster.command("import")
@argument(
    "file",
    "FILE",
    "a CSV file: name and, optionally, groups, course, starts, ends, mail (-: stdin)",
)
@flag("--dry-run", "show line by line what would happen, and change nothing")
@flag(
    "--whole",
    "the file is complete for its courses: end the roster entries of these courses that are not "
    "in the file",
)
def take(settings: Settings, file: str, dry_run: bool, whole: bool) -> int:
    """Import a CSV file: all of it or, if a line is wrong, nothing."""
    services = settings.open_services()
    data = read_input(file, MOST_BYTES)
    done = services.roster.import_roster(data, actor=actor(), dry_run=dry_run, whole=whole)
    value = {
        "done": done.done,
        "lines": [
            {
                "line": change.number or None,
                "what": change.event,
                **plain_entry(services, change.after),
            }
            for change in done.changes
        ],
        "problems": [{"line": p.number or None, "what": p.sentence} for p in done.problems],
    }
    show(value, _told(services, done))
    for problem in done.problems:
        note(str(problem))
    if done.problems:
        note("Nothing was changed.")
    return 1 if done.problems else 0


@roster.command()
@argument("member_name", "NAME", "the member's name")
@option("--course", "NAME", "end only the entry for this course (default: all courses)")
@reason_option
def end(settings: Settings, member_name: str, course: str | None, reason: str) -> None:
    """End a member's roster entries now; files and credits stay."""
    services = settings.open_services()
    ended = services.roster.end_on_roster(member_name, actor=actor(), reason=reason, course=course)
    name = ended[0].user
    where = f" for {course}" if course else ""
    grace = f"{services.settings.members.grace_minutes:g} min"
    text = (
        f"The time of {name} on the roster{where} is over now. If nothing else makes them a "
        f"member, they can start no server; those that run are stopped after {grace}, with a "
        "warning now. Files and credits stay."
    )
    courses = [entry.course for entry in ended if entry.course]
    show({"name": name, "ended": len(ended), "courses": courses}, text)


def plain_entry(services: Services, entry: RosterEntry) -> dict[str, Any]:
    """Return an entry as plain values, for scripts."""
    return {
        "name": entry.user,
        "course": entry.course,
        "groups": list(entry.groups),
        "mail": entry.mail,
        "starts_at": utc(entry.starts_at),
        "ends_at": utc(entry.ends_at),
        "holds": entry.holds(services.clock()),
    }


def _empty_roster(members: int) -> str:
    """Describe an empty roster: members without an entry are let in by how they sign in."""
    text = "The roster is empty: no list of members was imported."
    if members:
        text += f" The hub has {count(members, 'member')}, let in by the rules of its sign-in."
    return text


def _show_former(found: Sequence[Membership]) -> None:
    headers = ("NAME", "SINCE", "WHY", "BY")
    rows = [(each.user, local(each.ended_at), each.reason, each.actor) for each in found]
    plain = [
        {"name": x.user, "ended_at": utc(x.ended_at), "reason": x.reason, "actor": x.actor}
        for x in found
    ]
    show(plain, table(headers, rows) if rows else "Everybody who was a member still is.")


def _cells(services: Services, entry: RosterEntry) -> tuple[str, ...]:
    return tuple(text or "-" for text in services.roster.cells(entry).values())


def _now(services: Services, entry: RosterEntry) -> str:
    now = services.clock()
    if entry.holds(now):
        return "holds"
    return "over" if entry.ends_at and entry.ends_at <= now else "to come"


def _told(services: Services, done: RosterImport) -> str:
    headers = ("LINE", "NAME", "COURSE", "GROUPS", "STARTS", "ENDS", "MAIL", "WHAT")
    rows = [
        (str(change.number or "-"), *_cells(services, change.after), _what(services, change))
        for change in done.changes
    ]
    if not rows:
        return "No line was understood."
    new, changed, ended = (done.count(event) for event in ("new", "changed", "ended"))
    verb = "Wrote" if done.done else "Would write"
    total = f"{verb} {count(new, 'new line')}, {changed} changed, {ended} ended."
    return f"{table(headers, rows, right=('LINE',))}\n\n{total}"


def _what(services: Services, change: RosterChange) -> str:
    if change.before is None or change.event != "changed":
        return _SAID.get(change.event, change.event)
    changed = services.roster.changed_cells(change.before, change.after)
    return "; ".join(f"{name} was {old or '-'}" for name, old in changed) or "changed"


@dataclass(frozen=True, slots=True)
class MemberFiles:
    """What happens to a member's workspaces."""

    here: dict[str, str] = field(default_factory=dict)
    """Directories that are renamed, old path to new path."""
    elsewhere: dict[str, str] = field(default_factory=dict)
    """Directories that are not on this machine."""
    volumes: dict[str, str] = field(default_factory=dict)
    """Volumes of the engine, old name to new name."""


@group()
def members(settings: Settings) -> None:
    """Refuse: a subcommand is needed."""
    raise Refused("Choose a subcommand: `gpuspawner members rename OLD NEW`.")


@members.command()
@argument("old", "OLD", "the old name")
@argument("new", "NEW", "the new name, which the member already has at the Hub")
@yes_option
def rename(settings: Settings, old: str, new: str, yes: bool) -> None:
    """Rename a member, with everything that belongs to them."""
    services = settings.open_services()
    if done := services.renames.last_rename(old, new):
        text = f"{old} was renamed to {new} at {local(done.at)} by {done.actor}. Nothing to do."
        show({"old": old, "new": new, "changed": False, "at": utc(done.at)}, text)
        return
    found = services.renames.belongings(old, new)
    files = _files(settings, found, old, new)
    if found.open_leases and files.here:
        server = found.open_leases[0].server
        raise Refused(
            f"The server {server} runs, with files in {next(iter(files.here))}: stop it first "
            f"(`gpuspawner stop {server} --reason TEXT`). Nothing was changed."
        )
    note(_plan(found, files, old, new))
    if not yes and not confirmed(f"Rename {old} to {new}?"):
        raise Refused("Nothing was changed.")
    move = partial(storage_directories.move, files.here)
    services.renames.rename_member(old, new, actor=actor(), sources=files.here, move=move)
    text = f"{old} is renamed to {new}."
    if by_hand := _by_hand(files, new):
        text += "\n" + "\n".join(by_hand)
    value = {
        "old": old,
        "new": new,
        "changed": True,
        "directories": files.here,
        "directories_elsewhere": files.elsewhere,
        "volumes": files.volumes,
    }
    show(value, text)


def _files(settings: Settings, found: Belongings, old: str, new: str) -> MemberFiles:
    """Sort a member's workspaces by who renames them. Raises Refused."""
    from ..cli.hub import open_hub  # imports JupyterHub: slow, and needed here only

    settings.require_configuration("where workspaces are", file=True)
    hub = open_hub(settings.config)
    before, after = _workspace(hub, old), _workspace(hub, new)
    known = [some.source for some in found.workspaces]
    others = [before] if before.startswith("/") and before not in known else []
    directories, files = {}, MemberFiles()
    for source in (*known, *others):
        # A workspace that an earlier configuration created has the name somewhere in its path.
        renamed = "/".join(new if part == old else part for part in source.split("/"))
        target = after if source == before else renamed
        if target == source:
            continue
        if source.startswith("/"):
            directories[source] = target
        else:
            files.volumes[source] = target
    files.here.update(storage_directories.movable(directories))
    for source in known:
        if source in directories and source not in files.here:
            files.elsewhere[source] = directories[source]
    return files


def _workspace(hub: HubSettings, name: str) -> str:
    """Return a member's workspace by the hub's configuration; empty without one."""
    user = SimpleNamespace(
        name=name, escaped_name=quote(name, safe="@~"), settings={}, groups=[], url="/"
    )
    spawner = hub.app.spawner_class(config=hub.app.config, user=user)
    if "GPULocalSpawner" in hub.kinds:
        return str(spawner.home_dir)
    return str(getattr(spawner, "workspace_source", ""))


def _plan(found: Belongings, files: MemberFiles, old: str, new: str) -> str:
    what = [
        f"{format_credits(found.balance)} credits",
        count(found.leases, "lease"),
        count(found.tickets, "ticket"),
        count(found.folders, "shared folder"),
    ]
    lines = [f"{new} gets all that {old} has: {', '.join(what)}, and everything else."]
    lines += [f"{source} is renamed to {target}" for source, target in files.here.items()]
    lines += [f"The server {lease.server} keeps running." for lease in found.open_leases]
    lines += _by_hand(files, new)
    return "\n".join(lines)


def _by_hand(files: MemberFiles, new: str) -> list[str]:
    """Describe what only an admin can do."""
    lines = []
    for source, target in files.elsewhere.items():
        command = shlex.join(["mv", "-T", source, target])
        lines.append(f"On the machine that has {source}, before the next server starts: {command}")
    for source, target in files.volumes.items():
        label = shlex.quote(f"{LABEL}={new}")
        before, after = shlex.quote(f"{source}:/from:ro"), shlex.quote(f"{target}:/to")
        lines.append(
            f"The volume {source} keeps its name, as Docker renames none. While no server runs, "
            f"copy it:\n  docker volume create --label {label} {shlex.quote(target)}\n"
            f"  docker run --rm -v {before} -v {after} IMAGE cp -a /from/. /to/\n"
            f"and when all is there: docker volume rm {shlex.quote(source)}"
        )
    return lines
