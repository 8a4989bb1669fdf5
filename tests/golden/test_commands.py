"""The command line: the help of every command, and what those that only read print."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator

import pytest

from tests.golden.conftest import Golden
from tests.golden.site import Site

READS = (
    "devices",
    "leases",
    "leases --all",
    "leases --member ada",
    "accounts",
    "statement ada",
    "statement group:ml",
    "refills",
    "rates",
    "catalog",
    "catalog check",
    "folders",
    "roster",
    "roster show --former",
    "queue",
    "trail",
    "audit",
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is broken into lines, which Python's versions do in different ways."""
    monkeypatch.setenv("COLUMNS", "10000")


def test_the_help_of_every_command(golden: Golden, site: Site) -> None:
    pages = [f"$ gpuspawner {' '.join(words)}\n{text}" for words, text in helps(site)]
    assert len(pages) > 50
    golden("help.txt", "\n\n".join(pages))


def helps(site: Site, *words: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The help of a command and of all below it."""
    text = site.command(*words, "--help")
    yield (*words, "--help"), plain_help(text)
    listed = re.search(r"^(?:commands|changes):\n(.*?)(?:\n\n|\Z)", text, re.M | re.S | re.I)
    for name in re.findall(r"^ {2,4}([a-z][\w-]*)", listed[1], re.M) if listed else ():
        yield from helps(site, *words, name)


def plain_help(text: str) -> str:
    """The help as every version of Python would print it: its words in columns of our own."""
    text = re.sub(r"(-\w) ([A-Z]+), (--[\w-]+) \2", r"\1, \3 \2", text)  # as from 3.13 on
    text = re.sub(r"\n {9,}", "  ", text)  # a long name has its help on the next line
    lines = [re.sub(r"^( +\S.*?) {2,}", r"\1: ", line) for line in text.strip().splitlines()]
    wrapper = textwrap.TextWrapper(98, subsequent_indent=" " * 8, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) for line in lines)


@pytest.mark.parametrize("command", READS)
def test_what_a_command_prints(golden: Golden, site: Site, command: str) -> None:
    words = command.split()
    table, plain = site.command(*words), site.command(*words, "--json")
    json.loads(plain.partition("(exit code")[0])
    golden(
        f"commands/{'-'.join(words).replace('---', '-').replace(':', '-')}.txt",
        f"$ gpuspawner {command}\n{table}\n$ gpuspawner {command} --json\n{plain}",
    )


def test_why_a_ticket_is_before_another(golden: Golden, site: Site) -> None:
    arguments = ("queue", "--why", "dan", "eve/train")
    text = f"{site.command(*arguments)}\n{site.command(*arguments, '--json')}"
    golden("commands/queue-why.txt", text)


def test_the_schema_of_the_catalog(golden: Golden, site: Site) -> None:
    golden("commands/catalog-schema.json", site.command("catalog", "schema"))
