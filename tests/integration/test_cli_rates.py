"""Rates from a shell. Real: the command as a process, SQLite and PostgreSQL."""

from __future__ import annotations

import re

import pytest

from gpuspawner.core.units import MICRO
from gpuspawner.services import Broker, utcnow
from tests.support.command import ADA, Command, grant


def rows(text: str) -> list[list[str]]:
    """The table's lines, without its headers."""
    return [re.split(r"  +", line.strip()) for line in text.split("\n\n")[0].splitlines()[1:]]


def test_rates_are_listed_set_and_removed(cli: Command, broker: Broker) -> None:
    assert rows(cli("rates").stdout) == [
        ["-", "3.60", "A100", "*", "-", "always", "-", "configuration"],
        ["-", "1.00", "*", "*", "-", "always", "-", "configuration"],
    ]
    lease = grant(broker, ADA, devices=1, model="A100")
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
        "Rate 1 holds no more: 2.50 credits an hour"
    )
    assert [rate["id"] for rate in cli.json("rates")] == [2, None, None]
    assert broker.lease(lease.id).rate == 3_600_000
    assert [row[2:5] for row in rows(cli("trail").stdout)] == [
        ["remove rate", "rate 1", cli.json("trail")[0]["detail"]],
        ["set rate", "rate 2", cli.json("trail")[1]["detail"]],
        ["set rate", "rate 1", cli.json("trail")[2]["detail"]],
    ]
    assert cli.json("trail")[0]["detail"].endswith(": a slip")


def test_a_rate_holds_for_the_hub_at_once(cli: Command, broker: Broker) -> None:
    cli("rates", "set", "A100", "9")
    broker.clock = utcnow  # the commands' own
    assert grant(broker, ADA, devices=1, model="A100").rate == 9 * MICRO
    models = {model["model"]: model["rate"] for model in cli.json("devices")["models"]}
    assert models["A100-80GB"] == "9.000000"


def test_what_has_no_effect_is_said(cli: Command, broker: Broker) -> None:
    broker.look()
    said = cli("rates", "set", "B200", "9").stderr
    assert said == "No device of this hub is a B200 (there are: A100-80GB, T4).\n"
    cli("rates", "set", "A100-80GB", "3")
    said = cli("rates", "set", "A100", "2").stderr
    assert said == "Rate 2 is more particular and goes before it where both fit.\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("A100", "1,5"), "The field 'rate' is not valid: '1,5'. Write credits per GPU-hour as a"),
        (("A100", "NaN"), "The field 'rate' is not valid: 'NaN'"),
        (("A100", "-4"), "The field 'rate' is not valid: '-4'"),
        (("A100", "1" + "0" * 30), "credits an hour is more than 1000000"),
        (("A100", "0." + "1" * 18), "has more than six decimals"),
        (("", "1"), "The field 'model' is not valid: '' names no device model"),
        (("*", "1", "--hours", "25-3"), "The field 'hours' is not valid: '25-3'"),
        (("*", "1", "--zone", "Mars"), "The field 'zone' is not valid: 'Mars' is no time zone"),
        (("*", "1", "--from", "2020-01-01"), "cannot hold from 2020-01-01 00:00 UTC: that is over"),
        (("*", "1", "--from", "soon"), "The field 'from' is not valid: 'soon' is no date"),
        (("*", "1", "--slots", "0"), "The field 'slots' is not valid: 0 is no number of slots"),
    ],
)
def test_what_cannot_be_is_a_sentence(
    cli: Command, broker: Broker, arguments: tuple[str, ...], sentence: str
) -> None:
    done = cli("rates", "set", *arguments, code=1)
    assert sentence in done.stderr
    assert len(cli.json("rates")) == 2
    assert broker.trail() == []


def test_a_rate_that_is_not_there_is_not_removed(cli: Command, broker: Broker) -> None:
    assert "There is no rate 7 that an admin set" in cli("rates", "remove", "7", code=1).stderr
    assert "is no number of a rate" in cli("rates", "remove", "last", code=2).stderr
    assert broker.trail() == []
