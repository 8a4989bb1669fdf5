"""``gpuspawner folders``: the folders that members share, handed on, brought back and removed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..broker import Broker
from ..errors import Refused, UnknownFolder
from ..store.folders import Folder
from ..workspaces.sizes import format_bytes
from ..workspaces.trees import DirectoryTree, Tree, VolumeTree, must_be_unused
from .config import Settings
from .grammar import changes_of
from .output import local, show, table, utc
from .queue import actor


def grammar(command: argparse.ArgumentParser, common: Callable[..., Any]) -> None:
    """``gpuspawner folders`` alone lists, as ``list`` does."""
    add = changes_of(command, common)
    add("list", folders, "List the folders that members share.")
    handing = add("give", give, "Make a member the owner of a folder.")
    handing.add_argument("folder", metavar="FOLDER", help=_WHICH)
    handing.add_argument("member", metavar="MEMBER", help="the new owner")
    deleting = add("delete", delete, "Take a folder from everybody; its files stay.")
    deleting.add_argument("folder", metavar="FOLDER", help=_WHICH)
    deleting.add_argument("--name", default="", help="the folder's name once more")
    returning = add("restore", restore, "Bring a deleted folder back.")
    returning.add_argument("folder", metavar="FOLDER", help=_WHICH)
    removing = add("remove", remove, "Remove a deleted folder's files, for good.")
    removing.add_argument("folder", metavar="FOLDER", help=_WHICH)
    removing.add_argument(
        "--yes-delete", default="", metavar="NAME", help="the folder's name once more"
    )


_WHICH = "the folder's id, or its first letters"


def folders(arguments: argparse.Namespace, settings: Settings) -> int:
    """List them."""
    found = settings.open_broker().all_folders()
    headers = ("ID", "NAME", "OWNER", "MEMBERS", "MADE", "NOW")
    rows = [
        (
            some.id,
            some.name,
            some.owner,
            ", ".join(_told(member) for member in some.members) or "-",
            local(some.made_at),
            _now(some),
        )
        for some in found
    ]
    text = table(headers, rows) if rows else "No shared folders."
    show(arguments.json, [plain(some) for some in found], text)
    return 0


def give(arguments: argparse.Namespace, settings: Settings) -> int:
    """Hand one on."""
    broker = settings.open_broker()
    folder = find(broker, arguments.folder)
    done = broker.hand_on(folder.id, arguments.member, actor=actor(), admin=True)
    show(arguments.json, plain(done), f"{done.name} ({done.id}) belongs to {done.owner}.")
    return 0


def delete(arguments: argparse.Namespace, settings: Settings) -> int:
    """Take one away."""
    broker = settings.open_broker()
    folder = find(broker, arguments.folder)
    done = broker.delete_folder(folder.id, arguments.name, actor=actor(), admin=True)
    text = f"{done.name} ({done.id}) is nobody's from their next server on. Its files are still at "
    text += f"{broker.folder_place(done.id)}; `gpuspawner folders restore {done.id}` undoes it."
    show(arguments.json, plain(done), text)
    return 0


def restore(arguments: argparse.Namespace, settings: Settings) -> int:
    """Bring one back."""
    broker = settings.open_broker()
    done = broker.bring_back(find(broker, arguments.folder).id, actor=actor())
    show(arguments.json, plain(done), f"{done.name} ({done.id}) is back.")
    return 0


def remove(arguments: argparse.Namespace, settings: Settings) -> int:
    """Remove the files of a deleted one, and forget it."""
    broker = settings.open_broker()
    folder = find(broker, arguments.folder)
    place = broker.folder_place(folder.id)
    if folder.deleted_at is None:
        raise Refused(
            f"{folder.name} is in use. Delete it first: gpuspawner folders delete {folder.id}"
        )
    if not place:
        raise Refused("Where folders lie is not said: set c.Broker.folder_source.")
    if arguments.yes_delete != folder.name:
        use = broker.use_of(place, None, 10.0)
        size = format_bytes(use.used) if use else "of unknown size"
        raise Refused(
            f"This would remove {place}, {size}, with every file of the folder {folder.name}, for "
            f"good. Nothing was changed. If that is what you want, say --yes-delete "
            f"'{folder.name}'"
        )
    tree = _tree(place, settings)
    if tree.exists():
        tree.delete()
    broker.forget_folder(folder.id, actor=actor())
    show(arguments.json, {"removed": folder.id}, f"{folder.name} ({folder.id}) is removed.")
    return 0


def find(broker: Broker, text: str) -> Folder:
    """The folder whose id begins so. Raises UnknownFolder."""
    found = [some for some in broker.all_folders() if text and some.id.startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(folder.id for folder in found[:5])
        raise UnknownFolder(f"Several folders begin with {text!r}: {some}.")
    raise UnknownFolder(f"There is no folder {text!r}: `gpuspawner folders` lists them.")


def plain(some: Folder) -> dict[str, Any]:
    """A folder, for scripts."""
    return {
        "id": some.id,
        "name": some.name,
        "owner": some.owner,
        "made_at": utc(some.made_at),
        "owner_left_at": utc(some.left_at),
        "deleted_at": utc(some.deleted_at),
        "members": [
            {
                "member": member.user,
                "write": member.write,
                "invited_at": utc(member.invited_at),
                "accepted_at": utc(member.accepted_at),
            }
            for member in some.members
        ],
    }


def _tree(place: str, settings: Settings) -> Tree:
    """The files of a folder, which no container has."""
    from .hub import open_hub  # imports JupyterHub: slow, and needed here only

    hub = open_hub(settings.config)
    if not hub.uses_docker:
        return DirectoryTree(place)
    client = hub.connect()
    must_be_unused(client, place)
    return DirectoryTree(place) if place.startswith("/") else VolumeTree(client, place, "")


def _told(member: Any) -> str:
    how = "rw" if member.write else "ro"
    return f"{member.user} ({how}{'' if member.accepted_at else ', invited'})"


def _now(some: Folder) -> str:
    if some.deleted_at:
        return "deleted"
    return "owner left" if some.left_at else ""
