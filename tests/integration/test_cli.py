"""Real: the command as a process, SQLite and PostgreSQL, processes. Simulated: the devices."""

from __future__ import annotations

import glob
import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from gpuspawner.cli.app import main
from gpuspawner.leases.models import Request
from gpuspawner.monitoring.models import DeviceUse
from gpuspawner.queue.service import Terms
from gpuspawner.services import Broker, utcnow
from tests.support.brokers import make_broker
from tests.support.command import ADA, FLEET, GRACE, Command, grant

# Devices.


def test_devices_say_who_has_them(cli: Command, broker: Broker) -> None:
    lease = grant(broker, ADA, devices=1, model="A100")
    minute = utcnow().replace(second=0, microsecond=0)
    counts = {"samples": 60, "known": 60, "measured": 60, "busy": 45, "use_sum": 60 * 71}
    broker.monitoring.remember_use(
        [DeviceUse(uuid=lease.uuids[0], since=minute, seconds=60, **counts)]
    )
    printed = cli("devices").stdout
    assert printed.splitlines()[0].split() == [
        *("INDEX", "MODEL", "MEMORY", "STATE", "USE", "UUID", "DETAIL"),
    ]
    row = next(line for line in printed.splitlines() if " leased " in line)
    assert row.split()[:7] == ["0", "A100-80GB", "80", "GB", "leased", "71", "%"]
    assert row.endswith(f"ada, lease {lease.id}")
    assert printed.splitlines()[-1] == "2 of 3 devices free (simulated)"

    plain = cli.json("devices")
    assert (plain["source"], plain["total"], plain["free"]) == ("simulated", 3, 2)
    first = plain["devices"][0]
    assert (first["uuid"], first["state"]) == (lease.uuids[0], "leased")
    assert (first["lease"], first["member"]) == (lease.id, "ada")
    used = [d["last_minute"] and d["last_minute"]["use_percent"] for d in plain["devices"]]
    assert used == [71.0, None, None]
    assert [m["rate"] for m in plain["models"]] == ["3.600000", "1.000000"]


def test_devices_before_there_is_a_database(tmp_path: Path) -> None:
    cli = Command(tmp_path, f"sqlite:///{tmp_path}/not-yet.sqlite")
    done = cli("devices")
    assert "3 of 3 devices free" in done.stdout
    assert "what is leased is not known" in done.stderr
    assert not (tmp_path / "not-yet.sqlite").exists()


def test_a_device_source_with_a_mistake(cli: Command, broker: Broker, tmp_path: Path) -> None:
    grant(broker, ADA, devices=1)
    config = tmp_path / "jupyterhub_config.py"
    config.write_text(config.read_text().replace(FLEET, "simulated:0xT4"))
    assert "'0xT4' is not part of a simulated fleet" in cli("devices", code=2).stderr


def test_looking_changes_nothing_of_what_the_hub_saw(
    cli: Command, broker: Broker, tmp_path: Path
) -> None:
    broker.overview()
    with broker.store.read() as connection:
        before = connection.execute(sa.text("SELECT * FROM devices ORDER BY uuid")).all()
    config = tmp_path / "jupyterhub_config.py"
    text = config.read_text()
    config.write_text(text.replace(FLEET, "simulated:1xA100-80GB"))
    plain = cli.json("devices")
    assert [device["state"] for device in plain["devices"]] == ["free", "unknown", "unknown"]
    assert plain["devices"][1]["detail"] == "not there any more"
    config.write_text(text.replace(FLEET, "nvml"))
    assert cli.json("devices", code=0 if glob.glob("/dev/nvidia[0-9]*") else 1)
    with broker.store.read() as connection:
        after = connection.execute(sa.text("SELECT * FROM devices ORDER BY uuid")).all()
    assert after == before


# Leases.


def test_leases_open_and_ended(cli: Command, broker: Broker) -> None:
    ended = grant(broker, ADA, devices=2, model="A100", environment="pytorch")
    broker.forward(minutes=30)
    broker.release(ended.id, ended_at=broker.clock(), reason="stopped")
    lease = grant(broker, GRACE, devices=1, model="T4", environment="base")
    broker.forward(minutes=90)
    broker.ledger.charge_all()

    printed = cli("leases").stdout
    assert "1 open lease" in printed.splitlines()
    assert re.search(
        rf"{lease.id} +grace/night +base +1x T4 \(2\) +running +2025-03-01 12:30:00 UTC "
        r"+2025-03-01 12:30:00 UTC +1\.00 +1\.50 +-$",
        printed,
        re.MULTILINE,
    ), printed
    assert ended.id not in printed

    printed = cli("leases", "--all").stdout
    assert re.search(rf"^{ended.id} .* ended .* 7\.20 +3\.60 +2025-.* stopped$", printed, re.M)

    plain = cli.json("leases", "--all", "--member", "ada")
    assert [x["id"] for x in plain] == [ended.id]
    assert plain[0]["charged"] == "3.600000"
    assert plain[0]["rate"] == "7.200000"
    assert plain[0]["ended_at"] == "2025-03-01T12:30:00+00:00"
    assert [d["model"] for d in plain[0]["devices"]] == ["A100-80GB"] * 2

    assert [x["id"] for x in cli.json("leases", "--all", "--limit", "1")] == [lease.id]
    assert cli.json("leases", "--member", "ada") == []
    assert cli("leases", "--member", "bob").stdout == "No open leases of bob.\n"


def test_local_times_carry_their_zone(cli: Command, broker: Broker) -> None:
    grant(broker, ADA, devices=1)
    printed = cli("leases", TZ="Asia/Tokyo").stdout
    assert "2025-03-01 21:00:00 JST" in printed


# Credits.


def test_grant_and_statement(cli: Command, broker: Broker) -> None:
    done = cli("grant", "ada", "12.5", "--reason", "for the paper", "--actor", "prof")
    assert done.stdout == (
        "Gave 12.50 credits to member:ada. The balance is 112.50 credits (was 100.00).\n"
    )
    done = cli("grant", "member:ada", "-2.000001", "--reason", "a slip")
    assert done.stdout.startswith("Took 2.00 credits from member:ada. The balance is 110.49")
    assert broker.ledger.member("ada").balance == 110_499_999

    plain = cli.json("statement", "ada")
    assert (plain["account"], plain["balance"]) == ("member:ada", "110.499999")
    kept = [(x["kind"], x["amount"], x["balance"], x["reason"]) for x in plain["lines"]]
    assert kept == [
        ("adjustment", "-2.000001", "110.499999", "a slip"),
        ("grant", "12.500000", "112.500000", "for the paper"),
        ("grant", "100.000000", "100.000000", "Opening grant"),
    ]
    assert plain["lines"][1]["actor"] == "prof"
    assert plain["lines"][0]["actor"] == "root", "who ran it"
    assert datetime.fromisoformat(plain["lines"][0]["at"]).utcoffset() == timedelta(0)

    printed = cli("statement", "ada", "--limit", "1").stdout.splitlines()
    assert printed[0] == "member:ada: 110.49 credits"
    assert re.search(
        r"UTC +adjustment +-2\.01 +110\.49 +root +- +[0-9a-f]{8} +a slip$", printed[3]
    ), printed
    assert printed[-1] == "These are the newest 1 line; --limit shows more."


def test_the_actor_below_sudo_is_who_called_it(cli: Command, broker: Broker) -> None:
    cli("grant", "ada", "1", "--reason", "x", SUDO_USER="operator")
    assert broker.ledger.statement("member:ada")[0].actor == "operator"


def test_a_key_makes_a_grant_once(cli: Command, broker: Broker) -> None:
    again = ("grant", "ada", "5", "--reason", "March", "--key", "2025-03")
    assert cli.json(*again)["granted"] is True
    assert cli.json(*again)["granted"] is False
    assert broker.ledger.member("ada").balance == 105_000_000
    other = cli("grant", "ada", "6", "--reason", "March", "--key", "2025-03", code=1)
    assert "another amount or account" in other.stderr


def test_unknown_accounts_are_named_and_opened_when_asked(cli: Command, broker: Broker) -> None:
    done = cli("grant", "gracie", "5", "--reason", "x", code=1)
    assert done.stderr == (
        "gpuspawner: There is no account 'member:gracie'. Did you mean member:grace? "
        "A member's account opens at their first sign-in. Open it now with --open.\n"
    )
    done = cli("grant", "bob", "5", "--reason", "x", "--open")
    assert "Opened member:bob with its opening grant of 100.00 credits." in done.stderr
    assert broker.ledger.member("bob").balance == 105_000_000
    cli("grant", "bob", "5", "--reason", "x", "--open")
    assert broker.ledger.member("bob").balance == 110_000_000, "opened once only"
    cli("grant", "group:ml", "7", "--reason", "x", "--open")
    assert broker.ledger.account("group:ml").balance == 7_000_000
    assert "no account 'member:eve'" in cli("statement", "eve", code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["grant", "ada", "1"], 2, "--reason TEXT is missing"),
        (["grant", "ada", "1", "--reason", " "], 2, "it is empty"),
        (["grant", "ada", "nan", "--reason", "x"], 2, "'nan' is not an amount"),
        (["grant", "ada", "1e99", "--reason", "x"], 2, "more than 1,000,000,000 credits"),
        (["grant", "ada", "0.0000001", "--reason", "x"], 2, "more than six decimals"),
        (["grant", "ada", "0", "--reason", "x"], 2, "nothing would change"),
        (["grant", "system:grants", "1", "--reason", "x"], 1, "the ledger's own account"),
        (["grant", "group: ", "1", "--reason", "x"], 1, "no usable name"),
        (["statement", "ada", "--limit", "0"], 2, "write 1 or more"),
        (["release", "nothing"], 1, "There is no lease 'nothing'"),
        (["release", ""], 1, "There is no lease ''"),
        (["fly"], 2, "No such command 'fly'"),
        (["quueue"], 2, "Did you mean 'queue'?"),
        (["leases", "--reason", "x"], 2, "No such option '--reason'"),
        ([], 2, "COMMAND"),
        (["leases", "-f", "nowhere.py"], 2, "There is no configuration file nowhere.py"),
        (["leases", "--database", "mysql://h/x"], 2, "is no supported database"),
        (["leases", "--database", "nonsense"], 2, "the database URL cannot be read"),
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
    broker = make_broker(database_url=cli.database_url, device_source=FLEET)
    broker.ledger.open_account("ada")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    printed = capsys.readouterr()
    assert (printed.out, sentence in printed.err) == ("", True), printed.err
    assert broker.ledger.member("ada").balance == 100_000_000
    assert [account.name for account in broker.ledger.accounts()] == ["member:ada"]
    broker.store.close()


def test_accounts(cli: Command, broker: Broker) -> None:
    grant(broker, ADA, devices=1, model="A100")
    printed = cli("accounts").stdout.splitlines()
    assert [line.split() for line in printed[:3]] == [
        ["ACCOUNT", "BALANCE", "HELD", "AVAILABLE"],
        ["member:ada", "100.00", "0.60", "99.40"],
        ["member:grace", "100.00", "0.00", "100.00"],
    ]
    assert printed[0].index("BALANCE") + len("BALANCE") == printed[1].index("100.00") + 6
    assert cli.json("accounts")[0] == {
        "account": "member:ada",
        "balance": "100.000000",
        "held": "0.600000",
        "available": "99.400000",
    }


def test_names_of_any_width_stay_aligned_and_move_no_cursor(cli: Command, broker: Broker) -> None:
    broker.ledger.open_account("学生" * 10)
    cli("grant", "ada", "1", "--reason", "red \x1b[31m and a\nnew line")
    lines = cli("accounts").stdout.splitlines()
    wide = next(line for line in lines if "学生" in line)
    assert wide.index("100.00") + 20 == lines[1].index("101.00"), "each of 20 is two wide"
    printed = cli("statement", "ada").stdout
    assert "\x1b" not in printed
    assert "red ?[31m and a?new line" in printed


# Sessions.


def test_a_session_is_extended_by_hand(cli: Command, broker: Broker) -> None:
    broker.clock = lambda: utcnow() - timedelta(minutes=10)
    terms = Terms(seconds=3600, groups=frozenset({"guests"}))
    request = Request(devices=1, model="A100")
    lease = broker.confirm(broker.acquire(ADA, request, engine="local", terms=terms).id)
    assert lease.ends_at is not None
    shown = cli("leases").stdout
    assert shown.splitlines()[0].split()[-1] == "ENDS"
    assert f"{lease.ends_at.astimezone():%H:%M:%S}" in shown
    plain = cli.json("leases")[0]
    assert (plain["ends_at"], plain["outcome"]) == (lease.ends_at.isoformat(), "")
    done = cli("extend", lease.id[:8])
    extended = broker.lease(lease.id)
    assert extended.ends_at is not None and extended.ends_at > lease.ends_at
    assert f"The session of ada ends at {extended.ends_at.astimezone():%Y-%m-%d %H:%M:%S}" in (
        done.stdout
    )
    (change,) = broker.trail()
    assert change.action == "extend" and change.actor.startswith("cli:")

    endless = grant(broker, GRACE, devices=1)
    broker.confirm(endless.id)
    assert "has no end: nothing changed" in cli("extend", endless.id).stdout
    broker.order_stop(lease.id, "admin", reason="a new fan")
    refused = cli("extend", lease.id, code=1).stderr
    assert "cannot be extended: its server is being stopped" in refused
    assert "There is no lease 'nothing'" in cli("extend", "nothing", code=1).stderr
