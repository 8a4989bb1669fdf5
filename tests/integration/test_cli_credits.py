"""Credits from a shell. Real: the command as a process, SQLite and PostgreSQL, files.
Simulated: the devices."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.services import Broker, utcnow
from tests.support.command import ADA, Command, grant

# Files.


def write(tmp_path: Path, text: str | bytes, name: str = "course.csv") -> str:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_dry_run_says_line_by_line_what_would_happen(
    cli: Command, broker: Broker, tmp_path: Path
) -> None:
    file = write(tmp_path, "\ufeffmember;amount;reason\r\nada;12.5;homework\r\ngrace;1;\r\n")
    printed = cli("grant", "--file", file, "--dry-run", "--reason", "course").stdout
    rows = [line.split() for line in printed.splitlines()]
    assert rows[0] == ["LINE", "ACCOUNT", "AMOUNT", "BALANCE", "THEN", "REASON"]
    assert rows[1] == ["2", "member:ada", "12.50", "100.00", "112.50", "homework"]
    assert rows[2] == ["3", "member:grace", "1.00", "100.00", "101.00", "course"]
    assert printed.endswith("Would give 13.50 credits to 2 accounts.\n")
    assert broker.ledger.member("ada").balance == 100 * MICRO

    plain = cli.json("grant", "--file", file, "--reason", "course", "--actor", "eva")
    assert plain["done"] and plain["total"] == "13.500000"
    assert plain["lines"][0]["after"] == "112.500000"
    assert broker.ledger.member("ada").balance == 112_500_000
    assert broker.ledger.statement("member:ada")[0].actor == "eva"

    again = cli("grant", "--file", file, "--reason", "course", code=1)
    assert "were given at" in again.stderr and "Nothing was granted to anybody" in again.stderr
    assert broker.ledger.member("ada").balance == 112_500_000
    cli("grant", "--file", file, "--reason", "course", "--again")
    assert broker.ledger.member("ada").balance == 125 * MICRO


def test_what_is_wrong_with_a_file_is_said_all_at_once(
    cli: Command, broker: Broker, tmp_path: Path
) -> None:
    lines = ["ada,1,5", "grace,NaN", f"ada,{10**30}", "zoe,1", "grace,0.123456789012345678"]
    lines += ["grace,-5", "ada,2", "ada,3"]
    refused = cli(
        "grant", "--file", write(tmp_path, "\n".join(lines)), "--reason", "course", code=1
    )
    said = refused.stderr
    for words in (
        *("Line 1: the reason is '5': is the amount 1,5?", "Line 2: the amount 'NaN' is no number"),
        *("Line 3: the amount", "more than 1,000,000,000", "Line 4: there is no account"),
        *("Line 5: the amount", "more than six decimals", "Line 6: the amount -5.00 takes credits"),
        *("Line 8: member:ada is on line 7 already", "Nothing was granted to anybody."),
    ):
        assert words in said
    assert broker.ledger.member("ada").balance == 100 * MICRO and broker.trail() == []
    plain = cli.json("grant", "--file", write(tmp_path, "zoe,1"), "--reason", "x", code=1)
    assert plain["problems"][0]["line"] == 1 and not plain["done"]


def test_a_file_opens_accounts_when_told_to_and_its_credits_can_end(
    cli: Command, broker: Broker, tmp_path: Path
) -> None:
    file = write(tmp_path, "zoe,1\ngroup:lab,2\n")
    done = cli("grant", "--file", file, "--reason", "x", "--open", "--until", "2999-01-01").stdout
    assert "member:zoe (new)" in done and "group:lab (new)" in done
    assert broker.ledger.account("group:lab").balance == 2 * MICRO
    broker.clock = utcnow  # the command's
    ((lot, _left),) = broker.ledger.lots_of("group:lab")
    assert lot.ends_at == datetime(2999, 1, 1, tzinfo=timezone.utc)
    assert "2.00 of them end at 2999-01-01 00:00:00 UTC." in cli("statement", "group:lab").stdout
    ending = cli.json("statement", "group:lab")["ending"]
    assert ending == [{"at": "2999-01-01T00:00:00+00:00", "amount": "2.000000"}]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--file", "/nowhere.csv", "--reason", "x"], 1, "/nowhere.csv cannot be read: No such"),
        (["--file", "/", "--reason", "x"], 1, "/ cannot be read: Is a directory"),
        (["ada", "5", "--file", "x.csv"], 2, "leave out ACCOUNT, AMOUNT"),
        (["ada", "5", "--reason", "x", "--dry-run"], 2, "are for --file FILE"),
        (["ada", "5"], 2, "--reason TEXT is missing"),
        (["ada", "--reason", "x"], 2, "AMOUNT is missing"),
        ([], 2, "ACCOUNT is missing"),
        (["ada", "1,5", "--reason", "x"], 2, "1,5"),
        (["ada", "NaN", "--reason", "x"], 2, "NaN"),
        (["ada", "5", "--reason", "x", "--until", "soon"], 1, "'soon' is no date"),
        (["ada", "5", "--reason", "x", "--until", "2020-01-01"], 1, "which is over already"),
    ],
)
def test_what_cannot_be_granted(
    cli: Command, broker: Broker, arguments: list[str], code: int, words: str
) -> None:
    assert words in cli("grant", *arguments, code=code).stderr
    assert broker.ledger.member("ada").balance == 100 * MICRO


# Corrections.


def test_a_lease_is_refunded(cli: Command, broker: Broker) -> None:
    lease = grant(broker, ADA, devices=1, model="A100")
    broker.forward(hours=2)
    broker.release(lease.id, ended_at=broker.clock(), reason="stopped")
    assert broker.ledger.member("ada").balance == 92_800_000
    said = cli("refund", lease.id, "--reason", "ECC errors").stdout
    assert "Gave 7.20 credits back to member:ada" in said and "100.00 credits" in said
    assert "refunded already" in cli("refund", lease.id, "--reason", "again", code=1).stderr
    assert "leases --all" in cli("refund", "nothing", "--reason", "x", code=1).stderr
    change = broker.trail()[0]
    assert (change.actor, change.action) == ("cli:root", "refund")


def test_a_part_of_a_lease_is_refunded_once(cli: Command, broker: Broker) -> None:
    lease = grant(broker, ADA, devices=1, model="A100")
    broker.forward(hours=2)
    broker.release(lease.id, ended_at=broker.clock(), reason="stopped")
    part = ["refund", lease.id, "--amount", "1.2", "--key", "mail-7", "--reason", "a slow disk"]
    said = cli(*part).stdout
    assert "Gave 1.20 credits back" in said and "It cost 6.00 now" in said
    assert "with the key 'mail-7' was made before" in cli(*part).stdout
    assert "another amount" in cli(*part[:3], "1.3", *part[4:], code=1).stderr
    for amount, code, words in (
        ("6.000001", 1, "at most 6.000000"),
        ("-1", 1, "more than 0"),
        ("0", 2, "nothing would change"),
        ("1,5", 2, "1,5"),
        ("NaN", 2, "NaN"),
    ):
        refused = cli("refund", lease.id, "--amount", amount, "--reason", "x", code=code)
        assert words in refused.stderr, amount
    assert broker.ledger.member("ada").balance == 94 * MICRO
    rest = cli.json("refund", lease.id, "--reason", "all of it")
    assert (rest["refunded"], rest["left"], rest["balance"]) == (
        *("6.000000", "0.000000"),
        "100.000000",
    )


def test_a_transfer_is_reversed_by_the_first_letters_of_its_id(
    cli: Command, broker: Broker
) -> None:
    cli("grant", "ada", "5", "--reason", "course")
    listed = cli("statement", "ada").stdout
    assert "TRANSFER" in listed.splitlines()[2]
    name = cli.json("statement", "ada")["lines"][0]["transfer"]
    assert name[:8] in listed
    said = cli("reverse", name[:8], "--reason", "wrong member").stdout
    assert "Reversed: 5.00 credits from member:ada, whose balance is 100.00 now" in said
    assert "reversed already" in cli("reverse", name, "--reason", "again", code=1).stderr
    assert "no transfer that begins" in cli("reverse", "zz", "--reason", "x", code=1).stderr


def test_who_pays_for_a_member(cli: Command, broker: Broker) -> None:
    cli("grant", "group:lab", "5", "--reason", "budget", "--open")
    assert "as long as they are in the group" in cli("payer", "ada", "group:lab").stdout
    assert broker.ledger.payers("ada", ["lab"]).usual == "group:lab"
    cli("payer", "ada", "ada")
    assert broker.ledger.payers("ada", ["lab"]).usual == "member:ada"
    assert "no account 'group:labs'" in cli("payer", "ada", "group:labs", code=1).stderr
    assert "cannot pay for ada" in cli("payer", "ada", "grace", code=1).stderr


# Refills.


def test_a_group_account_that_is_opened_is_in_the_audit_trail(cli: Command, broker: Broker) -> None:
    for _ in range(2):
        cli("grant", "group:lab", "5", "--reason", "budget", "--open", "--actor", "eva")
    found = [(some.action, some.actor) for some in broker.trail() if some.subject == "group:lab"]
    assert sorted(found) == [("grant", "eva"), ("grant", "eva"), ("open_account", "eva")]


def test_a_refill_from_the_first_to_the_last(cli: Command, broker: Broker) -> None:
    rule = ["FREQ=WEEKLY;BYDAY=MO;BYHOUR=6;BYMINUTE=0", "10"]
    options = ["--zone", "Europe/Vienna", "--reason", "term", "--top-up", "--cap", "20"]
    tried = cli("refills", "add", *rule, *options, "--dry-run").stdout
    assert "Nothing was made" in tried and broker.refills.all_refills() == []
    made = cli.json("refills", "add", *rule, *options, "--keep-days", "7")
    assert (made["mode"], made["amount"], made["cap"]) == ("top_up", "10.000000", "20.000000")
    assert (made["for"], made["keep_days"]) == (["everybody"], 7)
    assert len(made["comes_at"]) == 5 and made["next_at"] == made["comes_at"][0]
    listed = cli("refills").stdout
    assert made["id"] in listed and "Europe/Vienna" in listed and "top up" in listed
    assert cli.json("refills", "list")[0]["id"] == made["id"]

    seen = cli("refills", "preview", made["id"][:4])
    assert "member:ada" in seen.stdout and "0.00 credits to 2 accounts" in seen.stdout
    removed = cli("refills", "remove", made["id"], "--reason", "term over").stdout
    assert "is given no more" in removed and cli("refills").stdout == "No refills.\n"
    assert "It comes no more" in cli("refills", "preview", made["id"]).stdout


def test_groups_of_a_refill_are_the_hubs_to_say(cli: Command, broker: Broker) -> None:
    done = cli("refills", "add", "FREQ=DAILY", "5", "--for", "members:ml", "--reason", "x")
    assert "each member of ml gets it: who that is, the Hub says then" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["add", "FREQ=SECONDLY", "1", "--reason", "x"], 1, "comes too often"),
        (["add", "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30", "1", "--reason", "x"], 1, "never comes"),
        (["add", "every day", "1", "--reason", "x"], 1, "no recurrence rule"),
        (["add", "FREQ=DAILY", "1", "--reason", "x", "--zone", "Mars"], 1, "Mars"),
        (["add", "FREQ=DAILY", "-1", "--reason", "x"], 1, "gives nothing"),
        (["add", "FREQ=DAILY", "1", "--reason", "x", "--for", "member:zoe"], 1, "no account"),
        (["add", "FREQ=DAILY", "1", "--reason", "x", "--for", "all"], 1, "names nobody"),
        (["add", "FREQ=DAILY", "1", "--reason", "x", "--keep-days", "0"], 2, "no number of days"),
        (["add", "FREQ=DAILY", "1", "--reason", "x", "--from", "soon"], 1, "no date"),
        (["add", "FREQ=DAILY", "1,5", "--reason", "x"], 2, "1,5"),
        (["remove", "zzz"], 1, "no refill 'zzz'"),
        (["preview", "zzz"], 1, "`gpuspawner refills` lists them"),
    ],
)
def test_a_refill_that_cannot_be(
    cli: Command, broker: Broker, arguments: list[str], code: int, words: str
) -> None:
    assert words in cli("refills", *arguments, code=code).stderr
    assert broker.refills.all_refills() == []
