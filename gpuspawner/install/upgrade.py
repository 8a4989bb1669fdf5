"""The upgrade of a hub's database to this gpuspawner: done and checked, or undone."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

from ..core.errors import BackupRefused, GPUSpawnerError, Refused
from ..db import backup
from ..db.engine import Store, newest, revision, sqlite_file, unknown_version, upgrade, versions
from ..db.leader import LeaderLock
from ..engines.preflight import CheckFinding, Status

FOR_POSTGRESQL = (
    "This command upgrades SQLite databases. For PostgreSQL, stop the hub, make a copy with "
    "pg_dump --format=custom, and start the hub: it upgrades the database in one transaction, "
    "which leaves everything as it was if it fails."
)
DATABASE = "database"
"""The check that is red before each upgrade, because the database is not upgraded yet."""
EARLIER = "To start the hub, install the earlier gpuspawner again."


class Upgrader:
    """Upgrades an SQLite database that no hub or service uses."""

    def __init__(self, url: str, check: Callable[[], Sequence[CheckFinding]]) -> None:
        """Args: the database's URL, and a function that checks the hub in another process.

        The check must not upgrade the database.

        Raises:
            Refused: The database is not an SQLite file, or there is none.
        """
        place = sqlite_file(url)
        if place is None:
            raise Refused(FOR_POSTGRESQL)
        if not place.exists():
            raise Refused(f"There is no database at {place}: the hub makes it at its first start.")
        self.url = url
        self.place = place
        self.check = check
        self.ok = True
        """False if the database is up to date and a check is red."""
        self.changed = False
        """True once the database was upgraded."""

    def backup_path(self, at: datetime | None = None) -> Path:
        """Return where the backup goes unless another file is named."""
        stamp = (at or datetime.now(timezone.utc)).strftime("%Y%m%d_%H%M%S")
        return self.place.parent / "backups" / f"before-upgrade-{stamp}.sqlite"

    def run(self, file: Path) -> Generator[str | CheckFinding, None, None]:
        """Back up to ``file``, upgrade and check; yield a sentence for each step, and findings.

        If the upgrade fails, or a check turns red that was green before, the database is put back
        as it was. Raises Refused then, and BackupRefused while a hub or a service uses the
        database, which is not changed.
        """
        with self._alone() as store:
            before = self._version(store)
            if before == newest():
                yield f"{self.place} is up to date (version {before}). Nothing was changed."
                yield "Checking the hub:"
                findings = self.check()
                yield from findings
                self.ok = not _names(findings, Status.FAIL)
                return
            _make_private_folder(file.parent)
            size = backup.back_up(store, file)
            yield f"Backed up {self.place} to {file} ({size / 1_000_000:.1f} MB)."
            try:
                yield "Checking the hub as it is, to compare."
                findings = self.check()
                others = _names(findings, Status.FAIL, Status.UNCHECKED)
                green = _names(findings, Status.OK) - others
                self._upgrade(store)
                yield f"Upgraded {self.place} from version {before} to {newest()}."
                yield "Checking the hub:"
                findings = self.check()
                yield from findings
                red = _names(findings, Status.FAIL)
                if broken := red & {*green, DATABASE}:
                    raise Refused(f"Red after the upgrade: {', '.join(sorted(broken))}.")
                self.changed = True
            except GPUSpawnerError as error:
                self._put_back(file)
                raise Refused(self._undone(error.message, before, file)) from error
            except BaseException:  # interrupted, or nobody reads the output any more
                self._put_back(file)
                raise
            if red:
                yield f"Not green before the upgrade either: {', '.join(sorted(red))}."
            yield f"The backup stays: {file}"

    @contextmanager
    def _alone(self) -> Iterator[Store]:
        """Keep hubs away from the database meanwhile."""
        store = Store(self.url)
        granter = LeaderLock(store)
        with closing(store):
            backup.take_leader_lock(granter)
            try:
                backup.require_unused(self.place)
                yield store
            finally:
                granter.give_up()

    def _version(self, store: Store) -> str:
        with store.engine.connect() as connection:
            found = revision(connection)
        store.engine.dispose()
        if found is None:
            raise Refused(f"{self.place} is not a database of gpuspawner. Nothing was changed.")
        if found not in versions():
            raise Refused(
                f"{self.place} {unknown_version(found)}: install the newer gpuspawner. Nothing was "
                "changed."
            )
        return found

    def _upgrade(self, store: Store) -> None:
        try:
            with store.write_engine.begin() as connection:
                upgrade(connection)
        except GPUSpawnerError:
            raise
        except Exception as error:
            why = " ".join(str(getattr(error, "orig", None) or error).split())
            raise Refused(f"The upgrade failed ({type(error).__name__}: {why}).") from error
        finally:
            store.engine.dispose()

    def _put_back(self, file: Path) -> None:
        try:
            backup.put_back(self.place, file)
        except BackupRefused as error:
            raise Refused(
                f"The upgrade failed, and the database could not be put back: {error.message} Do "
                f"not start the hub. End what uses {self.place}, then copy {file} over it."
            ) from error

    def _undone(self, why: str, before: str, file: Path) -> str:
        return (
            f"{why} The database is as it was before (version {before}); its backup is {file}. "
            f"{EARLIER}"
        )


def _names(findings: Sequence[CheckFinding], *of: Status) -> set[str]:
    return {each.name for each in findings if each.status in of}


def _make_private_folder(folder: Path) -> None:
    try:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
    except OSError as error:
        raise Refused(f"The folder {folder} cannot be made: {error.strerror}.") from None
