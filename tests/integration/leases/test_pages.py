"""Extensions on the member's page and by REST. Real: the service's pages over HTTP, SQLite.
Stand-ins: simulated devices, a clock that stands still, a small HTTP server for the Hub."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from gpuspawner.leases.models import Lease, Request, ServerRef, Terms
from tests.golden.site import ADMIN, Site
from tests.support.pages import words

TERMS = Terms(seconds=7200, wait=True)


def test_session_extends_only_while_nobody_waits(tmp_path: Path, migrated_file: Path) -> None:
    with Site(tmp_path, migrated_file, "simulated:1xT4") as site:
        services, clock = site.services, site.clock
        for user in ("ada", "bob"):
            services.members.membership_returned(user, actor="sign-in")
        trail = services.audit.trail()
        lease = services.queue.ask(
            ServerRef("ada"), Request(devices=1), engine="local", terms=TERMS
        )
        assert isinstance(lease, Lease)
        services.leases.confirm(lease.id)
        path = f"leases/{lease.id}/extend"
        assert "Extend to" in words(site.answer("ada", ""))

        clock.forward(minutes=10)
        done = site.answer("ada", path, {})
        assert done.ok and done.history[-1].status_code == 303
        assert "The session is extended: it ends at" in words(done)
        clock.forward(minutes=1)
        told = site.call("ada", path, json={}).json()
        assert (told["id"], told["outcome"], told["claim_by"]) == (lease.id, "", None)
        ends_at = services.leases.get(lease.id).ends_at
        assert ends_at == clock.now + timedelta(hours=2)
        assert told["ends_at"][:19] == f"{ends_at:%Y-%m-%dT%H:%M:%S}"
        assert services.audit.trail() == trail
        clock.forward(minutes=1)
        assert site.call(ADMIN, path, json={}).ok
        (change, *before) = services.audit.trail()
        assert (change.actor, change.action, before) == (ADMIN, "extend", trail)

        services.queue.ask(ServerRef("bob"), Request(devices=1), engine="local", terms=TERMS)
        longer = services.leases.get(lease.id)
        clock.forward(minutes=1)
        page = site.answer("ada", path, {})
        assert page.status_code == 409 and "Running" in words(page)
        assert "The session cannot be extended: 1 member waits for this GPU" in words(page)
        refused = site.call(ADMIN, path, json={})
        assert (refused.status_code, refused.json()["error"]) == (409, "cannot_extend")
        assert services.leases.get(lease.id) == longer
        assert site.call("ada", "leases/0123/extend", json={}).status_code == 404
