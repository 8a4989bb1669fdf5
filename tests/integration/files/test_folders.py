"""Shared folders: who gets which, and what is refused. Real: both databases, threads that race."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuspawner.core.errors import FolderRefused, InvalidRequest, NotAllowed, UnknownFolder
from gpuspawner.devices import closures
from gpuspawner.services import Broker
from tests.support.brokers import Clock, open_broker


@pytest.fixture
def database_url(each_database_url: str) -> str:
    """The queries, locks and constraints here are each database's own."""
    return each_database_url


def mounts(broker: Broker, user: str) -> list[tuple[str, bool]]:
    """What somebody's next server gets, and whether they may write."""
    return [(mount.name, mount.write) for mount in broker.shared_folders.folder_mounts(user)]


def trail(broker: Broker) -> list[tuple[str, str]]:
    """Who did what, the oldest first."""
    lines = broker.store.run(closures.trail)
    return [(line.actor, line.action) for line in reversed(lines)]


def test_a_folder_from_its_making_to_its_end(broker: Broker) -> None:
    made = broker.shared_folders.make_folder("Thesis", actor="anna")
    assert mounts(broker, "anna") == [("Thesis", True)]

    broker.shared_folders.invite(made.id, "bert", write=False, actor="anna")
    assert mounts(broker, "bert") == []
    broker.shared_folders.accept(made.id, actor="bert")
    assert mounts(broker, "bert") == [("Thesis", False)]
    broker.shared_folders.invite(made.id, "bert", write=True, actor="anna")
    assert mounts(broker, "bert") == [("Thesis", True)]

    broker.shared_folders.invite(made.id, "carl", write=True, actor="anna")
    broker.shared_folders.leave(made.id, actor="carl")
    assert mounts(broker, "carl") == [] and broker.shared_folders.folders("carl") == []
    broker.shared_folders.hand_on(made.id, "bert", actor="anna")
    assert (broker.shared_folders.folder(made.id).owner, mounts(broker, "anna")) == (
        "bert",
        [("Thesis", True)],
    )
    broker.shared_folders.leave(made.id, actor="anna")
    assert mounts(broker, "anna") == []

    with pytest.raises(FolderRefused, match="write its name, Thesis, and not 'thesis'"):
        broker.shared_folders.delete_folder(made.id, "thesis", actor="bert")
    broker.shared_folders.delete_folder(made.id, "Thesis", actor="bert")
    assert mounts(broker, "bert") == [] and broker.shared_folders.folders("bert") == []
    broker.shared_folders.bring_back(made.id, actor="boss")
    assert mounts(broker, "bert") == [("Thesis", True)]
    with pytest.raises(FolderRefused, match="not deleted"):
        broker.shared_folders.forget_folder(made.id, actor="boss")
    assert trail(broker) == [
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


def test_where_the_files_lie_is_made_from_the_id_alone(broker: Broker) -> None:
    made = broker.shared_folders.make_folder("Zoë's 数据 (1)", actor="anna")
    [mount] = broker.shared_folders.folder_mounts("anna")
    assert mount.source == f"/srv/folders/{made.id}" and made.id.isalnum() and made.id.isascii()
    assert mount.name == "Zoë's 数据 (1)"


@pytest.mark.parametrize("name", ["../up", "a/b", "", "a\x00", "a:ro", "{username}", "x" * 61])
def test_no_folder_is_made_of_what_is_no_name(broker: Broker, name: str) -> None:
    with pytest.raises(InvalidRequest):
        broker.shared_folders.make_folder(name, actor="anna")
    assert broker.shared_folders.all_folders() == [] and trail(broker) == []


def test_what_others_may_not_do(broker: Broker) -> None:
    made = broker.shared_folders.make_folder("Data", actor="anna")
    for attempt in (
        lambda: broker.shared_folders.accept(made.id, actor="bert"),
        lambda: broker.shared_folders.leave(made.id, actor="bert"),
        lambda: broker.shared_folders.invite(made.id, "bert", write=True, actor="bert"),
        lambda: broker.shared_folders.uninvite(made.id, "carl", actor="bert"),
        lambda: broker.shared_folders.hand_on(made.id, "bert", actor="bert"),
        lambda: broker.shared_folders.delete_folder(made.id, "Data", actor="bert"),
    ):
        with pytest.raises(UnknownFolder):
            attempt()
    broker.shared_folders.invite(made.id, "bert", write=True, actor="anna")
    broker.shared_folders.accept(made.id, actor="bert")
    for attempt in (
        lambda: broker.shared_folders.invite(made.id, "carl", write=True, actor="bert"),
        lambda: broker.shared_folders.uninvite(made.id, "anna", actor="bert"),
        lambda: broker.shared_folders.hand_on(made.id, "bert", actor="bert"),
        lambda: broker.shared_folders.delete_folder(made.id, "Data", actor="bert"),
    ):
        with pytest.raises(NotAllowed, match="anna's"):
            attempt()
    assert broker.shared_folders.folder(made.id).owner == "anna" and mounts(broker, "carl") == []


def test_mistakes_of_an_owner_are_sentences(broker: Broker, clock: Clock) -> None:
    made = broker.shared_folders.make_folder("Data", actor="anna")
    with pytest.raises(FolderRefused, match="you have a folder named DATA already"):
        broker.shared_folders.make_folder("DATA", actor="anna")
    with pytest.raises(FolderRefused, match="nobody named 'dora' has signed in"):
        broker.shared_folders.invite(made.id, "dora", write=True, actor="anna")
    with pytest.raises(FolderRefused, match="has it already"):
        broker.shared_folders.invite(made.id, "anna", write=True, actor="anna")
    with pytest.raises(FolderRefused, match="no member of it"):
        broker.shared_folders.hand_on(made.id, "bert", actor="anna")
    with pytest.raises(FolderRefused, match="hand it on"):
        broker.shared_folders.leave(made.id, actor="anna")
    clock.forward(minutes=1)
    broker.shared_folders.make_folder("Two", actor="anna")
    clock.forward(minutes=1)
    broker.shared_folders.make_folder("Three", actor="anna")
    with pytest.raises(FolderRefused, match="3 is the most"):
        broker.shared_folders.make_folder("Four", actor="anna")
    assert [name for name, _ in mounts(broker, "anna")] == ["Data", "Two", "Three"]


def test_folders_of_one_name_are_told_apart_and_keep_their_names(
    broker: Broker, clock: Clock
) -> None:
    first = broker.shared_folders.make_folder("Data", actor="anna")
    clock.forward(minutes=1)
    second = broker.shared_folders.make_folder("data", actor="bert")
    clock.forward(minutes=1)
    for folder, owner in ((second, "bert"), (first, "anna")):
        broker.shared_folders.invite(folder.id, "carl", write=False, actor=owner)
        broker.shared_folders.accept(folder.id, actor="carl")
        clock.forward(minutes=1)
    assert [name for name, _ in mounts(broker, "carl")] == ["data", f"Data ({first.id[:8]})"]


def test_who_left_the_hub_has_nothing_and_what_they_owned_is_handed_on(broker: Broker) -> None:
    owned = broker.shared_folders.make_folder("Owned", actor="anna")
    given = broker.shared_folders.make_folder("Given", actor="bert")
    broker.shared_folders.invite(owned.id, "bert", write=False, actor="anna")
    broker.shared_folders.accept(owned.id, actor="bert")
    broker.shared_folders.invite(given.id, "anna", write=True, actor="bert")
    broker.shared_folders.accept(given.id, actor="anna")
    assert broker.shared_folders.member_left("anna") == 2
    assert broker.shared_folders.member_left("anna") == 0
    # Whoever comes under the same name is somebody else.
    assert mounts(broker, "anna") == []
    with pytest.raises(UnknownFolder):
        broker.shared_folders.delete_folder(owned.id, "Owned", actor="anna")
    assert sorted(mounts(broker, "bert")) == [("Given", True), ("Owned", False)]
    broker.shared_folders.hand_on(owned.id, "carl", actor="boss", admin=True)
    assert mounts(broker, "carl") == [("Owned", True)] and mounts(broker, "anna") == []
    assert broker.shared_folders.folder(owned.id).left_at is None


def test_without_a_place_for_them_there_are_no_folders(database_url: str) -> None:
    broker = open_broker(database_url)
    with pytest.raises(FolderRefused, match=r"c\.GPUFolders\.source"):
        broker.shared_folders.make_folder("Data", actor="anna")
    assert broker.shared_folders.folder_mounts("anna") == []
    broker.store.close()


def test_many_at_once_never_make_more_than_the_most(broker: Broker) -> None:
    def make(number: int) -> bool:
        try:
            broker.shared_folders.make_folder(f"Folder {number}", actor="anna")
        except FolderRefused:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(make, range(12)))
    assert sum(made) == 3 and len(broker.shared_folders.folders("anna")) == 3


def test_an_owner_who_takes_it_back_and_a_member_who_accepts_at_once(broker: Broker) -> None:
    """Whoever comes second finds what the first left: never a member without an invitation."""
    made = broker.shared_folders.make_folder("Data", actor="anna")
    for _ in range(10):
        broker.shared_folders.invite(made.id, "bert", write=True, actor="anna")
        with ThreadPoolExecutor(2) as threads:
            taken = threads.submit(broker.shared_folders.uninvite, made.id, "bert", actor="anna")
            accepted = threads.submit(broker.shared_folders.accept, made.id, actor="bert")
            taken.result()
            assert accepted.exception() is None or isinstance(accepted.exception(), UnknownFolder)
        assert mounts(broker, "bert") == [] and broker.shared_folders.folder(made.id).members == ()
