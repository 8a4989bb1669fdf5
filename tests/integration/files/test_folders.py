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
    return [(mount.name, mount.write) for mount in broker.folder_mounts(user)]


def trail(broker: Broker) -> list[tuple[str, str]]:
    """Who did what, the oldest first."""
    lines = broker.store.run(closures.trail)
    return [(line.actor, line.action) for line in reversed(lines)]


def test_a_folder_from_its_making_to_its_end(broker: Broker) -> None:
    made = broker.make_folder("Thesis", actor="anna")
    assert mounts(broker, "anna") == [("Thesis", True)]

    broker.invite(made.id, "bert", write=False, actor="anna")
    assert mounts(broker, "bert") == []
    broker.accept(made.id, actor="bert")
    assert mounts(broker, "bert") == [("Thesis", False)]
    broker.invite(made.id, "bert", write=True, actor="anna")
    assert mounts(broker, "bert") == [("Thesis", True)]

    broker.invite(made.id, "carl", write=True, actor="anna")
    broker.leave(made.id, actor="carl")
    assert mounts(broker, "carl") == [] and broker.folders("carl") == []
    broker.hand_on(made.id, "bert", actor="anna")
    assert (broker.folder(made.id).owner, mounts(broker, "anna")) == ("bert", [("Thesis", True)])
    broker.leave(made.id, actor="anna")
    assert mounts(broker, "anna") == []

    with pytest.raises(FolderRefused, match="write its name, Thesis, and not 'thesis'"):
        broker.delete_folder(made.id, "thesis", actor="bert")
    broker.delete_folder(made.id, "Thesis", actor="bert")
    assert mounts(broker, "bert") == [] and broker.folders("bert") == []
    broker.bring_back(made.id, actor="boss")
    assert mounts(broker, "bert") == [("Thesis", True)]
    with pytest.raises(FolderRefused, match="not deleted"):
        broker.forget_folder(made.id, actor="boss")
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
    made = broker.make_folder("Zoë's 数据 (1)", actor="anna")
    [mount] = broker.folder_mounts("anna")
    assert mount.source == f"/srv/folders/{made.id}" and made.id.isalnum() and made.id.isascii()
    assert mount.name == "Zoë's 数据 (1)"


@pytest.mark.parametrize("name", ["../up", "a/b", "", "a\x00", "a:ro", "{username}", "x" * 61])
def test_no_folder_is_made_of_what_is_no_name(broker: Broker, name: str) -> None:
    with pytest.raises(InvalidRequest):
        broker.make_folder(name, actor="anna")
    assert broker.all_folders() == [] and trail(broker) == []


def test_what_others_may_not_do(broker: Broker) -> None:
    made = broker.make_folder("Data", actor="anna")
    for attempt in (
        lambda: broker.accept(made.id, actor="bert"),
        lambda: broker.leave(made.id, actor="bert"),
        lambda: broker.invite(made.id, "bert", write=True, actor="bert"),
        lambda: broker.uninvite(made.id, "carl", actor="bert"),
        lambda: broker.hand_on(made.id, "bert", actor="bert"),
        lambda: broker.delete_folder(made.id, "Data", actor="bert"),
    ):
        with pytest.raises(UnknownFolder):
            attempt()
    broker.invite(made.id, "bert", write=True, actor="anna")
    broker.accept(made.id, actor="bert")
    for attempt in (
        lambda: broker.invite(made.id, "carl", write=True, actor="bert"),
        lambda: broker.uninvite(made.id, "anna", actor="bert"),
        lambda: broker.hand_on(made.id, "bert", actor="bert"),
        lambda: broker.delete_folder(made.id, "Data", actor="bert"),
    ):
        with pytest.raises(NotAllowed, match="anna's"):
            attempt()
    assert broker.folder(made.id).owner == "anna" and mounts(broker, "carl") == []


def test_mistakes_of_an_owner_are_sentences(broker: Broker, clock: Clock) -> None:
    made = broker.make_folder("Data", actor="anna")
    with pytest.raises(FolderRefused, match="you have a folder named DATA already"):
        broker.make_folder("DATA", actor="anna")
    with pytest.raises(FolderRefused, match="nobody named 'dora' has signed in"):
        broker.invite(made.id, "dora", write=True, actor="anna")
    with pytest.raises(FolderRefused, match="has it already"):
        broker.invite(made.id, "anna", write=True, actor="anna")
    with pytest.raises(FolderRefused, match="no member of it"):
        broker.hand_on(made.id, "bert", actor="anna")
    with pytest.raises(FolderRefused, match="hand it on"):
        broker.leave(made.id, actor="anna")
    clock.forward(minutes=1)
    broker.make_folder("Two", actor="anna")
    clock.forward(minutes=1)
    broker.make_folder("Three", actor="anna")
    with pytest.raises(FolderRefused, match="3 is the most"):
        broker.make_folder("Four", actor="anna")
    assert [name for name, _ in mounts(broker, "anna")] == ["Data", "Two", "Three"]


def test_folders_of_one_name_are_told_apart_and_keep_their_names(
    broker: Broker, clock: Clock
) -> None:
    first = broker.make_folder("Data", actor="anna")
    clock.forward(minutes=1)
    second = broker.make_folder("data", actor="bert")
    clock.forward(minutes=1)
    for folder, owner in ((second, "bert"), (first, "anna")):
        broker.invite(folder.id, "carl", write=False, actor=owner)
        broker.accept(folder.id, actor="carl")
        clock.forward(minutes=1)
    assert [name for name, _ in mounts(broker, "carl")] == ["data", f"Data ({first.id[:8]})"]


def test_who_left_the_hub_has_nothing_and_what_they_owned_is_handed_on(broker: Broker) -> None:
    owned = broker.make_folder("Owned", actor="anna")
    given = broker.make_folder("Given", actor="bert")
    broker.invite(owned.id, "bert", write=False, actor="anna")
    broker.accept(owned.id, actor="bert")
    broker.invite(given.id, "anna", write=True, actor="bert")
    broker.accept(given.id, actor="anna")
    assert broker.member_left("anna") == 2
    assert broker.member_left("anna") == 0
    # Whoever comes under the same name is somebody else.
    assert mounts(broker, "anna") == []
    with pytest.raises(UnknownFolder):
        broker.delete_folder(owned.id, "Owned", actor="anna")
    assert sorted(mounts(broker, "bert")) == [("Given", True), ("Owned", False)]
    broker.hand_on(owned.id, "carl", actor="boss", admin=True)
    assert mounts(broker, "carl") == [("Owned", True)] and mounts(broker, "anna") == []
    assert broker.folder(owned.id).left_at is None


def test_without_a_place_for_them_there_are_no_folders(database_url: str) -> None:
    broker = open_broker(database_url)
    with pytest.raises(FolderRefused, match=r"c\.Broker\.folder_source"):
        broker.make_folder("Data", actor="anna")
    assert broker.folder_mounts("anna") == []
    broker.store.close()


def test_many_at_once_never_make_more_than_the_most(broker: Broker) -> None:
    def make(number: int) -> bool:
        try:
            broker.make_folder(f"Folder {number}", actor="anna")
        except FolderRefused:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(make, range(12)))
    assert sum(made) == 3 and len(broker.folders("anna")) == 3


def test_an_owner_who_takes_it_back_and_a_member_who_accepts_at_once(broker: Broker) -> None:
    """Whoever comes second finds what the first left: never a member without an invitation."""
    made = broker.make_folder("Data", actor="anna")
    for _ in range(10):
        broker.invite(made.id, "bert", write=True, actor="anna")
        with ThreadPoolExecutor(2) as threads:
            taken = threads.submit(broker.uninvite, made.id, "bert", actor="anna")
            accepted = threads.submit(broker.accept, made.id, actor="bert")
            taken.result()
            assert accepted.exception() is None or isinstance(accepted.exception(), UnknownFolder)
        assert mounts(broker, "bert") == [] and broker.folder(made.id).members == ()
