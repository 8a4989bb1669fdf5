"""Settings of the services: one configurable class per capability."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, get_type_hints

from traitlets import Dict, Float, Unicode, default
from traitlets.config import Config, LoggingConfigurable

from .core.errors import ConfigError
from .db.engine import default_url
from .devices.reservations import Reservation, check_reserved
from .devices.slots import check_shared_devices
from .leases.settings import GPUHost
from .ledger.prices import GPURates
from .ledger.settings import GPUCredits
from .members.service import GPUMembers
from .monitoring.health_service import GPUHealth
from .monitoring.service import GPUIdle
from .queue.delegation import GPUSlurm
from .queue.settings import GPUQueue
from .sharing.settings import GPUSharing
from .storage.service import GPUFolders

CONFIG_VARIABLE = "GPUSPAWNER_CONFIG"
"""The environment variable with which the service gets the hub's settings, as JSON."""


def config_from_environment() -> Config:
    """Return the hub's settings for the accounting service. Raises ConfigError."""
    text = os.environ.get(CONFIG_VARIABLE, "{}")
    try:
        settings: Any = json.loads(text)
        return Config({str(section): Config(values) for section, values in settings.items()})
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(what=f"{CONFIG_VARIABLE} is not a JSON object of sections") from None


class GPUDatabase(LoggingConfigurable):
    """The database of leases and credits, and the id by which a hub knows its own leases."""

    url = Unicode(
        config=True,
        help="""
        Where leases and credits are kept: an SQLite file or a PostgreSQL database.

        The default is the environment variable GPUSPAWNER_DATABASE_URL, else a file
        ``gpuspawner.sqlite`` in the hub's working directory. Example::

            c.GPUDatabase.url = "sqlite:////srv/jupyterhub/gpuspawner.sqlite"
            c.GPUDatabase.url = "postgresql://gpuspawner@/gpuspawner"
        """,
    )

    @default("url")
    def _default_url(self) -> str:
        return default_url()


class GPUDevices(LoggingConfigurable):
    """The source of the devices."""

    source = Unicode(
        "auto",
        config=True,
        help="""
        Where the devices come from: ``auto`` (NVML), or a simulated fleet for trying out.

        Example::

            c.GPUDevices.source = "simulated:4xA100-80GB,2xT4"
        """,
    )

    refresh_seconds = Float(
        2.0,
        config=True,
        help="""
        Seconds for which one snapshot of the devices is used before a new one is taken. Everybody
        who asks gets the same snapshot.

        Example::

            c.GPUDevices.refresh_seconds = 5
        """,
    )

    shared_devices = Dict(
        config=True,
        help="""
        Devices that several members may use at the same time, by part of a model's name or by
        UUID, and into how many equal slots each is divided. Up to 100; 1 is a device that is not
        shared. A UUID goes before a model, and the longer of two model names before the shorter.

        Members take turns on such a device, and nothing isolates them. The accounting service ends
        programs that use more than their share of the memory while others are there. A device gets
        another number of slots as soon as nobody uses it.

        Example::

            c.GPUDevices.shared_devices = {"T4": 4, "A100-40GB": 2}
        """,
    )

    def read_shared_devices(self) -> dict[str, int]:
        """Return the number of slots by model or UUID. Raises ConfigError."""
        return check_shared_devices(self.shared_devices)

    reserved = Dict(
        config=True,
        help="""
        Devices that are kept for groups, by part of a model's name or by UUID. Others never get
        one, unless ``others`` is ``"preemptible"``: then their preemptible runs may use it while it
        is idle, and have two minutes to leave when a member of the groups needs it.

        A UUID goes before a model, and the longer of two model names before the shorter; the UUID
        of a GPU is that of its MIG instances too. A change applies to what starts from then on.
        On Slurm, reserve nodes there (``scontrol create reservation``). Example::

            c.GPUDevices.reserved = {
                "A100": ["vision-lab"],
                "H100": {"groups": ["course-ml", "staff"], "others": "preemptible"},
            }
        """,
    )

    def read_reserved(self) -> dict[str, Reservation]:
        """Return the reservations by model or UUID. Raises ConfigError."""
        return check_reserved(self.reserved)


_SHARED_BY_SLURM = (
    "c.GPUDevices.shared_devices is for the GPUs of the hub's own machine, and "
    "c.GPUSlurm.cluster_file names a cluster. Remove it, and share GPUs of the cluster with "
    "gpuspawner slurm config --shards A100=4."
)
_RESERVED_BY_SLURM = (
    "c.GPUDevices.reserved does not apply to a cluster, whose nodes Slurm gives out. Remove it, "
    "and reserve nodes in Slurm: scontrol create reservation."
)
_BUDGET_OF_SLURM = (
    "c.GPUHost sets a budget of memory or CPU cores, but c.GPUSlurm.cluster_file names a cluster, "
    "where Slurm gives them out. Remove one of the two."
)


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """The settings of a configuration file, by capability."""

    database: GPUDatabase
    devices: GPUDevices
    host: GPUHost
    credits: GPUCredits
    rates: GPURates
    queue: GPUQueue
    members: GPUMembers
    idle: GPUIdle
    health: GPUHealth
    folders: GPUFolders
    slurm: GPUSlurm
    sharing: GPUSharing

    @classmethod
    def read(cls, config: Config) -> ServiceSettings:
        """Read every section. Raises TraitError if a value has the wrong type."""
        return cls(**{name: section(config=config) for name, section in _SECTIONS.items()})

    def require_valid(self) -> None:
        """Raise ConfigError if a value has the right type but is not allowed."""
        for is_set, sentence in (
            (self.devices.read_shared_devices(), _SHARED_BY_SLURM),
            (self.devices.read_reserved(), _RESERVED_BY_SLURM),
            (self.host.read_budget(), _BUDGET_OF_SLURM),
        ):
            if is_set and self.slurm.cluster_file:
                raise ConfigError(sentence)
        self.rates.read()
        self.credits.policies  # noqa: B018 - parsing it raises ConfigError
        self.idle.read_policies()
        self.health.read_policy()


_SECTIONS: dict[str, Any] = get_type_hints(ServiceSettings)
CLASSES: tuple[type[LoggingConfigurable], ...] = tuple(_SECTIONS.values())
"""The settings classes; :class:`ServiceSettings` holds one instance of each."""
