"""The line from a shell. Real: the command as a process, SQLite and PostgreSQL."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import sqlalchemy as sa

from gpuspawner.cli.app import main
from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.queue.models import Ticket
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker
from tests.support.brokers import make_broker
from tests.support.command import ADA, FLEET, Command, grant


@pytest.fixture
def line(broker: Broker) -> list[Ticket]:
    """Ada has all three devices; Bob, Cleo and Dan asked for one each, a minute apart.

    Just now, as the command's clock has it: who waits for days goes before every boost.
    """
    now = datetime.now(timezone.utc) - timedelta(minutes=5)
    broker.clock = lambda: now
    grant(broker, ADA, devices=2, model="A100")
    grant(broker, ServerRef("ada", "night"), devices=1)
    found = []
    for user, server in (("bob", ""), ("cleo", ""), ("dan", "night")):
        now += timedelta(minutes=1)
        request = Request(devices=1, model="A100", memory_bytes=40 * 2**30)
        asked = broker.ask(ServerRef(user, server), request, engine="local", terms=Terms(wait=True))
        assert isinstance(asked, Ticket)
        found.append(asked)
    return found


def rows(text: str) -> list[list[str]]:
    """The table's lines, up to the first blank one, without its headers."""
    table = text.split("\n\n")[0].splitlines()[1:]
    return [re.split(r"  +", line.strip()) for line in table]


def test_the_line(cli: Command, broker: Broker, line: list[Ticket]) -> None:
    printed = cli("queue").stdout
    assert [row[:5] for row in rows(printed)] == [
        [str(place), ticket.id, server, "-", "a GPU of model A100 with 40 GB; none is free"]
        for place, (ticket, server) in enumerate(
            zip(line, ("bob", "cleo", "dan/night"), strict=True), start=1
        )
    ]
    assert printed.splitlines()[-1] == "3 tickets wait"
    plain = cli.json("queue")
    assert plain["paused"] is None
    first = plain["tickets"][0]
    assert (first["id"], first["member"], first["server"], first["place"]) == (
        *(line[0].id, "bob"),
        *("", 1),
    )
    assert sum(part["points"] for part in first["parts"]) == pytest.approx(first["score"])
    assert datetime.fromisoformat(first["since"]) == line[0].created_at


def test_an_empty_line(cli: Command, broker: Broker) -> None:
    assert cli("queue").stdout == "Nobody waits in line.\n"
    assert cli.json("queue")["tickets"] == []
    assert cli("trail").stdout == "Nobody has changed anything yet.\n"


def test_why_one_is_before_the_other(cli: Command, line: list[Ticket]) -> None:
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


def test_changes_are_done_and_in_the_trail(
    cli: Command, broker: Broker, line: list[Ticket]
) -> None:
    bob, cleo, dan = line
    assert cli("queue", "move", "dan/night", "1", "--reason", "a demo").stdout == (
        f"Ticket {dan.id} of dan/night is moved to position 1: it is number 1 in line now.\n"
    )
    assert cli.json("queue", "boost", cleo.id[:8], "-50")["place"] == 3
    assert [t.server.user for t, _, _ in broker.order()] == ["dan", "bob", "cleo"]
    assert cli("queue", "move", "dan/night", "back").stdout == (
        f"Ticket {dan.id} of dan/night is back in the order: it is number 2 in line now.\n"
    )
    assert "has no boost any more: it is number 2" in cli("queue", "boost", "cleo", "0").stdout
    assert cli("queue", "cancel", "bob", "--reason", "the course is over").stdout == (
        f"Ticket {bob.id} of bob is cancelled.\n"
    )
    ended = broker.ticket(bob.id)
    assert (ended.outcome, ended.end_reason) == (
        "cancelled",
        "an admin cancelled it: the course is over",
    )
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


def test_pause_and_resume(cli: Command, broker: Broker, line: list[Ticket]) -> None:
    assert cli("pause", "--reason", "new fans").stdout.startswith("Granting is paused")
    assert "Nothing changed: cli:root paused granting at" in cli("pause").stdout
    listed = cli("queue").stdout
    assert re.search(r"Granting is paused by cli:root since .*: new fans$", listed)
    assert rows(listed)[0][4] == "the GPUs to be given out again (new fans)"
    assert cli.json("queue")["paused"]["reason"] == "new fans"
    assert cli("resume").stdout == "Granting goes on: 3 tickets in line.\n"
    assert cli("resume").stdout == "Nothing changed: granting was not paused.\n"
    assert [change.action for change in broker.trail()] == ["resume", "pause"]


def test_drain_and_undrain(cli: Command, broker: Broker, line: list[Ticket]) -> None:
    night = broker.lease_of(ServerRef("ada", "night"))
    assert night is not None
    (uuid,) = night.uuids
    index = str(night.devices[0].index)
    printed = cli("drain", index, "--reason", "a fan").stdout
    assert printed == (
        f"Device {index} (T4, {uuid}) is drained: nobody new gets it. "
        "The session of ada/night on it goes on to its end.\n"
    )
    listed = cli("devices").stdout
    assert re.search(
        rf"draining +\S+ +{uuid} +ada/night, lease \w+; drained by cli:root: a fan$", listed, re.M
    ), listed
    broker.release(night.id, reason="stopped")
    device = next(d for d in cli.json("devices")["devices"] if d["uuid"] == uuid)
    assert (device["state"], device["detail"]) == ("drained", "drained by cli:root: a fan")
    assert "0 of 3 devices free" in cli("devices").stdout
    assert "Nothing changed: cli:root drained Device" in cli("drain", uuid).stdout
    assert cli.json("undrain", uuid)["changed"] is True
    assert cli("undrain", index).stdout == f"Nothing changed: device {index} was not drained.\n"
    assert "1 of 3 devices free" in cli("devices").stdout


def test_the_line_goes_by_what_the_hub_saw_and_changes_nothing_of_it(
    cli: Command, broker: Broker, line: list[Ticket], tmp_path: Path
) -> None:
    def device_table() -> list[object]:
        with broker.store.read() as connection:
            return list(connection.execute(sa.text("SELECT * FROM devices ORDER BY uuid")))

    before = device_table()
    config = tmp_path / "jupyterhub_config.py"
    config.write_text(config.read_text().replace(FLEET, "nvml"))  # seen by the hub alone
    assert [row[0] for row in rows(cli("queue").stdout)] == ["1", "2", "3"]
    cli("drain", "0")
    cli("queue", "move", "dan/night", "1")
    cli("undrain", "0")
    assert device_table() == before


def test_options_count_before_and_after_the_subcommand(
    cli: Command, broker: Broker, line: list[Ticket]
) -> None:
    ticket = line[0].id
    assert json.loads(cli("queue", "--json", "boost", ticket, "-2.5").stdout)["boost"] == -2.5
    wrong = "sqlite:///not-there.sqlite"
    cli("queue", "--database", wrong, "boost", ticket, "1", code=1)
    right = ("--database", cli.database_url)
    assert cli.json("queue", "--database", wrong, "boost", ticket, "1", *right)["boost"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["queue", "move", "bob"], 2, "POSITION"),
        (["queue", "move", "bob", "0"], 2, "'0' is no position"),
        (["queue", "move", "bob", "1.5"], 2, "'1.5' is no position"),
        (["queue", "move", "bob", "9" * 400], 2, "is no position"),
        (["queue", "move", "bob", "first"], 2, "'first' is no position"),
        (["queue", "boost", "bob", "lots"], 2, "'lots' is no number of points"),
        (["queue", "boost", "bob", "nan"], 1, "nan is no number of points"),
        (["queue", "boost", "bob", "1e9"], 1, "is no number of points"),
        (["queue", "boost", "bob", "1", "--reason", "x" * 301], 1, "301 characters"),
        (["queue", "cancel", "bob"], 2, "Missing option '--reason'"),
        (["queue", "cancel", "bob", "--reason", " "], 2, "it is empty"),
        (["queue", "cancel", "nobody", "--reason", "x"], 1, "No ticket 'nobody' waits in line"),
        (["queue", "cancel", "", "--reason", "x"], 1, "No ticket '' waits in line"),
        (["queue", "--why", "bob", "bob"], 1, "Both are the same ticket"),
        (["queue", "--why", "bob"], 2, "requires 2 arguments"),
        (["queue", "fly", "bob"], 2, "No such command 'fly'"),
        (["drain", "9"], 1, "No device has the UUID or index '9'"),
        (["drain"], 2, "DEVICE"),
        (["undrain", "granting"], 1, "No device has the UUID or index 'granting'"),
        (["trail", "--limit", "0"], 2, "write 1 or more"),
    ],
)
def test_mistakes_are_sentences_and_change_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    cli = Command(tmp_path, f"sqlite:///{tmp_path}/hub.sqlite")
    broker = make_broker(database_url=cli.database_url, device_source="simulated:1xT4")
    asking = Terms(wait=True)
    broker.acquire(ADA, Request(devices=1), engine="local")
    broker.ask(ServerRef("bob"), Request(devices=1), engine="local", terms=asking)
    before = broker.waiting()
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    printed = capsys.readouterr()
    assert (printed.out, sentence in printed.err) == ("", True), printed.err
    assert (broker.waiting(), broker.closures(), broker.trail()) == (before, {}, [])
    broker.store.close()


def test_a_ticket_that_ended_says_how(cli: Command, broker: Broker, line: list[Ticket]) -> None:
    broker.end_ticket(line[0].id, "expired", "it waited for 14 days")
    done = cli("queue", "boost", line[0].id, "5", code=1)
    assert "of bob does not wait any more (expired: it waited for 14 days)." in done.stderr


def test_a_beginning_that_fits_several(cli: Command, broker: Broker, line: list[Ticket]) -> None:
    with broker.store.write() as connection:
        for number, ticket in enumerate(line):
            connection.execute(
                sa.text("UPDATE tickets SET id = :new WHERE id = :old"),
                {"new": f"aaaa{number}", "old": ticket.id},
            )
    done = cli("queue", "boost", "aaaa", "5", code=1)
    assert "Several tickets begin with 'aaaa': aaaa0, aaaa1, aaaa2." in done.stderr
    assert cli.json("queue", "boost", "aaaa1", "5")["place"] == 1
