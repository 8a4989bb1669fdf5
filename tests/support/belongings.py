"""A member with rows of every kind, and a process that is killed while it renames them."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Connection

import sqlalchemy as sa

from gpuspawner.core.units import MICRO
from gpuspawner.db.schema import batch_jobs, metadata
from gpuspawner.devices import closures
from gpuspawner.devices.closures import Closure
from gpuspawner.leases.models import Request, ServerRef, Sharing, Terms
from gpuspawner.ledger import repository as ledger_repository
from gpuspawner.ledger import totals
from gpuspawner.members import repository as members_repository
from gpuspawner.members.repository import RosterEntry
from gpuspawner.notifications.models import Notice, NoticeKind
from gpuspawner.notifications.repository import ChannelChoice
from gpuspawner.runs.models import Run, Work
from gpuspawner.runs.schedules import Schedule
from gpuspawner.services import Services
from gpuspawner.slurm import repository as slurm_repository
from gpuspawner.storage import directories
from gpuspawner.storage import repository as storage_repository
from gpuspawner.storage.repository import Workspace
from tests.support.brokers import Clock, open_services, running

OPENING = 10
"""Credits of a new account."""


def services_of(url: str, clock: Clock) -> Services:
    """Four devices of two slots at 4 credits an hour; members may have shared folders."""
    return open_services(
        url,
        clock,
        gpu_rates={"*": 4},
        opening_grant=OPENING,
        folder_source="folder-{id}",
        shared_devices={"A100": 2},
    )


def give_everything(services: Services, user: str, sources: list[str]) -> None:
    """Make rows of every kind that name this member, whose workspaces these are."""
    clock, account = Clock.of(services), f"member:{user}"
    services.members.membership_returned("friend", actor="hub")
    services.members.membership_returned(user, actor="hub", by_roster=True)
    services.ledger.open_account(user)
    services.ledger.open_group_account("lab", actor="root")
    services.ledger.grant(
        account, MICRO, actor="root", reason="prize", until=clock.now + timedelta(days=9)
    )
    services.ledger.open_account("friend")
    refill = services.refills.plan_refill(
        "FREQ=DAILY",
        amount=MICRO,
        starts_at=clock.now,
        audience=[account, "member:friend"],
        actor="root",
        reason="term",
    )
    services.refills.add_refill(refill)
    clock.forward(hours=1)
    services.refills.give_refill(refill.id)
    for minutes, sharing in ((30, Sharing.WHOLE), (7, Sharing.SLOT)):
        request = Request(devices=1, model="A100", sharing=sharing)
        lease = services.leases.grant(ServerRef(user), request, engine="local")
        services.leases.confirm(lease.id)
        clock.forward(minutes=minutes)
        services.ledger.charge_all()
        clock.forward(seconds=20)
        services.leases.release(lease.id, ended_at=clock.now, reason="stopped")
    services.ledger.refund(lease.id, MICRO // 100, actor="root", reason="a broken fan")
    services.store.run(totals.add_up, write=True)
    everyone = [running(services, f"other{number}") for number in range(4)]
    terms = Terms(wait=True)
    ticket = services.queue.ask(ServerRef(user), Request(devices=1), engine="docker", terms=terms)
    services.queue.end_ticket(ticket.id, "cancelled", "stopped")
    for each in everyone:
        services.leases.release(each.id, ended_at=clock.now, reason="stopped")
    services.notifications.add_notice(
        Notice(
            key=f"hello:{user}",
            user=user,
            kind=NoticeKind.TURN,
            title="Hello",
            body=f"Hello {user}",
            at=clock.now,
        )
    )
    services.notifications.choose(
        user, [ChannelChoice("mail", "me@example.org", frozenset({NoticeKind.TURN}))]
    )
    work = Work(command=("train",))
    run = Run(id="train-1", user=user, title="train", work=work, created_at=clock.now)
    services.runs.submit(run)
    services.runs.refuse(run.id, "it could not start")
    services.schedules.create(
        Schedule(
            id="train-1",
            user=user,
            title="train",
            cron="0 7 * * *",
            zone="UTC",
            work=work,
            created_at=clock.now,
            next_at=clock.now,
        )
    )
    mine = services.shared_folders.make_folder("ours", actor=user)
    services.shared_folders.invite(mine.id, "friend", write=True, actor=user)
    theirs = services.shared_folders.make_folder("theirs", actor="friend")
    services.shared_folders.invite(theirs.id, user, write=False, actor="friend")
    services.shared_folders.accept(theirs.id, actor=user)
    uuid = services.devices.look().devices[3].uuid
    with services.store.write() as connection:
        ledger_repository.put_payer(connection, user, account, clock.now)
        slurm_repository.put_groups(connection, {user: ["lab"]}, clock.now)
        members_repository.put_roster(connection, [RosterEntry(user.lower(), "ml")], clock.now)
        keeper = closures.keeper(ServerRef(user, "night"))
        closures.close(connection, Closure(uuid, clock.now, keeper, "it starts again"))
        connection.execute(
            sa.insert(batch_jobs).values(
                id="c:1:0",
                cluster="c",
                label="1",
                name="train",
                user="unix",
                member=user,
                account=account,
                rate=0,
                devices="1 T4",
                started_at=clock.now,
            )
        )
        for source in sources:
            storage_repository.put_workspace(
                connection, Workspace(source, user, clock.now, quota=1000)
            )
            if source.startswith("/"):
                storage_repository.give_project(connection, source)


def columns_with(services: Services, word: str) -> set[str]:
    """The columns of text, as ``table.column``, in which this word is somewhere."""
    found = set()
    with services.store.read() as connection:
        for table in metadata.sorted_tables:
            for column in table.columns:
                if isinstance(column.type, sa.Text):
                    there = column.contains(word, autoescape=True)
                    query = sa.select(sa.func.count()).select_from(table).where(there)
                    if connection.execute(query).scalar_one():
                        found.add(f"{table.name}.{column.name}")
    return found


def rename_and_die(
    said: Connection,
    url: str,
    clock: Clock,
    names: tuple[str, str],
    paths: dict[str, str],
    at: int | str,
) -> None:
    """Rename a member, and be killed before a step: a statement, a commit or a renamed directory.

    ``at`` is the step's number, or how its statement begins. Tells how many steps there were if it
    was not killed.
    """
    steps = 0
    services = services_of(url, clock)

    def step(what: str = "") -> None:
        nonlocal steps
        steps += 1
        if steps == at or (isinstance(at, str) and what.startswith(at)):
            os.kill(os.getpid(), signal.SIGKILL)

    @sa.event.listens_for(services.store.write_engine, "before_cursor_execute")
    def statement(_connection: object, _cursor: object, sql: str, *_: object) -> None:
        step(sql)

    @sa.event.listens_for(services.store.write_engine, "commit")
    def commit(*_: object) -> None:
        step("COMMIT")

    sys.addaudithook(lambda event, _: step() if event in ("os.rename", "os.mkdir") else None)
    move = lambda: directories.move(paths)  # noqa: E731
    services.renames.rename_member(*names, actor="root", sources=paths, move=move)
    said.send(steps)
