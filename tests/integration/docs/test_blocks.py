"""The commands and requests in the pages of docs, as a reader types them, page by page.

Real: the pages, the commands, SQLite, Bash, curl, the accounting service over HTTP. Stand-ins: the
devices are simulated, the clock stands still, and the service's Hub is a small HTTP server. Other
pages are followed by the tests that tests/support/steps.py names; a block that none runs says why.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.golden.scenario import fill, start
from tests.golden.site import ADMIN, SERVICE, Site
from tests.support import doc_blocks, steps
from tests.support.doc_blocks import Block
from tests.support.service_process import token_of

NOW = datetime(2026, 11, 27, 9, tzinfo=timezone.utc)
"""When the pages are written, or before any date in them."""
FOLDERS = ("/etc/gpuspawner", "/var/lib/gpuspawner", "/var/backups/gpuspawner")
"""Folders of a hub's machine; here each is the site's own."""
PAGES = [page for page in doc_blocks.pages() if page not in steps.FOLLOWED and steps.typed_in(page)]
MARKED = [
    page
    for page in doc_blocks.pages()
    if any(steps.is_tried(block) for block in doc_blocks.blocks_in(page))
]
STARTED_ANEW = ("free-a-gpu-that-stays-leased", "refund-a-session")
"""Pages that begin when Ada's server has ended, and her next one runs."""
STOPPED = (*STARTED_ANEW, "rename-a-member", "set-the-order-of-the-queue")
"""Pages that begin when Ada's server has ended."""
GONE = "0:0"
"""A process that is gone, for everybody: only root sees each process of other users."""
COURSE = "member,amount,reason\nada,10,week 1\nbob,10,\n"
JOBS = "timestamp,duration,num_gpus,group\n2026-10-01 08:01:43,1609,2,course-ml\n"


@pytest.fixture
def site(tmp_path: Path, migrated_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr("tests.golden.site.START", NOW)
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n" * 9))
    with Site(tmp_path, migrated_file) as site:
        fill(site)
        yield site


@pytest.mark.parametrize("page", PAGES, ids=doc_blocks.name_of)
def test_what_a_page_types_works_and_prints_what_the_page_shows(page: Path, site: Site) -> None:
    prepare(page, site)
    words = words_of(page, site)
    variables: list[str] = []
    for block in steps.typed_in(page):
        if "1fb536fd" in block.text:
            words["1fb536fd"] = site.services.ledger.statement("member:ada")[0].transfer[:8]
        if "4c1d09ab" in block.text:  # which the block before it made
            words["4c1d09ab"] = site.services.refills.all_refills()[-1].id
        run_block(block, words, variables, page, site)


@pytest.mark.parametrize("page", MARKED, ids=doc_blocks.name_of)
def test_a_block_with_a_reason_not_to_be_run_does_not_run(
    page: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the reason is needless. A block of other programs than gpuspawner is not tried."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setenv("PATH", str(site.folder))  # nor does Slurm of this machine take part
    prepare(page, site)
    words = words_of(page, site)
    for block in doc_blocks.blocks_in(page):
        if steps.is_tried(block):
            with pytest.raises(AssertionError):
                run_block(block, words, [], page, site)


def run_block(
    block: Block, words: Mapping[str, str], variables: list[str], page: Path, site: Site
) -> None:
    """Type each line of a block; fail unless it does what the page says."""
    if block.language == "python":
        program = [sys.executable, "-I", "-S", "-c", block.text]  # without any package
        assert subprocess.run(program, capture_output=True).returncode == 0
        return
    for line, shown in steps.lines_of(block):
        where = f"{doc_blocks.name_of(page)}:{block.line}: {line}"
        is_refusal = shown[:1] and shown[0].startswith("gpuspawner: ")
        assert steps.can_be_run(line), where
        typed = replaced(line, words)
        if steps.is_assignment(typed):
            variables.append(typed)
        elif calls := steps.calls_in(typed):
            for arguments in calls:
                printed = site.command(*arguments)
                if arguments[0] != "check":  # it fails where a GPU is sick, as one is here
                    assert ("(exit code" in printed) == bool(is_refusal), (where, printed)
                compare(where, [site.plain(replaced(each, words)) for each in shown], printed)
        else:
            run_in_bash(where, [steps.CURL, *variables, typed], page, site)


def prepare(page: Path, site: Site) -> None:
    """Have what the page says is there already."""
    services, clock = site.services, site.clock
    texts = [block.text for block in doc_blocks.blocks_in(page) if block.language == "text"]
    config = (site.folder / "jupyterhub_config.py").read_text(encoding="utf-8")
    roster = texts[-1] if texts else ""
    files = {"course.csv": COURSE, "jobs.csv": JOBS, "ml-2026.csv": roster, "new_config.py": config}
    for name, text in files.items():
        (site.folder / name).write_text(text, encoding="utf-8")
    if page.stem in STOPPED:
        clock.forward(hours=3)
        services.ledger.charge_all()
        adas = services.leases.of_account("member:ada")[0]
        services.leases.release(adas.id, ended_at=clock(), reason="stopped")
    if page.stem in STARTED_ANEW:
        for ticket in services.queue.waiting():
            services.queue.cancel(ticket.id, actor="kim", reason="for Ada's next server")
        start(services, clock, "ada", model="A100", engine_ref=GONE)
    if page.stem == "refill-credits":
        services.ledger.open_group_account("course-ml", actor="kim")


def words_of(page: Path, site: Site) -> dict[str, str]:
    """Return what a reader types in the place of a page's words."""
    services = site.services
    bobs = services.leases.of_account("group:ml")[0]
    all_adas = services.leases.of_account("member:ada")
    adas = all_adas[page.stem == "refund-a-session"]
    dans = [ticket.id for ticket in services.queue.waiting() if ticket.server.user == "dan"]
    return {
        "https://hub.example": site.service_url().removesuffix(SERVICE),
        "/opt/gpuspawner/bin/": "",
        **dict.fromkeys(FOLDERS, str(site.folder)),
        "7d0c1f2a9b3e4d55 --force": f"{bobs.id} --force",
        "7d0c1f2a9b3e4d55": adas.id,
        "$LEASE/refund": f"{all_adas[-1].id}/refund",
        "$LEASE/stop": f"{bobs.id}/stop",
        "$LEASE": adas.id,
        "$TICKET": "".join(dans),
        "$UUID": bobs.uuids[0],
        "3fa2": services.shared_folders.all_folders()[0].id,
        "$REFILL": services.refills.all_refills()[0].id,
    }


def replaced(text: str, words: Mapping[str, str]) -> str:
    for word, typed in words.items():
        text = text.replace(word, typed)
    return text


def run_in_bash(where: str, script: list[str], page: Path, site: Site) -> None:
    user = "ada" if page.parent.name == "members" else ADMIN
    done = subprocess.run(
        ["bash", "-ec", "\n".join(script)],
        cwd=site.folder,
        env={"PATH": os.environ["PATH"], "TOKEN": token_of(user)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (where, done.stdout, done.stderr)


def compare(where: str, shown: list[str], printed: str) -> None:
    """Fail unless each line that the page shows is printed, up to numbers, ids and tables' rows."""
    lines = {shape(line) for line in printed.splitlines()}
    is_row = False
    for line in shown:
        is_row = is_row and bool(line.strip())
        if not is_row and line != "...":
            assert shape(line) in lines, (where, line, printed)
        is_row = is_row or bool(re.fullmatch(r"[A-Z]+  [A-Z /]+", line))


def shape(line: str) -> str:
    """Return a line without its numbers, ids and spaces, and what is counted as if it was one."""
    words = ("N" if re.search(r"\d", word) else word for word in line.split())
    return re.sub(r"s\b", "", " ".join(words))
