"""What pages say of members' files."""

from __future__ import annotations

from dataclasses import dataclass

from ..broker import Broker
from ..store.folders import Folder


@dataclass(frozen=True, slots=True)
class Mine:
    """A folder as one member sees it."""

    folder: Folder
    called: str
    """Its name below ``~/shared``; nothing when they do not have it yet."""
    owner: bool
    write: bool


def folders_of(broker: Broker, user: str) -> tuple[list[Mine], list[Mine]]:
    """What somebody has, and what they are invited to."""
    called = {mount.folder_id: mount.name for mount in broker.folder_mounts(user)}
    found = [
        Mine(
            folder=folder,
            called=called.get(folder.id, ""),
            owner=folder.owner == user and folder.left_at is None,
            write=folder.writes(user),
        )
        for folder in broker.folders(user)
        if folder.owner != user or folder.left_at is None
    ]
    return [some for some in found if some.called], [some for some in found if not some.called]
