"""The configuration of shared GPUs, ``c.GPUSharing.NAME``."""

from __future__ import annotations

from traitlets import List, Unicode
from traitlets.config import LoggingConfigurable


class GPUSharing(LoggingConfigurable):
    """How GPUs are divided."""

    mig_command = List(
        Unicode(),
        default_value=["nvidia-smi"],
        minlen=1,
        config=True,
        help="""
        The command that makes and destroys MIG instances, for ``gpuspawner mig``: nvidia-smi, or a
        program that takes the same arguments. Only root may do that. Example, for a hub's user who
        may run it through sudo::

            c.GPUSharing.mig_command = ["sudo", "-n", "nvidia-smi"]
        """,
    )
