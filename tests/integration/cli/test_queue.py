"""The line and its replay from a shell. Real: the command. Simulated: the devices."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import sqlalchemy as sa

from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from gpuspawner.queue import replay
from gpuspawner.queue.models import Ticket
from gpuspawner.services import Services
from tests.support.command import ADA, FLEET, Command, grant
from tests.support.sessions import wait


@pytest.fixture
def line(services: Services) -> list[Ticket]:
    """Ada has all three devices; Bob, Cleo and Dan asked for one each, a minute apart.

    Just now, as the command's clock has it: who waits for days goes before every boost.
    """
    now = datetime.now(timezone.utc) - timedelta(minutes=5)
    services.clock = lambda: now
    grant(services, ADA, devices=2, model="A100")
    grant(services, ServerRef("ada", "night"), devices=1)
    found = []
    for user, server in (("bob", ""), ("cleo", ""), ("dan", "night")):
        now += timedelta(minutes=1)
        request = Request(devices=1, model="A100", memory_bytes=40 * 2**30)
        asked = services.queue.ask(
            ServerRef(user, server), request, engine="local", terms=Terms(wait=True)
        )
        assert isinstance(asked, Ticket)
        found.append(asked)
    return found


def rows(text: str) -> list[list[str]]:
    """The table's lines, up to the first blank one, without its headers."""
    table = text.split("\n\n")[0].splitlines()[1:]
    return [re.split(r"  +", line.strip()) for line in table]


def test_queue_command_lists_waiting_tickets(
    cli: Command, services: Services, line: list[Ticket]
) -> None:
    printed, needs = cli("queue").stdout, "a GPU of model A100 with 40 GB; none is free"
    assert [row[:5] for row in rows(printed)] == [
        [str(place), ticket.id, str(ticket.server), "-", needs]
        for place, ticket in enumerate(line, start=1)
    ]
    assert printed.splitlines()[-1] == "3 tickets wait"
    plain = cli.json("queue")
    assert plain["paused"] is None
    first = plain["tickets"][0]
    names = ("id", "member", "server", "place")
    assert [first[name] for name in names] == [line[0].id, "bob", "", 1]
    assert sum(part["points"] for part in first["parts"]) == pytest.approx(first["score"])
    assert datetime.fromisoformat(first["since"]) == line[0].created_at


def test_empty_queue_and_trail_are_reported(cli: Command, services: Services) -> None:
    assert cli("queue").stdout == "Nobody waits in the queue.\n"
    assert cli.json("queue")["tickets"] == []
    assert cli("trail").stdout == "Nobody has changed anything yet.\n"


def test_queue_explains_why_one_ticket_precedes_another(cli: Command, line: list[Ticket]) -> None:
    cli("queue", "boost", "cleo", "7.5", "--reason", "a paper")
    printed = cli("queue", "--why", "bob", line[1].id).stdout
    assert printed.splitlines()[0] == (
        f"cleo (ticket {line[1].id}, place 1) goes before bob (ticket {line[0].id}, place 2)."
    )
    assert re.search(r"^boost +7\.50 +- +\+7\.50 .* -$", printed, re.M), printed
    plain = cli.json("queue", "--why", "bob", "cleo")
    assert (plain["first"], plain["second"]) == (line[1].id, line[0].id)
    total = sum(difference["points"] for difference in plain["differences"])
    assert total == pytest.approx(plain["points"])


def test_queue_changes_take_effect_and_are_audited(
    cli: Command, services: Services, line: list[Ticket]
) -> None:
    bob, cleo, dan = line
    assert cli("queue", "move", "dan/night", "1", "--reason", "a demo").stdout == (
        f"Ticket {dan.id} of dan/night is moved to position 1: it is number 1 in the queue now.\n"
    )
    assert cli.json("queue", "boost", cleo.id[:8], "-50")["place"] == 3
    assert [t.server.user for t, _, _ in services.positions.order()] == ["dan", "bob", "cleo"]
    assert cli("queue", "move", "dan/night", "back").stdout == (
        f"Ticket {dan.id} of dan/night is back in the order: it is number 2 in the queue now.\n"
    )
    assert "no longer has a boost: it is number 2" in cli("queue", "boost", "cleo", "0").stdout
    assert cli("queue", "cancel", "bob", "--reason", "the course is over").stdout == (
        f"Ticket {bob.id} of bob is cancelled.\n"
    )
    ended = services.queue.ticket(bob.id)
    assert ended.outcome == "cancelled"
    assert ended.end_reason == "an admin cancelled it: the course is over"
    kept = [(x["actor"], x["action"], x["subject"], x["detail"]) for x in cli.json("trail")]
    assert kept == [
        ("cli:root", "cancelled", f"ticket {bob.id} of bob", ended.end_reason),
        ("cli:root", "boost", f"ticket {cleo.id} of cleo", "+0 points"),
        ("cli:root", "move", f"ticket {dan.id} of dan/night", "back to the order"),
        ("cli:root", "boost", f"ticket {cleo.id} of cleo", "-50 points"),
        ("cli:root", "move", f"ticket {dan.id} of dan/night", "to place 1: a demo"),
    ]
    printed = cli("trail", "--limit", "1")
    assert "cli:root  cancelled" in printed.stdout
    assert "newest 1 line" in printed.stderr


def test_granting_is_paused_and_resumed(
    cli: Command, services: Services, line: list[Ticket]
) -> None:
    assert cli("pause", "--reason", "new fans").stdout.startswith("Granting is paused")
    assert "Nothing changed: cli:root paused granting at" in cli("pause").stdout
    listed = cli("queue").stdout
    assert re.search(r"Granting is paused by cli:root since .*: new fans$", listed)
    assert rows(listed)[0][4] == "new GPU sessions to resume (new fans)"
    assert cli.json("queue")["paused"]["reason"] == "new fans"
    assert cli("resume").stdout == "Granting is resumed: 3 tickets in the queue.\n"
    assert cli("resume").stdout == "Nothing changed: granting was not paused.\n"
    assert [change.action for change in services.audit.trail()] == ["resume", "pause"]


def test_device_is_drained_and_undrained(
    cli: Command, services: Services, line: list[Ticket]
) -> None:
    night = services.leases.of_server(ServerRef("ada", "night"))
    assert night is not None
    (uuid,) = night.uuids
    index = str(night.devices[0].index)
    printed = cli("drain", index, "--reason", "a fan").stdout
    assert printed == (
        f"Device {index} (T4, {uuid}) is drained: no new session starts on it. "
        "The session of ada/night on it continues until it ends.\n"
    )
    listed = cli("devices").stdout
    assert re.search(
        rf"draining +\S+ +{uuid} +ada/night, lease \w+; drained by cli:root: a fan$", listed, re.M
    ), listed
    services.leases.release(night.id, reason="stopped")
    device = next(d for d in cli.json("devices")["devices"] if d["uuid"] == uuid)
    assert (device["state"], device["detail"]) == ("drained", "drained by cli:root: a fan")
    assert "0 of 2 devices free" in cli("devices").stdout
    assert "Nothing changed: cli:root drained Device" in cli("drain", uuid).stdout
    assert cli.json("undrain", uuid)["changed"] is True
    assert cli("undrain", index).stdout == f"Nothing changed: device {index} was not drained.\n"
    assert "1 of 3 devices free" in cli("devices").stdout


def test_drain_that_breaks_a_latest_start_needs_a_flag(cli: Command, services: Services) -> None:
    services.clock = lambda: datetime.now(timezone.utc)
    request, terms = Request(devices=1, model="T4"), Terms(seconds=36_000, wait=True)
    lease = services.queue.ask(ServerRef("ada"), request, engine="local", terms=terms)
    assert isinstance(lease, Lease)
    services.leases.confirm(lease.id)
    services.queue.ask(ServerRef("bob"), request, engine="local", terms=terms)
    refused = cli("drain", *lease.uuids, code=1)
    assert re.search(
        r"1 waiting member could start later than they were told \(by .* at the latest\)\. "
        r"Wait until they have started, or drain it anyway \(--anyway\)\.",
        refused.stderr,
    )
    assert not services.devices.closures()
    assert cli.json("drain", *lease.uuids, "--anyway")["changed"]


def test_queue_commands_leave_device_records_unchanged(
    cli: Command, services: Services, line: list[Ticket], tmp_path: Path
) -> None:
    def device_table() -> list[object]:
        with services.store.read() as connection:
            return list(connection.execute(sa.text("SELECT * FROM devices ORDER BY uuid")))

    before = device_table()
    config = tmp_path / "jupyterhub_config.py"
    config.write_text(config.read_text().replace(FLEET, "nvml"))  # seen by the hub alone
    assert [row[0] for row in rows(cli("queue").stdout)] == ["1", "2", "3"]
    cli("drain", "0")
    cli("queue", "move", "dan/night", "1")
    cli("undrain", "0")
    assert device_table() == before


def test_options_work_before_and_after_the_subcommand(
    cli: Command, services: Services, line: list[Ticket]
) -> None:
    ticket = line[0].id
    assert json.loads(cli("queue", "--json", "boost", ticket, "-2.5").stdout)["boost"] == -2.5
    wrong = "sqlite:///not-there.sqlite"
    cli("queue", "--database", wrong, "boost", ticket, "1", code=1)
    right = ("--database", cli.database_url)
    assert cli.json("queue", "--database", wrong, "boost", ticket, "1", *right)["boost"] == 1


def test_ended_ticket_and_ambiguous_prefix_are_rejected(
    cli: Command, services: Services, line: list[Ticket]
) -> None:
    ended = wait(services, "eve")
    services.queue.end_ticket(ended.id, "expired", "it waited for 14 days")
    done = cli("queue", "boost", ended.id, "5", code=1)
    assert "of eve is no longer waiting (expired: it waited for 14 days)." in done.stderr
    with services.store.write() as connection:
        for number, ticket in enumerate(line):
            connection.execute(
                sa.text("UPDATE tickets SET id = :new WHERE id = :old"),
                {"new": f"aaaa{number}", "old": ticket.id},
            )
    done = cli("queue", "boost", "aaaa", "5", code=1)
    assert "Several tickets begin with 'aaaa': aaaa0, aaaa1, aaaa2." in done.stderr
    assert cli.json("queue", "boost", "aaaa1", "5")["place"] == 1


TRACE = "timestamp,duration,num_gpus,cluster\n" + "".join(
    f"2026-10-01 0{n}:00:00,{1800 * (n + 1)},1,{'ab'[n % 2]}\n" for n in range(6)
)


def test_trace_is_simulated_under_every_policy(cli: Command, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    printed = cli("simulate", "--trace", str(trace), "--gpus", "1").stdout
    names = [line.split()[0] for line in printed.splitlines()[1:7]]
    assert names == ["gpuspawner", *replay.NAMES]
    assert "6 sessions on 1 GPU" in printed
    found = cli.json("simulate", "--trace", str(trace), "--gpus", "1", "--policy", "fifo")
    assert list(found["policies"]) == ["fifo"]
    # One after the other: 0.5 h, 1 h, ... asked for an hour apart.
    assert found["policies"]["fifo"]["longest"] == pytest.approx(3)


def test_simulation_replays_past_sessions_of_the_site(cli: Command, services: Services) -> None:
    now = datetime.now(timezone.utc)
    for hours, user in enumerate(("ada", "bob", "cleo"), start=1):
        start = now - timedelta(days=2, seconds=-hours)
        services.clock = lambda at=start: at
        lease = grant(services, ServerRef(user), devices=1, model="A100" if hours < 3 else None)
        services.leases.confirm(lease.id)
        end = start + timedelta(hours=hours)
        services.clock = lambda at=end: at
        services.leases.release(lease.id, ended_at=end, reason="stopped")
    found = cli.json("simulate", "--policy", "gpuspawner")
    assert found["jobs"] == 3
    assert found["policies"]["gpuspawner"]["longest"] == 0
    crowded = cli.json("simulate", "--policy", "fifo", "--gpus", "1")
    assert crowded["policies"]["fifo"]["longest"] == pytest.approx(3, rel=0.01)


def test_invalid_trace_file_is_reported(cli: Command, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE + "2026-10-01 07:00:00,soon,1,a\n")
    for file, sentence in (
        (trace, "trace.csv, line 8: duration is 'soon'"),
        (tmp_path / "none.csv", "none.csv cannot be read"),
    ):
        assert sentence in cli("simulate", "--trace", str(file), "--gpus", "1", code=1).stderr
