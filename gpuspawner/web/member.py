"""All that a member's own page shows, of one moment. Blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..broker import Broker, Overview
from ..broker.files import Held
from ..broker.health import OnSick
from ..broker.idle import Resting
from ..broker.membership import Ended
from ..broker.payers import Payers
from ..model import Lease, member_account
from . import credits, figures
from .curves import DeviceCurves, of_leases
from .files import Mine, folders_of


@dataclass(frozen=True, slots=True)
class MemberView:
    """The member's figures, as ``member.html`` names them."""

    mine: figures.Member
    overview: Overview
    devices: tuple[figures.DeviceFigures, ...]
    tickets: figures.OwnTickets
    past: credits.Credits
    ended: Ended | None
    files: list[Held]
    folders: list[Mine]
    offered: list[Mine]
    payers: Payers
    resting: list[Resting]
    sick: list[OnSick]
    lost: list[Lease]
    curves: dict[str, list[DeviceCurves]]


def look(
    broker: Broker, user: str, groups: Collection[str], warn_minutes: Sequence[float]
) -> MemberView:
    """Read everything in one transaction, so that all figures are of one moment.

    Devices, places in line and directories are looked at before and after it: a driver, another
    scheduler or a file system may take long.
    """
    broker.look()
    with broker.store.view():
        mine = figures.member(broker, user, warn_minutes)
        overview, devices = figures.devices(broker, user, False)
        tickets = broker.tickets_of(user, figures.TICKETS)
        past = credits.of_account(broker, member_account(user))
        had, offered = folders_of(broker, user)
        ended = broker.membership_end(user)
        spaces = broker.workspaces_of(user)
        payers = broker.payers(user, groups)
        resting, sick, lost = broker.resting(user), broker.sick_of(user), broker.lost_of(user)
        drawn = of_leases(broker, [some.lease for some in mine.running])
    return MemberView(
        mine=mine,
        overview=overview,
        devices=devices,
        tickets=figures.with_standings(broker, tickets, overview.waiting),
        past=past,
        ended=ended,
        files=broker.held_in(spaces),
        folders=had,
        offered=offered,
        payers=payers,
        resting=resting,
        sick=sick,
        lost=lost,
        curves=drawn,
    )
