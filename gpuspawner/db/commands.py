"""The commands ``gpuspawner audit``, ``backup``, ``restore`` and ``takeover``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cli.command import command
from ..cli.config import Settings, shown_url
from ..cli.output import actor, confirmed, count, local, note, printable, show
from ..cli.parameters import PATH, argument, flag, option, yes_option
from ..core.errors import AnotherHubGrants, Refused
from . import backup as db_backup
from .audit import AuditFinding
from .leader import LeaderLock, identity_file, read_identity

UNKNOWN_HEAD = "earlier rows were changed or deleted by hand, or it is from another database."


@command()
@option(
    "--head",
    "HEAD",
    "also verify this head of the audit chain, from an earlier audit or backup",
    default="",
)
def audit(settings: Settings, head: str) -> int:
    """Check every invariant on every row. Returns 1 if one is broken.

    Also returns 1 if the audit chain does not contain the head that was noted earlier.
    """
    services, noted = settings.open_services(), head
    with services.store.view():
        findings, rows = services.audit.check()
        head = services.audit.chain_head() if holds(findings) else ""
        known = not (noted and head) or services.audit.knows_head(noted)
    value = plain(findings, rows) | {"head": head or None}
    said = text(findings, rows)
    if head:
        said += f"\nHead of the audit chain (keep it elsewhere): {head}"
    if noted:
        value["knows_head"] = known
        if not known:
            said += f"\nThe chain does not contain the head {printable(noted)}: {UNKNOWN_HEAD}"
    show(value, said)
    return 0 if holds(findings) and known else 1


def holds(findings: Sequence[AuditFinding]) -> bool:
    """Return True if every invariant holds."""
    return not any(finding.problem for finding in findings)


def plain(findings: Sequence[AuditFinding], rows: Mapping[str, int]) -> dict[str, Any]:
    """Return the findings as plain values, for scripts."""
    return {
        "ok": holds(findings),
        "rows": dict(rows),
        "invariants": [
            {"name": f.name, "law": f.law, "ok": not f.problem, "problem": f.problem or None}
            for f in findings
        ],
    }


def text(findings: Sequence[AuditFinding], rows: Mapping[str, int]) -> str:
    """Format the findings for people: each rule, and the first row that breaks it."""
    lines = []
    for finding in findings:
        lines.append(f"{'BROKEN' if finding.problem else 'ok':6}  {finding.law}")
        if finding.problem:
            lines.append(f"        {printable(finding.problem)}")
    broken = sum(bool(finding.problem) for finding in findings)
    looked_at = ", ".join(f"{number} {name}" for name, number in rows.items())
    if broken:
        said = f"{count(broken, 'invariant')} broken; the first row of each is named above."
    else:
        said = "Every invariant holds."
    return "\n".join([*lines, "", f"{said} Rows: {looked_at}."])


@command()
@argument("file", "FILE", "the backup to write, an SQLite file", type=PATH)
@flag("--overwrite", "replace the file if it exists")
def backup(settings: Settings, file: Path, overwrite: bool) -> None:
    """Back up the database to a file while the hub keeps running."""
    store = settings.open_services().store
    size = db_backup.back_up(store, file, overwrite=overwrite)
    text = f"Copied the database to {file} ({size / 1_000_000:.1f} MB, for its owner only)."
    text += f" Check it with: gpuspawner restore --check {file}"
    head = db_backup.head(file)
    text += f"\nHead of its audit chain (keep it elsewhere): {head}"
    show({"file": str(file), "bytes": size, "head": head}, text)


@command()
@argument("file", "FILE", "a backup made by `gpuspawner backup`", type=PATH)
@flag("--check", "only check the backup, and change nothing")
@flag("--overwrite", "replace an existing database, which is kept under another name")
def restore(settings: Settings, file: Path, check: bool, overwrite: bool) -> None:
    """Check a backup, then replace the database with it."""
    if check:
        rows = db_backup.check(file)
        text = f"{file} can be restored: every invariant holds ({_looked_at(rows)})."
        show({"file": str(file), "rows": rows, "restored": False}, text)
        return
    settings.require_hub()
    done = db_backup.restore(settings.database_url, file, overwrite=overwrite)
    where = shown_url(settings.database_url)
    text = f"Restored {file} to {where}: every invariant holds ({_looked_at(done.rows)})."
    if done.kept:
        text += f" The old database is kept: {done.kept}"
    value = {"file": str(file), "rows": done.rows, "restored": True, "kept": done.kept or None}
    show(value, text)


def _looked_at(rows: Mapping[str, int]) -> str:
    return ", ".join(count(number, name.removesuffix("s")) for name, number in rows.items())


@command()
@yes_option
def takeover(settings: Settings, yes: bool) -> None:
    """Show which hub owns the database, ask, and make this hub its owner."""
    path = identity_file(settings.config)
    if not (identity := read_identity(path)):
        raise Refused(
            f"No hub has started here yet: there is no file {path}. Run this in the hub's working "
            "directory, with its configuration (-f)."
        )
    services = settings.open_services()
    granter = LeaderLock(services.store, identity)
    found, has_something = granter.owner()
    if found is None or found.hub == identity:
        text = "Nothing to do: the database belongs to this hub or to none."
        show({"changed": False, "hub": identity}, text)
        return
    if has_something:
        what = f"{count(len(services.leases.open_leases()), 'open lease')} and "
        what += f"{count(len(services.queue.waiting()), 'waiting ticket')}"
    else:
        what = "no open lease and no waiting ticket"
    note(
        f"The database belongs to the hub {found.hub}, which ran on {found.machine} since "
        f"{local(found.since)}, with {what}. This hub is {identity}.\n"
        "It will take them over: servers that it does not know are ended, and people in the queue "
        "who are not members here lose their place. Do this only if the other hub is "
        "stopped for good."
    )
    if not yes and not confirmed("Take it over?"):
        raise Refused("Nothing was changed.")
    try:
        granter.take_over(actor())
    except AnotherHubGrants:
        raise Refused(
            f"A hub runs on this database ({granter.holder()}): stop it first. Nothing was changed."
        ) from None
    text = "The database belongs to this hub. It resumes automatically within a minute."
    show({"changed": True, "hub": identity, "before": found.hub}, text)
