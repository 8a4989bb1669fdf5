"""The command line: the help of every command, and what those that only read print."""

from __future__ import annotations

import json
import re
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
    """Help is as wide as it gets, whatever terminal the tests run on."""
    monkeypatch.setenv("COLUMNS", "200")


def test_help_of_every_command_matches_the_recording(golden: Golden, site: Site) -> None:
    pages = [f"$ gpuspawner {' '.join(words)}\n{text}" for words, text in helps(site)]
    assert len(pages) > 50
    golden("help.txt", "\n\n".join(pages))


def helps(site: Site, *words: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The help of a command and of all below it."""
    text = site.command(*words, "--help")
    yield (*words, "--help"), text.strip()
    _, _, listed = text.partition("\nCommands:\n")
    for name in re.findall(r"^  ([a-z][\w-]*)  ", listed.partition("\n\n")[0], re.M):
        yield from helps(site, *words, name)


@pytest.mark.parametrize("command", READS)
def test_read_only_commands_match_the_recording(golden: Golden, site: Site, command: str) -> None:
    words = command.split()
    table, plain = site.command(*words), site.command(*words, "--json")
    json.loads(plain.partition("(exit code")[0])
    golden(
        f"commands/{'-'.join(words).replace('---', '-').replace(':', '-')}.txt",
        f"$ gpuspawner {command}\n{table}\n$ gpuspawner {command} --json\n{plain}",
    )


def test_queue_order_explanation_matches_the_recording(golden: Golden, site: Site) -> None:
    arguments = ("queue", "--why", "dan", "eve/train")
    text = f"{site.command(*arguments)}\n{site.command(*arguments, '--json')}"
    golden("commands/queue-why.txt", text)


def test_catalog_schema_matches_the_recording(golden: Golden, site: Site) -> None:
    golden("commands/catalog-schema.json", site.command("catalog", "schema"))
