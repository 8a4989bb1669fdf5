"""Who may have a workspace when. Real: both databases, directories, threads that race."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuspawner.core.errors import QuotaUnavailable, UnknownWorkspace, WorkspaceBusy
from gpuspawner.services import Services
from gpuspawner.storage import repository as storage_repository
from gpuspawner.storage.quotas import Quotas, QuotaUse, measure
from gpuspawner.storage.repository import ARCHIVED
from tests.support.brokers import Clock, acquire
from tests.support.parts import each_database
from tests.support.threads import at_once


def test_claimed_workspace_is_unavailable_to_servers(services: Services) -> None:
    services.storage.use_workspace("/srv/w/anna", "anna", None)
    claimed = services.storage.claim_workspace("/srv/w/anna", "an admin archives them")
    assert (claimed.user, claimed.busy) == ("anna", "an admin archives them")
    with pytest.raises(WorkspaceBusy, match="are not available right now: an admin archives them"):
        services.storage.use_workspace("/srv/w/anna", "anna", None)
    with pytest.raises(WorkspaceBusy, match="workspaces free /srv/w/anna"):
        services.storage.claim_workspace("/srv/w/anna", "somebody else too")
    assert services.storage.free_workspace("/srv/w/anna", actor="kim")
    assert not services.storage.free_workspace("/srv/w/anna", actor="kim")
    assert not services.storage.use_workspace("/srv/w/anna", "anna", None)
    [entry] = services.audit.trail()
    told = (entry.actor, entry.action, entry.subject, entry.detail)
    assert told == ("kim", "unlock workspace", "/srv/w/anna", "an admin archives them")


def test_workspace_of_a_running_server_cannot_be_claimed(services: Services) -> None:
    services.storage.use_workspace("/srv/w/anna", "anna", None)
    lease = acquire(services, "anna", 0)
    with pytest.raises(WorkspaceBusy, match=f"anna, whose server runs .lease {lease.id}"):
        services.storage.claim_workspace("/srv/w/anna", "an admin archives them")
    services.leases.release(lease.id, reason="stopped")
    services.storage.claim_workspace("/srv/w/anna", "an admin archives them")
    with pytest.raises(UnknownWorkspace):
        services.storage.claim_workspace("/srv/w/nobody", "an admin archives them")


@each_database
def test_server_and_admin_never_share_a_workspace(services: Services) -> None:
    """A start takes its lease and then the workspace, a claim looks for leases: one loses."""
    services.storage.use_workspace("/srv/w/anna", "anna", None)

    def use_or_claim(number: int) -> None:
        if number:
            services.storage.claim_workspace("/srv/w/anna", "an admin archives them")
        else:
            acquire(services, "anna", 0)
            services.storage.use_workspace("/srv/w/anna", "anna", None)

    for _ in range(15):
        refused = at_once(2, use_or_claim)
        assert any(isinstance(each, WorkspaceBusy) for each in refused)
        (lease,) = services.leases.open_leases()
        services.leases.release(lease.id, reason="stopped")
        services.storage.free_workspace("/srv/w/anna")


@each_database
def test_workspace_record_is_updated_on_change_or_when_stale(
    services: Services, clock: Clock
) -> None:
    assert services.storage.use_workspace("work-anna", "anna", 10)
    first = services.storage.workspaces()
    clock.forward(minutes=30)
    assert not services.storage.use_workspace("work-anna", "anna", 10)
    assert services.storage.workspaces() == first
    assert not services.storage.use_workspace("work-anna", "anna", 20)
    assert services.storage.workspaces()[0].seen_at == clock.now
    clock.forward(hours=2)
    assert not services.storage.use_workspace("work-anna", "anna", 20)
    assert services.storage.workspaces()[0].seen_at == clock.now
    [known] = services.storage.workspaces()
    assert (known.source, known.quota, known.is_volume) == ("work-anna", 20, True)


@each_database
def test_workspace_is_measured_daily_and_hourly_while_a_server_runs(
    services: Services, clock: Clock
) -> None:
    storage = services.storage
    for user in ("anna", "bert"):
        storage.use_workspace(f"/srv/w/{user}", user, None)
    lease = acquire(services, "anna", 0)

    def due() -> list[str]:
        return [some.user for some in storage.unmeasured()]

    assert due() == ["anna", "bert"]
    storage.keep_size("/srv/w/anna", 5)
    storage.keep_size("/srv/w/bert", None)
    assert due() == [] and storage.sizes["/srv/w/anna"] == (5, clock.now)
    clock.forward(minutes=59)
    assert due() == []
    clock.forward(minutes=1)
    assert due() == ["anna"]
    services.leases.release(lease.id, reason="stopped")
    assert due() == []
    clock.forward(hours=23)
    assert due() == ["anna", "bert"]


@each_database
def test_last_archive_of_each_workspace_is_found(services: Services, clock: Clock) -> None:
    storage = services.storage
    for source, file in (("work-anna", "1.tar"), ("work-bert", "2.tar"), ("work-anna", "3.tar")):
        storage.note_workspace(source, ARCHIVED, actor="kim", detail=file)
        clock.forward(hours=1)
    storage.note_workspace("work-bert", "restore workspace", actor="kim", detail="4.tar")
    found = {source: entry.detail for source, entry in storage.last_archives().items()}
    assert found == {"work-anna": "3.tar", "work-bert": "2.tar"}


@each_database
def test_quota_project_id_is_unique_per_workspace(services: Services) -> None:
    with services.store.write() as connection:
        ids = [storage_repository.give_project(connection, f"/srv/{name}") for name in "abab"]
        assert ids[:2] == ids[2:] and len(set(ids)) == 2
        assert min(ids) > storage_repository.FIRST_PROJECT
        assert storage_repository.project_of(connection, "/srv/c") is None


def test_measured_size_excludes_symlink_targets(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    (outside / "large").write_bytes(os.urandom(4 << 20))
    inside.mkdir()
    for name, target in (("up", ".."), ("out", str(outside)), ("file", str(outside / "large"))):
        (inside / name).symlink_to(target)
    (inside / "loop").symlink_to("loop")
    deep = inside / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "one").write_bytes(os.urandom(1 << 20))
    os.link(deep / "one", deep / "the same")
    held = measure(str(inside))
    assert held is not None and 1 << 20 <= held < (1 << 20) + 65536
    (tmp_path / "link").symlink_to(inside)
    assert measure(str(tmp_path / "link")) is None
    assert measure(str(tmp_path / "nothing")) is None
    assert measure(str(deep / "one")) is None
    assert measure(str(inside), patience=0) is None


def test_limit_is_measured_without_file_system_quotas(services: Services, tmp_path: Path) -> None:
    """Here nothing keeps projects: what is there is counted by looking."""
    mine = tmp_path / "anna"
    mine.mkdir()
    services.storage.use_workspace(str(mine), "anna", 1 << 20)
    [held] = services.storage.held_in(services.storage.workspaces_of("anna"))
    assert held.use is not None and not held.use.full
    (mine / "large").write_bytes(os.urandom(2 << 20))
    [held] = services.storage.held_in(services.storage.workspaces_of("anna"))
    assert held.use is not None and held.use.full and held.use.limit == 1 << 20
    assert services.storage.use_of("a-volume", 1 << 20) is None


@pytest.mark.parametrize(
    ("used", "limit", "full"),
    [
        (0, 100, False),
        (99, 100, False),
        (100, 100, True),
        (5 << 40, None, False),
        (2**40 - 2**26, 2**40, False),
        (2**40 - 2**26 + 1, 2**40, True),
    ],
)
def test_quota_is_full_at_or_just_below_its_limit(used: int, limit: int | None, full: bool) -> None:
    assert QuotaUse(used, limit).full is full


def test_unavailable_quota_is_explained(services: Services, tmp_path: Path) -> None:
    spaced = tmp_path / "a b"
    spaced.mkdir()
    missing = Quotas(["gpuspawner-has-no-such-command"])
    with pytest.raises(QuotaUnavailable, match="xfsprogs"):
        missing.set(str(tmp_path), 7, 1 << 20)
    with pytest.raises(QuotaUnavailable, match="has a space or a quote in it"):
        Quotas().set(str(spaced), 7, 1 << 20)
    assert "xfsprogs" in missing.problem(str(tmp_path))
    # The file system of temporary files keeps no project quotas.
    assert "XFS, mounted with prjquota" in Quotas().problem("/proc")
    with pytest.raises(QuotaUnavailable):
        services.storage.keep_quota("/proc/self", 1 << 20)
