"""Credits, refills and rates from a shell. Real: the command, files. Simulated: the
devices."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

from gpuspawner.core.units import MICRO
from gpuspawner.services import Services, utcnow
from tests.support.command import ADA, Command, grant

# Files.


def write(tmp_path: Path, text: str | bytes, name: str = "course.csv") -> str:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_grant_file_has_dry_run_and_repeats_on_request(
    cli: Command, services: Services, tmp_path: Path
) -> None:
    file = write(tmp_path, "\ufeffmember;amount;reason\r\nada;12.5;homework\r\ngrace;1;\r\n")
    printed = cli("grant", "--file", file, "--dry-run", "--reason", "course").stdout
    rows = [line.split() for line in printed.splitlines()]
    assert rows[0] == ["LINE", "ACCOUNT", "AMOUNT", "BALANCE", "THEN", "REASON"]
    assert rows[1] == ["2", "member:ada", "12.50", "100.00", "112.50", "homework"]
    assert rows[2] == ["3", "member:grace", "1.00", "100.00", "101.00", "course"]
    assert printed.endswith("Would give 13.50 credits to 2 accounts.\n")
    assert services.ledger.member("ada").balance == 100 * MICRO

    plain = cli.json("grant", "--file", file, "--reason", "course", "--actor", "eva")
    assert plain["done"] and plain["total"] == "13.500000"
    assert plain["lines"][0]["after"] == "112.500000"
    assert services.ledger.member("ada").balance == 112_500_000
    assert services.ledger.statement("member:ada")[0].actor == "eva"

    again = cli("grant", "--file", file, "--reason", "course", code=1)
    assert "were given at" in again.stderr and "Nothing was granted" in again.stderr
    assert services.ledger.member("ada").balance == 112_500_000
    cli("grant", "--file", file, "--reason", "course", "--again")
    assert services.ledger.member("ada").balance == 125 * MICRO


def test_grant_file_reports_all_mistakes_and_grants_nothing(
    cli: Command, services: Services, tmp_path: Path
) -> None:
    file = write(tmp_path, "ada,1\ngrcae,5\ngrace,1e3\nada,1\n")
    said = cli("grant", "--file", file, "--reason", "course", code=1).stderr
    assert said == (
        "Line 2: there is no account 'member:grcae'. Did you mean member:grace? --open opens it.\n"
        "Line 3: the amount '1e3' is not a number of credits: write it like 12.5.\n"
        "Line 4: member:ada is on line 1 already: add them up to one line.\n"
        "Nothing was granted.\n"
    )
    assert services.ledger.member("ada").balance == 100 * MICRO and services.audit.trail() == []
    plain = cli.json("grant", "--file", file, "--reason", "x", code=1)
    assert plain["problems"][0]["line"] == 2 and not plain["done"]


def test_grant_file_can_open_accounts_and_set_an_end(
    cli: Command, services: Services, tmp_path: Path
) -> None:
    file = write(tmp_path, "zoe,1\ngroup:lab,2\n")
    done = cli("grant", "--file", file, "--reason", "x", "--open", "--until", "2999-01-01").stdout
    assert "member:zoe (new)" in done and "group:lab (new)" in done
    assert services.ledger.account("group:lab").balance == 2 * MICRO
    services.clock = utcnow  # the command's
    ((lot, _left),) = services.ledger.lots_of("group:lab")
    assert lot.ends_at == datetime(2999, 1, 1, tzinfo=timezone.utc)
    assert "2.00 of them end at 2999-01-01 00:00:00 UTC." in cli("statement", "group:lab").stdout
    ending = cli.json("statement", "group:lab")["ending"]
    assert ending == [{"at": "2999-01-01T00:00:00+00:00", "amount": "2.000000"}]


# Corrections.


def test_lease_is_refunded_in_parts_up_to_its_charge(cli: Command, services: Services) -> None:
    lease = grant(services, ADA, devices=1, model="A100")
    services.forward(hours=2)
    services.leases.release(lease.id, ended_at=services.clock(), reason="stopped")
    part = ["refund", lease.id, "--amount", "1.2", "--key", "mail-7", "--reason", "a slow disk"]
    said = cli(*part).stdout
    assert "Gave 1.20 credits back" in said and "It cost 6.00 now" in said
    assert "with the key 'mail-7' was made before" in cli(*part).stdout
    assert "another amount" in cli(*part[:3], "1.3", *part[4:], code=1).stderr
    for amount, code, words in (("6.000001", 1, "at most 6.00,"), ("0", 2, "nothing would ch")):
        refused = cli("refund", lease.id, "--amount", amount, "--reason", "x", code=code)
        assert words in refused.stderr, amount
    assert services.ledger.member("ada").balance == 94 * MICRO
    change = services.audit.trail()[0]
    assert (change.actor, change.action) == ("cli:root", "refund")
    rest = cli.json("refund", lease.id, "--reason", "all of it")
    assert (rest["refunded"], rest["left"], rest["balance"]) == (
        *("6.000000", "0.000000"),
        "100.000000",
    )
    assert "refunded already" in cli("refund", lease.id, "--reason", "again", code=1).stderr


def test_transfer_is_reversed_once_by_its_id_prefix(cli: Command, services: Services) -> None:
    cli("grant", "ada", "5", "--reason", "course")
    listed = cli("statement", "ada").stdout
    assert "TRANSFER" in listed.splitlines()[2]
    name = cli.json("statement", "ada")["lines"][0]["transfer"]
    assert name[:8] in listed
    said = cli("reverse", name[:8], "--reason", "wrong member").stdout
    assert "Reversed: 5.00 credits from member:ada, whose balance is 100.00 now" in said
    assert "reversed already" in cli("reverse", name, "--reason", "again", code=1).stderr


def test_payer_command_changes_the_paying_account(cli: Command, services: Services) -> None:
    cli("grant", "group:lab", "5", "--reason", "budget", "--open")
    assert "as long as they are in the group" in cli("payer", "ada", "group:lab").stdout
    assert services.ledger.payers("ada", ["lab"]).usual == "group:lab"
    cli("payer", "ada", "ada")
    assert services.ledger.payers("ada", ["lab"]).usual == "member:ada"


# Refills.


def test_refill_is_added_listed_previewed_and_removed(cli: Command, services: Services) -> None:
    rule = ["FREQ=WEEKLY;BYDAY=MO;BYHOUR=6;BYMINUTE=0", "10"]
    options = ["--zone", "Europe/Vienna", "--reason", "term", "--top-up", "--cap", "20"]
    tried = cli("refills", "add", *rule, *options, "--dry-run").stdout
    assert "Nothing was created" in tried and services.refills.all_refills() == []
    made = cli.json("refills", "add", *rule, *options, "--keep-days", "7")
    assert (made["mode"], made["amount"], made["cap"]) == ("top_up", "10.000000", "20.000000")
    assert (made["for"], made["keep_days"]) == (["everybody"], 7)
    assert len(made["comes_at"]) == 5 and made["next_at"] == made["comes_at"][0]
    listed = cli("refills").stdout
    assert made["id"] in listed and "Europe/Vienna" in listed and "top up" in listed
    assert cli.json("refills", "list")[0]["id"] == made["id"]

    assert cli.json("refills", "preview", made["id"])["comes_at"] == made["comes_at"]
    seen = cli("refills", "preview", made["id"][:4])
    assert "member:ada" in seen.stdout and "0.00 credits to 2 accounts" in seen.stdout
    removed = cli("refills", "remove", made["id"], "--reason", "term over").stdout
    assert "is ended" in removed and cli("refills").stdout == "No refills.\n"
    assert "It has no more occurrences" in cli("refills", "preview", made["id"]).stdout
    done = cli("refills", "add", "FREQ=DAILY", "5", "--for", "members:ml", "--reason", "x")
    assert "Each member of ml gets it, too." in done.stderr


def rows(text: str) -> list[list[str]]:
    """The table's lines, without its headers."""
    return [re.split(r"  +", line.strip()) for line in text.split("\n\n")[0].splitlines()[1:]]


def test_rates_are_listed_set_and_removed(cli: Command, services: Services) -> None:
    assert rows(cli("rates").stdout) == [
        ["-", "3.60", "A100", "*", "-", "always", "-", "configuration"],
        ["-", "1.00", "*", "*", "-", "always", "-", "configuration"],
    ]
    lease = grant(services, ADA, devices=1, model="A100")
    set_ = ("rates", "set", "A100", "2.5", "--hours", "20-8", "--zone", "Europe/Vienna")
    done = cli(*set_, "--from", "2100-10-01", "--reason", "cheap nights")
    assert done.stdout == (
        "Rate 1 is set: 2.50 credits an hour for A100 at 20-8 (Europe/Vienna) from "
        "2100-10-01 00:00 CEST.\n"
    )
    assert done.stderr == ""
    now = cli.json("rates", "set", "*", "0.000001", "--environment", "course", "--slots", "2")
    assert (now["id"], now["rate"], now["source"], now["slots"]) == (2, "0.000001", "admin", 2)

    plain = cli.json("rates", "list")
    assert [(rate["id"], rate["model"]) for rate in plain] == [
        *((2, "*"), (1, "A100")),
        *((None, "A100"), (None, "*")),
    ]
    assert plain[1]["from"] == "2100-09-30T22:00:00+00:00"
    assert (plain[1]["actor"], plain[1]["reason"]) == ("cli:root", "cheap nights")
    assert "2100-10-01" not in cli("rates").stdout.split("\n\n")[1], "nights come sooner"

    assert cli("rates", "remove", "1", "--reason", "a slip").stdout.startswith(
        "Rate 1 is removed: 2.50 credits an hour"
    )
    assert [rate["id"] for rate in cli.json("rates")] == [2, None, None]
    assert services.leases.get(lease.id).rate == 3_600_000
    assert [row[2:5] for row in rows(cli("trail").stdout)] == [
        ["remove rate", "rate 1", cli.json("trail")[0]["detail"]],
        ["set rate", "rate 2", cli.json("trail")[1]["detail"]],
        ["set rate", "rate 1", cli.json("trail")[2]["detail"]],
    ]
    assert cli.json("trail")[0]["detail"].endswith(": a slip")


def test_rates_command_warns_of_rates_without_effect(cli: Command, services: Services) -> None:
    services.devices.look()
    said = cli("rates", "set", "B200", "9").stderr
    assert said == "No device of this hub is a B200 (there are: A100-80GB, T4).\n"
    cli("rates", "set", "A100-80GB", "3")
    said = cli("rates", "set", "A100", "2").stderr
    assert said == "A more specific rate applies where both match: 2.\n"


def test_grants_appear_in_the_statement(cli: Command, services: Services) -> None:
    done = cli("grant", "ada", "12.5", "--reason", "for the paper", "--actor", "prof")
    assert done.stdout == (
        "Gave 12.50 credits to member:ada. The balance is 112.50 credits (was 100.00).\n"
    )
    done = cli("grant", "member:ada", "-2.000001", "--reason", "a slip", SUDO_USER="operator")
    assert done.stdout.startswith("Took 2.00 credits from member:ada. The balance is 110.50")
    assert services.ledger.member("ada").balance == 110_499_999

    plain = cli.json("statement", "ada")
    assert (plain["account"], plain["balance"]) == ("member:ada", "110.499999")
    kept = [(x["kind"], x["amount"], x["balance"], x["reason"]) for x in plain["lines"]]
    assert kept == [
        ("adjustment", "-2.000001", "110.499999", "a slip"),
        ("grant", "12.500000", "112.500000", "for the paper"),
        ("grant", "100.000000", "100.000000", "Opening grant"),
    ]
    assert plain["lines"][1]["actor"] == "prof"
    assert plain["lines"][0]["actor"] == "operator", "who ran it, by sudo"
    assert datetime.fromisoformat(plain["lines"][0]["at"]).utcoffset() == timedelta(0)

    printed = cli("statement", "ada", "--limit", "1").stdout.splitlines()
    assert printed[0] == "member:ada: 110.50 credits"
    assert re.search(
        r"UTC +adjustment +-2\.00 +110\.50 +operator +- +[0-9a-f]{8} +a slip$", printed[3]
    ), printed
    assert printed[-1] == "These are the newest 1 line; --limit shows more."


def test_grant_with_a_key_is_made_once(cli: Command, services: Services) -> None:
    again = ("grant", "ada", "5", "--reason", "March", "--key", "2025-03")
    assert cli.json(*again)["granted"] is True
    assert cli.json(*again)["granted"] is False
    assert services.ledger.member("ada").balance == 105_000_000
    other = cli("grant", "ada", "6", "--reason", "March", "--key", "2025-03", code=1)
    assert "another amount or account" in other.stderr


def test_grant_opens_an_unknown_account_only_on_request(cli: Command, services: Services) -> None:
    done = cli("grant", "gracie", "5", "--reason", "x", code=1)
    assert done.stderr == (
        "gpuspawner: There is no account 'member:gracie'. Did you mean member:grace? "
        "A member's account opens at their first sign-in. Open it now with --open.\n"
    )
    done = cli("grant", "bob", "5", "--reason", "x", "--open")
    assert "Opened member:bob with its opening grant of 100.00 credits." in done.stderr
    assert services.ledger.member("bob").balance == 105_000_000
    cli("grant", "bob", "5", "--reason", "x", "--open")
    assert services.ledger.member("bob").balance == 110_000_000, "opened once only"
    for _ in range(2):
        cli("grant", "group:ml", "7", "--reason", "x", "--open", "--actor", "eva")
    assert services.ledger.account("group:ml").balance == 14_000_000
    found = [(x.action, x.actor) for x in services.audit.trail() if x.subject == "group:ml"]
    assert sorted(found) == [("grant", "eva"), ("grant", "eva"), ("open_account", "eva")]


def test_wide_names_align_and_control_characters_are_replaced(
    cli: Command, services: Services
) -> None:
    services.ledger.open_account("学生" * 10)
    cli("grant", "ada", "1", "--reason", "red \x1b[31m and a\nnew line")
    lines = cli("accounts").stdout.splitlines()
    wide = next(line for line in lines if "学生" in line)
    assert wide.index("100.00") + 20 == lines[1].index("101.00"), "each of 20 is two wide"
    printed = cli("statement", "ada").stdout
    assert "\x1b" not in printed
    assert "red ?[31m and a?new line" in printed
