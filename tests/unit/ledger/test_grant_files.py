"""Grants from a table. Real: everything, it is pure; every byte is from a stranger."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.core.units import MICRO
from gpuspawner.ledger.grant_files import MOST, digest, parse, parse_amount

ADA, BOB = ("member:ada", 10 * MICRO), ("member:bob", 1_500_000)


def test_lines_without_a_header_may_have_a_reason_each() -> None:
    for data in (b"ada,25\ngroup:ml101,500,autumn\n", b"group:ml101,500,autumn\nada,25\n"):
        rows, problems = parse(data, "course")
        assert problems == []
        assert {(row.account, row.amount, row.reason) for row in rows} == {
            ("member:ada", 25 * MICRO, "course"),
            ("group:ml101", 500 * MICRO, "autumn"),
        }


@pytest.mark.parametrize(
    "data",
    [
        b"member,amount\nada,10\nbob,1.5\n",
        b"ada,10\nbob,1.5",
        b"\xef\xbb\xbfmember,amount\r\nada,10\r\nbob,1.5\r\n",
        b"Member;Amount;Reason\nada;10;course\nbob;1.500000;\n",
        b"amount\tmember\n10\tada\n1.5\tbob\n",
        b'"member","amount"\n"ada","10"\n\n   \n"bob","1.5"\n',
        b"member:ada, 10 ,\nbob,+1.5,\n",
        "member,amount\nada,10\nbob,1.5\n".encode("utf-16"),
        b"user,credits\nada,00010\nbob,1.500000000000000000\n",
    ],
)
def test_spreadsheet_grant_tables_are_parsed(data: bytes) -> None:
    rows, problems = parse(data, "course")
    assert problems == []
    assert [(row.account, row.amount) for row in rows] == [ADA, BOB]
    assert {row.reason for row in rows} == {"course"}


def test_grant_lines_have_a_number_reason_and_unique_member() -> None:
    rows, problems = parse(b'member,amount,reason\n\nada,1,"homework, late"\ngroup:lab,2,\n', "x")
    assert problems == []
    assert [(row.number, row.account, row.reason) for row in rows] == [
        (3, "member:ada", "homework, late"),
        (4, "group:lab", "x"),
    ]

    rows, problems = parse(b"ada,1\nbob,2\nmember:ada,3\nada,4\n", "r")
    said = "member:ada is on line 1 already: add them up to one line."
    assert [str(problem) for problem in problems] == [f"Line {n}: {said}" for n in (3, 4)]
    assert len(rows) == 4
    _, (problem,) = parse(b"ada,1\n", "")
    assert "it has no reason: say why" in str(problem) and problem.remedy == "reason"

    _, problems = parse(b"ada,1,5\n", "")
    assert "is the amount 1,5? Write it with a point." in str(problems[0])
    _, problems = parse(b"member,amount\nada,1,5\n", "course")
    words = "it has 3 columns, and there are 2: an amount is written with a point"
    assert words in str(problems[0])


NO_NUMBERS = ("Infinity", "1_000", "\u0661", "9" * 5000)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"ada;1,5;r", "'1,5' has a comma: write it with a point"),
        (b'ada;"1,5";r', "'1,5' has a comma"),
        *((f"ada;{n};r".encode(), f"'{n}' is not a number of credits") for n in ("NaN", "1e3")),
        *((f"ada;{n};r".encode(), "is not a number of credits") for n in NO_NUMBERS),
        (b"ada;1000000000000000000000000000000;r", "more than 1,000,000,000 credits"),
        (b"ada;0.123456789012345678;r", "more than six decimals"),
        (b"ada;-5;r", "is negative: a file can only grant"),
        (b"ada;0;r", "the amount is 0"),
        (b"ada;;r", "has no amount for ada"),
        (b";5;r", "names no member"),
        (b"ada;5;r;7", "it has 4 columns, and there are 3"),
        (b"system:grants;5;r", None),
        (b"ada;5;6", "is the amount 5,6?"),
        (b"ada;5;" + b"x" * 301, "longer than 300 characters"),
        (b"group:;5;r", "no usable name"),
    ],
)
def test_invalid_grant_line_is_reported_with_its_number(line: bytes, words: str | None) -> None:
    rows, problems = parse(b"member;amount;reason\nzoe;1;r\n" + line + b"\n", "")
    if words is None:  # a member may be called anything
        assert not problems and rows[1].account == "member:system:grants"
        return
    (problem,) = problems
    assert problem.number == 3 and words in problem.sentence and len(problem.sentence) < 400
    assert str(problem).startswith("Line 3: ") and [row.account for row in rows] == ["member:zoe"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no lines with a member"),
        (b"\n\n", "no lines with a member"),
        (b"member,amount\n", "no lines with a member"),
        (b"ada,1\xff\n", "not text in UTF-8"),
        (b"ada,1\0\n", "not text"),
        (b"name,amount,grade\nada,1,A\n", "'name, amount, grade': write member, amount"),
        (b"member,user,amount\nada,x,1\n", "write member, amount"),
        (b"member,points\nada,1\n", "write member, amount"),
        (b'ada,"1\n', "not a line of a CSV file"),
        (b"x" * 4_000_001, "send it in parts"),
        (b"\xff\xfea", "not text in UTF-8"),
    ],
)
def test_invalid_grant_file_reports_one_problem(data: bytes, words: str) -> None:
    rows, problems = parse(data, "r")
    assert rows == [] and len(problems) == 1 and words in str(problems[0])


def test_grant_digest_ignores_how_the_file_is_written() -> None:
    one, _ = parse(b"member,amount\nada,10\nbob,1.5\n", "r")
    other, _ = parse(b"\xef\xbb\xbfbob;1.50;r\r\nmember:ada;10;\r\n", "r")
    assert digest(one) == digest(other)
    for changed in (b"ada,10\nbob,1.6\n", b"ada,10\n", b"ada,10\neva,1.5\n"):
        assert digest(parse(changed, "r")[0]) != digest(one)
    assert digest(parse(b"ada,10\nbob,1.5\n", "another")[0]) != digest(one)


@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode), st.text(max_size=20))
def test_any_grant_upload_gives_rows_or_problems(data: bytes, reason: str) -> None:
    rows, problems = parse(data, reason)
    assert rows or problems
    assert all(0 < row.amount <= MOST * MICRO and row.reason for row in rows)
    assert all(str(problem) for problem in problems)


@given(st.integers(1, MOST * MICRO))
def test_credit_amount_is_parsed_exactly(amount: int) -> None:
    assert parse_amount(f"{amount // MICRO}.{amount % MICRO:06d}") == amount
