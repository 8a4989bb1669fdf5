"""The roster from a table. Real: everything, it is pure; every byte is from a stranger."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.members.repository import RosterEntry
from gpuspawner.members.roster import parse

VIENNA = "Europe/Vienna"


def utc(year: int, month: int, day: int, hour: int) -> datetime:
    return datetime(year, month, day, hour, tzinfo=timezone.utc)


ADA = RosterEntry(
    user="ada",
    course="ml",
    groups=("course-ml", "gpu"),
    mail="ada@lab.example",
    starts_at=utc(2026, 9, 30, 22),
    ends_at=utc(2027, 2, 28, 23),
)
"""From the first of October to the last of February, both days whole, in Vienna."""


@pytest.mark.parametrize(
    "data",
    [
        b'name,course,groups,starts,ends,mail\nAda,ml,"course-ml, gpu",2026-10-01,2027-02-28,'
        b"ada@lab.example\n",
        b"\xef\xbb\xbfName;Course;Groups;Starts;Ends;Mail\r\nada;ml;course-ml,gpu;2026-10-01;"
        b"2027-02-28;ada@lab.example\r\n;;;;;\r\n",
        b"mail\tuntil\tfrom\tgroup\tcourse\tlogin\nada@lab.example\t2027-03-01 00:00\t2026-10-01\t"
        b"course-ml|gpu|gpu\tml\tADA\t\t\n",
        "username,e-mail,start,end,course,groups\nada,ada@lab.example,2026-10-01T00:00+02:00,"
        "2027-02-28,ml,course-ml;gpu\n".encode("utf-16"),
    ],
)
def test_spreadsheet_rosters_are_parsed(data: bytes) -> None:
    found, problems = parse(data, VIENNA)
    assert problems == []
    assert [each.entry for each in found] == [ADA]
    assert found[0].number == 2


def test_roster_line_needs_only_a_name() -> None:
    found, problems = parse(b"name\nada\n\nbob\n", "UTC")
    assert problems == []
    assert [(each.number, each.entry) for each in found] == [
        (2, RosterEntry("ada")),
        (4, RosterEntry("bob")),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"ada;28.02.2027", "the end '28.02.2027' is not a date. Write it like 2026-10-01"),
        (b"ada;2027-02-31", "the end '2027-02-31' is not a date"),
        (b"ada;9999-12-31", "is too far away: leave it empty for none"),
        (b"ada;;soon", "the start 'soon' is not a date"),
        (b"ada;2026-10-01;2026-10-02", "it ends (2026-10-01) before it starts (2026-10-02)"),
        (b";2027-01-01", "it names no member"),
        (b"ada;;;nobody", "'nobody' is not a mail address: write it like ada@lab.example"),
        (b"ada;;;a@b.c,d@e.f", "is not a mail address"),
        (b"ada;;;;;x", "it has 6 columns, and there are 5"),
        (b"a\x1bda", "unreadable characters"),
        (b"a" * 300, "is too long"),
        (b"ada;;;;lab, \x07", "unreadable characters"),
        (b"Zoe;;;;", "zoe is on line 2 already: leave one"),
    ],
)
def test_invalid_roster_line_is_reported_with_its_number(line: bytes, words: str) -> None:
    found, problems = parse(b"name;ends;starts;mail;groups\nzoe;;;;\n" + line + b"\n", VIENNA)
    (problem,) = problems
    assert problem.number == 3 and words in problem.sentence and len(problem.sentence) < 400
    assert found[0].entry == RosterEntry("zoe")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "names no members"),
        (b"name,ends\n", "names no members"),
        (b"ada,2027-01-01\n", "Line 1 has to name the columns: write name and, if you like"),
        (b"name,number\nada,1\n", "Line 1 has a column 'number' that a roster does not have"),
        (b"name,mail,email\nada,,\n", "Line 1 has a duplicate column ('mail')"),
        (b"name\n\xff\xfe\xff", "not text in UTF-8"),
        (b"name\nad\0a", "The file is not text"),
        (b'name\n"ada', "is not a line of a CSV file"),
        (b"name\n" + b"x" * 4_000_000, "send it in parts"),
    ],
)
def test_invalid_roster_file_reports_one_problem(data: bytes, words: str) -> None:
    found, problems = parse(data, VIENNA)
    (problem,) = problems
    assert found == [] and words in str(problem)


def test_member_may_have_one_roster_line_per_course() -> None:
    found, problems = parse(b"name,course\nada,ml\nada,vision\nada,ml\n", "UTC")
    assert [str(problem) for problem in problems] == [
        "Line 4: ada is on line 2 already for ml: leave one."
    ]
    assert [each.entry.course for each in found] == ["ml", "vision", "ml"]


@given(st.binary(max_size=300))
def test_roster_parser_survives_arbitrary_bytes(data: bytes) -> None:
    found, problems = parse(b"name,groups,course,starts,ends,mail\n" + data, VIENNA)
    for each in found:
        assert each.entry.user == each.entry.user.lower().strip() != ""
    assert all(problem.sentence.endswith(".") for problem in problems)
