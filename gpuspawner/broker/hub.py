"""The one broker of a Hub process, for its spawners and its pages."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from traitlets.config import Config

from ..store.identity import identity_file, make_identity
from .broker import Broker

KEY = "gpuspawner_broker"


def hub_broker(
    settings: MutableMapping[str, Any], config: Config, log: logging.Logger | Any
) -> Broker:
    """Return the hub's broker, made by whoever needs it first: a page or a spawner.

    It knows the hub's identity, without which the hub's own service would take it for another hub.
    ``settings`` are the Hub's own, which all of its spawners and pages share.
    """
    if KEY not in settings:
        settings[KEY] = _open_broker(config, log)
    found: Broker = settings[KEY]
    return found


def _open_broker(config: Config, log: logging.Logger | Any) -> Broker:
    broker = Broker(config=config)
    path = Path(broker.hub_id_file or identity_file(config))
    try:
        broker.granter.identity = make_identity(path)
    except OSError as error:
        log.warning(
            "The hub's id cannot be kept in %s (%s): name another file with "
            "c.Broker.hub_id_file. Until then another hub on the same database could take "
            "this one's leases for its own.",
            path,
            error.strerror,
        )
    return broker
