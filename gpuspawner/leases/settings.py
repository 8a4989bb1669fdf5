"""The configuration of the host's memory and CPU, ``c.GPUHost.NAME``."""

from __future__ import annotations

import os

from traitlets import Float, Unicode, Union
from traitlets.config import LoggingConfigurable

from ..core.config_models import parse_size
from ..core.errors import ConfigError
from .host_resources import UNLIMITED, HostAmount, HostBudget

AUTO = "auto"
"""What a setting says for all that this machine has."""


class GPUHost(LoggingConfigurable):
    """How much memory and CPU of this machine servers may be guaranteed together.

    Without a budget, guarantees hold nobody back. Not for a cluster: there Slurm gives out memory
    and CPUs.
    """

    memory = Unicode(
        config=True,
        help="""
        Memory of this machine that servers share, with a unit in powers of 1024, or ``auto`` for
        all that it has. The guarantees (``mem_guarantee``) of all servers together do not exceed
        it: a start for which too little is left waits in the queue, with or without a GPU. Empty:
        no budget. Example::

            c.GPUHost.memory = "auto"
            c.GPUHost.memory = "96G"
        """,
    )

    cpus = Union(
        [Float(), Unicode()],
        default_value=0.0,
        config=True,
        help="""
        CPU cores of this machine that servers share, or ``auto`` for all that it has, like
        ``memory``; servers are guaranteed ``cpu_guarantee``. 0: no budget. Example::

            c.GPUHost.cpus = "auto"
            c.GPUHost.cpus = 28
        """,
    )

    system_memory = Unicode(
        "4G",
        config=True,
        help="""
        What of ``memory`` is kept for the system, the Hub and other programs. Empty: nothing.
        Example::

            c.GPUHost.system_memory = "8G"
        """,
    )

    system_cpus = Float(
        1.0,
        min=0.0,
        config=True,
        help="""
        What of ``cpus`` is kept for the system, the Hub and other programs. Example::

            c.GPUHost.system_cpus = 2
        """,
    )

    memory_per_free_gpu = Unicode(
        config=True,
        help="""
        Memory that servers without a GPU leave for each GPU that nobody uses, so that a server
        that gets it can start. Set it to what your environments guarantee a server with a GPU.
        Empty: nothing. Example::

            c.GPUHost.memory_per_free_gpu = "16G"
        """,
    )

    cpus_per_free_gpu = Float(
        0.0,
        min=0.0,
        config=True,
        help="""
        CPU cores that servers without a GPU leave for each GPU that nobody uses. Example::

            c.GPUHost.cpus_per_free_gpu = 4
        """,
    )

    def read_budget(self) -> HostBudget | None:
        """Return the budget; None if none is set. Raises ConfigError."""
        memory, cpus = self._memory(), self._milli_cpus()
        per_free_gpu = HostAmount.of(
            _size("memory_per_free_gpu", self.memory_per_free_gpu), self.cpus_per_free_gpu
        )
        if memory is None and cpus is None:
            if per_free_gpu:
                what = (
                    "c.GPUHost keeps memory or CPU cores for each free GPU, but there is no budget "
                    'to keep them from. Set c.GPUHost.memory or c.GPUHost.cpus, such as to "auto"'
                )
                raise ConfigError(what=what)
            return None
        total = HostAmount(
            UNLIMITED if memory is None else memory, UNLIMITED if cpus is None else cpus
        )
        for dimension in (memory, cpus):
            if dimension is not None and dimension <= 0:
                raise ConfigError(what=_NOTHING_LEFT)
        return HostBudget(total, per_free_gpu)

    def _memory(self) -> int | None:
        if not self.memory:
            return None
        if self.memory == AUTO:
            found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        else:
            found = _size("memory", self.memory)
        return found - _size("system_memory", self.system_memory)

    def _milli_cpus(self) -> int | None:
        if self.cpus == AUTO:
            found = float(os.cpu_count() or 1)
        elif isinstance(self.cpus, str) or not 0 <= self.cpus < float("inf"):
            raise ConfigError(
                what=f"c.GPUHost.cpus is {self.cpus!r}; write a number of CPU cores, such as 28, "
                f'or "{AUTO}"'
            )
        else:
            found = self.cpus
        return HostAmount.of(0, found - self.system_cpus).milli_cpus if found else None


_NOTHING_LEFT = (
    "c.GPUHost.system_memory or c.GPUHost.system_cpus keeps all of the budget for the system. Keep "
    "less, or raise c.GPUHost.memory or c.GPUHost.cpus"
)


def _size(name: str, text: str) -> int:
    """Return the bytes that a setting says; 0 if it is empty. Raises ConfigError."""
    if not text:
        return 0
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(what=f"c.GPUHost.{name} {str(error).rstrip('.')}") from None
