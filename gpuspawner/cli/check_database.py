"""Checks of the database: reachable, writable, up to date, and forbidding the impossible.

Everything written by the checks is rolled back.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ..core.errors import GPUSpawnerError
from ..db.engine import Store
from ..db.schema import accounts, lease_places, leases, postings, tickets, transfers
from ..db.upgrades import newest, upgrade, versions
from ..db.upgrades import revision as schema_revision
from ..engines.preflight import CheckFinding, Status
from .config import passwords, redact, shown_url, sqlite_path
from .output import user_name

NAME = "database"
NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs"}
    | {"gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs"}
)


def check_database(url: str) -> tuple[CheckFinding, bool]:
    """Return the finding, and True if the checks that follow can read the database."""
    path = sqlite_path(url)
    try:
        if path is None:
            return _check(url, shown_url(url))
        if kind := network_file_system(path):
            return _on_network(path, kind), False
        if path.exists():
            return _check(url, f"SQLite at {path}")
        return _check_place(path), False
    except GPUSpawnerError as error:
        return CheckFinding(NAME, Status.FAIL, redact(error.message, passwords(url))), False


def network_file_system(path: Path, mounts: str | None = None) -> str:
    """Return the kind of the network file system with ``path``; empty for a local one."""
    if mounts is None:
        table = Path("/proc/self/mounts")
        mounts = table.read_text(encoding="utf-8", errors="replace") if table.exists() else ""
    kind, longest = "", -1
    for line in mounts.splitlines():
        fields = line.split()
        point = fields[1].replace("\\040", " ") if len(fields) > 2 else ""
        if point and path.is_relative_to(point) and len(point) >= longest:
            kind, longest = fields[2], len(point)  # a later mount hides an earlier one
    return kind if kind in NETWORK_FILE_SYSTEMS else ""


def _on_network(path: Path, kind: str) -> CheckFinding:
    text = f"{path} lies on a network file system ({kind}): SQLite's locks do not hold there."
    remedy = "Put the file on a disk of this machine, or use PostgreSQL (c.GPUDatabase.url)."
    return CheckFinding(NAME, Status.FAIL, text, remedy)


def _check_place(path: Path) -> CheckFinding:
    """Create a trial file beside the missing database, as the hub will, and remove it."""
    trial = path.with_name(f".gpuspawner-check-{secrets.token_hex(6)}.sqlite")
    try:
        trial.touch(mode=0o600, exist_ok=False)
        finding, _ = _check(f"sqlite:///{trial}", f"SQLite at {path}")
    except OSError as error:
        text = f"SQLite at {path} cannot be made by {user_name()}: {error.strerror}."
        return CheckFinding(NAME, Status.FAIL, text, _remedy(f"sqlite:///{path}"))
    finally:
        for ending in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                Path(f"{trial}{ending}").unlink()
    if finding.status is not Status.OK:
        return finding
    text = f"SQLite at {path}: not there yet, the hub can make it (tried as {user_name()})"
    return CheckFinding(NAME, Status.OK, text)


def _check(url: str, where: str) -> tuple[CheckFinding, bool]:
    store = Store(url)
    try:
        with store.write_engine.connect() as connection:
            transaction = connection.begin()
            try:
                return _check_schema(connection, where)
            finally:
                transaction.rollback()
    except (SQLAlchemyError, OSError) as error:
        why = redact(str(getattr(error, "orig", None) or error).strip(), passwords(url))
        text = f"{where} cannot be used by {user_name()}: {' '.join(why.split())}."
        return CheckFinding(NAME, Status.FAIL, text, _remedy(url)), False
    finally:
        store.close()


def _check_schema(connection: sa.Connection, where: str) -> tuple[CheckFinding, bool]:
    now = schema_revision(connection)
    if now is None:
        upgrade(connection)
    elif now not in versions():
        text = f"{where} is of version {now}, which this gpuspawner does not know."
        return CheckFinding(NAME, Status.FAIL, text, "Install the newer gpuspawner again."), False
    elif now != newest():
        text = f"{where} is of version {now}, this gpuspawner needs {newest()}."
        remedy = "Make a backup and restart the hub: it brings the database up to date."
        return CheckFinding(NAME, Status.FAIL, text, remedy), False
    if allowed := _what_it_allows(connection):
        text = f"{where} does not forbid {', '.join(allowed)}: constraints are missing."
        remedy = "Restore a backup, or start with an empty database. Grant nothing until then."
        return CheckFinding(NAME, Status.FAIL, text, remedy), False
    state = "empty, the hub fills it at its start" if now is None else f"version {now}"
    text = f"{where}: {state}, writable, refuses double leases and changes to the ledger"
    return CheckFinding(NAME, Status.OK, f"{text} (tried as {user_name()})"), now is not None


def _what_it_allows(connection: sa.Connection) -> list[str]:
    """Try the impossible, rolled back each time. Returns what succeeded."""
    mark = f"check-{secrets.token_hex(6)}"
    now = datetime.now(timezone.utc)
    account = f"member:{mark}"
    lease = {"user": mark, "account": account, "rate": 0, "hold": 0, "state": "granted"}
    lease |= {"granted_at": now}
    place = {"uuid": mark, "slot": 0, "index": 0, "model": "", "memory_bytes": 0, "open": True}
    ticket = {"user": mark, "request": "{}", "state": "waiting", "created_at": now}
    transfer = {"key": mark, "kind": "grant", "at": now, "actor": mark, "reason": mark}
    connection.execute(sa.insert(accounts).values(name=account, balance=0, opened_at=now))
    connection.execute(sa.insert(leases).values(id=f"{mark}-1", **lease))
    connection.execute(
        sa.insert(leases).values(id=f"{mark}-2", **{**lease, "server_name": "other"})
    )
    connection.execute(sa.insert(lease_places).values(lease_id=f"{mark}-1", **place))
    connection.execute(sa.insert(tickets).values(id=f"{mark}-1", **ticket))
    connection.execute(sa.insert(transfers).values(id=f"{mark}-1", **transfer))
    posting = {"transfer_id": f"{mark}-1", "account": account, "amount": 0}
    connection.execute(sa.insert(postings).values(posting))
    mine, ours = transfers.c.key == mark, postings.c.transfer_id == f"{mark}-1"
    impossible = {
        "two leases of one server": sa.insert(leases).values(id=f"{mark}-3", **lease),
        "two leases of one device": sa.insert(lease_places).values(lease_id=f"{mark}-2", **place),
        "two tickets of one server": sa.insert(tickets).values(id=f"{mark}-2", **ticket),
        "one transfer twice": sa.insert(transfers).values(id=f"{mark}-2", **transfer),
        "a changed transfer": sa.update(transfers).where(mine).values(reason="changed"),
        "a changed posting": sa.update(postings).where(ours).values(amount=1),
        "a deleted posting": sa.delete(postings).where(ours),
    }
    return [what for what, statement in impossible.items() if _succeeds(connection, statement)]


def _succeeds(connection: sa.Connection, statement: sa.Executable) -> bool:
    try:
        with connection.begin_nested():
            connection.execute(statement)
    except DBAPIError:
        return False
    return True


def _remedy(url: str) -> str:
    path = sqlite_path(url)
    if path is None:
        return (
            "See whether PostgreSQL runs and lets this user in: psql with the same host, name "
            "and user. The user must own the database."
        )
    return f"The hub's user must be able to write {path.parent} and the files in it."
