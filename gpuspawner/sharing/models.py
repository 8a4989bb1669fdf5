"""MIG layouts as frozen values: what is wanted, what gpuspawner made, and what is to be done."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from ..devices.models import MIGInstance, MIGPlacement, MIGProfile, MIGState


class RecordState(str, Enum):
    """What is to happen to an instance that gpuspawner makes or has made."""

    WANTED = "wanted"
    """It is to be made."""
    BEGUN = "begun"
    """It is being made: NVML says if it exists."""
    MADE = "made"
    UNWANTED = "unwanted"
    """It is to be destroyed."""


@dataclass(frozen=True, slots=True)
class RecordedInstance:
    """The store's record of an instance of gpuspawner's own."""

    profile: str
    profile_id: int
    placement: MIGPlacement
    boot_id: str
    """The boot in which it is made: no instance outlives its boot."""
    state: RecordState = RecordState.WANTED
    instance_id: int | None = None
    """The driver's number; None until it is made."""
    uuid: str = ""
    id: int = 0
    """The row's number in the store."""

    @property
    def name(self) -> str:
        """The instance for people, such as ``3g.20gb at 4:4``."""
        return place_name(self.profile, self.placement)


@dataclass(frozen=True, slots=True)
class MIGChange:
    """A change of a GPU's layout that is in progress, was interrupted, or failed."""

    gpu_uuid: str
    layout: str
    started_at: datetime
    stepped_at: datetime
    """When its last step began."""
    worker: str
    """The process that makes it; see :func:`gpuspawner.core.processes.this_process`."""
    failure: str = ""
    """Why it stopped; empty while it is in progress."""


@dataclass(frozen=True, slots=True)
class PlannedInstance:
    """An instance that is to be made."""

    profile: MIGProfile
    placement: MIGPlacement

    @property
    def name(self) -> str:
        """The instance for people, such as ``3g.20gb at 4:4``."""
        return place_name(self.profile.name, self.placement)


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """How a GPU gets a layout: what stays, what is destroyed, then what is made."""

    gpu: MIGState
    layout: str
    keep: tuple[MIGInstance, ...]
    """Instances of the layout that already exist, made by gpuspawner or not."""
    destroy: tuple[MIGInstance, ...]
    """Only instances that gpuspawner made."""
    create: tuple[PlannedInstance, ...]
    beside: tuple[MIGInstance, ...] = ()
    """Instances of others that are not in the layout and leave room for it."""


def place_name(profile: str, placement: MIGPlacement) -> str:
    """Format an instance as ``nvidia-smi mig -lgi`` does: its profile, start and size."""
    return f"{profile} at {placement.start}:{placement.size}"
