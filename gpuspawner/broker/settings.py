"""What an admin can set of the broker, as ``c.Broker.NAME``."""

from __future__ import annotations

from datetime import timedelta

from traitlets import Bool, Float, Integer, Unicode, Union, default

from ..store import default_url
from .prices import PriceSettings


class BrokerSettings(PriceSettings):
    """The traits of :class:`~gpuspawner.broker.Broker`."""

    database_url = Unicode(
        config=True,
        help="""
        Where leases and credits are kept: an SQLite file or a PostgreSQL database.

        The default is the environment variable GPUSPAWNER_DATABASE_URL, else a file
        ``gpuspawner.sqlite`` in the hub's working directory. Example::

            c.Broker.database_url = "sqlite:////srv/jupyterhub/gpuspawner.sqlite"
            c.Broker.database_url = "postgresql://gpuspawner@/gpuspawner"
        """,
    )

    @default("database_url")
    def _default_database_url(self) -> str:
        return default_url()

    hub_id_file = Unicode(
        config=True,
        help="""
        The file with the id of this hub, by which its leases are known as its own. It is made at
        the first start, and belongs into the backup of the hub's working directory.

        The default is ``gpuspawner_hub_id`` beside the hub's cookie secret. Example::

            c.Broker.hub_id_file = "/srv/jupyterhub/gpuspawner_hub_id"
        """,
    )

    device_source = Unicode(
        "auto",
        config=True,
        help="""
        Where the devices come from: ``auto`` (NVML), or a simulated fleet for trying out.

        Example::

            c.Broker.device_source = "simulated:4xA100-80GB,2xT4"
        """,
    )

    opening_grant = Union(
        [Float(), Unicode()],
        default_value=100.0,
        config=True,
        help="""
        Credits that a member gets once, when their account opens at first sign-in.

        Example::

            c.Broker.opening_grant = 250
        """,
    )

    hold_minutes = Float(
        10.0,
        config=True,
        help="""
        Minutes of GPU time that a balance must cover to start, and that are set aside.

        Example::

            c.Broker.hold_minutes = 30
        """,
    )

    hold_session = Bool(
        False,
        config=True,
        help="""
        Whether a balance must cover the whole session that is asked for, which is then set
        aside, and not only its first ``hold_minutes``. What is not used comes back at the end;
        a session without an end holds ``hold_minutes``.

        Example::

            c.Broker.hold_session = True
        """,
    )

    grace_seconds = Integer(
        300,
        config=True,
        help="""
        Seconds that a server goes on after its account ran dry and the member was warned.

        Example::

            c.Broker.grace_seconds = 600
        """,
    )

    refresh_seconds = Float(
        2.0,
        config=True,
        help="""
        Seconds for which one look at the devices serves everybody who asks.

        Example::

            c.Broker.refresh_seconds = 5
        """,
    )

    credits_help = Unicode(
        "Ask your admin for more credits.",
        config=True,
        help="""
        The sentence that tells a member without credits how to get some.

        Example::

            c.Broker.credits_help = "Write to gpu@lab.example for more credits."
        """,
    )

    def lead(self, seconds: int | None) -> timedelta:
        """How much time an account must be able to pay for when a session of so many seconds
        starts; None is one without an end."""
        whole = self.hold_session and seconds is not None
        return timedelta(seconds=seconds or 0) if whole else timedelta(minutes=self.hold_minutes)
