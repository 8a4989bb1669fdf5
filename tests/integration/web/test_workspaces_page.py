"""The admins' page of workspaces. Real: the service's pages over HTTP, SQLite. The clock stands
still, and the Hub is a small HTTP server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden.site import ADMIN, Site
from tests.golden.support import Request, ServerRef

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


def test_workspaces_are_listed_largest_first_and_searched(site: Site) -> None:
    page = site.service(ADMIN, "workspaces")
    assert page.index("work-bob") < page.index("/srv/w/&lt;b&gt;ada")
    assert "512.0 MB" in page and "of 1.0 GB" in page and "2, 3.5 GB together" in page
    assert "work-bob" not in (found := site.service(ADMIN, "workspaces?search=ADA"))
    assert "/srv/w/" in found
    assert "No workspace has this in its name." in site.service(ADMIN, "workspaces?search=zoe")


def test_running_server_and_former_member_are_marked(site: Site) -> None:
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
    assert done.startswith("303\n-> /services/gpu/workspaces?done=unlocked")
    assert {some.busy for some in storage.workspaces()} == {""}
    [entry] = site.services.audit.trail()
    assert (entry.actor, entry.action, entry.subject) == (ADMIN, "unlock workspace", WORK)
    again = site.service(ADMIN, "workspaces/unlock", form | {"confirm": "yes"})
    assert "done=nothing" in again and len(site.services.audit.trail()) == 1


def test_unknown_workspace_is_refused_on_the_page(site: Site) -> None:
    refused = site.service(ADMIN, "workspaces/unlock", {"workspace": "nowhere", "confirm": "yes"})
    assert refused.startswith("404") and "Nothing was changed." in refused
    assert "There is no workspace" in refused and "work-bob" in refused


def test_member_cannot_see_or_unlock_workspaces(site: Site) -> None:
    assert site.service("ada", "workspaces").startswith("403")
    form = {"workspace": WORK, "confirm": "yes"}
    assert site.service("ada", "workspaces/unlock", form).startswith("403")
    busy = {some.busy for some in site.services.storage.workspaces()}
    assert busy == {"", "an admin archives them"}
