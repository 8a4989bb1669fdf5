"""Shared folders: who gets which, and what is refused. Real: both databases, threads that race."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuspawner.core.errors import FolderRefused, InvalidRequest, NotAllowed, UnknownFolder
from gpuspawner.services import Services
from tests.support.brokers import Clock, open_services
from tests.support.parts import each_database
from tests.support.threads import at_once


def mounts(services: Services, user: str) -> list[tuple[str, bool]]:
    """What somebody's next server gets, and whether they may write."""
    return [(mount.name, mount.write) for mount in services.shared_folders.folder_mounts(user)]


def trail(services: Services) -> list[tuple[str, str]]:
    """Who did what, the oldest first."""
    lines = services.audit.trail()
    return [(line.actor, line.action) for line in reversed(lines)]


@each_database
def test_shared_folder_lifecycle_updates_mounts_and_audit(services: Services) -> None:
    made = services.shared_folders.make_folder("Thesis", actor="anna")
    assert mounts(services, "anna") == [("Thesis", True)]

    services.shared_folders.invite(made.id, "bert", write=False, actor="anna")
    assert mounts(services, "bert") == []
    services.shared_folders.accept(made.id, actor="bert")
    assert mounts(services, "bert") == [("Thesis", False)]
    services.shared_folders.invite(made.id, "bert", write=True, actor="anna")
    assert mounts(services, "bert") == [("Thesis", True)]

    services.shared_folders.invite(made.id, "carl", write=True, actor="anna")
    services.shared_folders.leave(made.id, actor="carl")
    assert mounts(services, "carl") == [] and services.shared_folders.folders("carl") == []
    services.shared_folders.hand_on(made.id, "bert", actor="anna")
    assert services.shared_folders.folder(made.id).owner == "bert"
    assert mounts(services, "anna") == [("Thesis", True)]
    services.shared_folders.leave(made.id, actor="anna")
    assert mounts(services, "anna") == []

    with pytest.raises(FolderRefused, match="write its name, Thesis, and not 'thesis'"):
        services.shared_folders.delete_folder(made.id, "thesis", actor="bert")
    services.shared_folders.delete_folder(made.id, "Thesis", actor="bert")
    assert mounts(services, "bert") == [] and services.shared_folders.folders("bert") == []
    services.shared_folders.bring_back(made.id, actor="boss")
    assert mounts(services, "bert") == [("Thesis", True)]
    with pytest.raises(FolderRefused, match="not deleted"):
        services.shared_folders.forget_folder(made.id, actor="boss")
    assert trail(services) == [
        ("anna", "make folder"),
        ("anna", "invite"),
        ("bert", "accept folder"),
        ("anna", "invite"),
        ("anna", "invite"),
        ("carl", "leave folder"),
        ("anna", "hand on folder"),
        ("anna", "leave folder"),
        ("bert", "delete folder"),
        ("boss", "bring back folder"),
    ]


def test_folder_path_is_derived_from_its_id_alone(services: Services) -> None:
    with pytest.raises(InvalidRequest):
        services.shared_folders.make_folder("../up", actor="anna")
    assert services.shared_folders.all_folders() == [] and trail(services) == []
    made = services.shared_folders.make_folder("Zoë's 数据 (1)", actor="anna")
    [mount] = services.shared_folders.folder_mounts("anna")
    assert mount.source == f"/srv/folders/{made.id}" and made.id.isalnum() and made.id.isascii()
    assert mount.name == "Zoë's 数据 (1)"


def test_only_the_owner_can_manage_a_folder(services: Services) -> None:
    folders = services.shared_folders
    made = folders.make_folder("Data", actor="anna")
    owners: list[Callable[[], object]] = [
        lambda: folders.invite(made.id, "carl", write=True, actor="bert"),
        lambda: folders.uninvite(made.id, "carl", actor="bert"),
        lambda: folders.hand_on(made.id, "bert", actor="bert"),
        lambda: folders.delete_folder(made.id, "Data", actor="bert"),
    ]
    members: list[Callable[[], object]] = [
        lambda: folders.accept(made.id, actor="bert"),
        lambda: folders.leave(made.id, actor="bert"),
    ]
    for attempt in owners + members:
        with pytest.raises(UnknownFolder):
            attempt()
    folders.invite(made.id, "bert", write=True, actor="anna")
    folders.accept(made.id, actor="bert")
    for attempt in owners:
        with pytest.raises(NotAllowed, match="belongs to anna"):
            attempt()
    assert folders.folder(made.id).owner == "anna" and mounts(services, "carl") == []


def test_invalid_owner_actions_are_refused(services: Services, clock: Clock) -> None:
    made = services.shared_folders.make_folder("Data", actor="anna")
    with pytest.raises(FolderRefused, match="you have a folder named DATA already"):
        services.shared_folders.make_folder("DATA", actor="anna")
    with pytest.raises(FolderRefused, match="nobody named 'dora' has signed in"):
        services.shared_folders.invite(made.id, "dora", write=True, actor="anna")
    with pytest.raises(FolderRefused, match="has it already"):
        services.shared_folders.invite(made.id, "anna", write=True, actor="anna")
    with pytest.raises(FolderRefused, match="not a member of it"):
        services.shared_folders.hand_on(made.id, "bert", actor="anna")
    with pytest.raises(FolderRefused, match="hand it on"):
        services.shared_folders.leave(made.id, actor="anna")
    more = [f"More {number}" for number in range(1, 10)]
    for name in more:
        clock.forward(minutes=1)
        services.shared_folders.make_folder(name, actor="anna")
    with pytest.raises(FolderRefused, match="10 is the most"):
        services.shared_folders.make_folder("One too many", actor="anna")
    assert [name for name, _ in mounts(services, "anna")] == ["Data", *more]


def test_folders_with_equal_names_are_mounted_distinctly(services: Services, clock: Clock) -> None:
    first = services.shared_folders.make_folder("Data", actor="anna")
    clock.forward(minutes=1)
    second = services.shared_folders.make_folder("data", actor="bert")
    clock.forward(minutes=1)
    for folder, owner in ((second, "bert"), (first, "anna")):
        services.shared_folders.invite(folder.id, "carl", write=False, actor=owner)
        services.shared_folders.accept(folder.id, actor="carl")
        clock.forward(minutes=1)
    assert [name for name, _ in mounts(services, "carl")] == ["data", f"Data ({first.id[:8]})"]


def test_former_member_loses_all_shared_folders(services: Services) -> None:
    owned = services.shared_folders.make_folder("Owned", actor="anna")
    given = services.shared_folders.make_folder("Given", actor="bert")
    services.shared_folders.invite(owned.id, "bert", write=False, actor="anna")
    services.shared_folders.accept(owned.id, actor="bert")
    services.shared_folders.invite(given.id, "anna", write=True, actor="bert")
    services.shared_folders.accept(given.id, actor="anna")
    assert services.shared_folders.member_left("anna") == 2
    assert services.shared_folders.member_left("anna") == 0
    # Whoever comes under the same name is somebody else.
    assert mounts(services, "anna") == []
    with pytest.raises(UnknownFolder):
        services.shared_folders.delete_folder(owned.id, "Owned", actor="anna")
    assert sorted(mounts(services, "bert")) == [("Given", True), ("Owned", False)]
    services.shared_folders.hand_on(owned.id, "carl", actor="boss", admin=True)
    assert mounts(services, "carl") == [("Owned", True)] and mounts(services, "anna") == []
    assert services.shared_folders.folder(owned.id).left_at is None


def test_folders_require_a_configured_location(database_url: str) -> None:
    services = open_services(database_url)
    with pytest.raises(FolderRefused, match=r"on this hub\. Ask your admin\.$"):
        services.shared_folders.make_folder("Data", actor="anna")
    assert services.shared_folders.folder_mounts("anna") == []
    services.store.close()


@each_database
def test_concurrent_creation_respects_the_folder_limit(services: Services) -> None:
    make = services.shared_folders.make_folder
    made = at_once(12, lambda number: make(f"Folder {number}", actor="anna"))
    assert sum(isinstance(each, FolderRefused) for each in made) == 2
    assert len(services.shared_folders.folders("anna")) == 10


@each_database
def test_concurrent_uninvite_and_accept_leave_no_member(services: Services) -> None:
    """Whoever comes second finds what the first left: never a member without an invitation."""
    folders = services.shared_folders
    made = folders.make_folder("Data", actor="anna")

    def take_back_or_accept(number: int) -> None:
        if number:
            folders.accept(made.id, actor="bert")
        else:
            folders.uninvite(made.id, "bert", actor="anna")

    for _ in range(10):
        folders.invite(made.id, "bert", write=True, actor="anna")
        _, accepted = at_once(2, take_back_or_accept)
        assert accepted is None or isinstance(accepted, UnknownFolder)
        assert mounts(services, "bert") == [] and folders.folder(made.id).members == ()
