"""``gpuspawner takeover``: this hub goes on with the leases of another one that is gone."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import AnotherHubGrants, Refused
from ..store.granter import Granter
from ..store.identity import identity_file, read_identity
from .config import Settings
from .output import confirmed, count, local, note, show
from .queue import actor


def takeover(arguments: argparse.Namespace, settings: Settings) -> int:
    """Say whose the database is, ask, and make it this hub's."""
    path = Path(settings.broker.hub_id_file or identity_file(settings.config))
    if not (identity := read_identity(path)):
        raise Refused(
            f"No hub has started here yet: there is no file {path}. Type this in the hub's working "
            "directory, with its configuration (-f)."
        )
    broker = settings.open_broker()
    granter = Granter(broker.store, identity)
    found, has_something = granter.owner()
    if found is None or found.hub == identity:
        text = "Nothing to do: the database belongs to this hub, or to nobody yet."
        show(arguments.json, {"changed": False, "hub": identity}, text)
        return 0
    if has_something:
        what = f"{count(len(broker.open_leases()), 'open lease')} and "
        what += f"{count(len(broker.waiting()), 'waiting ticket')}"
    else:
        what = "no open lease and no waiting ticket"
    note(
        f"The database belongs to the hub {found.hub}, which ran on {found.machine} since "
        f"{local(found.since)}, with {what}. This hub is {identity}.\n"
        "It will go on with them as its own: a server that it does not know is ended, and who "
        "waits and is no member here loses their place. Do this only if the other hub is stopped "
        "for good."
    )
    if not arguments.yes and not confirmed("Take it over?"):
        raise Refused("Nothing was changed.")
    try:
        granter.take_over(actor())
    except AnotherHubGrants:
        raise Refused(
            f"A hub runs on this database ({granter.holder()}): stop it first. Nothing was changed."
        ) from None
    text = "The database belongs to this hub. It goes on by itself within a minute."
    show(arguments.json, {"changed": True, "hub": identity, "before": found.hub}, text)
    return 0
