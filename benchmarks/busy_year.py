"""A year of a busy site, and then every page and report of it, behind a real hub.

1,000 members, 64 devices and 500,000 leases are written into an SQLite database as the services
would have written them (``tests/support/years.py``); ``--charge-minutes`` is the time between two
charges of a lease in it. Then a real hub with its proxy and its accounting service serves all
pages to an admin, to the member with the longest past, and to scripts; each is asked for several
times, over kept connections, in turns. There is no baseline: nothing else tells these things. The
audit, a backup and its proof are timed too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import requests
import sqlalchemy as sa
from support.report import Report, Series, argument_parser

from gpuspawner.db import audit as db_audit
from gpuspawner.db import backup
from gpuspawner.db.engine import Store
from gpuspawner.db.schema import accounts, leases, metadata
from gpuspawner.ledger import totals
from tests.support.hub import NAVIGATION
from tests.support.paying_hub import PayingHub
from tests.support.years import Year, write_year

MOST_MS = 300.0

PAGES: dict[str, tuple[str, ...]] = {
    "admin": (
        "",
        "admin",
        "accounts",
        "accounts/{account}",
        "accounts/{account}/statement",
        "usage",
        "usage?{span}&by=member",
        "usage?{span}&by=group",
        "usage?{span}&by=model",
        "usage?{span}&by=environment",
        "usage?{span}&by=week",
        "trail",
        "queue",
        "notices",
        "metrics",
        "api/accounts",
        "api/accounts/{account}",
        "api/accounts/{account}/statement",
        "api/leases?all=1",
        "api/leases?all=1&limit=500",
        "api/leases/{lease}/receipt",
        "api/usage?{span}&by=member",
        "api/usage?{span}&by=week",
        "api/devices",
        "api/queue",
        "api/trail",
    ),
    "member": ("", "statement", "notices", "api/me", "api/leases", "api/leases?limit=500"),
}
"""By who asks, below the service's prefix."""


def main() -> None:
    parser = argument_parser(__doc__, 15)
    parser.add_argument("--leases", type=int, default=500_000)
    parser.add_argument("--charge-minutes", type=float, default=60.0)
    options = parser.parse_args()
    report = Report("busy_year", ("who", "what", "runs", "first, ms", "then, ms"))
    report.figure("runs", options.runs)
    began = datetime.now(timezone.utc) - timedelta(days=Year().days + 1)
    seconds = 60 * options.charge_minutes
    year = replace(Year(), leases=options.leases, charge_seconds=seconds, begins=began)
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/year.sqlite"
        heaviest, lease = write(report, url, year)
        span = f"from={year.begins:%Y-%m-%d}&to={year.ends:%Y-%m-%d}"
        filled = {"account": heaviest, "lease": lease, "span": span}
        pages(report, Path(folder), url, filled, options.runs)
        proofs(report, Path(folder), url)
    report.print(options.json)


def write(report: Report, url: str, year: Year) -> tuple[str, str]:
    """Make the year; the account with the longest past, and one of its leases."""
    began = time.perf_counter()
    store = Store(url)
    write_year(store, year)
    written = time.perf_counter()
    # As the accounting service does it, which here would have had a year for it.
    while store.run(totals.add_up, write=True) == totals.LEASES_AT_ONCE:
        pass
    added = time.perf_counter() - written
    report.figure("add_up_ms_a_lease", 1000 * added / (year.leases + year.devices))
    with store.write() as connection:
        connection.exec_driver_sql("ANALYZE")
    with store.read() as connection:
        found = (
            sa.select(leases.c.account, sa.func.count())
            .group_by(leases.c.account)
            .order_by(sa.func.count().desc())
            .limit(1)
        )
        account, count = connection.execute(found).one()
        one = sa.select(leases.c.id).where(leases.c.account == account).limit(1)
        lease_id = str(connection.execute(one).scalar_one())
        sizes = db_audit.sizes(connection)
        tables = table_sizes(connection)
    store.close()
    size = Path(url.removeprefix("sqlite:///")).stat().st_size
    report.figure("database_mb", size / 1e6)
    report.figure("leases", sizes["leases"])
    report.figure("transfers", sizes["transfers"])
    report.figure("bytes_a_transfer", tables["ledger"] / sizes["transfers"])
    report.figure("bytes_a_lease", tables["leases"] / sizes["leases"])
    report.notes.append(
        f"{sizes['leases']} leases, {sizes['transfers']} transfers: {size / 1e6:.0f} MB "
        f"({tables['leases'] / sizes['leases']:.0f} bytes a lease, "
        f"{tables['ledger'] / sizes['transfers']:.0f} a transfer with its postings; indexes "
        f"included), made in {written - began:.0f} s, added up in {added:.0f} s. {account} has "
        f"{count} leases."
    )
    return str(account), lease_id


def table_sizes(connection: sa.Connection) -> dict[str, int]:
    """Bytes of the ledger's tables, and of the leases', with their indexes."""
    query = (
        "SELECT m.tbl_name, sum(s.pgsize) FROM dbstat s JOIN sqlite_master m ON m.name = s.name "
        "GROUP BY m.tbl_name"
    )
    try:
        sizes = {name: int(size) for name, size in connection.exec_driver_sql(query)}
    except sa.exc.OperationalError:  # an SQLite that was built without it
        return {"ledger": 0, "leases": 0}
    assert set(sizes) >= {"leases", "postings"} <= set(metadata.tables) | {accounts.name}
    return {
        "ledger": sizes["transfers"] + sizes["postings"],
        "leases": sizes["leases"] + sizes["lease_places"] + sizes.get("tickets", 0),
    }


def pages(report: Report, folder: Path, url: str, names: dict[str, str], runs: int) -> None:
    """A row for each page of each reader."""
    member = names["account"].partition(":")[2]
    worst = coldest = 0.0
    config = "c.Accounting.reconcile_seconds = 3600\nc.GPUCredits.charge_seconds = 3600\n"
    with PayingHub(folder / "hub", config, database_url=url) as hub:
        for who, paths in PAGES.items():
            user = "admin" if who == "admin" else member
            browser = hub.login(user)
            script = requests.Session()
            script.headers["Authorization"] = f"token {hub.user_token(user)}"
            for path in paths:
                address = f"{hub.url}/services/gpu/{path.format(**names)}"
                asks = script if path.startswith(("api/", "metrics")) else browser
                headers = {} if asks is script else NAVIGATION
                times = []
                for _ in range(runs + 1):
                    began = time.perf_counter()
                    answer = asks.get(address, headers=headers, timeout=300)
                    times.append(1000 * (time.perf_counter() - began))
                    if not answer.ok:
                        raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")
                later = Series(tuple(times[1:]))
                worst, coldest = max(worst, later.median), max(coldest, times[0])
                report.row(
                    who,
                    path.replace("{span}&", "a year, ") or "(own page)",
                    str(runs),
                    f"{times[0]:.0f}",
                    later.text(0),
                )
    report.figure("slowest_page_ms_median", worst, MOST_MS)
    report.figure("slowest_page_ms_first", coldest, MOST_MS)


def proofs(report: Report, folder: Path, url: str) -> None:
    """The audit, a copy, and the proof of the copy."""
    store = Store(url)
    copy = folder / "copy"

    def audit() -> None:
        broken = store.run(lambda c: [f.problem for f in db_audit.audit(c) if f.problem])
        assert not broken, broken

    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("audit", audit),
        ("backup", lambda: backup.back_up(store, copy)),
        ("restore --check", lambda: backup.check(copy)),
    )
    for name, step in steps:
        began = time.perf_counter()
        step()
        took = time.perf_counter() - began
        report.row("command", name, "1", f"{1000 * took:.0f}", "")
        report.figure(f"{name.split()[0]}_seconds", took)
    store.close()


if __name__ == "__main__":
    main()
