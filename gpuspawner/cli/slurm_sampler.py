"""``gpuspawner slurm sampler``: tells the hub what this node's GPUs do."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

from ..devices import open_source
from ..devices.base import Sampled
from ..errors import ConfigError
from ..slurm.cluster import sampler_address
from ..slurm.sampler import Recorder, serve
from .config import Settings
from .grammar import Add

LEAST_SECONDS = 30.0
"""Between two lists of the processes: the slowest question to a driver."""


def grammar(add: Add) -> None:
    """The word after ``gpuspawner slurm``."""
    telling = add("sampler", sampler, "Tell the hub what this node's GPUs do, until it is ended.")
    telling.add_argument(
        "--listen",
        required=True,
        metavar="URL",
        help="https://ADDRESS:9401, http://127.0.0.1:9401 or unix:///PATH, as 'sampler' of this "
        "node in cluster.yaml",
    )
    telling.add_argument(
        "--tls",
        default="/etc/docker/tls",
        metavar="DIR",
        help="of ca.pem, server-cert.pem and server-key.pem, for https (/etc/docker/tls)",
    )
    telling.add_argument(
        "--processes",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="between two lists of the processes on a GPU (60; at least 30)",
    )


def sampler(arguments: argparse.Namespace, settings: Settings) -> int:
    """Sample and answer until SIGTERM or SIGINT."""
    try:
        url = sampler_address(arguments.listen)
    except ValueError as error:
        raise ConfigError(f"--listen {error}") from None
    if not LEAST_SECONDS <= arguments.processes <= 86_400:
        raise ConfigError(
            f"--processes {arguments.processes:g}: write {LEAST_SECONDS:.0f} to 86400."
        )
    source = open_source(settings.broker.device_source)
    if not isinstance(source, Sampled):
        raise ConfigError(f"{source.name} does not tell what its devices do.")
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    recorder = Recorder(source.sampler(arguments.processes))
    asyncio.run(_until_ended(recorder, url, Path(arguments.tls)))
    return 0


async def _until_ended(recorder: Recorder, url: str, tls: Path) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(recorder, url, tls, stop)
