"""The admins' page of workspaces. Real: the service's pages over HTTP, SQLite. The clock stands
still, and the Hub is a small HTTP server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuspawner.leases.models import Request, ServerRef
from gpuspawner.storage.archives import WorkspaceJob
from tests.golden.site import ADMIN, Site
from tests.support.archives import Held, archive_with
from tests.support.processes import wait_for

WORK = "/srv/w/<b>ada"


@pytest.fixture
def site(tmp_path: Path, migrated_file: Path) -> Iterator[Site]:
    """Ada's workspace is locked, Bob's is larger."""
    with Site(tmp_path, migrated_file) as site:
        storage = site.services.storage
        storage.use_workspace(WORK, "ada", 2**30)
        storage.use_workspace("work-bob", "bob", None)
        storage.keep_size(WORK, 2**29)
        storage.keep_size("work-bob", 3 * 2**30)
        storage.claim_workspace(WORK, "an admin archives them")
        yield site


def test_workspaces_are_listed_searched_and_marked(site: Site) -> None:
    page = site.service(ADMIN, "workspaces")
    assert page.index("work-bob") < page.index("/srv/w/&lt;b&gt;ada"), "the largest first"
    assert "512.0 MB" in page and "of 1.0 GB" in page and "2, 3.5 GB together" in page
    assert "work-bob" not in (found := site.service(ADMIN, "workspaces?search=ADA"))
    assert "/srv/w/" in found
    assert "No workspace has this in its name." in site.service(ADMIN, "workspaces?search=zoe")
    told = json.loads(site.service(ADMIN, "api/workspaces").partition("\n")[2])
    listed = {some["member"]: some for some in told["workspaces"]}
    assert listed["ada"]["locked"] == "an admin archives them"
    assert listed["bob"]["bytes"] == 3 * 2**30 and (told["archives"], told["jobs"]) == ([], [])

    services = site.services
    services.leases.grant(ServerRef("bob"), Request(devices=0), engine="local")
    services.members.membership_returned("ada", actor="sign-in")
    services.members.membership_ended("ada", "the course is over", actor="kim")
    html = site.service(ADMIN, "workspaces")
    page = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))
    assert "ada no longer a member" in page and "bob no longer" not in page
    assert page.count("server runs") == 1 and "/services/gpu/leases/" in html


def test_workspace_is_unlocked_after_a_confirmation_and_audited(site: Site) -> None:
    storage = site.services.storage
    form = {"workspace": WORK}
    asked = site.service(ADMIN, "workspaces/unlock", form)
    assert "Unlock this workspace?" in asked and "/srv/w/&lt;b&gt;ada" in asked
    assert {some.busy for some in storage.workspaces()} == {"", "an admin archives them"}
    done = site.service(ADMIN, "workspaces/unlock", form | {"confirm": "yes"})
    assert done.startswith("303\n-> /services/gpu/workspaces?done=unlock")
    assert {some.busy for some in storage.workspaces()} == {""}
    [entry] = site.services.audit.trail()
    assert (entry.actor, entry.action, entry.subject) == (ADMIN, "unlock workspace", WORK)
    again = site.service(ADMIN, "workspaces/unlock", form | {"confirm": "yes"})
    assert "done=nothing" in again and len(site.services.audit.trail()) == 1


@pytest.fixture
def files(site: Site) -> Path:
    """Cleo's workspace, a directory with a file."""
    folder = site.folder / "members" / "cleo"
    folder.mkdir(parents=True)
    (folder / "note").write_text("hello")
    site.services.ledger.open_account("cleo")
    site.services.storage.use_workspace(str(folder), "cleo", None)
    return folder


def ended(site: Site) -> WorkspaceJob:
    """Wait for the end of the newest job."""
    jobs = site.services.workspace_jobs
    return wait_for(lambda: None if (job := jobs.jobs()[0]).is_open else job, "its end")


def test_workspace_is_archived_and_restored_after_confirmations(site: Site, files: Path) -> None:
    form = {"workspace": str(files)}
    asked = site.service(ADMIN, "workspaces/archive", form)
    assert "Archive this workspace?" in asked and "no server of cleo can start meanwhile" in asked
    assert site.services.workspace_jobs.jobs() == []
    sent = site.service(ADMIN, "workspaces/archive", form | {"confirm": "yes"})
    assert sent.startswith("303\n-> /services/gpu/workspaces?done=archive")
    archive = ended(site).archive
    for _ in range(2):  # it is there after a reload
        page = site.service(ADMIN, "workspaces")
        assert f"is archived as {archive} (5 bytes of files)" in page

    chosen = {"archive": archive}
    asked = site.service(ADMIN, "workspaces/restore", chosen)
    assert "Restore this archive?" in asked and 'value="SITE/members/cleo"' in asked
    sure = chosen | form | {"confirm": "yes"}
    assert "done=restore" in site.service(ADMIN, "workspaces/restore", sure)
    assert ended(site).state == "failed"
    failed = site.service(ADMIN, "workspaces")
    assert (
        "SITE/members/cleo of cleo was not restored: SITE/members/cleo is not empty; archive"
        in failed
    )
    (files / "note").unlink()
    site.service(ADMIN, "workspaces/restore", sure)
    assert ended(site).state == "done" and (files / "note").read_text() == "hello"
    assert f"{archive} is back in SITE/members/cleo of cleo" in site.service(ADMIN, "workspaces")
    trail = [(some.actor, some.action) for some in site.services.audit.trail()]
    assert trail == [(ADMIN, "restore workspace"), (ADMIN, "archive workspace")]

    # Of a workspace that nobody has any more: a refusal keeps what was typed.
    (files / "note").unlink()
    files.rmdir()
    site.services.storage.note_workspace(str(files), "delete workspace", actor=ADMIN)
    asked = site.service(ADMIN, "workspaces/restore", sure)
    assert asked.startswith("400") and "say which member it will belong to" in asked
    asked = site.service(ADMIN, "workspaces/restore", sure | {"member": "zoe"})
    assert asked.startswith("404") and 'name="member"' in asked and 'value="zoe"' in asked
    site.service(ADMIN, "workspaces/restore", sure | {"member": "cleo"})
    assert ended(site).state == "done" and (files / "note").read_text() == "hello"


def test_archive_is_cancelled_after_a_confirmation_and_by_the_command(
    site: Site, files: Path
) -> None:
    held = archive_with(site.services, Held)
    form = {"workspace": str(files)}
    idle = site.command("workspaces", "cancel", "cleo")
    assert "nothing was cancelled" in idle and "exit code 1" in idle
    site.service(ADMIN, "workspaces/archive", form | {"confirm": "yes"})
    assert held.reading.wait(60)
    assert 'action="/services/gpu/workspaces/cancel"' in site.service(ADMIN, "workspaces")
    asked = site.service(ADMIN, "workspaces/cancel", form)
    assert "Cancel this archive?" in asked and "Read so far" in asked
    assert "No archive will be made. The workspace is unchanged" in asked
    assert site.services.workspace_jobs.jobs()[0].state == "running"
    sent = site.service(ADMIN, "workspaces/cancel", form | {"confirm": "yes"})
    assert sent.startswith("303\n-> /services/gpu/workspaces?done=cancel")
    page = site.service(ADMIN, "workspaces?done=cancel")
    assert "cancelling" in page and "workspaces/cancel" not in page
    held.gate.set()
    assert ended(site).state == "cancelled" and (files / "note").read_text() == "hello"
    page = site.service(ADMIN, "workspaces")
    assert re.search(r"The archive of SITE/members/cleo of cleo, for \w+,\s+was cancelled", page)
    for more in ({}, {"confirm": "yes"}):  # nothing is asked that would be refused
        refused = site.service(ADMIN, "workspaces/cancel", form | more)
        assert refused.startswith("409") and "nothing was cancelled" in refused
    assert [some.action for some in site.services.audit.trail()] == ["cancel archive"]

    held = archive_with(site.services, Held)
    site.service(ADMIN, "workspaces/archive", form | {"confirm": "yes"})
    assert held.reading.wait(60)
    assert "Cancelling the archive of" in site.command("workspaces", "cancel", "cleo")
    again = json.loads(site.command("workspaces", "cancel", "cleo", "--json"))
    assert again == {"workspace": "SITE/members/cleo", "changed": False}
    held.gate.set()
    assert ended(site).state == "cancelled" and (files / "note").read_text() == "hello"
    assert list(site.services.workspace_jobs.folder.iterdir()) == []


def test_refusals_are_on_the_page_in_words(site: Site, files: Path) -> None:
    sure = {"workspace": str(files), "confirm": "yes"}
    lease = site.services.leases.grant(ServerRef("cleo"), Request(devices=0), engine="local")
    refused = site.service(ADMIN, "workspaces/archive", sure)
    assert refused.startswith("409") and "Nothing was changed." in refused
    assert "belongs to cleo, whose server runs" in refused
    site.services.leases.release(lease.id, reason="stopped")
    refused = site.service(ADMIN, "workspaces/archive", {"workspace": WORK, "confirm": "yes"})
    assert refused.startswith("409") and "already being processed" in refused
    for action in ("archive", "cancel", "unlock"):
        refused = site.service(ADMIN, f"workspaces/{action}", {"workspace": "nowhere"})
        assert refused.startswith("404") and "There is no workspace" in refused
        assert site.service(ADMIN, f"workspaces/{action}", {}).startswith("400")
    refused = site.service(ADMIN, "workspaces/restore", {"archive": "../x.tar.gz"})
    assert refused.startswith("404") and "There is no archive" in refused
    nowhere = {"workspace": "nowhere", "confirm": "yes"}
    refused = site.service(ADMIN, "workspaces/unlock", nowhere)
    assert refused.startswith("404") and "Nothing was changed." in refused
    assert "There is no workspace" in refused and "work-bob" in refused
