"""How the controller of a cluster is reached: by Slurm's programs, or by slurmrestd."""

from __future__ import annotations

import shutil

from traitlets import Unicode
from traitlets.config import LoggingConfigurable

from ..slurm.cluster import Cluster
from ..slurm.commands import Slurm
from ..slurm.controller import Controller
from ..slurm.rest import Rest


class Controllers(LoggingConfigurable):
    """The part of the broker that knows the way to a cluster's controller."""

    slurm_rest = Unicode(
        config=True,
        help="""
        Where slurmrestd is, for a hub on a machine without Slurm: an ``https://`` address, or on
        the hub's own machine ``http://127.0.0.1:6820`` or ``unix:///PATH``. Empty to use Slurm's
        programs.

        Example::

            c.Broker.slurm_rest = "https://head.example.org:6820"
        """,
    )

    slurm_rest_token = Unicode(
        config=True,
        help="""
        The file with the token that slurmrestd asks for, as ``scontrol token`` writes it, which
        only the hub's user may read. It is read each time, so a new one needs no restart. Jobs of
        members need a token of SlurmUser; with ``jobs_of_members`` off, one of the user to whom all
        jobs belong will do.

        Example::

            c.Broker.slurm_rest_token = "/etc/gpuspawner/slurm.token"
        """,
    )

    slurm_rest_ca = Unicode(
        config=True,
        help="""
        The CA that signed the certificate of an ``https://`` ``slurm_rest``; empty for those that
        the machine trusts.

        Example::

            c.Broker.slurm_rest_ca = "/etc/gpuspawner/ca.pem"
        """,
    )

    def controller_of(self, cluster: Cluster) -> Controller:
        """What asks and tells the cluster's controller. Raises ConfigError."""
        programs = Slurm(conf=cluster.slurm_conf)
        if not self.slurm_rest:
            return programs
        return Rest(self.slurm_rest, self.slurm_rest_token, self.slurm_rest_ca, programs=programs)

    def has_slurm_programs(self) -> bool:
        """Whether Slurm's database can be asked, for which only its programs are used. Without
        slurmrestd they have to be here."""
        return not self.slurm_rest or shutil.which("sacctmgr") is not None
