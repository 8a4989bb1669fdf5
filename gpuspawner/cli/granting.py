"""``gpuspawner pause``, ``resume``, ``drain``, ``undrain`` and ``trail``: who gets nothing new."""

from __future__ import annotations

import argparse
from typing import Any

from ..broker import Broker
from ..model import Device
from ..store.closures import GRANTING, Change
from .config import Settings
from .known import line_broker
from .output import count, local, note, show, table, utc
from .queue import actor, plain_closure


def pause(arguments: argparse.Namespace, settings: Settings) -> int:
    """Give out no devices until ``resume``."""
    broker = line_broker(settings)
    done = broker.pause(actor=actor(), reason=arguments.reason)
    closure = broker.closures().get(GRANTING)
    text = "Granting is paused: what runs goes on, and who waits waits on."
    if not done and closure:
        why = f": {closure.reason}" if closure.reason else ""
        text = f"Nothing changed: {closure.actor} paused granting at {local(closure.at)}{why}"
    value = {"changed": done, "paused": plain_closure(closure) if closure else None}
    show(arguments.json, value, text)
    return 0


def resume(arguments: argparse.Namespace, settings: Settings) -> int:
    """Give out devices again."""
    broker = line_broker(settings)
    done = broker.resume(actor=actor(), reason=arguments.reason)
    waiting = len(broker.waiting())
    text = f"Granting goes on: {count(waiting, 'ticket')} in line."
    if not done:
        text = "Nothing changed: granting was not paused."
    show(arguments.json, {"changed": done, "paused": None}, text)
    return 0


def drain(arguments: argparse.Namespace, settings: Settings) -> int:
    """Give a device to nobody new."""
    broker = line_broker(settings)
    device = broker.find_device(arguments.device)
    done = broker.drain(device.uuid, actor=actor(), reason=arguments.reason)
    closure = broker.closures().get(device.uuid)
    text = f"{_named(device)} is drained: nobody new gets it."
    if not done and closure:
        text = f"Nothing changed: {closure.actor} drained {_named(device)} at {local(closure.at)}."
    if done:
        text += _with_it(broker, device)
    server = _server_on(broker, device)
    if server:
        text += f" The session of {server} on it goes on to its end."
    value = {"changed": done, "drained": plain_closure(closure) if closure else None}
    show(arguments.json, {"uuid": device.uuid, "server": server, **value}, text)
    return 0


def undrain(arguments: argparse.Namespace, settings: Settings) -> int:
    """Give a device out again."""
    broker = line_broker(settings)
    done = broker.undrain(arguments.device, actor=actor(), reason=arguments.reason)
    text = f"Device {arguments.device} is given out again."
    if machine := done and broker.machine_of(broker.find_device(arguments.device).uuid):
        text = f"The whole machine {machine} is given out again."
    if not done:
        text = f"Nothing changed: device {arguments.device} was not drained."
    show(arguments.json, {"changed": done, "drained": None}, text)
    return 0


def trail(arguments: argparse.Namespace, settings: Settings) -> int:
    """Show who changed what, newest first."""
    changes = settings.open_broker().trail(arguments.limit)
    headers = ("TIME", "WHO", "WHAT", "ON", "DETAIL")
    rows = [(local(c.at), c.actor, c.action, c.subject, c.detail) for c in changes]
    text = table(headers, rows) if changes else "Nobody has changed anything yet."
    show(arguments.json, [plain_change(change) for change in changes], text)
    if len(changes) == arguments.limit:
        note(f"These are the newest {count(len(changes), 'line')}; --limit shows more.")
    return 0


def plain_change(change: Change) -> dict[str, Any]:
    """A line of the audit trail, for scripts."""
    return {
        "at": utc(change.at),
        "actor": change.actor,
        "action": change.action,
        "subject": change.subject,
        "detail": change.detail,
    }


def _named(device: Device) -> str:
    return f"Device {device.index} ({device.model}, {device.uuid})"


def _with_it(broker: Broker, device: Device) -> str:
    """What was drained beside it; empty where a device is drained by itself."""
    if not (machine := broker.machine_of(device.uuid)):
        return ""
    beside = len(broker.on_machine(device.uuid)) - 1
    others = f" and {count(beside, 'other device')} with it" if beside else ""
    return f" The whole machine {machine} is drained{others}: a GPU of it cannot be by itself."


def _server_on(broker: Broker, device: Device) -> str | None:
    servers = (str(x.server) for x in broker.open_leases() if device.uuid in x.uuids)
    return next(servers, None)
